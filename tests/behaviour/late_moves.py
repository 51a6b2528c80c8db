# SPDX-License-Identifier: Apache-2.0
"""One engine whose P16 moves late: what it finds after that. Run by test_late_moves.py with the name of what to do and
a directory; prints one line of JSON.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fuyou.errors import FuyouError
from ds_fuyou.storage import data_file
from tests.harness.models import TinyGPT, make_batch
from tests.harness.moving import place_params_in_step, train
from tests.harness.runner import ds_config

MODEL = {"num_layers": 3, "width": 72, "vocabulary": 500}
STORAGE = {"tier": "nvme"}


class Schedule:
    """Raises in a step, if it is told to."""

    def __init__(self) -> None:
        self.raises = False

    def step(self, *_: Any, **__: Any) -> None:
        if self.raises:
            raise RuntimeError("of the script's own scheduler")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept."""

    def get_lr(self) -> list[float]:
        return [1e-3]

    get_last_lr = get_lr


def engine_of(
    share: float, schedule: Schedule | None = None, shares: dict[str, float] | None = None, **more: Any
) -> Any:
    plan = {
        "chunk_bytes": 65536,
        "staging_bytes": 1 << 20,
        "prefetch_bytes": 1 << 17,
        "residency": {"parameters": share, **(shares or {})},
    }
    plan |= {"smallest_swapped_bytes": 1024, "activation_bytes": 65536}
    fuyou = {"nvme_path": sys.argv[2], "optimizer": STORAGE, "gradients": STORAGE, "plan": plan, **more}
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    config = ds_config(fuyou=fuyou)
    for name in ("offload_optimizer", "offload_param"):
        config["zero_optimization"].pop(name, None)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, lr_scheduler=schedule
    )
    return engine


def gathered() -> dict[str, Any]:
    """How much of the model a forward leaves gathered, before P16 leaves memory, after that, and when it is back."""
    engine = engine_of(1.0)
    found: list[float] = []

    def look(*_: Any) -> None:
        params = [param for param in engine.module.parameters() if not param.ds_persist]
        there = sum(param.ds_numel for param in params if param.ds_status is ZeroParamStatus.AVAILABLE)
        found.append(there / sum(param.ds_numel for param in params))

    engine.module.register_forward_hook(look)
    train(engine, MODEL, 0, 5)
    for first, share in ((5, 0.0), (8, 1.0)):
        place_params_in_step(engine, share)
        train(engine, MODEL, first, first + 3)
    engine.destroy()
    return {"gathered": [found[4], found[6], found[7], found[10]]}


def records() -> dict[str, Any]:
    """What stands in the files after a step in which P16 has moved, and after one that the script's scheduler ended."""
    schedule = Schedule()
    engine = engine_of(1.0, schedule)
    core = engine.optimizer.rank_state.core
    train(engine, MODEL, 0, 2)
    core.commits.wait()
    edition = core.store.last_commit().meta["edition"]
    place_params_in_step(engine, 0.0)
    train(engine, MODEL, 2, 3)
    commit = core.store.last_commit()
    found = {
        "moved": not any(core.place.residency.params),
        "step": commit.step,
        "training": commit.meta["training"] is not None,
        "same edition": commit.meta["edition"] == edition,
    }
    plan, state, schedule.raises = engine.optimizer.run_plan, engine.optimizer.rank_state, True
    ends = plan.step_applied

    def step_applied() -> None:
        found["may move"] = state.may_place_params
        ends()

    plan.step_applied = step_applied
    try:
        train(engine, MODEL, 3, 4)
    except RuntimeError as error:
        found["raised"] = str(error)
    commit = core.store.last_commit()
    found |= {"step that counts": commit.step, "its training": commit.meta["training"] is not None}
    return found


def inference() -> dict[str, Any]:
    """Parameters that a script gathers under inference mode right after they have moved are trained with."""
    engine = engine_of(1.0)
    losses = train(engine, MODEL, 0, 3)
    for step, share in ((3, 0.5), (4, 1.0)):
        place_params_in_step(engine, share)
        losses += train(engine, MODEL, step, step + 1)
        with torch.inference_mode(), deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            engine.module(make_batch(MODEL, 0, 0)["ids"])
    losses += train(engine, MODEL, 5, 8)
    engine.destroy()
    other = engine_of(1.0)
    expected = train(other, MODEL, 0, 8)
    other.destroy()
    return {"equal": losses == expected}


def budget() -> dict[str, Any]:
    """State files and swapped activations together keep to the user's budget, whatever moves."""
    whole = engine_of(1.0)
    stored = whole.optimizer.rank_state.store.total_bytes
    whole.destroy()
    limit = stored + (64 << 20)
    engine = engine_of(1.0, nvme_budget_bytes=limit, activations={"mode": "swap", "tier": "nvme"})
    state = engine.optimizer.rank_state
    train(engine, MODEL, 0, 3)
    space = state.activations.swapper.tier.storage.space
    taken = [space.num_bytes > 0, state.store.total_bytes + space.num_bytes <= limit]
    placed = state.place_params(0.0)
    both = state.store.total_bytes + space.num_bytes
    losses = train(engine, MODEL, 3, 5)
    engine.destroy()
    return {"taken": taken, "placed": placed, "kept": both <= limit, "trains": len(losses)}


def refusals() -> dict[str, Any]:
    """What a move of each class to storage says and raises where the first rank has no room, or its file's data may be
    lost.
    """
    found: dict[str, Any] = {}
    for what, name in (("P16", "place_params"), ("G16", "place_grads"), ("chunks", "move_to")):
        engine = engine_of(1.0, shares={"optimizer": 0.5, "gradients": 1.0}, optimizer={}, gradients={})
        state = engine.optimizer.rank_state
        train(engine, MODEL, 0, 2)
        state.core.commits.wait()
        for call, code in (("allocate_blocks", errno.ENOSPC), ("fdatasync", errno.EIO)):

            def fails(*_: Any, error: int = code) -> None:
                raise OSError(error, os.strerror(error))

            where = os if call == "fdatasync" else data_file
            with patch.object(where, call, fails) if dist.get_rank() == 0 else nullcontext():
                try:
                    found[f"{what} {call}"] = getattr(state, name)(0.0)
                except FuyouError as error:
                    found[f"{what} {call}"] = f"{type(error).__name__}: {error}"
            if code == errno.ENOSPC:
                train(engine, MODEL, 2, 3)
                state.core.commits.wait()
        engine.destroy()
    return found


def monitored() -> dict[str, Any]:
    """The first rank's monitor cannot write; the run goes on, on all ranks alike."""
    engine = engine_of(1.0)
    calls = []

    class Full:
        """A monitor on a full disk. DeepSpeed's own events go elsewhere."""

        enabled = True

        def write_events(self, events: list[Any]) -> None:
            calls.append(events)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monitor = engine.optimizer._monitor
    monitor._writes = dist.get_rank() == 0
    monitor._engine = lambda: SimpleNamespace(monitor=Full(), global_samples=0, train_batch_size=lambda: 1)
    losses = train(engine, MODEL, 0, 4)
    steps = engine.global_steps
    engine.destroy()
    return {"losses": losses, "steps": steps, "calls": len(calls)}


def main() -> None:
    deepspeed.init_distributed("gloo")
    name, directory = sys.argv[1], Path(sys.argv[2])
    assert directory.is_dir()
    found = {each.__name__: each for each in (gathered, records, inference, budget, refusals, monitored)}[name]()
    sys.stdout.write(f"FOUND {json.dumps(found)}\n")


if __name__ == "__main__":
    main()
