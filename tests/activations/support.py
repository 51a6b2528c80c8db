# SPDX-License-Identifier: Apache-2.0
"""Models, and a session around them, without any engine."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_fuyou.activations.blocks import Block, find_blocks
from ds_fuyou.activations.copies import CopyLane, copy_lane
from ds_fuyou.activations.parameters import SavedParameter, as_saved_parameter, cast_source
from ds_fuyou.activations.session import ActivationSession
from ds_fuyou.activations.surroundings import RandomSource
from ds_fuyou.activations.swapper import Swapper
from ds_fuyou.activations.tier import StorageHome, SwapTier
from ds_fuyou.activations.views import ViewSpec
from ds_fuyou.host.device import HostDevice
from ds_fuyou.planner.profile import BlockCost
from ds_fuyou.profiling.operators import OperatorRecorder, SavedHooks
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.swap_space import SwapSpace
from ds_fuyou.telemetry.trace import LaneTrace

__all__ = [
    *("MIB", "Attached", "Plain", "ResidentParameters"),
    *("attached", "gradients", "interrupted", "must_agree", "profile_blocks"),
]

MIB = 1024 * 1024


class PlainBlock(nn.Module):
    """Attention by hand, so that masks, views and shared storages are saved."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        allowed = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = (q @ k.transpose(-1, -2)).masked_fill(~allowed, float("-inf")).softmax(-1)
        weights = F.dropout(weights, self.dropout, self.training)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


class Plain(nn.Module):
    """A GPT with everything the saved-tensor hooks have to cope with."""

    def __init__(
        self,
        num_layers: int = 3,
        width: int = 64,
        vocabulary: int = 300,
        *,
        dropout: float = 0.0,
        tied: bool = False,
        frozen: Sequence[int] = (),
        twice: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(PlainBlock(width, dropout) for _ in range(num_layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.twice = twice
        if tied:
            self.head.weight = self.tokens.weight
        for index in frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids[:, :-1])
        for block in self.blocks:
            x = block(x)
        if self.twice:
            x = self.blocks[0](x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids[:, 1:].flatten())


@dataclass
class Attached:
    """A model with a session, and what is behind it."""

    model: nn.Module
    session: ActivationSession
    swapper: Swapper
    tier: SwapTier
    io: IoLane
    space: SwapSpace

    def settle(self) -> None:
        """Everything in flight has ended and everything dead is gone."""
        gc.collect()
        while True:
            for flight in self.tier._traffic or ():
                flight.transfer.wait_ended()
            for moved, _ in (*self.tier._copies_out, *self.tier._copies_in):
                moved.wait()
            self.tier.poll()
            if not (self.tier._copies_out or self.tier._copies_in or self.tier._waiting):
                break
        for flight in self.tier._traffic or ():
            flight.transfer.wait_ended()
        self.tier.poll()
        gc.collect()

    def nothing_is_left(self) -> bool:
        self.settle()
        return (self.tier.held.now, self.tier.arena_used_bytes, self.space.leased_bytes) == (0, 0, 0)


class ResidentParameters:
    """Parameters and buffers that stay in one place: a model without ZeRO."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._by_storage = {param.untyped_storage()._cdata: param for param in params}

    def find(self, tensor: torch.Tensor) -> SavedParameter | None:
        param = self._by_storage.get(tensor.untyped_storage()._cdata)
        if param is not None:
            return as_saved_parameter(tensor, param, param.data)
        source = cast_source(tensor)
        if source is None or not source.is_contiguous() or source.untyped_storage()._cdata not in self._by_storage:
            return None
        return SavedParameter(source, ViewSpec.of(tensor), tensor.dtype)

    def values(self, saved: SavedParameter) -> torch.Tensor:
        return saved.param.data


@contextlib.contextmanager
def attached(
    model: nn.Module,
    directory: Path,
    *,
    arena_bytes: int = 4 * MIB,
    smallest_bytes: int = 1024,
    eager: bool = True,
    budget_bytes: int | None = None,
    recompute: Callable[[str], bool] = lambda name: False,
    trace: LaneTrace | None = None,
    copies: CopyLane | None = None,
    on_storage: bool = True,
    draws: RandomSource | None = None,
) -> Iterator[Attached]:
    """Swaps the model's activations to ``directory`` until the end of the block. ``draws``: as a session's."""
    space = SwapSpace([directory], None if budget_bytes is None else lambda: budget_bytes)
    io = IoLane(IoSettings(), space.path_of)
    home = StorageHome(io, space, 0 if eager else arena_bytes // 2) if on_storage else None
    tier = SwapTier(arena_bytes, copies or copy_lane(HostDevice()), home, trace=trace)
    swapper = Swapper(
        tier,
        ResidentParameters(model.parameters()),
        device=torch.device("cpu"),
        smallest_bytes=smallest_bytes,
    )
    blocks = find_blocks(model)
    recomputed = [block for block in blocks if recompute(block.name)]
    session = ActivationSession(model, blocks, swapper, recomputed, draws=draws)
    try:
        yield Attached(model, session, swapper, tier, io, space)
    finally:
        session.close()
        io.close()


def profile_blocks(
    blocks: Sequence[Block], forward: Callable[[], object], hooks: SavedHooks | None = None
) -> tuple[BlockCost, ...]:
    """What each block does in ``forward``."""
    recorder = OperatorRecorder(blocks, hooks)
    with recorder:
        forward()
    return recorder.profiles()


Step = Callable[[nn.Module], None]


def gradients(model: nn.Module, step: Step) -> list[torch.Tensor | None]:
    """Gradients after ``step`` (forwards and backwards) from one state of the random generator."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    step(model)
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def interrupted(model: nn.Module, step: Step, part: nn.Module) -> None:
    """``step`` until Ctrl-C comes as a part of the model begins: no Exception, so PyTorch runs no hooks after it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = part.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(model)
    handle.remove()


def must_agree(
    model: nn.Module, step: Step, directory: Path, *, reference: nn.Module | None = None, **options: object
) -> Attached:
    """Gradients equal those of an untouched copy (or ``reference``), bit for bit; twice, since the second time storage
    and memory are used again. Nothing is left behind.
    """
    model.train()
    expected = gradients((reference if reference is not None else copy.deepcopy(model)).train(), step)
    with attached(model, directory, **options) as swapped:  # type: ignore[arg-type]
        for _ in range(2):
            found = gradients(model, step)
            for (name, _), a, b in zip(model.named_parameters(), expected, found, strict=True):
                assert (a is None) == (b is None), name
                assert a is None or torch.equal(a, b), name
            model.zero_grad(set_to_none=True)
            del found
        assert swapped.tier.counters.out_bytes > 0
        assert swapped.nothing_is_left(), (swapped.tier.held.now, swapped.tier.arena_used_bytes)
        assert swapped.tier.held.peak > 0
    return swapped
