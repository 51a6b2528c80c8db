# SPDX-License-Identifier: Apache-2.0
"""The same on an accelerator, where copies run on streams of their own. Deselected where there is none."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_fuyou.activations.blocks import find_blocks
from ds_fuyou.activations.copies import copy_lane
from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.activations.session import ActivationSession
from ds_fuyou.activations.swapper import Swapper
from ds_fuyou.activations.tier import StorageHome, SwapTier
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.swap_space import SwapSpace
from ds_fuyou.zero.device import rank_device
from tests.activations.support import MIB, Plain, ResidentParameters, gradients, profile_blocks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("on_storage", [False, True], ids=["cpu", "nvme"])
@pytest.mark.parametrize("arena_bytes", [MIB, 64 * MIB], ids=["small", "large"])
def test_gradients_on_the_device(arena_bytes: int, on_storage: bool, tmp_path: Path) -> None:
    device = rank_device().torch_device
    torch.manual_seed(0)
    model = Plain(num_layers=6, width=128, dropout=0.1).to(device).train()
    ids = torch.randint(300, (4, 129), device=device)

    def step(model: nn.Module) -> None:
        for _ in range(3):
            model(ids).backward()

    expected = gradients(copy.deepcopy(model), step)
    space = SwapSpace([tmp_path])
    io = IoLane(IoSettings(), space.path_of)
    tier = SwapTier(
        arena_bytes, copy_lane(rank_device()), StorageHome(io, space) if on_storage else None, rank_device()
    )
    index = ResidentParameters(model.parameters())
    swapper = Swapper(tier, index, device=device, smallest_bytes=4096)
    session = ActivationSession(model, find_blocks(model), swapper)
    for _ in range(3):
        found = gradients(model, step)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert tier.counters.out_bytes > 0
    session.close()
    io.close()
    space.close()


def test_any_mixture_of_fates_on_the_device(tmp_path: Path) -> None:
    """Outputs that are kept, swapped through pinned memory, or computed again."""
    device = rank_device().torch_device
    torch.manual_seed(0)
    model = Plain(num_layers=4, width=128, dropout=0.1).to(device).train()
    ids = torch.randint(300, (4, 129), device=device)

    def step(model: nn.Module) -> None:
        model(ids).backward()

    expected = gradients(copy.deepcopy(model), step)
    copied = copy.deepcopy(model)
    profile = profile_blocks(find_blocks(copied), lambda: step(copied))[0]
    calls = [output.call for output in profile.operators if output.call is not None]
    space = SwapSpace([tmp_path])
    io = IoLane(IoSettings(), space.path_of)
    tier = SwapTier(4 * MIB, copy_lane(rank_device()), StorageHome(io, space), rank_device())
    index = ResidentParameters(model.parameters())
    swapper = Swapper(tier, index, device=device, smallest_bytes=4096)
    session = ActivationSession(model, find_blocks(model), swapper)
    drawn = random.Random(0)
    for _ in range(4):
        fates = [BlockFate(Fate.SWAP, {call: drawn.choice(list(Fate)) for call in calls}) for _ in range(4)]
        session.decide({f"blocks.{i}": fate for i, fate in enumerate(fates)} | {"": BlockFate(Fate.SWAP)})
        found = gradients(model, step)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert tier.counters.out_bytes > 0
    session.close()
    io.close()
    space.close()


def test_device_memory_is_flat_in_layers(tmp_path: Path) -> None:
    """The allocator's own peak: with everything swapped, more layers need more parameters, not more activations."""
    device = rank_device().torch_device
    peaks, saved = [], []
    for num_layers in (6, 24):
        torch.manual_seed(0)
        model = Plain(num_layers=num_layers, width=256).to(device).train()
        ids = torch.randint(300, (8, 257), device=device)
        space = SwapSpace([tmp_path])
        io = IoLane(IoSettings(), space.path_of)
        tier = SwapTier(512 * MIB, copy_lane(rank_device()), StorageHome(io, space), rank_device())
        swapper = Swapper(tier, ResidentParameters(model.parameters()), device=device)
        session = ActivationSession(model, find_blocks(model), swapper)
        model(ids).backward()
        rank_device().synchronize()
        rank_device().reset_peak()
        before = rank_device().allocated_bytes()
        model(ids).backward()
        rank_device().synchronize()
        peaks.append(rank_device().peak_bytes() - before)
        saved.append(tier.counters.out_bytes // 2)
        session.close()
        io.close()
    block = (saved[1] - saved[0]) / 18
    assert peaks[1] - peaks[0] <= 2 * block
