# SPDX-License-Identifier: Apache-2.0
"""One rank of one training run: reads a case (JSON), trains, and saves what the run left behind.

Run as a script by harness.runner with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. The saved
dictionary holds losses, gradient norms, and P16, P32 and moments of every parameter by name.
"""

import json
import random
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from models import build_model, make_batch

MOMENTS = {"AdamW": ("exp_avg", "exp_avg_sq"), "Adam": ("exp_avg", "exp_avg_sq"), "Lion": ("exp_avg",), "Adagrad": ("exp_avg_sq",)}


def parameter_groups(model: torch.nn.Module, how: str) -> list:
    if how == "one":
        return [{"params": list(model.parameters())}]
    decay = [p for n, p in model.named_parameters() if "bias" not in n and "norm" not in n]
    rest = [p for n, p in model.named_parameters() if "bias" in n or "norm" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if how == "two_lrs":
        groups[1]["lr"] = 5e-4
    return groups


def build_engine(case: dict):
    if case["config"].get("fp16"):
        get_accelerator().is_fp16_supported = lambda: True  # eager fp16 works on the CPU; DeepSpeed asks for native kernels
    torch.manual_seed(case.get("seed", 0))
    random.seed(0)
    deepspeed.init_distributed("gloo")
    with deepspeed.zero.Init(config_dict_or_path=case["config"], enabled=case.get("zero_init", False)):
        model = build_model(case["model"])
    arguments = {"model": model, "config": case["config"]}
    if case.get("client_optimizer"):
        kind = getattr(torch.optim, case["client_optimizer"])
        arguments["optimizer"] = kind(parameter_groups(model, case.get("groups", "one")), lr=1e-3, weight_decay=0.1)
    else:
        arguments["model_parameters"] = parameter_groups(model, case.get("groups", "one"))
    engine, *_ = deepspeed.initialize(**arguments)
    return engine


def train(engine, case: dict, first: int, last: int, result: dict) -> None:
    accumulation = engine.gradient_accumulation_steps()
    for step in range(first, last):
        for micro in range(accumulation):
            batch = make_batch(case["model"], step * accumulation + micro, torch.distributed.get_rank())
            if step in case.get("eval_before", ()) and micro == 0:
                engine.eval()
                with torch.no_grad():
                    result["evals"].append(float(engine(**batch)))
                engine.train()
            loss = engine(**batch)
            engine.backward(loss * case.get("loss_factor", 1.0))
            if step in case.get("poison_grad", ()) and micro == accumulation - 1:
                pass
            engine.step()
        result["losses"].append(float(loss.detach()))
        norm = engine.get_global_grad_norm()
        result["norms"].append(None if norm is None else float(norm))
        result["applied"].append(bool(engine.was_step_applied()))
        result["scales"].append(float(engine.optimizer.loss_scale))


def collect(engine, case: dict, result: dict) -> None:
    moments = MOMENTS[case["config"].get("optimizer", {}).get("type", case.get("client_optimizer", "AdamW"))]
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            result["p16"][name] = param.data.detach().clone().cpu()
        if not param.requires_grad:
            continue
        result["p32"][name] = safe_get_full_fp32_param(param).clone().cpu()
        for moment in moments:
            state = safe_get_full_optimizer_state(param, moment)
            result[moment][name] = state.clone().cpu()


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as handle:
        case = json.load(handle)
    result: dict = {k: {} for k in ("p16", "p32", "exp_avg", "exp_avg_sq")} | {
        k: [] for k in ("losses", "norms", "applied", "scales", "evals")
    }
    engine = build_engine(case)
    first = 0
    if case.get("load"):
        engine.load_checkpoint(case["load"])
        first = engine.global_steps
    train(engine, case, first, case["steps"], result)
    if case.get("save"):
        engine.save_checkpoint(case["save"])
    collect(engine, case, result)
    result["optimizer_class"] = type(engine.optimizer).__name__
    if hasattr(engine.optimizer, "rank_state"):
        core = engine.optimizer.rank_state.core
        result["redone_chunks"] = core.num_redone_chunks
        result["num_chunks"] = len(core.layout.chunks)
        result["plan"] = repr(engine.optimizer.rank_state.plan)
    torch.save(result, f"{sys.argv[2]}.{torch.distributed.get_rank()}")
    engine.destroy()


if __name__ == "__main__":
    main()
