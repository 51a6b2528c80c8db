# SPDX-License-Identifier: Apache-2.0
"""Steps on a GPU (``make bench-gpu``), and on the stand-in device with that GPU's rates: how alike are they?

python -m benchmarks.gpu --case storage_bound --rounds 2     a quick look, nothing written
python -m benchmarks.gpu --standin                           the same cases on the stand-in device, on this machine
python -m benchmarks.gpu --out FILE.json                     everything, written to a file

A process takes so much of the GPU's memory as a consumer card has, whatever the GPU has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import StockTuning
from benchmarks.device import DeviceCase, markdown, measure
from ds_fuyou.ops.core import load_core
from ds_fuyou.profiling.machine import best_secs, device_rates
from ds_fuyou.zero.device import rank_device

__all__ = ["CASES", "GpuCase", "GpuRates", "main"]

MODEL = {"num_layers": 24, "width": 1024, "num_heads": 16, "length": 1024, "vocabulary": 8192}  # 320 million parameters
WIDE = {"num_layers": 4, "width": 4096, "num_heads": 32, "length": 2048, "vocabulary": 8192}  # 881 million
TUNING = StockTuning(intra_op_parallelism=8)


@dataclass(frozen=True)
class GpuRates:
    """FLOP/s of a large bf16 product; bytes/s of the GPU's memory, read and written, and of each way of its link."""

    name: str = ""
    flops: float = 0.0
    memory_rate: float = 0.0
    up_rate: float = 0.0
    down_rate: float = 0.0


@dataclass(frozen=True)
class GpuCase(DeviceCase):
    """``gpu_bytes``: what a process may take of its memory. ``on_standin``: by a clock, at the GPU's ``rates``."""

    gpu_bytes: float = 24e9
    rates: GpuRates = GpuRates()
    on_standin: bool = False

    def place(self) -> dict[str, Any]:
        return {"device": self.settings()} if self.on_standin else {"gpu_bytes": self.gpu_bytes}

    def settings(self) -> dict[str, float]:
        rates = {key: value for key, value in asdict(self.rates).items() if key != "name"}
        return {"timed": 1, "skip": 1, "zeros": 1, "capacity": self.gpu_bytes, **rates}


def _case(name: str, batch: int, variants: tuple[str, ...], bars: dict[str, float], **more: Any) -> GpuCase:
    return GpuCase(name, batch, 1.0, 0.0, 0.0, variants, bars, **{"model": MODEL, "tuning": TUNING, **more})


CASES = (
    _case(
        "storage_bound",
        16,
        ("zero_infinity", "fuyou_optimizer_nvme", "fuyou_all_nvme", "fuyou_optimizer_nvme_int8"),
        {"fuyou_optimizer_nvme/zero_infinity": 0.40, "fuyou_optimizer_nvme_int8/zero_infinity": 0.22},
    ),
    _case(
        "compute_bound",
        16,
        ("zero_infinity", "fuyou_optimizer_nvme", "fuyou_off"),
        {"fuyou_optimizer_nvme/fuyou_off": 1.03, "fuyou_optimizer_nvme/zero_infinity": 0.60},
        accumulation=40,
        num_timed=1,
    ),
    _case(
        "activations",
        32,
        ("zero_offload_checkpointing", "fuyou_dram_checkpointing", "fuyou_two_lines"),
        {"fuyou_two_lines/zero_offload_checkpointing": 1.0},
        model=WIDE,
        num_timed=2,
    ),
)
BY_NAME = {case.name: case for case in CASES}


def measure_gpu() -> GpuRates:
    """As ``fuyou plan --measure`` does, in this process; and copies of 1 GiB on the GPU."""
    device, found = rank_device(), device_rates()
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device=device.torch_device) for _ in range(2))
    memory_rate = 2 * (1 << 30) / best_secs(lambda: target.copy_(source), device.synchronize)
    return GpuRates(device.name, found["matmul_flops"], memory_rate, found["link_up"], found["link_down"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(BY_NAME), action="append", help="only this one; may be given again")
    parser.add_argument("--variant", action="append", help="only this one of the cases' variants")
    parser.add_argument("--rounds", type=int, default=3, help="bursts a variant (default 3)")
    parser.add_argument("--standin", action="store_true", help="on the stand-in device, at the rates of this GPU")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the storage to use")
    parser.add_argument("--out", type=Path, help="a JSON file for the results; those that it has of other cases stay")
    arguments = parser.parse_args()
    load_core()
    rates = measure_gpu()
    torch.cuda.empty_cache()  # the GPU is the workers'
    results: dict[str, Any] = {"cases": {}}
    if arguments.out is not None and arguments.out.exists():
        results = json.loads(arguments.out.read_text())
    results |= {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "gpu": asdict(rates),
    }
    for name in arguments.case or BY_NAME:
        case = replace(BY_NAME[name], rates=rates, on_standin=arguments.standin)
        if arguments.variant is not None:
            case = case.only(arguments.variant)
        told = f"{name}_standin" if arguments.standin else name
        with tempfile.TemporaryDirectory(prefix="fuyou-bench-", dir=arguments.directory) as directory:
            results["cases"][told] = measure(case, arguments.rounds, Path(directory))
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        print(markdown({"cases": {told: results["cases"][told]}}), flush=True)


if __name__ == "__main__":
    main()
