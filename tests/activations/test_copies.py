# SPDX-License-Identifier: Apache-2.0
"""Copies that end late, as those of an accelerator do: what is handed on too early shows as a wrong gradient."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.activations.late import LateCopies
from tests.activations.support import MIB, Plain, attached, gradients, must_agree

SMALL = 256 * 1024


def ids(seed: int, length: int = 33) -> torch.Tensor:
    return torch.randint(300, (4, length), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module) -> None:
    first, second = model(ids(0)), model(ids(1, 29))
    first.backward()
    second.backward()
    model(ids(2)).backward()


@pytest.mark.parametrize("late", [1, 4, 1000])
@pytest.mark.parametrize("arena_bytes", [SMALL, 16 * MIB], ids=["small", "large"])
def test_gradients(late: int, arena_bytes: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = must_agree(Plain(dropout=0.1), train, tmp_path, arena_bytes=arena_bytes, copies=LateCopies(late))
    moved = found.tier.counters
    if late == 1:
        assert moved.in_bytes > 0.9 * moved.out_bytes, "all but the last ones"
    else:
        assert moved.in_bytes < moved.out_bytes, "what had not left yet is used where it is"


class TightCopies(LateCopies):
    """To a device that has no memory for what nobody has asked for yet."""

    num_refused = 0

    def new_target(self, num_bytes: int) -> torch.Tensor:
        if sys._getframe(2).f_code.co_name == "read_ahead":
            self.num_refused += 1
            raise torch.OutOfMemoryError("no memory for this")
        return super().new_target(num_bytes)


def test_a_device_without_room_for_what_comes_later(tmp_path: Path) -> None:
    copies = TightCopies(1)
    must_agree(Plain(dropout=0.1), train, tmp_path, arena_bytes=16 * MIB, copies=copies)
    assert copies.num_refused > 0


@pytest.mark.parametrize("late", [1, 1000])
def test_host_memory_alone(late: int, tmp_path: Path, told: Callable[[], str]) -> None:
    """Without storage behind it, what does not fit stays on the device, and the log says so once."""
    torch.manual_seed(0)
    options = {"copies": LateCopies(late), "on_storage": False}
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
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        model(torch.randn(64, 64)).backward()
