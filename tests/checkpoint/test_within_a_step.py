# SPDX-License-Identifier: Apache-2.0
"""A signal handler saves, or loads: within a step there is no state that is of one step, elsewhere there is."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from ds_fuyou.errors import FuyouStateError
from tests.harness.models import TinyBlock, TinyGPT
from tests.harness.moving import train
from tests.harness.runner import ds_config

pytestmark = pytest.mark.usefixtures("only_rank")
MODEL = {"num_layers": 2, "width": 72, "vocabulary": 100}


@pytest.mark.parametrize("save", ["blocking", "background"])
@pytest.mark.parametrize("within", ["commits.norm_is_known", "_updates.publish", "clock.commit", "_end_window"])
def test_a_save_within_a_step_is_refused(
    within: str, save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    config = ds_config(fuyou={"nvme_path": str(tmp_path), "checkpoint": {"save": save}})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    train(engine, MODEL, 0, 2)
    path, _, name = within.rpartition(".")
    owner: Any = engine.optimizer.rank_state.core
    owner = getattr(owner, path) if path else owner
    original = getattr(owner, name)

    def signalled(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return original(*args, **kwargs)

    folder = tmp_path / "saved"
    before = signal.signal(signal.SIGUSR1, lambda *_: engine.save_checkpoint(str(folder)))
    try:
        engine.save_checkpoint(str(folder), tag="whole")
        monkeypatch.setattr(owner, name, signalled)
        with pytest.raises(FuyouStateError, match=r"save_checkpoint\(\) was called within engine.step\(\)"):
            train(engine, MODEL, 2, 3)
        monkeypatch.undo()
        engine.destroy()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [found.name for found in folder.iterdir() if found.is_dir()] == ["whole"]


def test_a_load_within_a_step_is_refused_and_the_next_call_outside_is_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    config = ds_config(fuyou={"nvme_path": str(tmp_path)})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    train(engine, MODEL, 0, 2)
    engine.save_checkpoint(str(tmp_path / "saved"))
    hook = engine.optimizer.optimizer.register_step_pre_hook(
        lambda *_: engine.load_checkpoint(str(tmp_path / "saved")) and None
    )
    with pytest.raises(FuyouStateError, match=r"load_checkpoint\(\) was called within engine.step\(\)"):
        train(engine, MODEL, 2, 3)
    hook.remove()
    assert engine.load_checkpoint(str(tmp_path / "saved"))[0] is not None
    train(engine, MODEL, 2, 3)
    engine.destroy()


class _Scaled(TinyBlock):
    """Has a small parameter in hand while its modules run."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(self.up(self.norm(x)).relu())


@pytest.mark.parametrize("save", ["blocking", "background"])
def test_a_save_within_a_forward_changes_nothing(save: str, tmp_path: Path) -> None:
    def losses_of(saves: bool) -> list[float]:
        torch.manual_seed(0)
        model = TinyGPT(**MODEL)
        model.blocks[1] = _Scaled(MODEL["width"])
        fuyou = {"nvme_path": str(tmp_path), "parameters": {"tier": "nvme"}, "checkpoint": {"save": save}}
        config = ds_config(fuyou=fuyou, zero_optimization={"stage3_param_persistence_threshold": 1000})
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        losses = train(engine, MODEL, 0, 2)
        assert engine.optimizer.persistent_parameters
        hook = engine.module.blocks[1].down.register_forward_pre_hook(
            lambda *_: engine.save_checkpoint(str(tmp_path / "saved")) and None if saves else None
        )
        losses += train(engine, MODEL, 2, 3)
        hook.remove()
        losses += train(engine, MODEL, 3, 5)
        engine.destroy()
        return losses

    assert losses_of(True) == losses_of(False)
    assert (tmp_path / "saved" / "global_step2").is_dir()
