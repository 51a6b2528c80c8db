# SPDX-License-Identifier: Apache-2.0
"""Swapped and recomputed gradients equal those of the untouched model, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.activations.support import MIB, Plain, attached, must_agree

SMALL = 256 * 1024  # an arena below what a forward saves: everything goes to storage and comes back


def ids(seed: int = 0, length: int = 33, vocabulary: int = 300) -> torch.Tensor:
    return torch.randint(vocabulary, (4, length), generator=torch.Generator().manual_seed(seed))


def train(accumulation: int = 1, autocast: bool = False):
    def step(model: nn.Module) -> None:
        for micro in range(accumulation):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(ids(micro))
            (loss / accumulation).backward()

    return step


MODELS = {
    "plain": {},
    "dropout": {"dropout": 0.2},
    "tied": {"tied": True},
    "frozen": {"frozen": (0, 2)},
    "twice": {"twice": True},
}


@pytest.mark.parametrize(
    ("accumulation", "autocast", "arena_bytes"),
    [(1, False, SMALL), (1, True, 16 * MIB), (3, False, 16 * MIB), (3, True, SMALL)],
    ids=["1-fp32-small", "1-autocast-large", "3-fp32-large", "3-autocast-small"],
)
@pytest.mark.parametrize("name", MODELS)
def test_gpt(name: str, accumulation: int, autocast: bool, arena_bytes: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = must_agree(Plain(**MODELS[name]), train(accumulation, autocast), tmp_path, arena_bytes=arena_bytes)
    if arena_bytes == SMALL:
        assert found.tier.counters.read_bytes > 0


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_blocks_between_swapped_ones(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    must_agree(Plain(**MODELS[name]), train(2), tmp_path, arena_bytes=SMALL, recompute=lambda block: "1" in block)


def test_several_micro_batches_in_flight(tmp_path: Path) -> None:
    def step(model: nn.Module) -> None:
        first, second, third = (model(ids(seed, length)) for seed, length in ((0, 33), (1, 21), (2, 40)))
        second.backward()
        (first + third).backward()

    must_agree(Plain(dropout=0.1), step, tmp_path, arena_bytes=SMALL)


class Cells(nn.Module):
    """Their gates lie in one memory, are no views of one another, and are changed in place one after another."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(width, width), nn.GRUCell(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = cell = other = x
        for _ in range(3):
            hidden, cell = self.lstm(x, (hidden, cell))
            other = self.gru(hidden, other)
        return (hidden + other).square().mean()


@pytest.mark.parametrize("arena_bytes", [SMALL, 16 * MIB])
def test_gates_of_recurrent_cells(arena_bytes: int, tmp_path: Path) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    must_agree(Cells(), lambda model: model(x).backward(), tmp_path, arena_bytes=arena_bytes)


class Random(nn.Module):
    """Its noise is saved before it is drawn."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down, self.random = nn.Linear(width, width), nn.Linear(width, width), nn.RReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.random(self.down(F.rrelu(self.up(x), training=True))).square().mean()


@pytest.mark.parametrize("arena_bytes", [SMALL, 16 * MIB])
def test_what_is_saved_before_it_is_made(arena_bytes: int, tmp_path: Path) -> None:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    before = torch.rrelu, torch.rrelu_
    must_agree(Random(), lambda model: model(x).backward(), tmp_path, arena_bytes=arena_bytes)
    assert (torch.rrelu, torch.rrelu_) == before


class Spoilt(Random):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        made = F.rrelu(hidden, training=True)
        hidden += 1.0
        return made.sum()


def test_what_is_saved_before_it_is_made_is_not_changed_later(tmp_path: Path) -> None:
    with attached(Spoilt(), tmp_path) as swapped:
        loss = swapped.model(torch.randn(512, 64))
        with pytest.raises(RuntimeError, match="modified by an inplace operation, after it had been saved"):
            loss.backward()


class Rotations(nn.Module):
    """Saves copies of parameters in another type as they are, as complex numbers and as bits."""

    def __init__(self, numel: int = 4096) -> None:
        super().__init__()
        self.turn, self.mask = (nn.Parameter(torch.randn(numel, 2, dtype=torch.bfloat16)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        turned = torch.view_as_complex(x) * torch.view_as_complex(self.turn.float())
        wide = self.mask.float()
        odd = wide.view(torch.int32).bitwise_right_shift(16).remainder(2).bool()
        return (torch.view_as_real(turned) * wide).where(odd, x).square().mean()


@pytest.mark.parametrize("arena_bytes", [SMALL, 16 * MIB])
def test_parameters_in_another_type(arena_bytes: int, tmp_path: Path) -> None:
    x = torch.randn(4096, 2, generator=torch.Generator().manual_seed(0))
    must_agree(Rotations(), lambda model: model(x).backward(), tmp_path, arena_bytes=arena_bytes)


def test_evaluation_and_no_grad_in_between(tmp_path: Path) -> None:
    def step(model: nn.Module) -> None:
        loss = model(ids(0))
        model.eval()
        with torch.no_grad():
            model(ids(5))
        with torch.inference_mode():
            model(ids(6))
        model.train()
        with torch.no_grad():
            model(ids(7))
        loss.backward()

    must_agree(Plain(dropout=0.1), step, tmp_path, arena_bytes=SMALL)


def test_backward_twice_through_a_retained_graph(tmp_path: Path) -> None:
    def step(model: nn.Module) -> None:
        loss = model(ids(0))
        loss.backward(retain_graph=True)
        loss.backward()

    must_agree(Plain(), step, tmp_path, arena_bytes=SMALL)


def test_second_derivatives(tmp_path: Path) -> None:
    def step(model: nn.Module) -> None:
        loss = model(ids(0))
        params = [p for p in model.parameters() if p.requires_grad]
        first = torch.autograd.grad(loss, params, create_graph=True)
        sum(g.square().sum() for g in first).backward()

    must_agree(Plain(num_layers=2), step, tmp_path, arena_bytes=SMALL)


def test_written_only_when_host_memory_fills_up(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = must_agree(Plain(), train(), tmp_path, arena_bytes=32 * MIB, eager=False)
    assert found.tier.counters.written_bytes == 0
    found = must_agree(Plain(), train(), tmp_path, arena_bytes=SMALL, eager=False)
    assert found.tier.counters.written_bytes > 0
