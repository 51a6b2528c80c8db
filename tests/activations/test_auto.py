# SPDX-License-Identifier: Apache-2.0
"""The rule for mode "auto", and changing fates between steps."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_fuyou.activations.auto import BlockFates, BlockMeasurement, choose_fates
from tests.activations.support import Plain, attached, gradients

MEASURED = BlockMeasurement(
    num_blocks=12,
    block_bytes=100e6,
    num_forwards=1,
    step_secs=1.0,
    storage_bytes_per_sec=2e9,
    other_storage_bytes=1e9,
    device_bytes=500e6,
)


def fates(**changes: float) -> BlockFates:
    return choose_fates(replace(MEASURED, **changes))


def test_the_rule() -> None:
    """Room for five blocks less two to work on; storage has 1 GB a second to spare, a block needs 200 MB a step."""
    assert fates() == BlockFates(num_swapped=5, num_recomputed=4, num_kept=3)
    assert fates(device_bytes=1200e6) == BlockFates(0, 0, 12), "everything fits"
    assert fates(device_bytes=0) == BlockFates(5, 7, 0)
    assert fates(storage_bytes_per_sec=None) == BlockFates(9, 0, 3), "nothing bounds swapping"
    assert fates(other_storage_bytes=3e9) == BlockFates(0, 9, 3), "storage is the bound already"
    assert fates(storage_bytes_per_sec=100e9) == BlockFates(9, 0, 3)
    assert fates(num_forwards=5) == BlockFates(1, 8, 3)
    assert fates(block_bytes=0) == BlockFates(0, 0, 12)


@pytest.mark.parametrize("device_bytes", [0, 3e8, 7e8, 2e9])
@pytest.mark.parametrize("rate", [None, 1e9, 3e9])
def test_every_block_has_one_fate(device_bytes: float, rate: float | None) -> None:
    found = fates(device_bytes=device_bytes, storage_bytes_per_sec=rate)
    assert found.num_swapped + found.num_recomputed + found.num_kept == 12
    assert min(found.num_swapped, found.num_recomputed, found.num_kept) >= 0


def test_fates_change_between_steps(tmp_path: Path) -> None:
    ids = torch.randint(300, (4, 33))

    def train(model: nn.Module) -> None:
        model(ids).backward()

    torch.manual_seed(0)
    model = Plain(num_layers=4, dropout=0.1).train()
    expected = gradients(copy.deepcopy(model), train)
    with attached(model, tmp_path) as swapped:
        blocks = swapped.session.blocks
        moved = []
        for chosen in (BlockFates(4, 0, 0), BlockFates(2, 1, 1), BlockFates(0, 4, 0), BlockFates(0, 0, 4)):
            before = swapped.tier.counters.out_bytes
            swapped.session.decide(*chosen.split(blocks))
            found = gradients(model, train)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), chosen
            moved.append(swapped.tier.counters.out_bytes - before)
            model.zero_grad()
        assert moved[0] > 1.5 * moved[1] > 0
        assert moved[2:] == [0, 0]
        del found
        assert swapped.nothing_is_left()
