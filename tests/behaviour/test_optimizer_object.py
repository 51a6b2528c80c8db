# SPDX-License-Identifier: Apache-2.0
"""The optimizer object updates nothing; what hangs on it works as in stock, and a change of its states is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.test_engines import run


def found_by(name: str, tmp_path: Path) -> dict[str, Any]:
    (found,) = run(name, tmp_path / "swap", script="optimizer_object.py")
    return found


def test_schedulers_of_pytorch_see_that_the_optimizer_stepped(tmp_path: Path) -> None:
    assert found_by("scheduled", tmp_path) == {"same": True, "told": [[], []]}


def test_hooks_around_the_step_run_and_set_what_it_does(tmp_path: Path) -> None:
    assert found_by("hooked", tmp_path) == {"same": True, "hooks": [4, 4]}


def test_every_kind_of_optimizer_object_takes_a_step_without_parameters(tmp_path: Path) -> None:
    found = found_by("kinds", tmp_path)
    assert set(found["steps"].values()) == {2}, found
    assert set(found["left"].values()) == {1}, found


@pytest.mark.parametrize("name", ["changed", "changed-empty-group"])
def test_states_that_a_script_resets_are_told_to_be_elsewhere(name: str, tmp_path: Path) -> None:
    found = found_by(name, tmp_path)
    assert found["warned"] == []
    assert all("safe_set_full_optimizer_state" in said for said in found["told"].values()), found
    assert found["read"] == [0, 0, 0]
    assert "the first of shape (3, 5); they would never be trained" in found["added"]
    assert found["same"]
    assert (tmp_path / "log0").read_text().count("optimizer.state was read, and is empty") == 1


def test_gradients_of_a_step_that_raised_are_not_added_to_the_next(tmp_path: Path) -> None:
    found = found_by("cut-short", tmp_path)
    theirs, ours = found["seen"]
    assert ours == theirs
    assert "already at minimum" in ours[2]
    assert found["same"]


def test_types_that_cannot_be_trained_are_named(tmp_path: Path) -> None:
    told = found_by("types", tmp_path)["told"]
    assert all("must be of torch.float32" in said and dtype in said for dtype, said in told.items()), told
