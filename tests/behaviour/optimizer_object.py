# SPDX-License-Identifier: Apache-2.0
"""What scripts do with the optimizer object itself: ``optimizer_object.py NAME SWAP_PATH``. Prints one JSON line; stock
is the reference.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam

from ds_fuyou.errors import FuyouConfigError, FuyouStateError
from tests.behaviour.engines import equal, say, states
from tests.harness.group import leave_group
from tests.harness.models import build_model, make_batch
from tests.harness.runner import ds_config
from tests.parity.cases import block

Made = tuple[Any, Any]
KINDS: dict[str, Callable[[Any], Any]] = {
    "DeepSpeedCPUAdam": lambda params: DeepSpeedCPUAdam(params, lr=1e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-3, foreach=True),
    "AdamW with an empty group": lambda params: torch.optim.AdamW(
        [{"params": [*params]}, {"params": []}], lr=1e-3, weight_decay=0.0
    ),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-3),
}


def engine_of(
    swap: str | None, kind: str = "DeepSpeedCPUAdam", config: dict[str, Any] | None = None, **more: Any
) -> Made:
    """(an engine, the optimizer that the script made for it)."""
    config = dict(config or ds_config(optimizer=None))
    if swap is not None:
        config["fuyou"] = block(swap, "all", "speculate")
    torch.manual_seed(1)
    model = build_model({})
    optimizer = KINDS[kind](model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, **more)
    return engine, optimizer


def train(engine: Any, first: int, last: int) -> None:
    for index in range(first, last):
        engine.backward(engine(**make_batch({}, index, 0)))
        engine.step()


def scheduled(swap: str) -> dict[str, Any]:
    """A scheduler of PyTorch's, which looks whether ``optimizer.step()`` was called before its own."""

    def ended(path: str | None) -> tuple[dict[str, torch.Tensor], list[str]]:
        engine, _ = engine_of(path, lr_scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 3e-3, 20))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train(engine, 0, 4)
        found = states(engine)
        engine.destroy()
        return found, [str(each.message) for each in told if "lr_scheduler" in str(each.message)]

    (stock, theirs), (ours, told) = ended(None), ended(swap)
    return {"same": equal(stock, ours), "told": [theirs, told]}


def hooked(swap: str) -> dict[str, Any]:
    """Hooks around ``step()``: one of them sets the rate of the step that follows."""

    def ended(path: str | None) -> tuple[dict[str, torch.Tensor], int]:
        engine, optimizer = engine_of(path)
        seen = []

        def before(which: Any, *_: Any) -> None:
            which.param_groups[0]["lr"] = 1e-3 / (1 + engine.global_steps)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: seen.append(engine.global_steps))
        train(engine, 0, 4)
        found = states(engine)
        engine.destroy()
        return found, len(seen)

    (stock, theirs), (ours, number) = ended(None), ended(swap)
    return {"same": equal(stock, ours), "hooks": [theirs, number]}


def kinds(swap: str) -> dict[str, Any]:
    """Every kind of object takes a ``step()`` that finds no parameters, and is whole again behind the engine."""
    steps, left = {}, {}
    for kind in KINDS:
        engine, optimizer = engine_of(swap, kind)
        seen: list[int] = []
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
        train(engine, 0, 2)
        engine.destroy()
        steps[kind] = len(seen)
        optimizer.state["a"] = {"step": 1}
        left[kind] = len(optimizer.state)
    return {"steps": steps, "left": left}


def changed(swap: str, kind: str = "DeepSpeedCPUAdam") -> dict[str, Any]:
    """A script that resets the states is told that it does not, and may go on. Its scheduler comes last."""
    engine, optimizer = engine_of(swap, kind)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        train(engine, 0, 2)
        scheduler.step()
    warned = [str(each.message) for each in heard if "lr_scheduler" in str(each.message)]

    def replace() -> None:
        optimizer.state = defaultdict(dict)
        train(engine, 2, 3)

    def set_one() -> None:
        optimizer.state["a"] = {}

    ways: dict[str, Callable[[], object]] = {
        "clear": optimizer.state.clear,
        "set one": set_one,
        "pop": lambda: optimizer.state.pop("a", None),
        "update": lambda: optimizer.state.update(a={}),
        "assign": lambda: setattr(engine.optimizer, "state", defaultdict(dict)),
        "replace": replace,
    }
    told = {}
    for way, change in ways.items():
        try:
            change()
            told[way] = "nothing"
        except FuyouStateError as error:
            told[way] = str(error)
    read = [len(optimizer.state), len(list(optimizer.state.items())), len(optimizer.state["a"])]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 5))]})
    try:
        engine.step()
        added = "nothing"
    except FuyouStateError as error:
        added = str(error)
    optimizer.param_groups.pop()
    engine.step()  # of the backward whose step() was refused
    train(engine, 3, 5)
    stock, _ = engine_of(None)
    train(stock, 0, 5)
    same = equal(states(stock), states(engine))
    return {"told": told, "read": read, "added": added, "same": same, "warned": warned}


def cut_short(swap: str) -> dict[str, Any]:
    """A ``step()`` that raises, loss scale being at its minimum, and a script that goes on with other batches."""
    get_accelerator().is_fp16_supported = lambda: True  # as in train_worker.py
    scale = {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 4.0, "hysteresis": 1}

    def ended(path: str | None) -> tuple[dict[str, torch.Tensor], list[Any]]:
        engine, _ = engine_of(path, config=ds_config(optimizer=None, bf16=None, fp16=scale))
        seen: list[Any] = []
        for index in range(6):
            engine.backward(engine(**make_batch({}, index, 0)) * (float("nan") if index in (1, 2) else 1.0))
            try:
                engine.step()
                seen.append((engine.was_step_applied(), float(engine.get_global_grad_norm())))
            except Exception as error:
                seen.append(str(error))
        found = states(engine)
        engine.destroy()
        return found, seen

    (stock, theirs), (ours, seen) = ended(None), ended(swap)
    return {"same": equal(stock, ours), "seen": [theirs, seen]}


def types(swap: str) -> dict[str, Any]:
    """Types that the core does not have, as DeepSpeed takes them from the first parameter."""
    told = {}
    get_accelerator().is_fp16_supported = lambda: False  # where a CPU has fp16, DeepSpeed itself refuses them
    for dtype in (torch.float64, torch.complex64):
        model = torch.nn.Linear(8, 8, dtype=dtype)
        config = {**ds_config(bf16=None), "fuyou": block(swap, "all")}
        try:
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            told[str(dtype)] = "nothing"
        except FuyouConfigError as error:
            told[str(dtype)] = str(error)
    return {"told": told}


SCENARIOS: dict[str, Any] = {
    "scheduled": scheduled,
    "hooked": hooked,
    "kinds": kinds,
    "changed": changed,
    "changed-empty-group": lambda swap: changed(swap, "AdamW with an empty group"),
    "cut-short": cut_short,
    "types": types,
}

if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    say(SCENARIOS[sys.argv[1]](sys.argv[2]))
    leave_group()
