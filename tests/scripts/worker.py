# SPDX-License-Identifier: Apache-2.0
"""One rank of one run of a script (``grammar.py``), started by tests.harness.runner."""

import json
import os
import random
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.device.accelerator import install_from
from tests.harness.group import leave_group
from tests.scripts.actions import Run
from tests.scripts.models import Model


def build(spec: dict):
    if spec["config"].get("fp16"):
        get_accelerator().is_fp16_supported = lambda: True  # as in train_worker.py
    torch.manual_seed(0)
    random.seed(0)
    with deepspeed.zero.Init(config_dict_or_path=spec["config"], enabled=spec["zero_init"]):
        model = Model(spec["kinds"], tied=spec["tied"], leaves_loss=spec["leaves_loss"])
    if spec["frozen"] is not None:
        for param in model.blocks[spec["frozen"] % len(model.blocks)].parameters():
            param.requires_grad_(False)
    for param in model.parameters():
        param.is_optimized = param.requires_grad
    params = [param for param in model.parameters() if param.is_optimized]
    cut = len(params) // 2 if spec["groups"] == 2 else len(params)
    groups = [{"params": params[:cut]}, {"params": params[cut:], "lr": 2e-3, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups[: spec["groups"]], config=spec["config"])
    return engine


def what_is_left(run: Run) -> dict:
    left = {}
    for number, engine in enumerate(run.engines):
        for name, param in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                left[f"{number} P16 {name}"] = param.data.detach().clone().cpu()
            if not param.is_optimized:
                continue
            param.requires_grad_(True)  # for who asks
            left[f"{number} P32 {name}"] = safe_get_full_fp32_param(param).clone().cpu()
            for moment in ("exp_avg", "exp_avg_sq") if run.num_steps[number] else ():
                left[f"{number} {moment} {name}"] = safe_get_full_optimizer_state(param, moment).clone().cpu()
        left |= {f"{number} {name}": buffer.clone().cpu() for name, buffer in engine.module.named_buffers()}
    return left


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as handle:
        script = json.load(handle)
    install_from(os.environ)
    deepspeed.init_distributed("gloo" if get_accelerator().device_name() == "cpu" else None)
    directory = f"{sys.argv[2]}-files"
    run = Run([build(spec) for spec in script["engines"]], directory, does_all=script["does_all"])
    run.do(script["actions"])
    left = what_is_left(run)
    trips = []
    if hasattr(torch, "standin"):
        torch.standin.synchronize()
        trips = torch.standin.take_trips()
    kinds = [type(engine.optimizer).__name__ for engine in run.engines]
    torch.save({"seen": run.seen, "left": left, "trips": trips, "kinds": kinds}, f"{sys.argv[2]}.{os.environ['RANK']}")
    for engine in run.engines:
        engine.destroy()
    leave_group()


if __name__ == "__main__":
    main()
