# SPDX-License-Identifier: Apache-2.0
"""What Python on the training thread costs a module: many small modules, on the host, in CPU time of that thread.

python -m benchmarks.training_thread                        forward, backward, step and evaluation of each variant
python -m benchmarks.training_thread --profile fuyou_all_nvme --part backward     where its time goes, by function
python -m benchmarks.training_thread --gathered     the same with parameters that do not stay gathered, as large ones do
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cases import StockTuning, config_of
from benchmarks.processes import started

__all__ = ["VARIANTS", "main", "measure_thread"]

VARIANTS = ("zero_offload", "fuyou_dram", "fuyou_all_nvme")
MODEL = {"num_layers": 48, "width": 64, "num_heads": 1, "length": 8, "vocabulary": 256, "checkpointing": False}
PARTS = ("forward", "backward", "step", "evaluation")
NUM_STEPS = 20


def measure_thread(trainer: Any, *, num_steps: int, profile: str | None) -> dict[str, Any]:
    """Least seconds of each part, the number of modules, and the profile of a part, in the process that trains."""
    import torch

    torch.set_num_threads(1)
    engine, found = trainer.engine, {part: [] for part in PARTS}
    profiler = cProfile.Profile(time.thread_time)

    def timed(part: str, call: Any, *arguments: Any) -> Any:
        begin = time.thread_time()
        told = (profiler.runcall if part == profile else _call)(call, *arguments)
        found[part].append(time.thread_time() - begin)
        return told

    for _ in range(num_steps):
        batch = trainer.batch()
        loss = timed("forward", engine, batch)
        timed("backward", engine.backward, loss)
        timed("step", engine.step)
    trainer.drain()
    engine.eval()
    with torch.no_grad():
        for _ in range(num_steps):
            timed("evaluation", engine, batch)
    engine.train()
    told = io.StringIO()
    if profile is not None:
        pstats.Stats(profiler, stream=told).sort_stats("tottime").print_stats(45).print_stats("ds_fuyou")
    num_modules = sum(1 for _ in engine.module.modules())
    least = {part: min(secs) for part, secs in found.items()}
    return {"least": {"num_modules": num_modules, **least}, "profile": told.getvalue()}


def _call(call: Any, *arguments: Any) -> Any:
    return call(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=VARIANTS)
    parser.add_argument("--part", choices=PARTS, default="evaluation", help="what is profiled")
    parser.add_argument("--rounds", type=int, default=3, help="bursts a variant, in turns; the least counts")
    parser.add_argument("--gathered", action="store_true", help="parameters do not stay gathered")
    arguments = parser.parse_args()
    profiled = None if arguments.profile is None else arguments.part
    variants = VARIANTS if arguments.profile is None else (arguments.profile,)
    with tempfile.TemporaryDirectory(prefix="fuyou-bench-") as scratch:
        specs = {}
        for variant in variants:
            (Path(scratch) / variant).mkdir()
            config = config_of(variant, Path(scratch) / variant, StockTuning(), 1, 0.0)
            if arguments.gathered:
                config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
            specs[variant] = {"model": MODEL, "batch": 1, "mode": "train", "config": config}
        with started(specs, Path(scratch)) as workers:
            found: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
            for _ in range(arguments.rounds):
                for worker in workers:
                    told = worker.ask(do="thread", steps=NUM_STEPS, profile=profiled)
                    print(told["profile"], end="")
                    found[worker.name].append(told["least"])
    least = {name: {key: min(each[key] for each in all_of) for key in all_of[0]} for name, all_of in found.items()}
    for name, secs in least.items():
        print(f"{name:16s}" + "".join(f"  {part} {1e3 * secs[part]:.1f} ms" for part in PARTS))
        if "zero_offload" in least and name != "zero_offload":
            beyond = {part: secs[part] - least["zero_offload"][part] for part in PARTS}
            a_module = "".join(f"  {part} {1e6 * beyond[part] / secs['num_modules']:.1f} us" for part in PARTS)
            print(f"{'':16s}{a_module}  a module beyond stock")


if __name__ == "__main__":
    main()
