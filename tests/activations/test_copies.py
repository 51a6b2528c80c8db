# SPDX-License-Identifier: Apache-2.0
"""Copies that end late, as those of an accelerator do: a stand-in for its streams, over real memory and storage.

A copy is made only when its event is asked often enough or waited for. So memory that is handed on too early shows as
a wrong gradient.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_fuyou.activations.copies import InFlightCopy
from tests.activations.support import MIB, Plain, attached, gradients, must_agree

SMALL = 256 * 1024


class LateStream:
    """Does its copies in order; time passes when somebody asks."""

    def __init__(self) -> None:
        self.now = 0
        self.queue: deque[LateEvent] = deque()


class LateEvent:
    def __init__(self, stream: LateStream, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], late: int) -> None:
        self.stream, self.parts, self.due = stream, parts, stream.now + late
        stream.queue.append(self)

    def query(self) -> bool:
        self.stream.now += 1
        if self.stream.now >= self.due:
            self.synchronize()
        return self not in self.stream.queue

    def synchronize(self) -> None:
        while self in self.stream.queue:
            self.stream.queue.popleft().run()

    def run(self) -> None:
        for source, target in self.parts:
            target.copy_(source)
        self.parts = ()


class LateCopies:
    device_is_host = False

    def __init__(self, num_queries: int) -> None:
        self.num_queries = num_queries
        self.out, self.back = LateStream(), LateStream()

    def mark(self) -> None:
        return None

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: object) -> InFlightCopy:
        parts = ((source, target),)
        return InFlightCopy(LateEvent(self.out, parts, self.num_queries), parts)

    def new_target(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def copy_in(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> InFlightCopy:
        return InFlightCopy(LateEvent(self.back, parts, self.num_queries), parts)

    def make_visible(self, target: torch.Tensor, event: LateEvent) -> torch.Tensor:
        event.synchronize()  # the computing stream would wait here
        return target


def ids(seed: int, length: int = 33) -> torch.Tensor:
    return torch.randint(300, (4, length), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module) -> None:
    first, second = model(ids(0)), model(ids(1, 29))
    first.backward()
    second.backward()
    model(ids(2)).backward()


@pytest.mark.parametrize("num_queries", [1, 4, 1000])
@pytest.mark.parametrize("arena_bytes", [SMALL, 16 * MIB], ids=["small", "large"])
def test_gradients(num_queries: int, arena_bytes: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = must_agree(Plain(dropout=0.1), train, tmp_path, arena_bytes=arena_bytes, copies=LateCopies(num_queries))
    moved = found.tier.counters
    if num_queries == 1:
        assert moved.in_bytes > 0.9 * moved.out_bytes, "all but the last ones"
    else:
        assert moved.in_bytes < moved.out_bytes, "what had not left yet is used where it is"


@pytest.mark.parametrize("num_queries", [1, 1000])
def test_host_memory_alone(num_queries: int, tmp_path: Path, told: Callable[[], str]) -> None:
    """Without storage behind it, what does not fit stays on the device, and the log says so once."""
    torch.manual_seed(0)
    options = {"copies": LateCopies(num_queries), "on_storage": False}
    found = must_agree(Plain(), train, tmp_path, arena_bytes=16 * MIB, **options)
    assert found.space.num_bytes == 0
    assert told() == ""
    must_agree(Plain(), train, tmp_path, arena_bytes=SMALL, **options)
    assert told().count("stays on the device") == 1


def test_device_memory_is_let_go_when_the_copy_has_ended(tmp_path: Path) -> None:
    model = Plain().train()
    with attached(model, tmp_path, arena_bytes=16 * MIB, copies=LateCopies(3), on_storage=False) as swapped:
        loss = model(ids(0))
        saved = swapped.tier.counters.out_bytes
        assert swapped.tier.held.peak < saved / 2
        swapped.settle()
        assert swapped.tier.held.now < saved / 20
        loss.backward()


def test_a_graph_that_is_freed_while_copies_run(tmp_path: Path) -> None:
    """Its memory is used again only when they have ended."""
    torch.manual_seed(0)
    model = Plain().train()
    expected = gradients(copy.deepcopy(model), train)
    with attached(model, tmp_path, arena_bytes=SMALL, copies=LateCopies(50)) as swapped:
        for seed in range(3):
            model(ids(seed))
        found = gradients(model, train)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        model.zero_grad()
        del found
        assert swapped.nothing_is_left()


def test_a_change_in_place_while_the_copy_runs_is_refused(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).sigmoid()
            z = self.linear(y)
            y.mul_(2.0)
            return z.mean()

    model = InPlace().train()
    with (
        attached(model, tmp_path, copies=LateCopies(1000)),
        pytest.raises(RuntimeError, match="modified by an in-place operation"),
    ):
        model(torch.randn(64, 64)).backward()
