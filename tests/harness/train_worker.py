# SPDX-License-Identifier: Apache-2.0
"""One rank of one training run: reads a case (JSON), trains, and saves what the run left behind.

Run as a script by harness.runner with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. The
saved dictionary holds losses, gradient norms, and P16, P32 and moments of every parameter by name.

What a case may ask for in certain steps (lists of step numbers): ``eval_before`` (under ``inference_mode`` if the case
says so), ``edit_before`` (new values under GatheredParameters), ``look_at`` (fp32 states and gradients between backward
and step, and after the step), ``read_ungathered_after`` (which parameters are there), ``set_states_before`` and
``set_gradient_in`` (safe_set_full_*). ``load``, ``save`` (at the end) and ``export`` name folders; ``save_after``
steps, to ``save_to``, training goes on. What scripts do inside a step is in script_actions.py. ``compile`` names a
backend of torch.compile; ``plain`` trains without DeepSpeed; ``move_after``: steps, and which share of states is to be
in host memory from then on. ``leaf``: expert modules are leaves for ZeRO-3. ``model_parallel``: an ``mpu`` object that
says this many ranks share a model; ``sequence_parallel``: DeepSpeed's own, that says this many share a sequence.
"""

import json
import os
import random
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    set_z3_leaf_modules,
)
from models import TinyExperts, build_model, make_batch
from plain import PlainEngine
from script_actions import (
    before_step,
    break_rank,
    evaluate_late,
    forward_and_backward,
    hook_gradients,
    within,
    wrapped,
)

from ds_fuyou.host import run_ahead
from ds_fuyou.parameters.partition import Presence
from tests.device import faults
from tests.device.accelerator import install_from
from tests.harness.gpu import repeatable
from tests.harness.group import leave_group
from tests.harness.moving import place_params_in_step

MOMENTS = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "Lion": ("exp_avg",),
    "Adagrad": ("exp_avg_sq",),
}


def parameter_groups(model: torch.nn.Module, how: str) -> list:
    if how == "one":
        return [{"params": list(model.parameters())}]
    decay = [p for n, p in model.named_parameters() if "bias" not in n and "norm" not in n]
    rest = [p for n, p in model.named_parameters() if "bias" in n or "norm" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if how == "two_lrs":
        groups[1]["lr"] = 5e-4
    return groups


class Units:
    """What Megatron-like scripts pass as ``mpu``: either every rank has a copy of the model, or all share one; or (0)
    each trains a model of its own."""

    def __init__(self, num_sharing: int) -> None:
        world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        alone = [torch.distributed.new_group([each]) for each in range(world_size)][rank]
        everybody = torch.distributed.new_group(list(range(world_size)))
        self._model, self._data = everybody if num_sharing > 1 else alone, everybody if num_sharing == 1 else alone

    def get_model_parallel_group(self):
        return self._model

    def get_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank(self._model)

    def get_model_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size(self._model)

    def get_data_parallel_group(self):
        return self._data

    def get_data_parallel_rank(self) -> int:
        return torch.distributed.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size(self._data)


def set_padded_gradients(engine, padding: float) -> None:
    """Each gradient as it is, and ``padding`` behind the end of its parameter, where this rank's part has any."""
    for param in engine.module.parameters():
        part = safe_get_local_grad(param).clone()
        set_padding(param, part, padding)
        safe_set_local_grad(param, part)


def set_padding(param: torch.nn.Parameter, part: torch.Tensor, value: float) -> None:
    """What this rank's part of a parameter has behind the parameter's end := ``value``."""
    part[max(0, param.ds_numel - torch.distributed.get_rank() * part.numel()) :] = value


def build_engine(case: dict):
    if case["config"].get("fp16"):
        get_accelerator().is_fp16_supported = lambda: (
            True
        )  # eager fp16 works on the CPU; DeepSpeed asks for native kernels
    torch.manual_seed(case.get("seed", 0))
    random.seed(0)
    deepspeed.init_distributed("gloo" if get_accelerator().device_name() == "cpu" else None)
    if "free_bytes" in case:  # as if every rank found its own amount of free host memory
        from ds_fuyou.zero.run import run_design

        run_design.free_memory_of_rank = lambda: case["free_bytes"][torch.distributed.get_rank()] // 2
        run_design.copied_later_bytes = lambda: 0
    with deepspeed.zero.Init(config_dict_or_path=case["config"], enabled=case.get("zero_init", False)):
        model = build_model(case["model"])
    for param in model.parameters() if "padding" in case else ():  # as if memory had held it where partitions were made
        set_padding(param, param.ds_tensor.data, case["padding"])
    hook_gradients(model, case, "before")
    if case.get("plain"):
        return PlainEngine(model, parameter_groups(model, case.get("groups", "one")), case["config"])
    if case.get("leaf"):
        set_z3_leaf_modules(model, [TinyExperts])
    arguments = {"model": model, "config": case["config"]}
    if case.get("client_optimizer"):
        kind = getattr(torch.optim, case["client_optimizer"])
        arguments["optimizer"] = kind(parameter_groups(model, case.get("groups", "one")), lr=1e-3, weight_decay=0.1)
    else:
        arguments["model_parameters"] = parameter_groups(model, case.get("groups", "one"))
    if "model_parallel" in case:
        arguments["mpu"] = Units(case["model_parallel"])
    if "sequence_parallel" in case:
        parallel_state_sp.initialize_sequence_parallel(case["sequence_parallel"])
        arguments["mpu"] = parallel_state_sp
    engine, *_ = deepspeed.initialize(**arguments)
    hook_gradients(model, case, "behind")
    if case.get("compile"):
        engine.compile(backend=case["compile"])
    return engine


def chosen_parameters(engine, case: dict) -> dict:
    """A matrix, a bias and the embedding: chunks early and late in the order.

    Stock cannot set a parameter whose elements cannot be shared out evenly; ``odd`` takes one on several ranks too.
    """
    is_even = torch.distributed.get_world_size() > 1 and not case.get("odd")
    wanted = ("tokens.weight", "blocks.1.down.bias" if is_even else "blocks.1.up.bias", "blocks.0.down.weight")
    return {name: param for name, param in engine.module.named_parameters() if name in wanted}


def edit_parameters(engine, case: dict) -> None:
    for param in chosen_parameters(engine, case).values():
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                param.data.mul_(0.5)


def set_states(engine, case: dict) -> None:
    """``local``: by this rank's parts, as gradients are then."""
    for param in chosen_parameters(engine, case).values():
        if case.get("local"):
            safe_set_local_fp32_param(param, safe_get_local_fp32_param(param) * 0.75)
            safe_set_local_optimizer_state(param, safe_get_local_optimizer_state(param, "exp_avg") * 0.5, "exp_avg")
            continue
        safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 0.75)
        for moment in ("exp_avg", "exp_avg_sq"):
            safe_set_full_optimizer_state(param, safe_get_full_optimizer_state(param, moment) * 0.5, moment)


def set_gradients(engine, case: dict) -> None:
    for param in chosen_parameters(engine, case).values():
        if case.get("local"):
            safe_set_local_grad(param, safe_get_local_grad(param) * 3.0)
        else:
            safe_set_full_grad(param, safe_get_full_grad(param) * 3.0)


def look(engine, case: dict, result: dict) -> None:
    """Appends what the public functions say now."""
    seen = {}
    for name, param in chosen_parameters(engine, case).items():
        seen[name] = safe_get_full_fp32_param(param).clone().cpu()
        seen[f"{name} grad"] = safe_get_full_grad(param).clone().cpu()
        for moment in ("exp_avg", "exp_avg_sq") if engine.global_steps else ():
            seen[f"{name} {moment}"] = safe_get_full_optimizer_state(param, moment).clone().cpu()
    result["seen"].append(seen)


def prepare_step(engine, case: dict, step: int, result: dict) -> None:
    break_rank(engine, case, step)
    if step in case.get("offload_states_in", ()):
        engine.offload_states()
        engine.reload_states()
    if step in case.get("edit_before", ()):
        edit_parameters(engine, case)
    if step in case.get("set_states_before", ()):
        set_states(engine, case)
    if step in case.get("eval_before", ()):
        batch = make_batch(case["model"], 10_000 + step, torch.distributed.get_rank())
        engine.eval()
        with torch.inference_mode() if case.get("inference_mode") else torch.no_grad():
            result["evals"].append(float(engine(**batch)))
        engine.train()


def train(engine, case: dict, first: int, last: int, result: dict) -> None:
    managed = case["config"].get("managed_gradient_accumulation", True)
    for step in range(first, last):
        if str(step) in case.get("batch_size_at", {}):
            engine.set_train_batch_size(case["batch_size_at"][str(step)])
        accumulation = engine.gradient_accumulation_steps() if managed else case["micro_batches"]
        one_step = case.get("set_boundary") or not managed
        prepare_step(engine, case, step, result)
        if str(step + 1) in case.get("params_after", {}):
            place_params_in_step(engine, case["params_after"][str(step + 1)])
        for micro in range(accumulation):
            index = step * accumulation + micro
            is_last = micro == accumulation - 1
            if case.get("set_boundary"):
                engine.set_gradient_accumulation_boundary(is_last)
            with wrapped(engine, case):
                loss = forward_and_backward(engine, case, step, index)
            if micro == 0:
                within(engine, case, step, edit_parameters, result)
            if is_last:
                before_step(engine, case, step, step * accumulation, accumulation)
            if is_last and step in case.get("set_gradient_in", ()):
                set_gradients(engine, case)
            if is_last and "gradient_padding" in case:
                set_padded_gradients(engine, case["gradient_padding"])
            if is_last and step in case.get("look_at", ()):
                look(engine, case, result)
            late = evaluate_late(engine, case, step) if is_last else []
            if is_last or not one_step:
                engine.step()
            result["evals"] += [float(each) for each in late]
        result["param_reads"].append(param_reads(engine))
        if step in case.get("look_at", ()):
            look(engine, case, result)
        if step in case.get("read_ungathered_after", ()):
            there = {name: p.data.clone().cpu() for name, p in engine.module.named_parameters() if p.data.numel() > 1}
            result["seen"].append(there)
        result["losses"].append(float(loss.detach()))
        norm = engine.get_global_grad_norm()
        result["norms"].append(None if norm is None else float(norm))
        result["applied"].append(bool(engine.was_step_applied()))
        result["scales"].append(float(engine.optimizer.loss_scale))
        result["rates"].append([group["lr"] for group in engine.optimizer.param_groups])
        if str(step + 1) in case.get("move_after", {}):
            rank_state = engine.optimizer.rank_state
            assert rank_state.move_to(case["move_after"][str(step + 1)], case.get("move_bytes", 1 << 20))
        if str(step + 1) in case.get("grads_after", {}):
            assert engine.optimizer.rank_state.place_grads(case["grads_after"][str(step + 1)])
        if step + 1 == case.get("save_after"):
            for _ in range(2):  # the second time replaces the first
                engine.save_checkpoint(case["save_to"])


def collect(engine, case: dict, result: dict) -> None:
    moments = MOMENTS[case["config"].get("optimizer", {}).get("type", case.get("client_optimizer", "AdamW"))]
    for name, param in engine.module.named_parameters():
        if case.get("plain"):
            result["p32"][name] = param.data.detach().clone()
            continue
        with deepspeed.zero.GatheredParameters([param]):
            result["p16"][name] = param.data.detach().clone().cpu()
        if not param.requires_grad:
            continue
        result["p32"][name] = safe_get_full_fp32_param(param).clone().cpu()
        for moment in moments:
            state = safe_get_full_optimizer_state(param, moment)
            result[moment][name] = state.clone().cpu()


def collect_activations(session, result: dict) -> None:
    """What was swapped, and how many saved tensors were recognised as parameters."""
    if session is None:
        return
    result["swapped_bytes"] = session.counters.out_bytes
    result["swap_read_bytes"] = session.counters.read_bytes
    if session.swapper is not None:
        result["saved_parameters"] = session.swapper.num_saved_parameters


def shares_of(core) -> dict[str, float]:
    """How much of every class really is in host memory, of the elements."""
    chunks, residency = core.layout.chunks, core.place.residency
    return {
        name: sum(chunk.numel for chunk in chunks if resident[chunk.index]) / core.layout.numel
        for name, resident in (
            ("optimizer", residency.states),
            ("parameters", residency.params),
            ("gradients", residency.grads),
        )
    }


def param_reads(engine) -> tuple[int, int] | None:
    """(reads of parameters from storage for the steps so far, parameters that lie there). After a step, what changes in
    it and is not away has been read for the next one.
    """
    state = getattr(engine.optimizer, "rank_state", None)
    if state is None or not state.reads_parameters:
        return None
    num_stored = sum(not state.core.place.is_in_memory(span) for span in state.layout.params)
    store = state.parameters
    num_next = sum(p.source.changes and bool(p.num_bytes) and p.presence is not Presence.AWAY for p in store.partitions)
    return store.num_demand_reads + store.num_ahead_reads - num_next, num_stored


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as handle:
        case = json.load(handle)
    run_ahead._MOST_BYTES = case.get("most_ahead_bytes", run_ahead._MOST_BYTES)
    install_from(os.environ)
    if get_accelerator().device_name() == "cuda":
        repeatable()
    result: dict = {k: {} for k in ("p16", "p32", "exp_avg", "exp_avg_sq")} | {
        k: [] for k in ("losses", "norms", "applied", "scales", "evals", "rates", "seen", "param_reads")
    }
    engine = build_engine(case)
    first = 0
    if case.get("load"):
        engine.load_checkpoint(case["load"])
        first = engine.global_steps
    train(engine, case, first, case["steps"], result)
    if case.get("save"):
        engine.save_checkpoint(case["save"])
    if case.get("export"):
        engine.save_16bit_model(case["export"])
    if case["steps"] or not case.get("save"):  # stock has no moments before its first step
        collect(engine, case, result)
    result["optimizer_class"] = type(engine.optimizer).__name__
    if hasattr(engine.optimizer, "rank_state"):
        core = engine.optimizer.rank_state.core
        core.wait_all()  # what the last step moves has moved
        result["directories"] = [str(path) for path in core.store.directories] if core.store else []
        result["redone_chunks"] = core.num_redone_chunks
        result["num_chunks"] = len(core.layout.chunks)
        result["plan"] = repr(engine.optimizer.rank_state.plan)
        result["shares"] = shares_of(core)
        result["moved"] = (core.mover.counts.num_to_memory, core.mover.counts.num_to_storage)
        result["file_bytes"] = [sum(f.stat().st_size for f in Path(d).glob("*")) for d in result["directories"]]
        result["frozen_bytes"] = engine.optimizer.rank_state.frozen_bytes()
        collect_activations(engine.optimizer.rank_state.activations, result)
    if hasattr(torch, "standin"):
        torch.standin.synchronize()
        result["trips"] = torch.standin.take_trips()
        result["device"] = torch.standin.core.counters() | torch.standin.core.memory()
        result["sites"] = faults.seen
    torch.save(result, f"{sys.argv[2]}.{torch.distributed.get_rank()}")
    if not case.get("plain"):
        engine.destroy()
        leave_group()


if __name__ == "__main__":
    main()
