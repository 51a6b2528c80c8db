# SPDX-License-Identifier: Apache-2.0
"""What scripts do with one model and several engines, or several ``zero.Init`` contexts, is as in stock."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.behaviour.test_engines import run

SCENARIOS = (
    "edits",
    "twice",
    "twice-destroyed",
    "twice-no-init",
    "then-stock",
    "adapters",
    "beside",
    "thawed",
    "validated",
    "validated-alive",
    "left",
    "inspected",
    "watched",
    "failed",
    "interrupted",
    "built-on",
    "made-whole",
    "copied",
    "other-inits",
    "budget",
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_shared_models_hold_what_stock_gives_them(name: str, tmp_path: Path) -> None:
    (found,) = run(name, tmp_path / "swap", script="shared_models.py")
    assert found
    assert all(same is True for same in found.values()), found
    assert not [path for path in (tmp_path / "swap").glob("**/*") if path.is_file()]


def test_ranks_with_different_amounts_of_free_memory_place_frozen_parameters_alike(tmp_path: Path) -> None:
    first, second = run("unlike", tmp_path / "swap", num_ranks=2, script="shared_models.py")
    assert first == second
    assert 0 < len(first["frozen on storage"]) < first["num frozen"], "the model is cut in two"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_parameters_are_gathered_ahead_in_the_first_forward_after_a_step(num_ranks: int, tmp_path: Path) -> None:
    for found in run("ahead", tmp_path / "swap", num_ranks=num_ranks, script="shared_models.py"):
        assert all(number > 0 for number in found.values()), found


def test_edits_of_two_models_on_two_ranks(tmp_path: Path) -> None:
    for found in run("edits", tmp_path / "swap", num_ranks=2, script="shared_models.py"):
        assert all(same is True for same in found.values()), found
