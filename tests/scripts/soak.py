# SPDX-License-Identifier: Apache-2.0
"""Random training scripts (``make scripts``): ``python -m tests.scripts.soak [--number N] [--first SEED]``.

Each is drawn from a seed (``grammar.py``), run with the package and without, and compared bit by bit. Of one that
differs as much is taken away as can be while it differs, and what is left is printed as JSON: ``--script FILE`` runs
that again.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.harness.bits import same
from tests.harness.ports import remove_shared_buffers
from tests.harness.runner import ds_config, run_case
from tests.scripts.grammar import draw

__all__ = ["differences", "main", "same"]

WORKER = Path(__file__).parent / "worker.py"
Wrong = list[str]


class UnusableError(Exception):
    """The reference itself fails."""


# ---- one script ----------------------------------------------------------------------------------------------------


def _as_case(script: dict, block_of: Callable[[dict], dict | None], device: Any) -> dict:
    engines = []
    for spec in copy.deepcopy(script["engines"]):
        block = block_of(spec)
        if block is not None:
            spec["config"]["fuyou"] = block
        engines.append(spec)
    return {**script, "engines": engines, "device": device}


def _in_memory(spec: dict) -> dict:
    """The block of an engine with nothing on storage, which computes the same."""
    moments = {"moments": kept} if (kept := spec["fuyou"]["optimizer"].get("moments")) else {}
    homes = {name: {"tier": "cpu"} for name in ("parameters", "gradients")}
    return {"optimizer": {"tier": "cpu", "overlap": "none", **moments}, **homes, "activations": {"mode": "none"}}


def _run(case: dict, directory: Path, name: str) -> list[dict]:
    try:
        return run_case(case, directory, name, WORKER)
    finally:
        remove_shared_buffers()


def differences(script: dict, directory: Path) -> Wrong:
    """What the package does otherwise than the script's reference, on the CPU. Files go into ``directory``.

    Raises:
        UnusableError: the reference fails.
    """
    swap = directory / "swap"
    swap.mkdir(parents=True)
    is_stock = script["reference"] == "stock"
    theirs = _as_case(script, lambda spec: None if is_stock else _in_memory(spec), "cpu") | {"does_all": False}
    ours = _as_case(script, lambda spec: {"nvme_path": str(swap), **spec["fuyou"]}, script["device"])
    try:
        expected = _run(theirs, directory, "theirs")
    except AssertionError as error:
        raise UnusableError(str(error)) from error
    try:
        found = _run({**ours, "does_all": True}, directory, "ours")
    except AssertionError as error:
        return [str(error)]
    wrong = [f"left behind: {path}" for path in swap.rglob("*") if path.is_file()]
    for rank, (a, b) in enumerate(zip(expected, found, strict=True)):
        wrong += [f"rank {rank}: {trip}" for trip in b["trips"][:3]]
        names = [[name for name, _ in result["seen"]] for result in (a, b)]
        if names[0] != names[1]:
            wrong.append(f"rank {rank}: saw {names[0]}, and ours {names[1]}")
        for place, ((name, one), (_, other)) in enumerate(zip(a["seen"], b["seen"], strict=False)):
            if not same(one, other):
                said = "" if isinstance(one, torch.Tensor) and one.dim() else f": {one} and {other}"
                wrong.append(f"rank {rank}, look {place}: {name}{said}")
        wrong += [f"rank {rank}: {name}" for name in a["left"] if not same(a["left"][name], b["left"].get(name))]
    return wrong


# ---- as little of it as differs --------------------------------------------------------------------------------------


def _lists(script: dict) -> Iterator[list]:
    """Those from which anything may be taken."""
    yield script["actions"]
    for name, arguments in script["actions"]:
        if name == "micro":
            yield arguments["within"]
            yield arguments["after"]


def _smaller(script: dict) -> Iterator[dict]:
    """Candidates: large parts first."""
    if len(script["engines"]) == 2:
        for kept in range(2):
            one = copy.deepcopy(script)
            one["engines"] = [one["engines"][kept]]
            for each in _lists(one):
                each[:] = [[n, {**a, "engine": 0}] for n, a in each if a["engine"] == kept]
            yield one
    for key, simple in (("world_size", 1), ("device", "cpu")):
        if script[key] != simple:
            yield {**copy.deepcopy(script), key: simple}
    num_lists = sum(1 for _ in _lists(script))
    for share in (2, 4, 8):
        for part in range(share):
            one = copy.deepcopy(script)
            actions = one["actions"]
            del actions[part * len(actions) // share : (part + 1) * len(actions) // share]
            yield one
    for number in range(num_lists):
        size = len(list(_lists(script))[number])
        for place in reversed(range(size)):
            one = copy.deepcopy(script)
            del list(_lists(one))[number][place]
            yield one
    yield from _simpler(script)


def _simpler(script: dict) -> Iterator[dict]:
    """Settings taken back, one at a time."""
    plain = ds_config()
    for number, spec in enumerate(script["engines"]):
        for place in range(len(spec["kinds"])):
            if spec["kinds"][place] != "mlp":
                one = copy.deepcopy(script)
                one["engines"][number]["kinds"][place] = "mlp"
                yield one
        for path in [("config", key) for key in spec["config"]] + [
            ("config", "zero_optimization", key) for key in spec["config"]["zero_optimization"]
        ]:
            wanted: Any = plain
            for key in path[1:]:
                wanted = wanted.get(key)
            yield from _replaced(script, number, path, wanted)
        for section, values in spec["fuyou"].items():
            yield from _replaced(script, number, ("fuyou", section), None)
            for key in values if isinstance(values, dict) else ():
                yield from _replaced(script, number, ("fuyou", section, key), None)
        for key, simple in (
            ("frozen", None),
            ("groups", 1),
            ("zero_init", False),
            ("tied", False),
            ("leaves_loss", False),
        ):
            yield from _replaced(script, number, (key,), simple)


def _replaced(script: dict, number: int, path: tuple[str, ...], value: Any) -> Iterator[dict]:
    """With a value of an engine's replaced, or left out for None; nothing where it is so already."""
    one = copy.deepcopy(script)
    held = one["engines"][number]
    for key in path[:-1]:
        held = held[key]
    if held.get(path[-1]) == value:
        return
    if value is None and len(path) > 1:
        del held[path[-1]]
    else:
        held[path[-1]] = copy.deepcopy(value)
    yield one


def shrink(script: dict, differs: Callable[[dict], bool], secs: float) -> dict:
    """Takes away what can be taken while it ``differs``, for so many seconds at most."""
    end = time.monotonic() + secs
    place, is_smaller = 0, False
    while time.monotonic() < end:
        candidates = list(_smaller(script))
        if place >= len(candidates):
            if not is_smaller:
                break
            place, is_smaller = 0, False
        elif differs(candidates[place]):
            script, is_smaller = candidates[place], True
        else:
            place += 1
    return script


# ---- many ------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help="of scripts")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--script", type=Path, help="run this one instead, without shrinking it")
    parser.add_argument("--shrink-secs", type=float, default=600.0, help="for each that differs")
    args = parser.parse_args()
    number = failed = 0

    with tempfile.TemporaryDirectory(prefix="fuyou-scripts-") as scratch:

        def run(script: dict) -> Wrong:
            nonlocal number
            number += 1
            return differences(script, Path(scratch) / str(number))

        def differs(script: dict) -> bool:
            try:
                return bool(run(script))
            except UnusableError:
                return False

        given = [(str(args.script), json.loads(args.script.read_text()))] if args.script else None
        for name, script in given or ((f"seed {s}", draw(s)) for s in range(args.first, args.first + args.number)):
            try:
                wrong = run(script)
            except UnusableError as error:
                sys.stdout.write(f"{name}: the reference fails: {str(error).strip()[-1500:]}\n")
                continue
            sys.stdout.write(f"{name}: {'DIFFERS' if wrong else 'equal'}\n")
            if wrong:
                failed += 1
                sys.stdout.write("\n".join([each[-3000:] for each in wrong[:8]]) + f"\n({len(wrong)} in all)\n")
            if wrong and not args.script:
                least = shrink(script, differs, args.shrink_secs)
                sys.stdout.write(f"{name}, as little of it as differs:\n{json.dumps(least)}\n")
            sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
