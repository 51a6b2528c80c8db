# SPDX-License-Identifier: Apache-2.0
"""A call of a module is the outermost one when no other is running, however the others have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_fuyou.host.outermost_call import OutermostCall


class Watched(nn.Module):
    """Whose forward does what a test says; ``found``: whether each call was the outermost, as it began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Callable[[], object] = lambda: None
        self.found: list[str] = []
        self.call = OutermostCall()
        self.register_forward_pre_hook(torch.compiler.disable(self._enter))
        self.register_forward_hook(torch.compiler.disable(self._leave), always_call=True)

    def _enter(self, *_: object) -> None:
        self.found.append("begins" if self.call.enter() else "begins within")

    def _leave(self, *_: object) -> None:
        self.found.append("ends" if self.call.leave() else "ends within")

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        work, self.work = self.work, lambda: None
        work()
        return batch + 1

    def take(self) -> list[str]:
        found, self.found = self.found, []
        return found


@pytest.fixture(params=[False, True], ids=["", "compiled"])
def model(request: pytest.FixtureRequest) -> Watched:
    model = Watched()
    if request.param:
        model.compile(backend="eager")
    return model


BATCH = torch.zeros(1)
ALONE = ["begins", "ends"]


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_call_that_an_interrupt_ended_is_no_more(model: Watched) -> None:
    for _ in range(2):  # from one line, by frames of one size: the next ones may get the addresses of the first
        model.work = interrupt
        with pytest.raises(KeyboardInterrupt):
            model(BATCH)
        assert model.take() == ["begins"]
        for _ in range(2):
            model(BATCH)
            assert model.take() == ALONE


def test_a_call_within_a_call_is_not_the_outermost(model: Watched) -> None:
    for _ in range(2):
        model.work = lambda: model(BATCH)
        model(BATCH)
        assert model.take() == ["begins", "begins within", "ends within", "ends"]


def test_a_call_of_another_thread_runs_beside_the_first() -> None:
    model = Watched()

    def beside() -> None:
        thread = threading.Thread(target=model, args=(BATCH,))
        thread.start()
        thread.join()

    model.work = beside
    model(BATCH)
    assert model.take() == ["begins", "begins within", "ends within", "ends"]


def test_nothing_of_a_call_is_kept_when_it_has_ended() -> None:
    model = Watched()
    model(BATCH)
    assert model.call._frames == []
    model.work = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(BATCH)
    model.call.forget()
    assert model.call._frames == []
    model(BATCH)
    assert model.take() == [*ALONE, "begins", *ALONE]
