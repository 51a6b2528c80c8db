# SPDX-License-Identifier: Apache-2.0
"""Two ranks of one machine that is not the same for both: rank 1 has the slower disk, and later the scarce memory.

Run by test_ranks_plan_alike.py with a directory; each rank prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys

import deepspeed
import torch

import ds_fuyou.zero.run.run_moves as run_moves
import ds_fuyou.zero.run.run_plan as run_plan
from tests.harness.models import TinyGPT, make_batch
from tests.harness.runner import ds_config

MODEL = {"num_layers": 3, "width": 72, "vocabulary": 500}
RATES, LATER = (60e6, 20e6), (60e6, 5e6)  # bytes a second, of ranks 0 and 1


def broken(*_: object) -> None:
    raise ValueError("no decision today")


def no_memory(*_: object) -> None:
    raise MemoryError("none for a probe")


def main() -> None:
    rank = int(os.environ["RANK"])
    deepspeed.init_distributed("gloo")
    fuyou = {
        "nvme_path": sys.argv[1],
        "dram_budget_bytes": 2_200_000,
        "gradients": {"tier": "nvme"},
        "parameters": {"tier": "nvme"},
        "plan": {"chunk_bytes": 32768, "staging_bytes": 512 << 10, "prefetch_bytes": 1 << 20},
    }
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    config = ds_config(gradient_clipping=0.0, fuyou=fuyou)
    del config["zero_optimization"]["offload_optimizer"]  # it would say where states are
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    state, plan = engine.optimizer.rank_state, engine.optimizer.run_plan
    state.core.io.engine.set_throttle(RATES[rank], RATES[rank])
    found: dict = {"losses": [], "shares": [state.plan.residency.optimizer]}

    def steps(count: int) -> None:
        for _ in range(count):
            loss = engine(make_batch(MODEL, len(found["losses"]), 0)["ids"])
            engine.backward(loss)
            engine.step()
            found["losses"].append(float(loss.detach()))

    steps(3)
    found["measured"] = plan.profile.to_json()
    state.core.wait_all()
    steps(10)
    state.core.io.engine.set_throttle(LATER[rank], LATER[rank])
    steps(12)
    found["anew"] = plan.profile.to_json()
    found["causes"] = [finding.cause.name for finding in plan.findings]
    found["shares"].append(state.plan.residency.optimizer)
    if rank == 1:
        little = int(run_moves._FLOOR * run_moves.memory_of_rank()) - 1
        run_moves.free_memory_of_rank = lambda: little
    steps(4)
    state.core.wait_all()
    found["shares"].append(state.plan.residency.optimizer)
    resident = state.core.place.residency.states
    found["resident"] = sum(resident) / len(resident)
    if rank == 0:
        plan.moves._better = broken
    try:
        plan.moves.move(plan.profile)
    except Exception as error:
        found["raised"] = type(error).__name__
    steps(1)
    engine.destroy()
    if rank == 1:
        run_plan.probe_link = no_memory
    os.environ["DS_FUYOU_PROFILES"] += "-of-a-rank-that-cannot-measure"
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(3):
        engine.backward(engine(make_batch(MODEL, step, 0)["ids"]))
        engine.step()
    found["unmeasured"] = engine.optimizer.run_plan.profile is None
    engine.destroy()
    sys.stdout.write(f"RESULT {json.dumps(found)}\n")


if __name__ == "__main__":
    main()
