# SPDX-License-Identifier: Apache-2.0
"""One scenario of benchmarks/planner.py in one process: an engine that measures, the search, engines to compare.

Run as ``python benchmarks/planner_worker.py SCENARIO.json``; prints one line of JSON. The device is the timed stand-in,
storage is throttled in the I/O engine, so the lanes' rates are the same on every machine that is faster.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
from torch import nn  # noqa: E402

LIVE_MATRICES = 2  # of the largest, in use and on their way: with less no fetch runs beside computing
GRID = (0.0, 0.25, 0.5, 0.75, 1.0)
FATES = ("auto", "swap", "recompute")
STARTS = ("speculate", "defer")
NUM_EXPERTS, LORA_RANK = 4, 8
LEAD = 8  # steps of the engine that measures: two for the profile, and what a run needs to know its usual rates


class Experts(nn.Module):
    """As many products as one of its experts has, over all of their weights: tokens are spread evenly."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(inputs, outputs) for _ in range(NUM_EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(NUM_EXPERTS, dim=1)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)], dim=1)


class Adapted(nn.Module):
    """A frozen linear module with an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, LORA_RANK, bias=False)
        self.up = nn.Linear(LORA_RANK, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def model_of(scenario: dict[str, Any]) -> nn.Module:
    from finetune import GPT

    model = GPT(**scenario["model"])
    if scenario["kind"] == "lora":
        model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            linear = getattr(block, name)
            if scenario["kind"] == "lora":
                setattr(block, name, Adapted(linear))
            elif scenario["kind"] == "moe" and name in ("up", "down"):
                setattr(block, name, Experts(linear.in_features, linear.out_features))
    return model


def streamed(scenario: dict[str, Any]) -> dict[str, int]:
    """Parameters come and go as on a device that holds a small part of a model."""
    largest = 4 * scenario["model"]["width"] ** 2
    return {
        "stage3_max_live_parameters": LIVE_MATRICES * largest,
        "stage3_max_reuse_distance": LIVE_MATRICES * largest,
        "stage3_prefetch_bucket_size": largest // 2,
        "stage3_param_persistence_threshold": 0,
    }


def config_of(scenario: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed JSON. ``plan`` is nothing where the planner decides."""
    block: dict[str, Any] = {
        "nvme_path": scenario["directory"],
        "dram_budget_bytes": scenario["dram_bytes"],
        "gpu_budget_bytes": scenario["gpu_bytes"],
        "activations": {"mode": plan.pop("mode", "auto")},
        "optimizer": {"clip_policy": plan.pop("clip_policy", "auto")},
        "plan": {"chunk_bytes": 2 << 20, "num_threads": scenario["threads"], **plan},
    }
    return {
        "train_micro_batch_size_per_gpu": scenario["batch"],
        "gradient_accumulation_steps": scenario["accumulation"],
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, **streamed(scenario)},
        "steps_per_print": 1_000_000_000,
        "fuyou": block,
    }


def trained(scenario: dict[str, Any], plan: dict[str, Any], lead: int, timed: int) -> dict[str, Any]:
    """Seconds of a step in steady state, what was predicted, bytes planned and held."""
    import deepspeed

    config = config_of(scenario, dict(plan))
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = model_of(scenario)
    params = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    optimizer: Any = engine.optimizer
    state, length = optimizer.rank_state, scenario["model"]["length"]
    state.core.io.engine.set_throttle(scenario["storage"], scenario["storage"])
    ids = torch.zeros(scenario["batch"], length + 1, dtype=torch.int64, device=engine.device)

    def step() -> None:
        for _ in range(scenario["accumulation"]):
            engine.backward(engine(ids))
            engine.step()

    for _ in range(lead):
        step()
    for _ in range(40):  # what moves to the plan must have arrived
        if state.core.mover.is_idle:
            break
        step()
    torch.standin.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(timed):
        step()
    secs = (time.perf_counter() - begin) / timed
    run_plan = optimizer.run_plan
    prediction, held, planned = run_plan.prediction, optimizer._tier_bytes.peaks(), optimizer._tier_bytes.planned(0.0)
    found = {
        "secs": secs,
        "predicted": None if prediction is None else prediction.iteration_secs,
        "bound": None if prediction is None else prediction.bound,
        "residency": vars(state.plan.residency),
        "host": [planned["host memory"], held["host memory"]],
        "storage": [planned["storage"], held["storage"]],
        "device": [state.planned_device_bytes, torch.standin.max_memory_allocated()],
        "profile": run_plan.profile,
        "given": state.plan_input,
        "plan": state.plan,
    }
    engine.destroy()
    return found


def searched(measured: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
    """(predicted seconds, what to set) of every point of a grid over the shares of all classes, the fates of
    activations and when updates begin, that fits host memory with the lanes it needs.
    """
    from ds_fuyou.planner.document import Residency
    from ds_fuyou.planner.plan import classes_of, minimum_lane_bytes, resident_bytes
    from ds_fuyou.planner.profiled import activation_costs, run_time

    profile, given = measured["profile"], measured["given"]
    given = replace(given, device_room_bytes=profile.room or 0.0)
    names = classes_of(given)
    for clip_policy, mode in itertools.product(STARTS, FATES):
        given = replace(given, may_speculate=clip_policy == "speculate")
        steps = run_time(profile, given, activations=activation_costs(profile), mode=mode)
        for shares in itertools.product(GRID, repeat=len(names)):
            residency = Residency(**dict(zip(names, shares, strict=True)))
            needed = resident_bytes(given, residency)
            needed += (
                minimum_lane_bytes(given, residency, measured["plan"].chunk_bytes) + measured["plan"].activation_bytes
            )
            if needed <= given.dram_budget_bytes:
                chosen = {"residency": dict(zip(names, shares, strict=True)), "mode": mode, "clip_policy": clip_policy}
                yield steps.secs(steps.placed(given, residency, 0.0)), chosen


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    scenario = json.loads(Path(sys.argv[1]).read_text())
    from tests.device.accelerator import install

    install(**scenario["device"])
    import deepspeed

    from ds_fuyou.errors import FuyouConfigError

    deepspeed.init_distributed("gloo")
    cold = trained(scenario, {}, lead=LEAD, timed=1)
    grid = sorted(searched(cold), key=lambda point: point[0])
    ours = trained(scenario, {}, lead=3, timed=scenario["timed"])
    by_hand = []
    for secs, chosen in grid[: scenario["num_best"]]:
        try:
            found = trained(scenario, chosen, lead=3, timed=scenario["timed"])
        except FuyouConfigError:  # with what the lanes take besides it does not fit after all
            continue
        by_hand.append({"searched": secs, "set": chosen, **shown(found)})
    again = trained(scenario, {}, lead=3, timed=scenario["timed"])
    ours["secs_again"] = again["secs"]
    result = {"cold": shown(cold), "ours": shown(ours), "by_hand": by_hand, "num_points": len(grid)}
    replies.write(json.dumps(result) + "\n")
    replies.flush()
    os._exit(0)


def shown(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in ("profile", "given", "plan")}


if __name__ == "__main__":
    main()
