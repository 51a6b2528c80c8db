# SPDX-License-Identifier: Apache-2.0
"""P16 that leaves host memory, or comes, when a run has long begun: what the rest of the engine makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.behaviour.test_engines import run


def test_p16_that_left_memory_is_not_gathered_whole_again(tmp_path: Path) -> None:
    """DeepSpeed remembers what it released under the bound of before."""
    (found,) = run("gathered", tmp_path / "swap", script="late_moves.py")
    before, left, still, back = found["gathered"]
    assert before == back == 1.0, "as stock: there is room for 1e9 elements"
    assert max(left, still) < 0.6


def test_a_step_in_which_p16_moves_is_recorded_whole_and_one_that_is_cut_short_moves_nothing(tmp_path: Path) -> None:
    """It ends all the same: other ranks come to the collectives of its end."""
    (found,) = run("records", tmp_path / "swap", script="late_moves.py")
    assert found == {
        "moved": True,
        "step": 3,
        "training": True,
        "same edition": True,
        "raised": "of the script's own scheduler",
        "may move": False,
        "step that counts": 3,
        "its training": True,
    }


def test_a_monitor_that_fails_is_told_and_ends_no_step(tmp_path: Path) -> None:
    mine, other = run("monitored", tmp_path / "swap", 2, "late_moves.py")
    assert (mine["calls"], other["calls"]) == (3, 0), "the first step is not told of"
    assert mine["steps"] == other["steps"] == 4
    assert (tmp_path / "log0").read_text().count("the monitor cannot be told of steps (OSError(28") == 1


def test_what_is_gathered_under_inference_mode_after_a_move_is_trained_with(tmp_path: Path) -> None:
    assert run("inference", tmp_path / "swap", script="late_moves.py") == [{"equal": True}]


def test_what_moves_to_storage_leaves_swapped_activations_their_part_of_the_budget(tmp_path: Path) -> None:
    (found,) = run("budget", tmp_path / "swap", script="late_moves.py")
    assert found == {"taken": [True, True], "placed": False, "kept": True, "trains": 2}
    assert "which may be used: nvme_budget_bytes" in (tmp_path / "log0").read_text()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_move_that_leaves_files_unknown_ends_the_run_and_one_without_room_does_not(
    num_ranks: int, tmp_path: Path
) -> None:
    """On all ranks: it would end at the next commit of one, behind a log that says that training goes on."""
    mine, *others = run("refusals", tmp_path / "swap", num_ranks, "late_moves.py")
    failed = "nothing more can be committed after a failure: making data durable failed while a file grew"
    for what in ("P16", "G16", "chunks"):
        assert mine[f"{what} allocate_blocks"] is False
        assert failed in mine[f"{what} fdatasync"]
        for other in others:
            assert other[f"{what} allocate_blocks"] is False
            assert "another rank can commit no more steps" in other[f"{what} fdatasync"]
    said = (tmp_path / "log0").read_text()
    for what in ("P16 stays where it is", "G16 stays where it is", "chunks stay where they are"):
        assert said.count(f"{what}, training goes on") == 1
