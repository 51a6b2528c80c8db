# SPDX-License-Identifier: Apache-2.0
"""What checksums cost: of steps and of their updates with and without, paired and interleaved; and the sum by itself.

python -m benchmarks.checksums --case balanced --case storage_bound --pairs 10
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import StockTuning, spec_of
from benchmarks.processes import ForeignLoad, Worker, started
from benchmarks.report import environment_of
from benchmarks.run import BY_NAME, summary
from ds_fuyou.ops.core import load_core

VARIANTS = {"balanced": "fuyou_all_nvme", "storage_bound": "fuyou_all_nvme", "activations": "fuyou_swap"}
"""By case; of the last, swapped activations are summed, too."""


def compare(case_name: str, pairs: int, directory: Path) -> dict[str, Any]:
    """Seconds of a step, of its updates, and of the processor a step, by "on" and "off"."""
    case, specs = BY_NAME[case_name], {}
    for name in ("on", "off"):
        (directory / name).mkdir(exist_ok=True)
        specs[name] = spec_of(case, VARIANTS[case_name], directory / name, StockTuning())
        specs[name]["config"]["fuyou"]["checksum"] = name == "on"
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in specs}
    with tempfile.TemporaryDirectory(prefix="fuyou-bench-") as scratch, started(specs, Path(scratch)) as workers:
        for worker in workers:
            worker.ask(do="steps", lead=3, timed=1)
        load = ForeignLoad(workers)
        for index in range(pairs):
            for worker in workers if index % 2 == 0 else reversed(workers):
                runs[worker.name].append(_burst(worker, case.num_timed))
            print(case_name, {name: round(found[-1]["secs"], 3) for name, found in runs.items()}, flush=True)
        foreign = load.cores()
    about: dict[str, Any] = {"case": case_name, "foreign_cores": foreign, "runs": runs}
    for what in ("secs", "update_secs"):
        ratios = [on[what] / off[what] for on, off in zip(runs["on"], runs["off"], strict=True)]
        about[what] = {name: summary([run[what] for run in found]) for name, found in runs.items()}
        about[what]["ratio"] = summary(ratios)
    return about


def _burst(worker: Worker, num_timed: int) -> dict[str, Any]:
    found = worker.ask(do="steps", lead=1, timed=num_timed)
    return {"secs": found["secs"], "update_secs": found["lanes"]["update_busy_secs"]}


def bytes_per_sec(num_bytes: int, rounds: int = 15) -> float:
    """Of the sum over memory of one size, again and again: in the cache if it fits. One core."""
    core, words = load_core(), torch.randint(0, 2**31, (num_bytes // 4,), dtype=torch.int32)
    repeats = max(1, (1 << 28) // num_bytes)
    rates = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(repeats):
            core.place_sum(words.data_ptr(), words.numel(), 0)
        rates.append(repeats * num_bytes / (time.perf_counter() - begin))
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=VARIANTS, action="append")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the storage to use")
    parser.add_argument("--out", type=Path, help="a JSON file for everything that was measured")
    arguments = parser.parse_args()
    rates = {size: bytes_per_sec(size) for size in (192 << 10, 64 << 20)}
    for size, rate in rates.items():
        print(f"the sum over {size >> 10} KiB: {rate / 1e9:.1f} GB/s")
    rows = []
    with tempfile.TemporaryDirectory(prefix="fuyou-checksums-", dir=arguments.directory) as scratch:
        for name in arguments.case or VARIANTS:
            rows.append(compare(name, arguments.pairs, Path(scratch)))
            for what in ("secs", "update_secs"):
                found = rows[-1][what]
                print(
                    f"{name} {what}: {found['on']['median']:.4f} on, {found['off']['median']:.4f} off, ratio "
                    f"{found['ratio']['median']:.3f} ({found['ratio']['quartile_1']:.3f} to "
                    f"{found['ratio']['quartile_3']:.3f}), foreign cores {rows[-1]['foreign_cores']:.2f}",
                    flush=True,
                )
        if arguments.out is not None:
            about = {"environment": environment_of(Path(scratch)), "sum_bytes_per_sec": rates, "rows": rows}
            arguments.out.write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
