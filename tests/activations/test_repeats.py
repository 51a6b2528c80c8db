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
from ds_fuyou.activations.unseen import sum_of_words
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


class Differentiates(nn.Module):
    """Takes derivatives in its own forward, for which the region is computed again while that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = self.up(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + self.down(force.square()).square()


class OnTwo(nn.Module):
    """Computes on a second device, too, which a gradient goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up(x).to("meta").square().sum()
        return x + self.down(self.up(x).unbind()[0])


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize("block", [Differentiates, OnTwo])
def test_nothing_is_said_of_blocks_that_repeat_themselves(
    block: type[nn.Module], is_partial: bool, tmp_path: Path, told: Callable[[], str]
) -> None:
    model = Model(always)
    model.blocks = nn.ModuleList(block() for _ in range(3))
    step = lambda model: model(torch.randn(32, WIDTH, requires_grad=True)).backward()  # noqa: E731
    expected = gradients(model, step)
    with attached(model, tmp_path, recompute=lambda name: not is_partial) as swapped:
        if is_partial:
            fates = {block.name: BlockFate(Fate.SWAP, {}) for block in swapped.session.blocks}
            swapped.session.decide({"": BlockFate(Fate.SWAP)} | fates)
        found = gradients(model, step)
    assert all(map(torch.equal, expected, found))
    assert SAYS not in told()


def test_what_is_compared_is_copied_nowhere() -> None:
    """Summed as 16-bit integers it would be there once more as words, four times as large."""
    values = torch.randn(64, 1000, 3).to(torch.bfloat16)
    with torch.profiler.profile(profile_memory=True) as taken:
        found = sum_of_words(values)
    assert 0 < sum(max(0, event.self_cpu_memory_usage) for event in taken.key_averages()) < 1000
    assert int(found) == int(values.view(-1).view(torch.int64).sum())


def test_which_forwards_are_compared() -> None:
    assert [number for number in range(1, 5000) if is_looked_at(number)] == [1, 16, 256, 4096]
