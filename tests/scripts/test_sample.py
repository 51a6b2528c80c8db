# SPDX-License-Identifier: Apache-2.0
"""A sample of what `make scripts` does in full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.bits import same
from tests.scripts.grammar import draw
from tests.scripts.soak import differences

SEEDS = (7, 22)  # on the stand-in device; split masters and swapped activations


@pytest.mark.parametrize("seed", SEEDS)
def test_a_script_that_was_drawn_trains_as_stock_does(seed: int, tmp_path: Path) -> None:
    assert differences(draw(seed), tmp_path) == []


def test_every_bit_counts_but_those_of_nan() -> None:
    none = torch.tensor([0x7FC00000, -0x10000], dtype=torch.int32).view(torch.float32)
    assert same(none, none.flip(0))
    assert not same(none, torch.tensor([float("nan"), 0.0]))
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same(torch.zeros(2), torch.zeros(1, 2))
    assert not same(torch.zeros(2), torch.zeros(2).double())
