# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on a file system that shares blocks with the state files: nothing is copied."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.test_background import results
from tests.unit.test_filesystems import available, mount


@pytest.fixture(params=[kind for kind in available() if kind in ("xfs", "btrfs")])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    target = mount(request.param, tmp_path / "fs")
    yield target
    subprocess.run(["umount", target], check=True)


@pytest.mark.parametrize(("tiers", "slots"), [("all", 2), ("all", 1), ("half", 2)])
def test_states_are_shared_and_not_written(tiers: str, slots: int, place: Path, tmp_path: Path) -> None:
    (found,) = results("cloned", place, tiers=tiers, slots=slots)
    if tiers == "all":
        assert found["written"] < found["size"] / 4
    assert found["whole"] == [None]
    assert found["same"]
    other = tmp_path / "copied"
    other.mkdir()
    (copied,) = results("cloned", other, tiers=tiers, slots=slots)
    assert copied["written"] > found["size"] * 0.9, "this file system copies"
    assert copied["digest"] == found["digest"]


def test_steps_meanwhile_change_nothing_of_it(place: Path) -> None:
    """They go on before anything is written, and do not wait."""
    given = {"tiers": "all", "free_steps": 3}
    (found,) = results("exact", place, **given)
    (alone,) = results("exact", place, undisturbed=True, **given)
    assert found["same"]
    assert found["digest"] == alone["digest"]


def test_a_run_that_is_to_be_durable_copies(place: Path) -> None:
    """The next writes of a slot whose blocks are shared need new ones, which others may have taken."""
    (found,) = results("cloned", place, durable=True)
    assert found["written"] > found["size"] * 0.9
    assert found["same"]
