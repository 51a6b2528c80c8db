# SPDX-License-Identifier: Apache-2.0
"""``fuyou plan``: what fits where, how fast a step is, and why."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Set
from dataclasses import replace
from pathlib import Path

from ds_fuyou.cli.machine_options import (
    add_adapter_options,
    add_machine_options,
    machine_from,
    model_from,
    pinned_limit_bytes,
    size_in,
)
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.files import replacing
from ds_fuyou.planner.cost import Workload
from ds_fuyou.planner.document import save
from ds_fuyou.planner.explain import class_lines, class_rows, run_document
from ds_fuyou.planner.hardware import GIB, Machine
from ds_fuyou.planner.plan import under_block as under_block_of_rank
from ds_fuyou.planner.policies import Tiers
from ds_fuyou.planner.profile import RunProfile
from ds_fuyou.planner.profiled import placed_under, predict, profile_line
from ds_fuyou.simulator.choose import choose, with_checkpointing
from ds_fuyou.simulator.compare import Training, compared, compared_text
from ds_fuyou.simulator.fixed import limited, under_block
from ds_fuyou.simulator.report import document_of, largest_batch, plan_text, upgrades
from ds_fuyou.simulator.simulate import chrome_trace
from ds_fuyou.simulator.systems import find_policy
from ds_fuyou.state_layout import BF16, FP32, INT8, SPLIT, WHOLE, StateLayout

__all__ = ["add_arguments", "run"]

_OF_PROFILE = frozenset({"config", "masters", "moments", "out", "json"})
_OF_MACHINE = frozenset({"gpu", "ssd", "num_ssds", "ssd_tb", "dram_gb", "host"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, machine, workload and output."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="Hugging Face config.json, gpt:layers,heads,hidden,vocab, or a size such as 13B")
    what.add_argument(
        "--profile",
        type=Path,
        metavar="PROFILE.JSON",
        help="what a run measured and kept, as its log says: what the next run under --config does",
    )
    parser.add_argument("--config", type=Path, metavar="DS.JSON", help="DeepSpeed JSON: batch, accumulation, the block")
    add_machine_options(parser)
    parser.add_argument(
        "--measure",
        nargs="+",
        type=Path,
        metavar="DIRECTORY",
        help="measure this machine, storage in these directories",
    )
    parser.add_argument(
        "--measure-gb",
        type=size_in(GIB),
        default=1.0,
        help="file to measure storage with, 2^30 bytes, or as 4GiB (%(default)s)",
    )
    parser.add_argument("--batch", type=int, help="sequences of a micro-batch on each GPU; default: --config's, or 1")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--accumulation", type=int, help="micro-batches a step; default: --config's, or 1")
    add_adapter_options(parser)
    parser.add_argument(
        "--fused-loss", action="store_true", help="the script's loss never has all logits (Liger's fused one, say)"
    )
    parser.add_argument("--system", default="ds_fuyou", help="policy to plan for (%(default)s)")
    parser.add_argument(
        "--masters", choices=(WHOLE, SPLIT, BF16), help="how P32 is kept on storage; default: --config's"
    )
    parser.add_argument("--moments", choices=(FP32, BF16, INT8), help="how moments are kept; default: --config's")
    parser.add_argument("--compare", action="store_true", help="beside ZeRO-3, ZeRO-Offload and ZeRO-Infinity")
    parser.add_argument("--tokens", type=float, help="of the training that is compared (1e9); compares")
    parser.add_argument("--price", type=float, default=0.0, help="of the machine an hour, in any currency; compares")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="save the plan document, or a page if it ends in .html"
    )
    parser.add_argument("--trace", type=Path, metavar="TRACE.JSON", help="save the simulated step, for fuyou report")
    parser.add_argument("--json", action="store_true", help="print the plan document instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Plans, prints, and saves where asked.

    Raises:
        FuyouConfigError: something is misspelt or contradictory, or nothing fits.
    """
    if arguments.profile is not None:
        _refuse_others(arguments, "--profile", "the profile says", _OF_PROFILE | {"profile"})
        return _of_profile(arguments)
    if arguments.measure is not None:
        _refuse_others(arguments, "--measure", "this machine is measured", vars(arguments).keys() - _OF_MACHINE)
    compares = arguments.compare or bool(arguments.price) or arguments.tokens is not None
    if compares and arguments.system != "ds_fuyou":
        raise FuyouConfigError(f"--compare is of ds_fuyou and the others; plan --system {arguments.system} without it")
    machine, policy = _machine(arguments), find_policy(arguments.system)
    batch, accumulation = arguments.batch, arguments.accumulation
    if arguments.config is not None:
        from ds_fuyou.cli.ds_config import read_ds_config

        given = read_ds_config(arguments.config)
        batch, accumulation = given.batch.of(machine.num_gpus, batch, accumulation)
        if given.block is not None:
            policy = under_block(
                policy,
                given.block,
                given.has_storage,
                is_bfloat16=given.is_bfloat16,
                param_bytes=given.param_bytes,
                stock=given.states,
            )
            machine = limited(machine, given.block, given.has_storage)
    if policy.tiers is not Tiers.PLANNED and (arguments.masters or arguments.moments):
        raise FuyouConfigError(f"--masters and --moments are of ds_fuyou: {policy.name} keeps states whole, in fp32")
    slices_loss = policy.slices_loss or arguments.fused_loss
    policy = replace(policy, layout=_layout(policy.layout, arguments), slices_loss=slices_loss)
    work = Workload(
        model_from(arguments),
        1 if batch is None else batch,
        arguments.seq,
        1 if accumulation is None else accumulation,
    )
    chosen = choose(work, machine, with_checkpointing(work, machine, policy))
    document = document_of(chosen)
    training = Training(1e9 if arguments.tokens is None else arguments.tokens, arguments.price)
    rows = compared(work, machine, policy, training) if compares else []
    is_page = _is_page(arguments.out)
    text = plan_text(chosen) if is_page or not arguments.json else ""  # seconds: what it weighs is decided anew
    if is_page:
        from ds_fuyou.telemetry.plan_page import render_plan

        with replacing(arguments.out) as part:
            part.write_text(render_plan(chosen, text, rows, training), encoding="utf-8")
    elif arguments.out is not None:
        save(document, arguments.out)
    if arguments.trace is not None:
        with replacing(arguments.trace) as part:
            part.write_text(json.dumps(chrome_trace(chosen.simulated, machine)), encoding="utf-8")
    if arguments.json:
        shown = document.to_json()
        largest, rate = largest_batch(chosen)
        shown["predicted"] |= {"largest_batch": largest, "largest_batch_tokens_per_s": round(rate, 2)}
        if rows:
            shown["predicted"]["compared"] = [row.to_json() for row in rows]
        shown["predicted"]["upgrades"] = {what: round(secs, 4) for what, secs in upgrades(chosen)}
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    else:
        sys.stdout.write(text + "\n")
        if rows:
            sys.stdout.write(compared_text(rows, training) + "\n")
    return 0


def _is_page(out: Path | None) -> bool:
    return out is not None and out.suffix.lower() in (".html", ".htm")


def _refuse_others(arguments: argparse.Namespace, beside: str, why: str, allowed: Set[str]) -> None:
    """Raises FuyouConfigError for what was given and would say nothing."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args(["--model", ""]))
    given = vars(arguments)
    others = sorted(name for name in defaults.keys() - allowed if given[name] != defaults[name] and name != "model")
    if others:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise FuyouConfigError(f"{names} cannot be given with {beside}: {why}")


def _layout(layout: StateLayout, arguments: argparse.Namespace) -> StateLayout:
    """With what the command line says of states."""
    return replace(layout, masters=arguments.masters or layout.masters, moments=arguments.moments or layout.moments)


def _of_profile(arguments: argparse.Namespace) -> int:
    """The same decision as that of a run which finds the profile."""
    from ds_fuyou.cli.ds_config import read_ds_config

    if _is_page(arguments.out):
        raise FuyouConfigError(f"--out {arguments.out}: of a profile there is no page, but a document; name it .json")
    block = None if arguments.config is None else read_ds_config(arguments.config)
    if block is None or block.block is None:
        raise FuyouConfigError("--profile needs --config DS.JSON with an enabled fuyou block, as the run had it")
    try:
        profile = RunProfile.from_json(json.loads(arguments.profile.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise FuyouConfigError(f"--profile {arguments.profile}: must be what a run kept, found {error!r}") from error
    facts = replace(profile.given, layout=_layout(profile.given.layout, arguments))
    given = under_block_of_rank(facts, block.block, block.has_storage)
    decision = placed_under(block.block, given, profile)
    document = run_document(profile, given, decision)
    if arguments.out is not None:
        save(document, arguments.out)
    if arguments.json:
        sys.stdout.write(json.dumps(document.to_json(), indent=2) + "\n")
        return 0
    rows = class_rows(decision.settled(given), decision.time, decision.place, decision.plan)
    lines = [profile_line(profile), predict(decision.time, decision.place).line(), *class_lines(rows, decision.secs)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _machine(arguments: argparse.Namespace) -> Machine:
    """Of the presets, or measured; what fell while it was measured is said on stderr."""
    if arguments.measure is None:
        return machine_from(arguments)
    if not 0 < arguments.measure_gb <= 4096:
        raise FuyouConfigError(f"--measure-gb must be positive and at most 4096, found {arguments.measure_gb:g}")
    if arguments.num_gpus < 1:
        raise FuyouConfigError(f"--num-gpus must be positive, found {arguments.num_gpus}")
    limit = pinned_limit_bytes(arguments)
    from ds_fuyou.profiling.machine import machine_of_measured, measure_machine

    measured = measure_machine(arguments.measure, int(arguments.measure_gb * (1 << 30)))
    for line in measured.drift():
        sys.stderr.write(f"fuyou plan: {line}\n")
    return replace(machine_of_measured(measured, arguments.num_gpus), pinned_limit_bytes=limit)
