# SPDX-License-Identifier: Apache-2.0
"""The base of adapters leaves host memory where that becomes scarce, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.huggingface.test_adapter_checkpoints import differences, lacks, run

AUTO: dict[str, Any] = {name: {"tier": "auto"} for name in ("parameters", "optimizer", "gradients")}
UNPLACED = {"zero_optimization": {name: {"device": "none"} for name in ("offload_param", "offload_optimizer")}}


@pytest.fixture(scope="module", params=[{"world_size": 1}, {"world_size": 2, "zero_init": True}], ids=str)
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    do = [("train", 2), ("train", 1), ("edit", "head.weight"), ("train", 3)]
    return request.param, run(tmp_path_factory.mktemp("stock"), "stock", do, tiers=None, **request.param)


@pytest.mark.parametrize("block", [{}, {"resume": "auto"}, {"optimizer": {"tier": "nvme"}}], ids=str)
def test_it_leaves_on_all_ranks_when_one_has_none_left(block: dict, stock: tuple[dict, dict], tmp_path: Path) -> None:
    """Also where nothing was on storage before, and where a run may be gone on from, or states are there already."""
    case, expected = stock
    do = [("train", 2), ("scarce", case["world_size"] - 1), ("train", 1), ("save", "a")]
    do += [("edit", "head.weight"), ("save", "b"), ("train", 3)]
    found = run(tmp_path, "ours", do, tiers={**AUTO, **block}, config=UNPLACED, **case)
    assert found["losses"] == expected["losses"]
    assert differences(expected, found) == []
    held, share = found["frozen"]
    assert share == 0.0
    assert held["nvme"] > 10 * held["cpu"] > 0, "what is small, and stays gathered"
    assert found["output"].count("host memory is scarce: 100 % of the frozen parameters have left it for storage") == 1
    assert lacks(found, "a"), "the base is what the script built, wherever it is"
    assert not lacks(found, "b")
    again = run(tmp_path, "again", [("load", "b"), ("train", 3)], tiers=AUTO, config=UNPLACED, **case)
    assert again["losses"] == expected["losses"][3:]


def test_it_stays_on_all_ranks_when_one_has_no_room_on_storage(stock: tuple[dict, dict], tmp_path: Path) -> None:
    case, expected = stock
    do = [("train", 2), ("scarce", case["world_size"] - 1), ("full", 0)]
    do += [("train", 1), ("edit", "head.weight"), ("train", 3)]
    found = run(tmp_path, "ours", do, tiers=AUTO, config=UNPLACED, **case)
    assert found["losses"] == expected["losses"]
    assert differences(expected, found) == []
    held, share = found["frozen"]
    assert (held["nvme"], share) == (0, 1.0)
    assert found["output"].count("frozen parameters stay where they are, training goes on") == 1, "of one rank, once"
    assert "host memory is scarce" not in found["output"]


def test_a_base_that_shall_be_in_memory_stays(tmp_path: Path) -> None:
    """The block says so."""
    do = [("train", 2), ("scarce", 0), ("train", 2)]
    found = run(tmp_path, "ours", do, tiers={"parameters": {"tier": "cpu"}}, config=UNPLACED)
    assert found["frozen"][0]["nvme"] == 0
