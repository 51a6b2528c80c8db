# SPDX-License-Identifier: Apache-2.0
"""The main job on the oldest supported DeepSpeed as on the newest: equal to stock, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.runner import ds_config
from tests.parity.cases import block

pytestmark = pytest.mark.compat


@pytest.mark.parametrize(("tiers", "policy"), [("half", "speculate"), ("all", "defer")])
def test_equals_stock(tiers: str, policy: str, must_equal, tmp_path: Path) -> None:
    case = {
        "steps": 6,
        "model": {},
        "groups": "two",
        "config": ds_config(gradient_clipping=1.0, gradient_accumulation_steps=2),
    }
    must_equal(case, block(str(tmp_path / "swap"), tiers, policy, "backward_and_forward", 2))
