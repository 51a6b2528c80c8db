# SPDX-License-Identifier: Apache-2.0
"""The base of adapters leaves host memory where that is scarce, comes where there is more, and nothing else changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.huggingface.test_adapter_checkpoints import differences, lacks, run

DEEP = {"num_layers": 8}
AUTO: dict[str, Any] = {name: {"tier": "auto"} for name in ("parameters", "optimizer", "gradients")}
UNPLACED = {"zero_optimization": {name: {"device": "none"} for name in ("offload_param", "offload_optimizer")}}
CASES = [{"world_size": 1, "model": DEEP}, {"world_size": 2, "model": DEEP, "zero_init": True}]


@pytest.fixture(scope="module", params=CASES, ids=str)
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    do = [("train", 3), ("edit", "head.weight"), ("train", 4)]
    return request.param, run(tmp_path_factory.mktemp("stock"), "stock", do, tiers=None, **request.param)


@pytest.mark.parametrize("block", [{}, {"resume": "auto"}, {"optimizer": {"tier": "nvme"}}], ids=str)
def test_it_leaves_on_all_ranks_when_one_has_none_left(block: dict, stock: tuple[dict, dict], tmp_path: Path) -> None:
    """Also where nothing was on storage before, and where a run may be gone on from, or states are there already."""
    case, expected = stock
    do = [("train", 2), ("scarce", case["world_size"] - 1), ("train", 1), ("save", "a")]
    do += [("edit", "head.weight"), ("save", "b"), ("train", 4)]
    found = run(tmp_path, "ours", do, tiers={**AUTO, **block}, config=UNPLACED, **case)
    assert found["losses"] == expected["losses"]
    assert differences(expected, found) == []
    held, share = found["frozen"]
    assert held["nvme"] > 10 * held["cpu"] > 0, "what is small, and stays gathered"
    assert share == pytest.approx(held["cpu"] / (held["cpu"] + held["nvme"]), abs=0.02)
    (told,) = re.findall(r"host memory is scarce: (\d+) % of the frozen parameters have left it", found["output"])
    assert int(told) > 90
    assert lacks(found, "a"), "the base is what the script built, wherever it is"
    assert not lacks(found, "b")
    again = run(tmp_path, "again", [("load", "b"), ("train", 4)], tiers=AUTO, config=UNPLACED, **case)
    assert again["losses"] == expected["losses"][3:]


def test_it_stays_on_all_ranks_when_one_has_no_room_on_storage(stock: tuple[dict, dict], tmp_path: Path) -> None:
    case, expected = stock
    do = [("train", 2), ("scarce", case["world_size"] - 1), ("full", 0)]
    do += [("train", 1), ("edit", "head.weight"), ("train", 4)]
    found = run(tmp_path, "ours", do, tiers=AUTO, config=UNPLACED, **case)
    assert found["losses"] == expected["losses"]
    assert differences(expected, found) == []
    held, share = found["frozen"]
    assert (held["nvme"], share) == (0, 1.0)
    assert found["output"].count("frozen parameters stay where they are, training goes on") == 1, "of one rank, once"
    assert "host memory is scarce" not in found["output"]


HELD = {"optimizer": {"tier": "cpu"}, "gradients": {"tier": "cpu"}}


@pytest.mark.parametrize("block", [HELD, {"resume": "auto"}], ids=str)
def test_it_comes_when_measured_steps_say_so(block: dict, stock: tuple[dict, dict], tmp_path: Path) -> None:
    """Also where nothing else may move: all of it is in memory, or a run may be gone on from."""
    case, expected = stock
    budget = 350_000 if case["world_size"] == 1 else 270_000
    tiers = {**AUTO, **block, "dram_budget_bytes": budget, "plan": {"chunk_bytes": 16384}}
    do = [("train", 3), ("edit", "head.weight"), ("train", 2), ("roomy", 1_100_000), ("train", 2)]
    found = run(tmp_path, "ours", do, tiers=tiers, config=UNPLACED, **case)
    assert found["losses"] == expected["losses"]
    assert differences(expected, found) == []
    held, share = found["frozen"]
    if share == 0:  # as good: look-ahead memory has room for all of it
        assert re.findall(r"storage ([\d.]+) GB/s read", found["output"])[-1] == "0.00"
        return
    assert held["cpu"] > 2 * held["nvme"], "what is small, and stays gathered, and what look-ahead memory holds"
    assert share > 0.7
    ((now, before),) = re.findall(
        r"frozen parameters have moved in .* s: (\d+) % .* instead of (\d+) %", found["output"]
    )
    assert int(before) + 20 < int(now)


def test_it_moves_again_and_again(stock: tuple[dict, dict], tmp_path: Path) -> None:
    """By halves, by thirds, whole."""
    case, expected = stock
    do: list = [("train", 1), ("place", 0.5), ("train", 1), ("place", 0.2), ("train", 1), ("edit", "head.weight")]
    do += [("place", 0.7), ("train", 1), ("place", 0.0), ("train", 1), ("place", 1.0), ("place", 0.4), ("train", 2)]
    found = run(tmp_path, "ours", do, tiers=AUTO, config=UNPLACED, **case)
    assert found["losses"] == expected["losses"]
    assert differences(expected, found) == []
    held, _ = found["frozen"]
    assert held["cpu"] / (held["cpu"] + held["nvme"]) == pytest.approx(0.4, abs=0.2)


def test_others_leave_where_it_cannot(tmp_path: Path) -> None:
    """Another engine of the process may use it."""
    stored = {"optimizer": {"tier": "nvme"}, "gradients": {"tier": "nvme"}}
    tiers = {**AUTO, **stored, "dram_budget_bytes": 1_200_000, "plan": {"chunk_bytes": 16384}}
    do = [("train", 2), ("other", ""), ("scarce", 0), ("train", 4)]
    found = run(tmp_path, "ours", do, tiers=tiers, config=UNPLACED, model=DEEP, adapter={"r": 64})
    assert "frozen parameters cannot leave it now" in found["output"]
    assert "host memory is scarce: P16 of" in found["output"], found["output"][-3000:]


def test_a_move_that_is_cut_short_ends_the_engine(tmp_path: Path) -> None:
    """And says so."""
    with pytest.raises(AssertionError, match="frozen parameters that change their home were cut short"):
        run(tmp_path, "ours", [("train", 1), ("cut", 0.0), ("train", 1)], tiers=AUTO, config=UNPLACED)


def test_a_base_that_shall_be_in_memory_stays(tmp_path: Path) -> None:
    """The block says so."""
    do = [("train", 2), ("scarce", 0), ("train", 2)]
    found = run(tmp_path, "ours", do, tiers={"parameters": {"tier": "cpu"}}, config=UNPLACED)
    assert found["frozen"][0]["nvme"] == 0
