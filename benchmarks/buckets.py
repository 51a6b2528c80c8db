# SPDX-License-Identifier: Apache-2.0
"""What it costs to reduce gradients in stock's buckets instead of block by block, on more than two ranks.

python -m benchmarks.buckets --ranks 3 --rounds 6      prints a table row a size of buckets

All engines live in the same processes and take turns: a step that is not timed, two that are, and the updates that
these leave behind are waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = {"num_layers": 8, "width": 512, "num_heads": 8, "length": 256, "vocabulary": 8192}
CUTS = ("block", "bucket")
HOLDS_ALL = 500_000_000  # DeepSpeed's default
TIERS = {"states": ("cpu", "nvme", "cpu"), "all": ("nvme", "nvme", "nvme")}


def config_of(cut: str, bucket: int, batch: int, tiers: str, directory: str) -> dict[str, Any]:
    parameters, optimizer, gradients = TIERS[tiers]
    return {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": bucket},
        "fuyou": {
            "nvme_path": directory,
            "parameters": {"tier": parameters},
            "optimizer": {"tier": optimizer},
            "gradients": {"tier": gradients, "reduce_by": cut},
        },
    }


def rank_main(told: dict[str, Any]) -> None:
    """One rank: rank 0 leaves the seconds of a step by cut and size."""
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]
    import deepspeed
    import torch
    from finetune import GPT

    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    ids = torch.randint(MODEL["vocabulary"], (told["batch"], MODEL["length"] + 1))
    engines = {}
    for bucket in told["buckets"]:
        for cut in CUTS:
            torch.manual_seed(0)
            model = GPT(**MODEL)
            directory = f"{told['directory']}/{cut}-{bucket}"
            Path(directory).mkdir(exist_ok=True)
            config = config_of(cut, bucket, told["batch"], told["tiers"], directory)
            made = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            engines[cut, bucket] = made[0]
    secs: dict[str, list[float]] = {f"{cut} {bucket}": [] for cut, bucket in engines}

    def steps(engine: Any, number: int) -> None:
        for _ in range(number):
            engine.backward(engine(ids))
            engine.step()

    for index in range(-1, told["rounds"]):
        turns = list(engines.items())
        for (cut, bucket), engine in turns if index % 2 else reversed(turns):
            steps(engine, 1)
            torch.distributed.barrier()
            begin = time.perf_counter()
            steps(engine, 2)
            torch.distributed.barrier()
            took = (time.perf_counter() - begin) / 2
            engine.optimizer.rank_state.core.wait_all()
            torch.distributed.barrier()
            if index >= 0:
                secs[f"{cut} {bucket}"].append(took)
    if torch.distributed.get_rank() == 0:
        numel = sum(p.ds_numel for p in next(iter(engines.values())).module.parameters())
        Path(told["out"]).write_text(json.dumps({"secs": secs, "numel": numel}))
    for engine in engines.values():
        engine.destroy()
    torch.distributed.barrier()
    os._exit(0)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the ranks; returns what rank 0 left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="fuyou-bench-", dir=arguments.directory) as scratch:
        told = {
            "directory": scratch,
            "out": f"{scratch}/out.json",
            "rounds": arguments.rounds,
            "batch": arguments.batch,
            "tiers": arguments.tiers,
            "buckets": arguments.buckets,
        }
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
        env |= {"WORLD_SIZE": str(arguments.ranks), "LOCAL_WORLD_SIZE": str(arguments.ranks), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.buckets", "--told", json.dumps(told)],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=ROOT,
                stdout=sys.stderr,
            )
            for rank in range(arguments.ranks)
        ]
        try:
            codes = [rank.wait() for rank in ranks]
            if any(codes):
                raise RuntimeError(f"ranks ended with {codes}")
        finally:
            for rank in ranks:
                rank.kill()
        found: dict[str, Any] = json.loads(Path(told["out"]).read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tiers", choices=TIERS, default="states")
    parser.add_argument("--buckets", type=int, nargs="+", default=[2_000_000, HOLDS_ALL], help="reduce_bucket_size")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--told", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.told:
        rank_main(json.loads(arguments.told))
        return
    found = measure(arguments)
    print(json.dumps(found["secs"]))
    for bucket in arguments.buckets:
        block, cut = (found["secs"][f"{cut} {bucket}"] for cut in CUTS)
        ratios = [ours / theirs for ours, theirs in zip(cut, block, strict=True)]
        print(
            f"| {arguments.ranks} | {arguments.tiers} | {bucket:,} of {found['numel']:,} | "
            f"{statistics.median(block):.2f} | {statistics.median(cut):.2f} | {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}) |"
        )


if __name__ == "__main__":
    main()
