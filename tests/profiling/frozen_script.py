# SPDX-License-Identifier: Apache-2.0
"""Trains the last block of a model whose rest is frozen, with host memory for none, some and all of that.

Run by test_frozen_homes.py with a directory; prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed
import torch

from ds_fuyou.telemetry.report import LaneTimes
from tests.harness.models import TinyGPT, make_batch
from tests.harness.runner import ds_config

MODEL = {"num_layers": 8, "width": 72, "vocabulary": 500}
PLAN = {"chunk_bytes": 32768, "staging_bytes": 512 << 10, "prefetch_bytes": 256 << 10}
WATCHED = 12  # steps whose reads are counted: what is read ahead at their begin and at their end is of others
TIERS = {"optimizer": {"tier": "nvme"}, "gradients": {"tier": "cpu"}}


def trained(longer: int = 0, **block: Any) -> dict[str, Any]:
    """``longer``: further steps with twice the batch, after which the plan must be that of the larger one."""
    config = ds_config(gradient_clipping=0.0, fuyou={"nvme_path": sys.argv[1], "plan": PLAN, **TIERS, **block})
    for section in ("offload_optimizer", "offload_param"):
        config["zero_optimization"].pop(section, None)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = TinyGPT(**MODEL)
    model.requires_grad_(False)
    list(model.blocks)[-1].requires_grad_(True)
    params = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    state, losses = engine.optimizer.rank_state, []
    for step in range(4):
        loss = engine(make_batch(MODEL, step, 0)["ids"])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    plan = engine.optimizer.run_plan
    state.core.wait_all()
    prediction, before = plan.prediction, LaneTimes.of(state).read_bytes
    for step in range(WATCHED):
        engine.backward(engine(make_batch(MODEL, step, 0)["ids"]))
        engine.step()
    state.core.wait_all()
    really = (LaneTimes.of(state).read_bytes - before) / WATCHED
    for step in range(longer):
        engine.backward(engine(make_batch(MODEL, step, 0)["ids"].repeat(2, 1)))
        engine.step()
    found = {
        "losses": losses,
        "planned": state.plan.residency.frozen,
        "frozen_bytes": state.plan_input.frozen_bytes,
        "held": state.frozen_bytes(),
        "shape": None if plan.profile is None else plan.profile.shape,
        "watches": plan._watch is not None,
        "really_read": really,
        "read": None if prediction is None else prediction.read_bytes,
    }
    engine.destroy()
    return found


def main() -> None:
    deepspeed.init_distributed("gloo")
    found = {
        "storage": trained(parameters={"tier": "nvme"}, dram_budget_bytes=1 << 30),
        "some": trained(dram_budget_bytes=int(sys.argv[2])),
        "all": trained(8, dram_budget_bytes=1 << 30),
    }
    sys.stdout.write(f"RESULT {json.dumps(found)}\n")


if __name__ == "__main__":
    main()
