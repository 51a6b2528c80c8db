# SPDX-License-Identifier: Apache-2.0
"""What dead runs left is told by a rank of every disk, and removed where the block says so and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.durability.runs import launch, run_to_end
from tests.harness.forked import finish


def left_on(path: Path) -> dict[int, set[str]]:
    """Names of state directories, by disk."""
    return {disk: {found.name for found in path.glob(f"disk{disk}/ds_fuyou/*")} for disk in (0, 1)}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_dies_before_its_first_step_leaves_its_files_once(when: str, tmp_path: Path) -> None:
    """Two ranks with a disk each, striped over both: whoever removes one directory leaves the other to be judged."""
    for disk in (0, 1):
        (tmp_path / f"disk{disk}").mkdir()
    paths = [str(tmp_path / f"disk{disk}") for disk in (0, 1)]
    block = {"nvme_path": paths, "resume": "auto", "on_stale": "clean"}
    case = {"steps": 4, "die": {"0": [0, when], "1": [0, when]}, "block": block}
    before: set[str] = set()
    for number in range(2):
        processes, _ = launch(tmp_path, case, 2, f"start{number}.")
        finish(processes)
        found = set.union(*left_on(tmp_path).values())
        assert found
        assert not found & before, "they hold no step"
        before = found

    processes, _ = launch(tmp_path, {**case, "die": {"0": [2, "after"], "1": [2, "after"]}}, 2, "stepped")
    finish(processes)
    stepped = left_on(tmp_path)
    assert all(len(names) == 2 for names in stepped.values()), "of each rank"
    other = {**case, "block": {**block, "plan": {"chunk_bytes": 16384}}}
    processes, _ = launch(tmp_path, other, 2, "other")
    finish(processes)
    assert all(left_on(tmp_path)[disk] >= names for disk, names in stepped.items()), "with a step in them they stay"


def test_each_disk_is_told_of_and_cleaned_by_a_rank_that_has_it(tmp_path: Path) -> None:
    for disk in (0, 1):
        (tmp_path / f"disk{disk}").mkdir()
    block = {"nvme_path": f"{tmp_path}/disk{{rank}}", "resume": "auto", "on_stale": "clean"}
    case = {"steps": 4, "die": {"0": [2, "all"], "1": [2, "all"]}, "block": block}
    processes, _ = launch(tmp_path, case, 2, "first")
    finish(processes)
    first = left_on(tmp_path)
    assert all(len(names) == 1 for names in first.values())

    other = {**case, "block": {**block, "resume": "off", "on_stale": "report"}}
    processes, logs = launch(tmp_path, other, 2, "second")
    finish(processes)
    for disk, log in enumerate(logs):
        said = log.read_text(errors="replace")
        (name,) = first[disk]
        assert f"disk{disk}/ds_fuyou/{name}: " in said, said[-3000:]
        assert f"left by the dead run {name.rpartition('-rank')[0]} (rank {disk}" in said
        assert f"disk{1 - disk}/ds_fuyou/" not in said
    both = left_on(tmp_path)
    assert all(len(both[disk]) == 2 and both[disk] > first[disk] for disk in both), "nothing was gone on from"

    processes, logs = launch(tmp_path, {**case, "die": {"0": [3, "after"], "1": [3, "after"]}}, 2, "third")
    finish(processes)
    said = logs[0].read_text(errors="replace")
    assert "going on from step 2, in place" in said
    assert "removed" not in said
    assert left_on(tmp_path) == both, "of a run that may go on nothing is removed"

    fresh = {**case, "block": {**block, "resume": "off"}, "out": str(tmp_path)}
    fresh.pop("die")
    run_to_end(tmp_path, fresh, 2, "fourth")
    assert left_on(tmp_path) == {0: set(), 1: set()}
