# SPDX-License-Identifier: Apache-2.0
"""A sample of what `make scripts` does in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.grammar import draw
from tests.scripts.soak import differences

SEEDS = (7, 22)  # on the stand-in device; split masters and swapped activations


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_script_that_was_drawn_trains_as_stock_does(seed: int, tmp_path: Path) -> None:
    assert differences(draw(seed), tmp_path) == []
