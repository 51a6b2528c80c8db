# SPDX-License-Identifier: Apache-2.0
"""Measures the cases of benchmarks/cases.py in paired, interleaved runs (``make bench``).

python benchmarks/run.py --case balanced --pairs 3     a quick look, nothing written
python benchmarks/run.py                               everything, written to benchmarks/results/
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import io_engine
from benchmarks.cases import BESIDE_IO, CASES, OFF, Case, StockTuning, spec_of
from benchmarks.floor import BYTES_A_PARAMETER, floor_of
from benchmarks.memory import measure_memory
from benchmarks.processes import ForeignLoad, Worker, started
from benchmarks.rates import Rates, measure_rates
from benchmarks.report import environment_of, markdown, write_results
from ds_fuyou.ops.core import load_core

TUNINGS = (
    StockTuning(10_000_000, 1),
    StockTuning(20_000_000, 1),
    StockTuning(20_000_000, 2),
    StockTuning(50_000_000, 1),
)
TUNING_ROUNDS = 5
ROLLOUT_TOKENS = 64
PARTIAL = Path(tempfile.gettempdir()) / "fuyou-bench-partial.json"  # what there is if a run is cut off
BY_NAME = {case.name: case for case in CASES}
NAMES = ["tuning", *BY_NAME, "memory", "io"]


def measure(case: Case, num_pairs: int, directory: Path, tuning: StockTuning) -> dict[str, Any]:
    """Rounds of one burst a variant, in alternating order; see ``worker.Trainer.steps`` for what is timed."""
    specs = {name: spec_of(case, name, directory, tuning) for name in case.variants}
    rates = [measure_rates(directory)]
    with (
        tempfile.TemporaryDirectory(prefix="fuyou-bench-") as scratch,
        started(specs, Path(scratch)) as workers,
    ):
        bursts: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
        for worker in workers:
            worker.ask(do="steps", lead=2, timed=1)
        beside = _load_of(case, directory, workers)
        load = ForeignLoad(workers)
        for index in range(num_pairs):
            for worker in workers if index % 2 == 0 else reversed(workers):
                with beside() if worker.name == BESIDE_IO else nullcontext():
                    bursts[worker.name].append(_burst(case, worker))
            times = "  ".join(f"{name} {runs[-1]['secs']:.3f}" for name, runs in bursts.items())
            print(f"{case.name} round {index}: {times}", flush=True)
        foreign_cores = load.cores()
        about = {worker.name: worker.about for worker in workers}
    rates.append(measure_rates(directory))
    return {
        "case": asdict(case),
        "num_pairs": num_pairs,
        "foreign_cores": foreign_cores,
        "variants": {
            name: {
                "step_secs": summary([run["secs"] for run in runs]),
                "parts": dict(zip(("forward", "backward", "step"), _parts(runs), strict=True)),
                "lanes": {k: statistics.median(r["lanes"][k] for r in runs) for k in runs[-1]["lanes"]},
                "about": about[name],
                "config": specs[name]["config"],
            }
            for name, runs in bursts.items()
        },
        "ratios": _ratios(case, bursts),
        "rates": [asdict(rate) for rate in rates],
        "floors": _floors(bursts, about, rates),
    }


def _burst(case: Case, worker: Worker) -> dict[str, Any]:
    if case.timed == "rollout":
        return worker.ask(do="rollout", tokens=ROLLOUT_TOKENS)
    if case.timed == "saving":
        return worker.ask(do="saving")
    return worker.ask(do="steps", lead=1, timed=case.num_timed)


def _load_of(case: Case, directory: Path, workers: Sequence[Worker]) -> Callable[[], AbstractContextManager[None]]:
    """The load of BESIDE_IO: what ``fuyou_optimizer_nvme`` moves in a step, at the pace of its steps."""
    if BESIDE_IO not in case.variants:
        return nullcontext
    optimizer = next(worker for worker in workers if worker.name == "fuyou_optimizer_nvme")
    secs = optimizer.ask(do="steps", lead=1, timed=case.num_timed)["secs"]
    read, written = BYTES_A_PARAMETER["fuyou_optimizer_nvme"]
    data = directory / "load"
    io_engine.fill(data)
    return lambda: io_engine.steady_load(data, (read + written) / 2 * optimizer.about["numel"] / secs)


def _parts(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [statistics.median(step[part] for run in runs for step in run["steps"]) for part in (1, 2, 3)]


def _ratios(case: Case, bursts: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Round by round quotients: their median and spread."""
    found = []
    for ours, theirs, bar in case.ratios:
        pairs = [a["secs"] / b["secs"] for a, b in zip(bursts[ours], bursts[theirs], strict=True)]
        found.append({"of": ours, "to": theirs, "bar": bar, **summary(pairs)})
    return found


def _floors(bursts: dict[str, Any], about: dict[str, Any], rates: Sequence[Rates]) -> dict[str, Any]:
    """Floors by the better of the rates before and after, where the case has a variant without optimizer."""
    if not bursts.keys() & set(OFF):
        return {}
    compute = min(statistics.median(run["secs"] for run in bursts[name]) for name in bursts.keys() & set(OFF))
    higher = ("read", "write", "mixed", "update", "num_cores")
    best = Rates(
        **{key: max(asdict(rate)[key] for rate in rates) for key in higher},
        io_cpu_secs_per_byte=min(rate.io_cpu_secs_per_byte for rate in rates),
    )
    floors = {}
    for name in sorted(bursts.keys() & BYTES_A_PARAMETER.keys()):
        floor = floor_of(name, about[name]["numel"], compute, best)
        measured = statistics.median(run["secs"] for run in bursts[name])
        floors[name] = {**asdict(floor), "secs": floor.secs, "measured_over_floor": measured / floor.secs}
    return floors


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes, quartiles and the values."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "quartile_1": quartiles[0],
        "quartile_3": quartiles[2],
        "values": list(values),
    }


def tune(directory: Path) -> tuple[StockTuning, list[dict[str, Any]]]:
    """The fastest ZeRO-Infinity of TUNINGS on the balanced case, interleaved like the cases themselves."""
    case = replace(CASES[0], variants=("zero_infinity",), ratios=())
    specs = {str(i): spec_of(case, "zero_infinity", directory / str(i), t) for i, t in enumerate(TUNINGS)}
    for name in specs:
        (directory / name).mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="fuyou-bench-") as scratch,
        started(specs, Path(scratch)) as workers,
    ):
        runs: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for worker in workers * TUNING_ROUNDS:
            runs[worker.name].append(worker.ask(do="steps", lead=1, timed=case.num_timed)["secs"])
    medians = [statistics.median(runs[name]) for name in specs]
    rows = [{**asdict(t), "secs": secs} for t, secs in zip(TUNINGS, medians, strict=True)]
    print(f"tuning of ZeRO-Infinity: {rows}", flush=True)
    return TUNINGS[medians.index(min(medians))], rows


def run_all(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Everything asked for. What fails is recorded and does not cost the rest."""
    wanted = arguments.case or NAMES
    results: dict[str, Any] = {"environment": environment_of(directory), "cases": [], "failed": {}}
    tuning = StockTuning()
    if "tuning" in wanted:
        tuning, results["tuning"] = tune(directory)
    results["stock_tuning"] = asdict(tuning)
    for name in wanted:
        try:
            if name == "memory":
                with tempfile.TemporaryDirectory(prefix="fuyou-bench-") as scratch:
                    results["memory"] = measure_memory(directory, Path(scratch), tuning)
            elif name == "io":
                results["io"] = io_engine.run(directory, max(5, arguments.pairs))
            elif name in BY_NAME:
                results["cases"].append(measure(BY_NAME[name], arguments.pairs, directory, tuning))
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            results["failed"][name] = str(error)
        PARTIAL.write_text(json.dumps(results))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=NAMES, action="append", help="only this one; may be given again")
    parser.add_argument("--pairs", type=int, default=10, help="rounds a case (default 10)")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the storage to use")
    parser.add_argument("--write", action="store_true", help="write results for a selection of cases, too")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    load_core()  # builds now, once, whatever must be built
    with tempfile.TemporaryDirectory(prefix="fuyou-bench-", dir=arguments.directory) as directory:
        results = run_all(arguments, Path(directory))
    results["total_secs"] = time.perf_counter() - begin
    print(markdown(results))
    if arguments.case is None or arguments.write:
        print(f"written: {write_results(results)}")
    if results["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
