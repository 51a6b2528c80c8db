# SPDX-License-Identifier: Apache-2.0
"""The main job on the oldest supported DeepSpeed as on the newest: equal to stock, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.models import build_model
from tests.harness.plans import plan_document
from tests.harness.runner import ds_config
from tests.parity.cases import block

pytestmark = pytest.mark.compat


PLANNED = {"block_input": (0, 3, 0), "mlp_up": (1, 1, 1)}  # blocks in which it is kept, swapped, recomputed


@pytest.mark.parametrize(("tiers", "policy", "mode"), [("half", "speculate", "swap"), ("all", "defer", "auto")])
def test_equals_stock(tiers: str, policy: str, mode: str, must_equal, tmp_path: Path) -> None:
    case = {
        "steps": 6,
        "model": {},
        "groups": "two",
        "config": ds_config(gradient_clipping=1.0, gradient_accumulation_steps=2),
    }
    fuyou = block(str(tmp_path / "swap"), tiers, policy, "backward_and_forward", 2)
    fuyou["plan"] |= {"smallest_swapped_bytes": 1024, "activation_bytes": 65536}
    if mode == "auto":
        numel = sum(param.numel() for param in build_model({}).parameters())
        fuyou["plan"] = plan_document(numel, 3, PLANNED, **fuyou["plan"])
    fuyou["activations"] = {"mode": mode, "tier": "nvme"}
    _, ours = must_equal(case, fuyou)
    assert ours[0]["swap_read_bytes"] > 0
    assert ("decided after step 1" in ours[0]["output"]) == (mode == "auto")
