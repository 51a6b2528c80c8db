# SPDX-License-Identifier: Apache-2.0
"""The automatic plan against exhaustive search, on the timed stand-in device.

python -m benchmarks.planner                               24 scenarios, about an hour
python -m benchmarks.planner --only storage-full-1 --only lora   those whose names hold one of these
python -m benchmarks.planner --write                       into benchmarks/results, beside what stands there of today

A scenario is what bounds the step (link, compute, storage, Adam), micro-batches a step (1, 8), what is trained (a full
model, adapters over a frozen base larger than host memory, experts), and host memory from "nothing fits" to "all fits".
In one process an engine measures; every point of a grid over the shares of all classes and the fates of activations is
predicted by what it measured; the best few are trained by hand, and ours, which knows the budgets alone, before and
after them.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import environment_of_worker
from benchmarks.rates import measure_rates
from ds_fuyou.ops.core import load_core
from tests.device.build import build

WORKER = Path(__file__).with_name("planner_worker.py")
RESULTS = Path(__file__).with_name("results")
MODELS = {"full": (4, 1024), "lora": (4, 1536), "moe": (3, 1024)}  # large enough for bytes to outweigh the interpreter
LEVELS = (0.35, 0.6, 0.85, 1.3)  # host memory, as a share of what everything in it would take
STORAGE = {"compute": 1.0e9, "link": 1.0e9, "storage": 0.35e9, "adam": 1.0e9}  # bytes/s, each way
SCENARIO_SECS = 600


@dataclass(frozen=True)
class Scenario:
    """``level``: host memory by the number of LEVELS. FLOP/s, bytes/s of the link each way and of storage follow from
    ``bound``; for eight micro-batches the device and its link are four times as fast where they bound the step, which
    would take minutes.
    """

    bound: str
    kind: str
    accumulation: int
    level: int

    @property
    def name(self) -> str:
        return f"{self.bound}-{self.kind}-{self.accumulation}"

    def spec(self, directory: Path, num_best: int) -> dict[str, Any]:
        layers, width = MODELS[self.kind]
        vocabulary, length, batch = 1024, 128, 4
        experts = 4 if self.kind == "moe" else 1
        base = layers * (4 + 8 * experts) * width * width + 2 * vocabulary * width
        adapters = layers * 18 * 8 * width
        # P16 in two versions, states with split masters, G16; adapters and their base.
        everything = 16 * adapters + 2 * base if self.kind == "lora" else 16 * base
        lanes = 48 << 20
        level = LEVELS[self.level] if self.kind != "lora" else (0.2, 0.4, 0.6, 0.8)[self.level]
        flops, link = {
            "compute": (0.12e12, 2e9),
            "link": (2e12, 0.15e9),
            "storage": (2e12, 2e9),
            "adam": (4e12, 4e9),
        }[self.bound]
        faster = 4 if self.accumulation > 1 and self.bound in ("compute", "link") else 1
        return {
            "kind": self.kind,
            "model": {
                "num_layers": layers,
                "width": width,
                "num_heads": width // 32,
                "length": length,
                "vocabulary": vocabulary,
            },
            "batch": batch,
            "accumulation": self.accumulation,
            "directory": str(directory),
            "storage": STORAGE[self.bound],
            "threads": 1,
            "dram_bytes": int(lanes + level * everything),
            "gpu_bytes": (240 << 20) * width**2 // 1024**2,
            "num_best": num_best,
            "timed": 2 if self.accumulation > 1 else 4,
            "device": {
                "timed": 1,
                "skip": 1,
                "zeros": 1,
                "flops": flops * faster,
                "memory_rate": 1e12,
                "up_rate": link * faster,
                "down_rate": link * faster,
                "capacity": 4 << 30,
            },
        }


def _level(bound: str, kind: str, accumulation: int) -> int:
    """All levels occur with all kinds; updates bound a step only where most states are in host memory."""
    number = (
        ("storage", "compute", "link", "adam").index(bound) + (accumulation > 1) + ("full", "lora", "moe").index(kind)
    )
    return 3 - number % 2 if bound == "adam" else number % 4


SCENARIOS = tuple(
    Scenario(bound, kind, accumulation, _level(bound, kind, accumulation))
    for bound, kind, accumulation in itertools.product(
        ("storage", "compute", "link", "adam"), ("full", "lora", "moe"), (1, 8)
    )
)


def measure(scenario: Scenario, directory: Path, num_best: int) -> dict[str, Any]:
    """All engines of a scenario, in a fresh process with profiles of its own.

    Raises:
        RuntimeError: with the end of what it said.
    """
    with tempfile.TemporaryDirectory(prefix="fuyou-planner-") as scratch:
        file = Path(scratch) / "scenario.json"
        file.write_text(json.dumps(scenario.spec(directory, num_best)))
        environment = {**environment_of_worker(), "DS_FUYOU_PROFILES": str(Path(scratch) / "profiles")}
        try:
            done = subprocess.run(
                [sys.executable, str(WORKER), str(file)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=SCENARIO_SECS,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise RuntimeError(f"{scenario.name} did not end within {SCENARIO_SECS} s") from late
    if done.returncode != 0 or not done.stdout.strip():
        raise RuntimeError(f"{scenario.name} exited with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "level": scenario.level, **summary(found)}


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Ours (the mean of before and after) against the best by hand; predictions of all that were run."""
    ours = statistics.mean((found["ours"]["secs"], found["ours"]["secs_again"]))
    best = min(found["by_hand"], key=lambda run: run["secs"])
    return {
        "secs": ours,
        "best_secs": best["secs"],
        "best": best["set"],
        "over_best": ours / best["secs"],
        "error": found["ours"]["predicted"] / ours - 1 if found["ours"]["predicted"] else None,
    }


def _wanting(scenarios: Sequence[Scenario], directory: Path) -> str | None:
    """A line if the storage is slower than what the scenarios are throttled to, in either direction and in both."""
    rates = measure_rates(directory)
    most = min(rates.read, rates.write, rates.mixed / 2)
    names = [scenario.name for scenario in scenarios if STORAGE[scenario.bound] > most]
    if not names:
        return None
    return (
        f"the storage of {directory} reads {rates.read / 1e9:.2f} GB/s, writes {rates.write / 1e9:.2f}, both "
        f"{rates.mixed / 1e9:.2f}, less than {', '.join(names)} have: their times are this disk's. Name a faster one "
        "with --directory, or one in memory (/dev/shm)"
    )


def markdown(results: Mapping[str, Any]) -> str:
    lines = [
        "# The automatic plan against exhaustive search",
        "",
        f"{results['date']}, {results['machine']}, timed stand-in device. `python -m benchmarks.planner`",
        "",
        "| scenario | memory | ours (s) | best by hand (s) | which | ours / best | predicted | bound by | host "
        "| storage | device |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *map(_row, results["scenarios"], results["scenarios"].values()),
        "",
        *_verdict(results["scenarios"].values()),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, one: Mapping[str, Any]) -> str:
    ours, best = one["ours"], one["best"]
    shares = "/".join(f"{share:g}" for share in best["residency"].values())
    error = "–" if one["error"] is None else f"{100 * one['error']:+.0f} %"
    held = " | ".join(f"{ours[tier][1] / max(1.0, ours[tier][0]):.2f}" for tier in ("host", "storage", "device"))
    return (
        f"| {name} | {one['level']} | {one['secs']:.3f} | {one['best_secs']:.3f} | {shares} {best['mode']} | "
        f"{one['over_best']:.3f} | {error} | {ours['bound']} | {held} |"
    )


def _verdict(found: Iterator[Mapping[str, Any]] | Sequence[Mapping[str, Any]] | Any) -> Iterator[str]:
    found = list(found)
    if not found:
        return
    over = [one["over_best"] for one in found]
    errors = [abs(one["error"]) for one in found if one["error"] is not None]
    yield f"- ours / best: at most 1.03 in {sum(o <= 1.03 for o in over)} of {len(over)}, worst {max(over):.3f}"
    if errors:
        median, worst = statistics.median(errors), max(errors)
        yield f"- predicted against measured: median {100 * median:.1f} % (bar 5), worst {100 * worst:.1f} % (bar 12)"
    yield "- host, storage, device: most bytes held over planned"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="scenarios whose name holds this; may be given again")
    parser.add_argument("--best", type=int, default=3, help="points of the grid that are trained (default %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the storage to use")
    parser.add_argument("--write", action="store_true", help="write results of a selection, too")
    arguments = parser.parse_args()
    load_core()
    build()
    chosen = [s for s in SCENARIOS if arguments.only is None or any(text in s.name for text in arguments.only)]
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    target = RESULTS / f"{date}-planner-search.json"
    results: dict[str, Any] = {
        "date": date,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "scenarios": {},
    }
    writes = arguments.write or arguments.only is None
    if writes and target.exists():
        results = json.loads(target.read_text())
    slower = _wanting(chosen, arguments.directory)
    if slower:
        print(slower, file=sys.stderr, flush=True)
    failed = []
    for scenario in chosen:
        with tempfile.TemporaryDirectory(prefix="fuyou-planner-", dir=arguments.directory) as directory:
            try:
                found = results["scenarios"][scenario.name] = measure(scenario, Path(directory), arguments.best)
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                failed.append(scenario.name)
                continue
        print(_row(scenario.name, found), flush=True)
        if writes:  # after each: a run that is cut off has taken long already
            order = {s.name: results["scenarios"][s.name] for s in SCENARIOS if s.name in results["scenarios"]}
            results["scenarios"] = order
            target.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            target.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    print("\n".join(_verdict([results["scenarios"][s.name] for s in chosen if s.name in results["scenarios"]])))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
