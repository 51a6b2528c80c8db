# SPDX-License-Identifier: Apache-2.0
"""One rank of a script that trains adapters of PEFT, or other models with frozen parts: ``CASE.json OUT``.

``block``: the fuyou block, none for stock; ``config``: changes of the configuration. ``adapter``: of LoraConfig, null
for none; ``others``: adapters that are added, and not trained; ``frozen``: parts of names. ``wrapped``: the adapted
model is a part of another, with a frozen "teacher" beside it where it says so. ``int8``: weights of blocks are frozen
codes. ``seed``: of the base, ``model``: another form of it. ``zero_init``. ``do``: a list of what happens, ``[name,
arguments...]``, see :class:`Run`.

OUT.RANK has ``losses``, ``p16`` and ``p32`` of all parameters, ``client``: the client state of the last load, and
``saved``: by folder, what rank 0's file says. ``frozen``: this rank's bytes by tier, and the plan's share in memory.
"""

import contextlib
import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from peft import LoraConfig, get_peft_model
from torch import nn

import ds_fuyou.zero.run.run_moves as run_moves
from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.planner.profile import StorageRates
from ds_fuyou.storage import swap_space
from tests.harness.group import leave_group
from tests.harness.models import TinyGPT, make_batch
from tests.harness.runner import ds_config

MODEL = {"num_layers": 2, "width": 64, "vocabulary": 101}


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module, *, teacher: bool) -> None:
        super().__init__()
        self.inner = inner
        self.teacher = nn.Linear(8, 8).requires_grad_(False) if teacher else None

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.inner(**batch)


class Codes(nn.Module):
    """A frozen linear layer of int8 codes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes = (linear.weight.detach().float() * 100).round().clamp(-127, 127).to(torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype) / 100)


def build(case: dict, config: dict) -> nn.Module:
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=case.get("zero_init", False)):
        torch.manual_seed(case.get("seed", 0))
        model: nn.Module = TinyGPT(**MODEL | case.get("model", {}))
    if case.get("int8"):
        for block in model.blocks:
            block.down = Codes(block.down)
    if case.get("adapter") is not None:
        adapter = LoraConfig(**{"r": 4, "target_modules": ["up"], **case["adapter"]})
        model = get_peft_model(model, adapter)
        for name in case.get("others", ()):
            model.add_adapter(name, adapter)
        model.set_adapter("default")
    for name, param in model.named_parameters():
        if any(part in name for part in case.get("frozen", ())):
            param.requires_grad_(False)
    return Wrapper(model, teacher=case["wrapped"] == "teacher") if case.get("wrapped") else model


def engine_of(model: nn.Module, config: dict) -> Any:
    trained = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


class Run:
    def __init__(self, model: nn.Module, config: dict) -> None:
        self.config, self.rank = config, int(os.environ["RANK"])
        self.engine = engine_of(model, config)
        self.losses: list[float] = []
        self.saved: dict[str, Any] = {}
        self.client: dict[str, Any] = {}
        self.others: list[Any] = []

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            batch = make_batch(MODEL, self.engine.global_steps, self.rank)
            loss = self.engine(**batch)
            self.engine.backward(loss)
            self.engine.step()
            self.losses.append(float(loss.detach()))

    def scarce(self, rank: int) -> None:
        """From here on this rank's machine has nothing left."""
        if self.rank == rank:
            run_moves.free_memory_of_rank = lambda: 0

    def roomy(self, dram_budget_bytes: int) -> None:
        """From here on there is so much of it, before storage that bounds a step."""
        state, plan = self.engine.optimizer.rank_state, self.engine.optimizer.run_plan
        state.design = replace(state.design, given=replace(state.design.given, dram_budget_bytes=dram_budget_bytes))
        slow = StorageRates(3e3, 3e3, 3e3, 0.0, 0.0)  # also beside others that have the cores
        plan.profile = replace(plan.profile, device_is_host=False, storage=slow, link_up=1e12, link_down=1e12)
        plan._measured_rates = slow
        plan.moves.move(plan.profile)

    def place(self, share: float) -> None:
        """Of the base in host memory."""
        assert self.engine.optimizer.rank_state.place_frozen(share)

    def cut(self, share: float) -> None:
        """As :meth:`place`; Ctrl-C comes in the middle of it, and is caught."""
        state = self.engine.optimizer.rank_state
        cut_short = mock.patch.object(state.parameters, "take", side_effect=KeyboardInterrupt)
        with cut_short, contextlib.suppress(KeyboardInterrupt):
            state.place_frozen(share)

    def other(self, _: str) -> None:
        """Another engine of the process."""
        self.others.append(engine_of(TinyGPT(**MODEL), self.config))

    def full(self, rank: int) -> None:
        """From here on this rank's disk has no room for parameters."""

        def refuse(*_: object) -> list:
            raise FuyouStorageError(errno.ENOSPC, "nothing is left", "the disk")

        if self.rank == rank:
            swap_space.SwapSpace.leases = refuse

    def save(self, folder: str, **named: Any) -> None:
        self.engine.save_checkpoint(folder, **named)
        getattr(self.engine, "fuyou_wait_checkpoint", lambda: None)()
        files = Path(folder, Path(folder, "latest").read_text())
        model = torch.load(files / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
        self.saved[Path(folder).name] = {
            "bytes": sum(file.stat().st_size for file in files.iterdir()),
            "fragments": model["frozen_param_fragments"],
            "shapes": model["frozen_param_shapes"],
            "names": set(model["module"]),
        }

    def load(self, folder: str, **named: Any) -> None:
        path, client_state = self.engine.load_checkpoint(folder, **named)
        assert path is not None
        self.client = client_state

    def adapt(self, **named: Any) -> None:
        """What was trained as a whole is the base of an adapter from now on."""
        model = self.engine.module
        self.engine.destroy()
        self.engine = engine_of(get_peft_model(model, LoraConfig(r=4, target_modules=["up"], **named)), self.config)

    def export(self, folder: str) -> None:
        self.engine.save_16bit_model(folder)

    def edit(self, part: str, modifier: int | None = 0, by: float = 1.0, at: int = -1) -> None:
        params = [param for name, param in self.engine.module.named_parameters() if part in name]
        assert params
        with torch.no_grad(), deepspeed.zero.GatheredParameters(params, modifier_rank=modifier):
            if self.rank == 0 or modifier is None:
                params[0].data.view(-1)[at].add_(by)  # the last one is of the last rank's part

    def thaw(self, part: str, value: bool = True) -> None:
        for name, param in self.engine.module.named_parameters():
            if part in name:
                param.requires_grad_(value)


def left(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": run.losses, "saved": run.saved, "client": run.client, "p16": {}, "p32": {}}
    if hasattr(run.engine.optimizer, "rank_state"):
        state = run.engine.optimizer.rank_state
        found["frozen"] = (state.frozen_bytes(), state.plan.residency.frozen)
    in_optimizer = {id(p) for group in run.engine.optimizer.fp16_groups for p in group}
    for name, param in run.engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found["p16"][name] = param.data.clone()
        if id(param) in in_optimizer and param.requires_grad:
            found["p32"][name] = safe_get_full_fp32_param(param).clone()
    return found


def main(case: dict, out: str) -> None:
    deepspeed.init_distributed("gloo")
    changes = dict(case.get("config", {}))
    if case.get("block") is not None:
        changes["fuyou"] = case["block"]
    else:
        changes["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    config = ds_config(**changes)
    run = Run(build(case, config), config)
    for name, *arguments in case["do"]:
        named = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        getattr(run, name)(*arguments, **named)
    torch.save(left(run), f"{out}.{run.rank}")
    run.engine.destroy()
    leave_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
