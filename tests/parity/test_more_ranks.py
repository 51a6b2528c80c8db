# SPDX-License-Identifier: Apache-2.0
"""Three and four ranks: sums of more than two numbers have stock's order, so every bit is stock's there, too.

The model's parameters cannot be shared out evenly, and some have fewer elements than there are ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.device.parity import must_equal_stock
from tests.harness.runner import differences, ds_config, run_case, with_fuyou
from tests.parity.cases import block

SMALL_BUCKET = 50_000
"""Elements: one matrix is larger, the others share several buckets a backward."""
TOLD = "zero_optimization.reduce_bucket_size is"


def case(world_size: int, zero: dict | None = None, **changes: Any) -> dict:
    config = ds_config(gradient_clipping=0.5, zero_optimization=zero or {}, **changes)
    model = {"gates": True, "width": 83}
    return {"steps": 3, "model": model, "groups": "two", "config": config, "world_size": world_size}


def test_three_ranks_with_small_buckets_equal_stock(stock_run, tmp_path: Path) -> None:
    """On a device that computes by itself: gradients stay on it until their bucket is reduced."""
    small = case(3, {"reduce_bucket_size": SMALL_BUCKET}, gradient_accumulation_steps=3)
    fuyou = block(str(tmp_path / "swap"), "all", "speculate")
    ours = must_equal_stock(small, fuyou, {"seed": 1, "delay_secs": 0.003}, stock_run, tmp_path)
    assert not any(TOLD in result["output"] for result in ours), "updates have backward to hide behind"


def test_two_nodes_of_two_ranks_equal_stock_with_a_bucket_that_holds_the_model(stock_run, tmp_path: Path) -> None:
    """As torchrun starts them; each node has a path of its own. One line says why updates wait."""
    large = case(4, bf16=None) | {"ranks_per_node": 2}
    for node in range(2):
        (tmp_path / f"disk{node}").mkdir()
    fuyou = with_fuyou(large, block(str(tmp_path / "disk{node}"), "half", "speculate"))
    ours = run_case(fuyou, tmp_path, "ours")
    assert differences(stock_run(large), ours) == []
    for rank, result in enumerate(ours):
        assert result["directories"]
        assert all(Path(path).is_relative_to(tmp_path / f"disk{rank // 2}") for path in result["directories"])
    assert [result["output"].count(TOLD) for result in ours] == [1, 0, 0, 0]
    assert not [path for node in range(2) for path in (tmp_path / f"disk{node}").glob("**/*") if path.is_file()]


@pytest.mark.compat
def test_three_ranks_with_a_bucket_a_communication_dtype_and_all_reduce_equal_stock(must_equal, tmp_path: Path) -> None:
    """Linear modules reduce in bf16 and all others in fp32, so two buckets fill side by side."""
    zero = {"reduce_bucket_size": SMALL_BUCKET, "reduce_scatter": False}
    mixed = case(3, zero, bf16=None, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    must_equal(mixed, block(str(tmp_path / "swap"), "states", "speculate"))
