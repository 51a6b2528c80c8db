# SPDX-License-Identifier: Apache-2.0
"""The automatic plan against a sweep by hand, and what it predicted against what was measured.

python -m benchmarks.planner                    six cases, about 30 minutes, written to benchmarks/results/
python -m benchmarks.planner --case base_slow   one of them, nothing written
python -m benchmarks.planner --quick            one tiny case, two runs by hand: whether it works at all

A case is a model with its batch and a storage speed, throttled in the I/O engine (reads and writes share it). By hand:
swapped shares of blocks {0, 25, 50, 75, 100 %}, the rest recomputed, each with three placements of whole classes that
fit the same budgets. The automatic run has the budgets alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import environment_of_worker
from benchmarks.report import environment_of
from ds_fuyou.ops.core import load_core

WORKER = Path(__file__).with_name("planner_worker.py")
RESULTS = Path(__file__).with_name("results")
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
PLACES = (("cpu", "nvme", "cpu"), ("cpu", "nvme", "nvme"), ("nvme", "nvme", "nvme"))
FAST, SLOW = 1.0e9, 0.3e9
CASE_SECS = 420


@dataclass(frozen=True)
class PlannerCase:
    """``gpu_blocks``: device memory for saved activations, in blocks' worth. ``dram_bytes_each``: host memory a
    parameter: P16 in two versions and G16 take 6, states 12, a quarter of it goes to lanes.
    """

    name: str
    num_layers: int
    width: int
    length: int
    batch: int
    rate: float
    gpu_blocks: float = 2.5
    dram_bytes_each: float = 13.0
    vocabulary: int = 4096
    chunk_bytes: int = 2 << 20
    num_lead: int = 4
    num_timed: int = 4

    @property
    def block_bytes(self) -> float:
        """About what one block saves."""
        return 34.0 * self.batch * self.length * self.width

    def spec(self, directory: Path, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What the worker needs. The host budget has room for P16, G16 and a part of the states."""
        heads = max(1, self.width // 64)
        return {
            "name": self.name,
            "model": {
                "num_layers": self.num_layers,
                "width": self.width,
                "num_heads": heads,
                "length": self.length,
                "vocabulary": self.vocabulary,
            },
            "batch": self.batch,
            "rate": self.rate,
            "directory": str(directory),
            "gpu_budget_bytes": int(self.gpu_blocks * self.block_bytes),
            "dram_bytes_each": self.dram_bytes_each,
            "chunk_bytes": self.chunk_bytes,
            "staging_bytes": 48 << 20,
            "num_lead": self.num_lead,
            "num_timed": self.num_timed,
            "runs": list(runs),
        }


MODELS = (
    PlannerCase("small_batch", 6, 448, 64, 1, FAST),
    PlannerCase("base", 6, 448, 128, 4, FAST),
    PlannerCase("large_batch", 4, 512, 256, 4, FAST),
)
CASES = tuple(
    replace(model, name=f"{model.name}_{speed}", rate=rate)
    for model in MODELS
    for speed, rate in (("fast", FAST), ("slow", SLOW))
)
QUICK = PlannerCase("quick", 2, 128, 32, 1, FAST, chunk_bytes=128 << 10, vocabulary=512, num_timed=2)


def runs_of(shares: Sequence[float], places: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The automatic run twice, first and last (the first one measures, the last one starts planned), and the sweep."""
    auto: dict[str, Any] = {"tiers": None, "share": None}
    by_hand = [{"tiers": list(tiers), "share": share} for tiers in places for share in shares]
    return [auto, *by_hand, auto]


def measure(case: PlannerCase, directory: Path, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All runs of a case, in a fresh process with profiles of its own."""
    with tempfile.TemporaryDirectory(prefix="fuyou-planner-") as scratch:
        spec = case.spec(directory, runs)
        file = Path(scratch) / "case.json"
        file.write_text(json.dumps(spec))
        environment = {**environment_of_worker(), "DS_FUYOU_PROFILES": str(Path(scratch) / "profiles")}
        done = subprocess.run(
            [sys.executable, str(WORKER), str(file)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=CASE_SECS,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"case {case.name} exited with {done.returncode}:\n{done.stderr[-3000:]}")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {"case": asdict(case), "spec": {**spec, "runs": len(runs)}, "runs": found, **summary(found)}


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The automatic plan (its better run is not chosen: both are told) against the best by hand, and all errors."""
    auto = [run["secs"] for run in runs if run["tiers"] is None]
    by_hand = [run for run in runs if run["tiers"] is not None]
    best = min(by_hand, key=lambda run: run["secs"])
    errors = [run["predicted"] / run["secs"] - 1 for run in runs if run["predicted"]]
    own = [run["predicted"] / run["secs"] - 1 for run in runs if run["tiers"] is None and run["predicted"]]
    return {
        "auto_secs": auto,
        "best": {key: best[key] for key in ("tiers", "share", "secs")},
        "auto_over_best": statistics.median(auto) / best["secs"],
        "auto_errors": own,
        "median_error": statistics.median(map(abs, errors)) if errors else None,
        "worst_error": max(map(abs, errors)) if errors else None,
        "filled": {
            tier: runs[-1]["bytes"][tier]["measured"] / max(1.0, runs[-1]["bytes"][tier]["planned"])
            for tier in runs[-1]["bytes"]
        },
    }


def markdown(results: dict[str, Any]) -> str:
    """The tables of a result."""
    environment = results["environment"]
    lines = [
        "# The automatic plan against a sweep by hand",
        "",
        f"{environment['date']}, {environment['num_cores']} cores ({environment['cpu']}), {environment['storage']}, "
        f"torch {environment['torch']}, DeepSpeed {environment['deepspeed']}; load average at the start "
        f"{environment['load_average_at_start']:.1f}. `python -m benchmarks.planner`",
        "",
        "| case | auto, cold and kept profile (s) | best by hand (s) | which | auto / best |",
        "|---|---|---|---|---|",
    ]
    lines += [_first_row(case) for case in results["cases"]]
    lines += [
        "",
        "Predicted against measured: of the automatic runs, and of all runs. Filled: most bytes held / bytes planned.",
        "",
        "| case | auto | all: median | all: worst | host memory filled | storage filled |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_second_row(case) for case in results["cases"]]
    own = [abs(error) for case in results["cases"] for error in case["auto_errors"]]
    if own:
        median, worst = 100 * statistics.median(own), 100 * max(own)
        lines += ["", f"Automatic runs, all cases: median error {median:.0f} %, worst {worst:.0f} %."]
    lines += ["", *_details(results["cases"])]
    return "\n".join(lines) + "\n"


def _first_row(case: dict[str, Any]) -> str:
    best = case["best"]
    which = f"{'/'.join(best['tiers'])}, {100 * best['share']:.0f} % swapped"
    auto = ", ".join(f"{secs:.3f}" for secs in case["auto_secs"])
    return f"| {case['case']['name']} | {auto} | {best['secs']:.3f} | {which} | {case['auto_over_best']:.2f} |"


def _second_row(case: dict[str, Any]) -> str:
    own = ", ".join(f"{100 * error:+.0f} %" for error in case["auto_errors"]) or "–"
    if case["median_error"] is None:
        return f"| {case['case']['name']} | – | – | – | – | – |"
    filled = " | ".join(f"{100 * case['filled'][tier]:.0f} %" for tier in ("host memory", "storage"))
    return (
        f"| {case['case']['name']} | {own} | {100 * case['median_error']:.0f} % | {100 * case['worst_error']:.0f} % "
        f"| {filled} |"
    )


def _details(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    for case in cases:
        yield f"<details><summary>{case['case']['name']}: every run</summary>\n"
        yield "| placement (P16/states/G16) | swapped | measured (s) | predicted (s) | bound by |"
        yield "|---|---|---|---|---|"
        for run in case["runs"]:
            where = "auto" if run["tiers"] is None else "/".join(run["tiers"])
            share = "auto" if run["share"] is None else f"{100 * run['share']:.0f} %"
            predicted = "–" if run["predicted"] is None else f"{run['predicted']:.3f}"
            yield f"| {where} | {share} | {run['secs']:.3f} | {predicted} | {run['bound'] or '–'} |"
        yield "\n</details>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--quick", action="store_true", help="one tiny case")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the storage to use")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    load_core()  # builds now, once, whatever must be built
    chosen = [QUICK] if arguments.quick else [c for c in CASES if arguments.case is None or c.name in arguments.case]
    runs = runs_of((0.0, 1.0), PLACES[:1]) if arguments.quick else runs_of(SHARES, PLACES)
    with tempfile.TemporaryDirectory(prefix="fuyou-planner-", dir=arguments.directory) as directory:
        results: dict[str, Any] = {"environment": environment_of(Path(directory)), "cases": []}
        for case in chosen:
            results["cases"].append(measure(case, Path(directory), runs))
            print(_first_row(results["cases"][-1]), flush=True)
            results["total_secs"] = time.perf_counter() - begin
            if not arguments.quick and arguments.case is None:
                _write(results)  # after each case: a run that is cut off has taken long already
    print(markdown(results))


def _write(results: dict[str, Any]) -> None:
    target = RESULTS / f"{results['environment']['date']}-planner-runs.md"
    target.write_text(markdown(results), encoding="utf-8")
    target.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
