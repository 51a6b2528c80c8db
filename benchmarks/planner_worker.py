# SPDX-License-Identifier: Apache-2.0
"""All runs of one case of benchmarks/planner.py in one process, one engine after the other; a line of JSON for each.

Run as ``python benchmarks/planner_worker.py CASE.json``. Storage is throttled in the I/O engine, so the two speeds are
the same on every machine that is faster. The first run is the automatic one, which knows nothing; the others start from
the profile that it kept.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

FATES = ("keep", "swap", "recompute")
OPERATORS = ("norm_1", "qkv", "attention", "attention_projection", "norm_2", "mlp_up", "mlp_activation", "mlp_down")


def config_of(case: dict[str, Any], run: dict[str, Any], numel: int) -> dict[str, Any]:
    """The DeepSpeed JSON of one run. By hand: tiers and swapped blocks are given, what is not swapped is recomputed."""
    block: dict[str, Any] = {
        "nvme_path": case["directory"],
        "gpu_budget_bytes": case["gpu_budget_bytes"],
        "dram_budget_bytes": int(case["dram_bytes_each"] * numel),
    }
    settings = {"chunk_bytes": case["chunk_bytes"], "staging_bytes": case["staging_bytes"]}
    if run["tiers"] is None:
        block["plan"] = settings
    else:
        for name, tier in zip(("parameters", "optimizer", "gradients"), run["tiers"], strict=True):
            block[name] = {"tier": tier}
        layers = case["model"]["num_layers"]
        swapped = round(run["share"] * layers)
        counts = dict(zip(FATES, (0, swapped, layers - swapped), strict=True))
        inputs = dict(zip(FATES, (0, layers, 0), strict=True))
        block["plan"] = {
            "schema": "ds_fuyou.plan/1",
            "model": {"name": case["name"], "params": numel, "layers": layers, "fingerprint": "by hand"},
            "world_size": 1,
            "residency": {"parameters": 1, "optimizer": 0, "gradients": 1},
            "activations": {"block_input": inputs, **dict.fromkeys(OPERATORS, counts)},
            "settings": settings,
        }
    return {
        "train_micro_batch_size_per_gpu": case["batch"],
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3},
        "steps_per_print": 1_000_000_000,
        "fuyou": block,
    }


def measure(case: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step in steady state, what was predicted, and bytes of each tier, planned and at most held."""
    import deepspeed
    import torch
    from finetune import GPT
    from text import manual

    torch.manual_seed(0)
    model = GPT(**case["model"])
    numel = sum(param.numel() for param in model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(case, run, numel)
    )
    optimizer: Any = engine.optimizer
    state, length = optimizer.rank_state, case["model"]["length"]
    state.core.io.engine.set_throttle(case["rate"], case["rate"])
    data, generator = manual(), torch.Generator().manual_seed(0)

    def step() -> None:
        starts = torch.randint(len(data) - length - 1, (case["batch"],), generator=generator)
        engine.backward(engine(torch.stack([data[s : s + length + 1] for s in starts])))
        engine.step()

    automatic = run["tiers"] is None  # a run without a profile decides on activations after its fourth step
    for _ in range(case["num_lead"] + (2 if automatic else 0)):
        step()
    begin = time.perf_counter()
    for _ in range(case["num_timed"]):
        step()
    secs = (time.perf_counter() - begin) / case["num_timed"]
    prediction = optimizer.run_plan.prediction
    found = {
        **run,
        "secs": secs,
        "predicted": None if prediction is None else prediction.iteration_secs,
        "bound": None if prediction is None else prediction.bound,
        "bytes": tier_bytes(optimizer),
        "numel": numel,
    }
    engine.destroy()
    return found


def tier_bytes(optimizer: Any) -> dict[str, dict[str, float]]:
    """By tier: what the placement and the profile say (whole pools, whole slots, everything that one forward saves,
    because the measured step swaps all of it), and the most that was held; on storage, what the files take.
    """
    state, profile = optimizer.rank_state, optimizer.run_plan.profile
    saved = sum(one.num_bytes for block in profile.blocks for one in block.operators if one.saved) if profile else 0.0
    planned = optimizer._tier_bytes.planned(saved)
    session = state.activations
    tier = session.swapper.tier if session is not None and session.swapper is not None else None
    directories = state.store.directories if state.store is not None else ()
    files = [file for path in directories for file in Path(path).rglob("*") if file.is_file()]
    stored = sum(file.stat().st_blocks * 512 for file in files)
    if tier is not None and tier.storage is not None:
        stored += tier.storage.space.num_bytes
    measured = {"host memory": optimizer._tier_bytes.peaks()["host memory"], "storage": float(stored)}
    return {name: {"planned": planned[name], "measured": measured[name]} for name in planned}


def main() -> None:
    import deepspeed

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    case = json.loads(Path(sys.argv[1]).read_text())
    deepspeed.init_distributed("gloo")
    for run in case["runs"]:
        replies.write(json.dumps(measure(case, run)) + "\n")
        replies.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
