# SPDX-License-Identifier: Apache-2.0
"""What scripts do between steps reads as few bytes as memory allows, ahead of their use, and gives stock's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.test_engines import run

SCRIPT = "rollouts.py"


def found_by(name: str, tmp_path: Path) -> dict[str, Any]:
    (found,) = run(name, tmp_path / "swap", script=SCRIPT)
    assert all(found["same"]), found
    assert not [path for path in (tmp_path / "swap").glob("**/*") if path.is_file()]
    return found


def test_tokens_read_nothing_twice_of_a_model_that_fits(tmp_path: Path) -> None:
    found = found_by("fits", tmp_path)
    assert found["each"][0]["bytes"] <= found["model"]
    assert [token["bytes"] for token in found["each"][1:]] == [0] * 7
    assert sum(token["demand"] for token in found["each"]) <= 1
    assert found["overflows"] == 0


def test_tokens_read_what_three_quarters_of_the_pool_do_not_hold(tmp_path: Path) -> None:
    found = found_by("half", tmp_path)
    steady = found["each"][3:]  # until then what stays is what steps before, and the first token, have left
    largest = 400 * 1024  # room for it may be cut
    assert max(token["bytes"] for token in steady) <= found["model"] - found["pool"] * 3 // 4 + 2 * largest
    assert max(token["bytes"] for token in steady) < 0.75 * found["model"]
    assert sum(token["demand"] for token in found["each"]) <= 3, "by trace, though much of it does not stay"
    assert found["overflows"] == 0


def test_a_gather_of_everything_reads_each_byte_once_and_ahead(tmp_path: Path) -> None:
    found = found_by("gathered", tmp_path)
    assert found["first"]["bytes"] <= found["model"]
    assert found["first"]["demand"] == 0
    assert found["rest"]["bytes"] == 0


def test_engines_without_an_optimizer_read_ahead_from_their_first_forward_on(tmp_path: Path) -> None:
    found = found_by("inference", tmp_path)
    assert max(forward["demand"] for forward in found["each"]) <= 1
    assert max(forward["bytes"] for forward in found["each"][2:]) < found["model"], "what the pool holds stays"
    assert all(found["within plan"])
    assert all(found["counted"])
    assert "inference blocks" in found["spans"]
    assert found["reads"], "their reads are in the lane trace"
    assert found["closed"] == [0, 0]


def test_engines_that_infer_look_ahead_with_what_others_leave_of_the_budget(tmp_path: Path) -> None:
    found = found_by("one-budget", tmp_path)
    sizes, limits = found["found"], found["limits"]
    assert all(size <= limit for size, limit in zip(sizes, limits, strict=True)), found
    assert sizes[1] < sizes[0], "beside one that trains there is less"
    assert sizes[2] > sizes[1], "an engine that has ended takes nothing"
    assert found["holds"] == [False, True], "half of a budget that holds the model holds it"
    assert found["trains"] == [True, True], "one that trains plans with what they leave"


def test_engines_that_share_a_model_read_ahead_in_turn(tmp_path: Path) -> None:
    assert found_by("handed-on", tmp_path)["demand"] <= 1


def test_an_evaluation_between_steps_is_read_ahead(tmp_path: Path) -> None:
    found = found_by("evaluation", tmp_path)
    first, second = found["each"]
    assert sum(batch["demand"] for batch in first) <= 8, "it is the first one"
    assert sum(batch["demand"] for batch in second) <= 3
    assert max(batch["bytes"] for batch in second) <= found["model"] * 1.1, "nothing is read for a backward"
    assert found["overflows"] == 0


def test_what_is_prefetched_for_a_backward_that_does_not_come_can_be_gathered(tmp_path: Path) -> None:
    assert found_by("between", tmp_path)["in flight"] > 0


def test_frozen_parameters_in_flight_can_be_gathered(tmp_path: Path) -> None:
    assert found_by("frozen", tmp_path)["in flight"] > 0


def test_a_forward_without_gradients_leaves_no_gather_in_flight(tmp_path: Path) -> None:
    """Scripts gather what is "not available", and take the rest as it is."""
    found = found_by("in_flight", tmp_path)["found"]
    assert found == ["NOT_AVAILABLE", True, "INFLIGHT"], "a backward would use what is in flight"


@pytest.mark.parametrize(("name", "num_ranks"), [("edited", 1), ("edited", 2), ("edited-leaves", 1)])
def test_a_forward_inside_of_a_gather_lets_nothing_go_that_is_edited(name: str, num_ranks: int, tmp_path: Path) -> None:
    for found in run(name, tmp_path / "swap", num_ranks=num_ranks, script=SCRIPT):
        assert all(found["same"]), found
        assert any(found["away"]), "the next forward lets them go"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_that_ends_inside_of_a_gather_forgets_no_edit(num_ranks: int, tmp_path: Path) -> None:
    for found in run("ended-inside", tmp_path / "swap", num_ranks=num_ranks, script=SCRIPT):
        assert all(found["same"]), found
        assert all(found["away"]), "the end of the context lets them go"


def test_what_is_saved_or_merged_is_read_once_ahead_and_not_written_back(tmp_path: Path) -> None:
    found = found_by("saved", tmp_path)
    for name in ("state_dict", "save_16bit_model"):
        reads = found["found"][name]
        assert 0 < reads["bytes"] <= 1.02 * found["model"], name
        assert (reads["demand"], reads["written"]) == (0, 0), name
    merged = found["found"]["modules"]
    assert merged["demand"] <= 3
    assert merged["written"] == 0
    assert merged["bytes"] <= 1.5 * found["model"], "the pool reads on into the next forward"
    assert found["held"] == 0, "a state dictionary takes none of the look-ahead's memory"
    assert not found["is held"], "what nobody refers to any more is gone, whenever Python collects cycles"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_saved_lies_on_storage_where_memory_has_no_room_for_it(num_ranks: int, tmp_path: Path) -> None:
    for rank, found in enumerate(run("scarce", tmp_path / "swap", num_ranks=num_ranks, script=SCRIPT)):
        assert all(found["same"]), found
        if rank == 0:
            assert all(found["in a file"])
            assert any(found["some in a file"])
            assert not all(found["some in a file"])
        assert not any(found["none in a file"])


def test_sleep_leaves_nothing_gathered_and_waking_reads_ahead(tmp_path: Path) -> None:
    found = found_by("sleep", tmp_path)
    assert found["away"]
    assert found["woken"]["demand"] == found["then"]["demand"] == 0
    assert found["woken"]["ahead"] + found["then"]["ahead"] > 0
    assert "device must be cpu" in found["refused"]
    assert len(found["ended"]) == 2, "a destroyed engine has nothing to offload or to reload"


def test_two_ranks_gather_in_portions_of_the_pool(tmp_path: Path) -> None:
    for found in run("ranks", tmp_path / "swap", num_ranks=2, script=SCRIPT):
        assert all(found["same"]), found
        assert found["overflows"] == [0, 0, 0]
