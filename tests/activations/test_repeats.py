# SPDX-License-Identifier: Apache-2.0
"""A block that makes other values when it is computed again is named, once; one that repeats itself is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.activations.repeats import is_looked_at
from tests.activations.support import attached, gradients

WIDTH = 48
SAYS = "has made other values than in forward"


class Block(nn.Module):
    """``how`` gets an object that the block holds and a recomputation does not see."""

    def __init__(self, how: Callable[[SimpleNamespace], float]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how, self.seen = how, SimpleNamespace(number=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.number += 1
        hidden = F.gelu(self.up(self.norm(x))) * self.how(self.seen)
        hidden += torch.empty_like(hidden).fill_(0.5)
        return x + F.dropout(self.down(hidden), 0.2)


class Model(nn.Module):
    def __init__(self, how: Callable[[SimpleNamespace], float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def always(seen: SimpleNamespace) -> float:
    return 2.0


def by_turns(seen: SimpleNamespace) -> float:
    return 1.0 + seen.number % 2


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize(("how", "number"), [(always, 0), (by_turns, 1)])
def test_other_values_are_told_once(
    how: Callable[[SimpleNamespace], float], number: int, is_partial: bool, tmp_path: Path, told: Callable[[], str]
) -> None:
    model = Model(how)
    with attached(model, tmp_path, recompute=lambda name: not is_partial) as swapped:
        if is_partial:
            fates = {block.name: BlockFate(Fate.SWAP, {}) for block in swapped.session.blocks}
            swapped.session.decide({"": BlockFate(Fate.SWAP)} | fates)
        for _ in range(2):
            gradients(model, lambda model: model(torch.randn(32, WIDTH)).backward())
    said = told()
    assert said.count(SAYS) == number
    assert said.count("Block: computed again in backward, aten.mul.Tensor (call ") == number


def test_what_begins_to_differ_later_is_found_later(tmp_path: Path, told: Callable[[], str]) -> None:
    model = Model(lambda seen: 1.0 if seen.number < 12 else by_turns(seen))
    step = lambda model: model(torch.ones(32, WIDTH) + torch.randn(32, WIDTH)).backward()  # noqa: E731
    with attached(model, tmp_path, recompute=lambda name: True):
        for _ in range(15):
            gradients(model, step)
        assert SAYS not in told()
        gradients(model, step)
    assert told().count(SAYS) == 1


def test_which_forwards_are_compared() -> None:
    assert [number for number in range(1, 5000) if is_looked_at(number)] == [1, 16, 256, 4096]
