# SPDX-License-Identifier: Apache-2.0
"""Trains one engine and hands it, after its steps were measured, another machine's measurements.

Run by test_moving_to_the_plan.py with a directory and the block's "resume"; prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import deepspeed
import torch

import ds_fuyou.zero.run.run_moves as run_moves
from ds_fuyou.planner.plan import stored_bytes
from ds_fuyou.planner.profile import RunProfile, StorageRates, save_profile
from ds_fuyou.planner.watch import Cause
from tests.harness.models import TinyGPT
from tests.harness.moving import train
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
    losses = train(engine, MODEL, 0, 3)
    engine.destroy()
    return [share, *losses]


def read_often(found: RunProfile) -> RunProfile:
    """A device that computes fast, behind slow storage, and has eight micro-batches a step: each reads P16 twice."""
    return replace(
        slow_adam(found),
        forward_secs=1e-4,
        backward_secs=2e-4,
        update_rate=1e12,
        storage=StorageRates(1e8, 1e8, 1e8, 0.0, 0.0),
        accumulation=8,
    )


def engine_of(resume: str, nvme_budget_bytes: int | str = "auto", **more: object) -> deepspeed.DeepSpeedEngine:
    directory = sys.argv[1]
    fuyou = {
        "nvme_path": directory,
        "dram_budget_bytes": 2_200_000,
        "gradients": {"tier": "nvme"},
        "parameters": {"tier": "nvme"},
        "plan": {"chunk_bytes": 65536, "staging_bytes": 1 << 20, "prefetch_bytes": 1 << 20},
        "resume": resume,
        "nvme_budget_bytes": nvme_budget_bytes,
        **more,
    }
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    config = ds_config(gradient_clipping=0.0, fuyou=fuyou)
    for name in ("offload_optimizer", "offload_param"):  # they would say where states and P16 are
        config["zero_optimization"].pop(name, None)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def moves_of_all() -> dict[str, object]:
    """Of P16, states and G16, which a run has placed that knows nothing: P16 comes when states have left, and all leave
    when there is no memory, one class after the other."""
    os.environ["DS_FUYOU_PROFILES"] += "-of-a-run-that-knows-nothing"
    open_tiers = {"parameters": {"tier": "auto"}, "gradients": {"tier": "auto"}}
    engine = engine_of("off", **open_tiers, plan={"chunk_bytes": 65536, "staging_bytes": 1 << 20})
    state, plan = engine.optimizer.rank_state, engine.optimizer.run_plan
    found: dict[str, list[object]] = {
        "losses": train(engine, MODEL, 0, 3),
        "planned": [],
        "resident": [],
        "regions": [],
        "starts": [],
    }

    def look() -> None:
        residency, place = state.plan.residency, state.core.place.residency
        found["planned"].append([residency.parameters, residency.optimizer, residency.gradients])
        found["resident"].append([state.layout.share_of(share) for share in (place.params, place.states, place.grads)])
        found["starts"].append([state.core.place.num_versions, state.core.policy.choose().value])
        names = ("param16/", "grad16/")
        found["regions"].append([sum(region.startswith(name) for region in state.store.regions) for name in names])

    look()
    measured = plan.profile
    for first, profile in ((3, read_often(measured)), (8, slow_adam(measured))):
        plan.profile = profile
        plan._usual = {Cause.READS: 1e30, Cause.WRITES: 1e30}  # lanes worked beside something else
        plan.moves.move(profile)
        plan._moved()
        found["losses"] += train(engine, MODEL, first, first + 5)
        state.core.wait_all()
        look()
    plan.moves.move(read_often(measured))
    found["losses"] += train(engine, MODEL, 13, 17)
    look()
    run_moves.free_memory_of_rank = lambda: 4096
    found["losses"] += train(engine, MODEL, 17, 24)
    look()
    found["watched"] = plan.prediction is not None
    found["slower"] = [finding.text for finding in plan.findings if finding.cause in (Cause.READS, Cause.WRITES)]
    engine.destroy()
    return found


def main() -> None:
    resume = sys.argv[2]
    deepspeed.init_distributed("gloo")
    engine = engine_of(resume)
    state, plan = engine.optimizer.rank_state, engine.optimizer.run_plan
    before, host_bytes, losses = state.plan.residency.optimizer, state.planned_host_bytes, train(engine, MODEL, 0, 3)
    assert plan.profile is not None
    measured = plan.profile
    plan.profile = slow_adam(measured)
    plan.moves.move(plan.profile)
    plan._moved()
    losses += train(engine, MODEL, 3, 8)
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
        found["all"] = moves_of_all()
    sys.stdout.write(f"RESULT {json.dumps(found)}\n")


if __name__ == "__main__":
    main()
