# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in ``save_checkpoint()`` as its thread starts: either that goes on and everybody knows of it, or none does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from ds_fuyou.checkpoint.streamed_file import StreamedFile
from ds_fuyou.errors import FuyouStateError
from tests.harness.limits import HANG_SECS
from tests.harness.models import TinyGPT
from tests.harness.moving import train
from tests.harness.runner import ds_config

pytestmark = pytest.mark.usefixtures("only_rank")
MODEL = {"num_layers": 2, "width": 72, "vocabulary": 100}


@pytest.mark.parametrize("begins", [True, False], ids=["the thread has begun", "no thread"])
def test_training_goes_on_after_ctrl_c_as_the_thread_starts(
    begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    config = ds_config(fuyou={"nvme_path": str(tmp_path), "checkpoint": {"save": "background"}})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    train(engine, MODEL, 0, 2)
    start, fill = threading.Thread.start, StreamedFile.fill_rest
    has_begun, may_write = threading.Event(), threading.Event()

    def interrupt(thread: threading.Thread) -> None:
        if thread.name != "fuyou-save":
            return start(thread)
        if begins:
            start(thread)
            assert has_begun.wait(HANG_SECS)
        raise KeyboardInterrupt

    def held(*args: Any) -> None:
        has_begun.set()
        assert may_write.wait(HANG_SECS)
        fill(*args)

    folder, state = tmp_path / "saved", engine.optimizer.checkpoint_state
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        patch.setattr(StreamedFile, "fill_rest", held)
        with pytest.raises(KeyboardInterrupt):
            engine.save_checkpoint(str(folder), tag="first")
    assert state.save is not None, "all ranks wait for it together"
    may_write.set()
    if begins:
        engine.fuyou_wait_checkpoint()
        assert [found.name for found in folder.iterdir() if found.is_dir()] == ["first"]
    else:
        with pytest.raises(FuyouStateError, match="interrupted"):
            engine.fuyou_wait_checkpoint()
    train(engine, MODEL, 2, 4)
    engine.save_checkpoint(str(folder), tag="first")
    engine.fuyou_wait_checkpoint()
    assert [found.name for found in folder.iterdir() if found.is_dir()] == ["first"]
    engine.destroy()
