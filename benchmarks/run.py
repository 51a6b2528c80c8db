# SPDX-License-Identifier: Apache-2.0
"""Measures the cases of benchmarks/cases.py in paired, interleaved runs (``make bench``).

python benchmarks/run.py --case balanced --pairs 3
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cases import CASES, Case, StockTuning, spec_of
from benchmarks.processes import Worker, started


def measure(case: Case, num_pairs: int, directory: Path, tuning: StockTuning) -> dict[str, Any]:
    """Rounds of one burst a variant, in alternating order; see the docstring of ``Trainer.steps``."""
    specs = {name: spec_of(case, name, directory, tuning) for name in case.variants}
    with (
        tempfile.TemporaryDirectory(prefix="fuyou-bench-") as scratch,
        started(specs, Path(scratch)) as workers,
    ):
        bursts: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
        for worker in workers:
            worker.ask(do="steps", lead=2, timed=1)
        for index in range(num_pairs):
            ordered = list(workers) if index % 2 == 0 else list(reversed(workers))
            for worker in ordered:
                bursts[worker.name].append(worker.ask(do="steps", lead=1, timed=case.num_timed))
            _print_round(case, index, bursts)
        about = {worker.name: worker.about for worker in workers}
    return {
        "case": case.name,
        "bursts": bursts,
        "about": about,
        "specs": specs,
        "ratios": ratios(case, bursts),
    }


def ratios(case: Case, bursts: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The median of the rounds' own quotients, with the spread of these quotients."""
    found = []
    for ours, theirs, bar in case.ratios:
        pairs = [a["secs"] / b["secs"] for a, b in zip(bursts[ours], bursts[theirs], strict=True)]
        found.append({"of": ours, "to": theirs, "bar": bar, **summary(pairs)})
    return found


def summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": values}


def _print_round(case: Case, index: int, bursts: dict[str, list[dict[str, Any]]]) -> None:
    times = "  ".join(f"{name} {runs[-1]['secs']:.3f}" for name, runs in bursts.items())
    print(f"{case.name} round {index}: {times}", flush=True)


def _print_case(result: dict[str, Any]) -> None:
    for name, runs in result["bursts"].items():
        step = summary([run["secs"] for run in runs])
        lanes = {k: statistics.median(r["lanes"][k] for r in runs) for k in runs[-1]["lanes"]}
        parts = [statistics.median(s[i] for r in runs for s in r["steps"]) for i in (1, 2, 3)]
        print(
            f"{name}: {step['median']:.3f} s a step ({step['min']:.3f}-{step['max']:.3f}), forward {parts[0]:.3f} "
            f"backward {parts[1]:.3f} step {parts[2]:.3f} { ({k: round(v, 3) for k, v in lanes.items()}) }"
        )
    for ratio in result["ratios"]:
        print(
            f"{ratio['of']} / {ratio['to']}: {ratio['median']:.3f} ({ratio['min']:.3f}-{ratio['max']:.3f}), bar {ratio['bar']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--variant", action="append", help="only these variants of the case")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuyou-bench-", dir=arguments.directory) as scratch:
        for case in CASES:
            if arguments.case is None or case.name in arguments.case:
                _print_case(measure(case, arguments.pairs, Path(scratch), StockTuning()))


if __name__ == "__main__":
    main()
