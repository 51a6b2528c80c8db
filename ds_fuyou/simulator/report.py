# SPDX-License-Identifier: Apache-2.0
"""A chosen plan explained: bytes by tier, lane times, alternatives, upgrades; as a document and as text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ds_fuyou.host.available_memory import AUTO_TENTHS
from ds_fuyou.planner.cost import P16_BYTES, closed_form
from ds_fuyou.planner.document import PlanDocument, Residency, Subject
from ds_fuyou.planner.hardware import GIB
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.policies import Tiers
from ds_fuyou.simulator.choose import Chosen, alternatives, batches, fits, quick_secs, room_line
from ds_fuyou.simulator.fit import run_budget
from ds_fuyou.units import shown_bytes

__all__ = ["TIER_NAMES", "document_of", "largest_batch", "plan_text", "upgrades"]

TIER_NAMES = {"gpu": "GPU", "cpu": "host memory", "nvme": "storage"}
_OF_THE_LINK = (Lane.DOWN, Lane.UP)


def document_of(chosen: Chosen) -> PlanDocument:
    """The plan as a document, predictions included."""
    work, place, model = chosen.work, chosen.place, chosen.work.model
    return PlanDocument(
        model=Subject(model.name, model.params, model.layers, model.fingerprint),
        world_size=chosen.machine.num_gpus,
        residency=Residency(place.params, place.states, place.grads, place.frozen, place.states_twice),
        activations={
            name: {"keep": kept, "swap": swapped, "recompute": again} for name, kept, swapped, again in place.fates
        },
        settings=_settings(chosen),
        workload={"batch": work.batch, "seq": work.seq, "accumulation": work.accumulation},
        machine=chosen.machine.name,
        predicted=_predicted(chosen),
    )


def _settings(chosen: Chosen) -> dict[str, int]:
    """What was decided of them; of other systems slots alone."""
    chunks = {} if chosen.plan is None else {"chunk_bytes": chosen.plan.chunk_bytes}
    most = 2 if chosen.plan is None else chosen.plan.slots
    return {**chunks, "slots": 1 if chosen.second_slot_bytes else most}


def _predicted(chosen: Chosen) -> dict[str, Any]:
    return {
        "policy": chosen.policy.name,
        "updates": chosen.policy.updates.value,
        "iteration_secs": round(chosen.iteration_secs, 4),
        "iteration_secs_closed_form": round(chosen.closed.iteration_secs, 4),
        "tokens_per_s": round(chosen.tokens_per_s, 2),
        "tflops_model": round(chosen.tflops_model, 2),
        "tflops_8p": round(chosen.tflops_8p, 2),
        "bound_lane": chosen.bound.label,
        "lane_secs": {lane.label: round(chosen.simulated.lane_secs[lane], 4) for lane in Lane},
        "bytes": {
            tier: {item.name: round(item.num_bytes) for item in chosen.needs.items if item.tier == tier}
            for tier in TIER_NAMES
        },
        "storage_bytes_written_a_step": round(chosen.written_bytes),
        "endurance_days": _endurance_days(chosen),
    }


def _endurance_days(chosen: Chosen) -> float | None:
    """Days of training until the SSDs' warranted writes are used up; None where nothing is written."""
    if chosen.written_bytes <= 0 or chosen.machine.endurance_bytes <= 0:
        return None
    steps = chosen.machine.endurance_bytes / chosen.written_bytes
    return round(steps * chosen.iteration_secs / 86400, 1)


def largest_batch(chosen: Chosen) -> tuple[int, float]:
    """The largest of :func:`batches` (or the one asked for) that fits, and tokens a second with it; by the closed form,
    relative to its own prediction.
    """
    larger = (batch for batch in reversed(batches(chosen.work.seq)) if batch > chosen.work.batch)
    works = (replace(chosen.work, batch=batch) for batch in larger)
    found = next((work for work in works if fits(work, chosen.machine, chosen.asked)), None)
    if found is None:
        return chosen.work.batch, chosen.tokens_per_s
    longer = quick_secs(found, chosen.machine, chosen.asked) / chosen.closed.iteration_secs
    return found.batch, chosen.tokens_per_s * found.batch / chosen.work.batch / longer


def upgrades(chosen: Chosen) -> list[tuple[str, float]]:
    """(what is doubled, iteration seconds then), best first; by the closed form, relative to its own prediction."""
    machine = chosen.machine
    options = {
        "storage bandwidth and size (twice the SSDs)": replace(
            machine,
            storage_read=2 * machine.storage_read,
            storage_write=2 * machine.storage_write,
            storage_bytes=2 * machine.storage_bytes,
        ),
        "DRAM": replace(machine, dram_bytes=2 * machine.dram_bytes),
        "GPU FLOP/s": replace(machine, flops=2 * machine.flops),
        "GPU memory": replace(machine, gpu_bytes=2 * machine.gpu_bytes),
        "GPU link": replace(machine, link_up=2 * machine.link_up, link_down=2 * machine.link_down),
        "CPU and its memory bandwidth": replace(
            machine, update_rate=2 * machine.update_rate, pass_rate=2 * machine.pass_rate
        ),
    }
    if machine.shares_cores:
        options = {"cores": replace(options["CPU and its memory bandwidth"], flops=2 * machine.flops)} | {
            name: grown for name, grown in options.items() if name == "DRAM" or name.startswith("storage")
        }
    base = closed_form(chosen.work, machine, chosen.policy, chosen.place).iteration_secs
    found = [
        (what, chosen.iteration_secs * quick_secs(chosen.work, grown, chosen.asked) / base)
        for what, grown in options.items()
    ]
    return sorted(found, key=lambda pair: pair[1])


def plan_text(chosen: Chosen) -> str:
    """The table that the command prints."""
    return "\n".join(_lines(chosen))


def _lines(chosen: Chosen) -> Iterator[str]:
    work, model = chosen.work, chosen.work.model
    yield f"{model.name}: {model.params / 1e9:.2f} B parameters, {model.layers} blocks of {model.hidden}"
    yield f"on {chosen.machine.name}; batch {work.batch} x {work.seq}" + (
        f", {work.accumulation} micro-batches a step" if work.accumulation > 1 else ""
    )
    if chosen.policy.param_bytes > P16_BYTES:
        yield "fp32 parameters, as neither bf16 nor fp16 is on; compute, activations and GPU memory: those of 16 bits"
    yield ""
    yield "what lives where"
    for tier, name in TIER_NAMES.items():
        total, have = chosen.needs.total(tier), chosen.needs.have[tier]
        if tier == "gpu" and chosen.machine.shares_cores:
            name = "host memory, for computing"
        yield f"  {name:<36}{shown_bytes(total):>11}  of {shown_bytes(have)}"
        for item in chosen.needs.items:
            if item.tier == tier:
                yield f"    {item.name:<34}{shown_bytes(item.num_bytes):>11}"
    yield from _unlike_a_run(chosen)
    if room := room_line(chosen):
        yield f"  {room}"
    if chosen.second_slot_bytes:
        yield f"  one slot a chunk, as storage lacks {shown_bytes(chosen.second_slot_bytes)} for two: updates begin in"
        yield "  step(), and a crash may cost the state since the last checkpoint"
    yield ""
    yield f"activations of {model.layers} blocks{'keep':>14}{'swap':>8}{'recompute':>11}"
    for name, kept, swapped, again in chosen.place.fates:
        yield f"  {name:<24}{kept:>12}{swapped:>8}{again:>11}"
    yield ""
    yield "lanes, seconds of a step"
    for lane in Lane:
        secs = chosen.simulated.lane_secs[lane]
        if chosen.machine.shares_cores and lane in _OF_THE_LINK:
            continue
        mark = "  <- bounds the step" if lane is chosen.bound else ""
        yield f"  {lane.label:<20}{secs:>9.2f}{100 * secs / chosen.iteration_secs:>6.0f} %{mark}"
    yield ""
    yield f"step {chosen.iteration_secs:.2f} s (closed form {chosen.closed.iteration_secs:.2f} s)"
    yield f"{chosen.tokens_per_s:.1f} tokens/s, {chosen.tflops_model:.1f} model TFLOPS (6 P and attention)"
    yield f"{chosen.tflops_8p:.1f} TFLOPS by the 8 P of published figures"
    days = _endurance_days(chosen)
    if days is not None:
        yield f"{shown_bytes(chosen.written_bytes)} written to storage a step; rated writes last {days:.0f} days"
    largest, rate = largest_batch(chosen)
    more = " or more" if largest >= batches(chosen.work.seq)[-1] else ""
    yield f"largest batch that fits: {largest}{more}, {rate:.1f} tokens/s"
    what, secs = upgrades(chosen)[0]
    if secs < 0.99 * chosen.iteration_secs:
        yield f"next best upgrade: twice the {what}, {secs:.2f} s a step"
    else:
        yield "no single upgrade of storage, DRAM, GPU, link or CPU to twice its size gains 1 %"
    others = alternatives(chosen)
    if others:
        yield ""
        yield "each class, what its best other home would cost by the closed form"
    for line in others:
        yield f"  {line}"


def _unlike_a_run(chosen: Chosen) -> Iterator[str]:
    """Where a limit that is told lets a plan fill more than a run takes whose block names no budget."""
    block, auto = chosen.policy.block, run_budget(chosen.machine)
    is_open = block is None or block.dram_budget_bytes == "auto"
    if chosen.policy.tiers is Tiers.PLANNED and is_open and chosen.needs.total("cpu") > (1 + 1e-9) * auto:
        each = chosen.needs.total("cpu") / chosen.machine.num_gpus / GIB
        yield f"  a run whose block sets no dram_budget_bytes takes {10 * AUTO_TENTHS} % of what is free at its start:"
        yield f'  {auto / GIB:.4g} GiB at most here; this plan needs "dram_budget_bytes": "{math.ceil(each)}GiB"'
