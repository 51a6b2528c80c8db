# SPDX-License-Identifier: Apache-2.0
"""Trains one engine and hands it, after its steps were measured, another machine's measurements.

Run by test_moving_to_the_plan.py with a directory and the block's "resume"; prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import deepspeed
import torch

from ds_fuyou.planner.plan import stored_bytes
from ds_fuyou.planner.profile import RunProfile, StorageRates, save_profile
from tests.harness.models import TinyGPT, make_batch
from tests.harness.runner import ds_config

MODEL = {"num_layers": 3, "width": 72, "vocabulary": 500}


def slow_adam(found: RunProfile) -> RunProfile:
    """A device that computes by itself, backward long and forward short, storage fast, updates as long as backward: in
    memory states would make the next forward wait for their updates.
    """
    return replace(
        found,
        device_is_host=False,
        forward_secs=0.01,
        backward_secs=1.0,
        update_rate=250_000.0,
        storage=StorageRates(50e9, 50e9, 50e9, 0.0, 0.0),
        link_up=1e12,
        link_down=1e12,
    )


def second_start(kept: RunProfile, nvme_budget_bytes: int) -> list[float]:
    """[states in memory, by which it was placed, losses] of an engine that finds what was kept, with a small budget."""
    save_profile(kept)
    engine = engine_of("off", nvme_budget_bytes)
    share = engine.optimizer.rank_state.plan.residency.optimizer
    losses = train(engine, 0, 3)
    engine.destroy()
    return [share, *losses]


def engine_of(resume: str, nvme_budget_bytes: int | str = "auto") -> deepspeed.DeepSpeedEngine:
    directory = sys.argv[1]
    fuyou = {
        "nvme_path": directory,
        "dram_budget_bytes": 2_200_000,
        "gradients": {"tier": "nvme"},
        "parameters": {"tier": "nvme"},
        "plan": {"chunk_bytes": 65536, "staging_bytes": 1 << 20, "prefetch_bytes": 1 << 20},
        "resume": resume,
        "nvme_budget_bytes": nvme_budget_bytes,
    }
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    config = ds_config(gradient_clipping=0.0, fuyou=fuyou)
    del config["zero_optimization"]["offload_optimizer"]  # it would say where states are
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train(engine: deepspeed.DeepSpeedEngine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(make_batch(MODEL, step, 0)["ids"])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    resume = sys.argv[2]
    deepspeed.init_distributed("gloo")
    engine = engine_of(resume)
    state, plan = engine.optimizer.rank_state, engine.optimizer.run_plan
    before, host_bytes, losses = state.plan.residency.optimizer, state.planned_host_bytes, train(engine, 0, 3)
    assert plan.profile is not None
    measured = plan.profile
    plan.profile = slow_adam(measured)
    plan._move()
    losses += train(engine, 3, 8)
    state.core.wait_all()
    shares = state.core.place.residency.states
    found = {
        "losses": losses,
        "planned": [before, state.plan.residency.optimizer],
        "resident": sum(shares) / len(shares),
        "moved": state.core.mover.counts.num_to_storage,
        "host_bytes": [host_bytes, state.planned_host_bytes],
    }
    stored = stored_bytes(state.plan_input, replace(state.plan.residency, optimizer=before))
    engine.destroy()
    if resume == "off":
        found["roomy"] = second_start(slow_adam(measured), 1 << 30)
        found["small"] = second_start(slow_adam(measured), int(1.15 * stored))
    sys.stdout.write(f"RESULT {json.dumps(found)}\n")


if __name__ == "__main__":
    main()
