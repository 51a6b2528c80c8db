# SPDX-License-Identifier: Apache-2.0
"""No run begins beside steps of its model that it does not go on from; where none are left, it does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.durability.runs import launch
from tests.harness.forked import finish

RESUME = {"resume": "auto"}


def ends_of(path: Path, case: dict, world_size: int, name: str) -> tuple[list[int | None], str]:
    """Status of every rank, and what rank 0 said."""
    processes, logs = launch(path, case, world_size, name)
    finish(processes)
    return [process.exitcode for process in processes], logs[0].read_text(errors="replace")


def leave_steps(path: Path, block: dict, world_size: int = 1) -> None:
    """Those of a run that is killed after its second."""
    die = {str(rank): [2, "all"] for rank in range(world_size)}
    statuses, said = ends_of(path, {"steps": 3, "block": block, "die": die}, world_size, "killed")
    assert statuses == [-9] * world_size, said[-3000:]


def goes_on(path: Path, block: dict, world_size: int) -> bool:
    """A run of as many ranks and the same settings."""
    statuses, said = ends_of(path, {"steps": 3, "block": block, "ends": True}, world_size, "last")
    return statuses == [0] * world_size and "going on from step 2, in place" in said


def is_refused(path: Path, block: dict, world_size: int, because: str) -> bool:
    statuses, said = ends_of(path, {"steps": 3, "block": block, "ends": True}, world_size, "refused")
    assert "STEP" not in said, said[-3000:]
    assert all(status not in (0, -9) for status in statuses)
    return re.search(f"so it does not begin anew, either: [^\\n]*{re.escape(because)}", said) is not None


@pytest.mark.parametrize("world_size", [1, 2])
def test_none_begins_on_another_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    """Which hold other parts of the parameters."""
    leave_steps(tmp_path, RESUME, world_size)
    other = 3 - world_size
    assert is_refused(tmp_path, RESUME, other, f"it is of {world_size} ranks, and this run has {other}")
    assert goes_on(tmp_path, RESUME, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_engine_that_ran_out_of_device_memory_leaves_its_place_and_its_steps(
    world_size: int, tmp_path: Path
) -> None:
    """To the one that a script builds with a smaller batch; both go on from the same steps."""
    case = {"steps": 4, "block": RESUME, "runs_out": True}
    die = {str(rank): [2, "all"] for rank in range(world_size)}
    statuses, said = ends_of(tmp_path / "run", {**case, "die": die}, world_size, "killed")
    assert statuses == [-9] * world_size, said[-3000:]
    assert "RAN OUT after 0" in said
    statuses, said = ends_of(tmp_path / "run", {**case, "ends": True}, world_size, "last")
    assert statuses == [0] * world_size, said[-3000:]
    assert "RAN OUT after 2" in said
    assert said.count("going on from step 2, in place") == 2
    _, undisturbed = ends_of(tmp_path / "other", {"steps": 4, "block": RESUME, "ends": True}, world_size, "log")
    last = re.findall(r"LOSSES \d [34] .*", said)
    assert len(last) == 2
    assert last == re.findall(r"LOSSES \d [34] .*", undisturbed)
    assert list(tmp_path.glob("run/ds_fuyou/*")) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_engine_that_made_no_step_leaves_what_it_went_on_from(world_size: int, tmp_path: Path) -> None:
    """To the next process, not to the next engine of this one: it may be another fold's, with nothing left to do."""
    die = {str(rank): [2, "all"] for rank in range(world_size)}
    case = {"steps": 4, "block": RESUME}
    ends_of(tmp_path / "run", {**case, "die": die}, world_size, "killed")
    statuses, said = ends_of(tmp_path / "run", {**case, "steps": 2, "ends": True}, world_size, "nothing left to do")
    assert statuses == [0] * world_size, said[-3000:]
    assert "the run made no step: the state of the last step stays in" in said
    ends = {**case, "ends": True}
    statuses, said = ends_of(tmp_path / "run", {**ends, "runs_out": "at once"}, world_size, "two")
    assert statuses == [0] * world_size, said[-3000:]
    assert said.count("going on from step 2, in place") == 1
    statuses, said = ends_of(tmp_path / "run", ends, world_size, "last")
    assert statuses == [0] * world_size, said[-3000:]
    assert said.count("going on from step 2, in place") == 1
    _, undisturbed = ends_of(tmp_path / "other", {**case, "ends": True}, world_size, "log")
    assert re.findall(r"LOSSES \d [34] .*", said) == re.findall(r"LOSSES \d [34] .*", undisturbed)
    assert list(tmp_path.glob("run/ds_fuyou/*")) == []


@pytest.mark.parametrize("parameters", ["cpu", "nvme"])
def test_none_begins_with_its_states_in_host_memory(parameters: str, tmp_path: Path) -> None:
    leave_steps(tmp_path, RESUME)
    block = {**RESUME, "optimizer": {"tier": "cpu"}, "parameters": {"tier": parameters}}
    assert is_refused(tmp_path, block, 1, "this run keeps some in host memory")
    assert goes_on(tmp_path, RESUME, 1)


@pytest.mark.parametrize("gone", [0, 1])
def test_none_begins_where_a_disk_is_not_mounted(gone: int, tmp_path: Path) -> None:
    disks = [tmp_path / f"disk{number}" for number in (0, 1)]
    for disk in disks:
        disk.mkdir()
    block = {**RESUME, "nvme_path": list(map(str, disks))}
    leave_steps(tmp_path, block)
    disks[gone].rename(tmp_path / "unmounted")
    disks[gone].mkdir()
    assert is_refused(tmp_path, block, 1, "the state directory must exist")
    disks[gone].rmdir()
    (tmp_path / "unmounted").rename(disks[gone])
    assert goes_on(tmp_path, block, 1)


def test_none_begins_where_ranks_are_on_other_machines_than_before(tmp_path: Path) -> None:
    """As launchers may number them anew: each disk is that of the other rank."""
    disks = [tmp_path / f"disk{number}" for number in (0, 1)]
    for disk in disks:
        disk.mkdir()
    block = {**RESUME, "nvme_path": f"{tmp_path}/disk{{rank}}"}
    leave_steps(tmp_path, block, 2)
    disks[0].rename(tmp_path / "other")
    disks[1].rename(disks[0])
    (tmp_path / "other").rename(disks[1])
    assert is_refused(tmp_path, block, 2, "which does not run where it is")


@pytest.mark.parametrize(("resume", "level"), [("off", "INFO"), ("auto", "WARNING")])
def test_a_run_with_its_states_in_host_memory_says_what_a_kill_costs(resume: str, level: str, tmp_path: Path) -> None:
    """Though it needs no storage; a warning where somebody relies on going on."""
    everything = {part: {"tier": "cpu"} for part in ("parameters", "optimizer", "gradients")}
    case = {"steps": 1, "block": {"resume": resume, **everything}, "ends": True}
    statuses, said = ends_of(tmp_path, case, 1, "log")
    assert statuses == [0], said[-3000:]
    assert re.search(f"{level}: P32 and the moments of .* are in host memory: this run is as durable as its last", said)


def test_a_run_begins_beside_steps_in_one_slot(tmp_path: Path) -> None:
    """The third was being written over the second: no run goes on from that."""
    block = {**RESUME, "plan": {"slots": 1}}
    leave_steps(tmp_path, block)
    statuses, said = ends_of(tmp_path, {"steps": 1, "block": block, "ends": True}, 1, "again")
    assert statuses == [0], said[-3000:]
    assert "this run starts from its beginning" in said


def test_a_run_begins_beside_what_a_clean_end_left_when_it_was_killed(tmp_path: Path) -> None:
    """Between the directories of two disks: the record goes first."""
    disks = [tmp_path / f"disk{number}" for number in (0, 1)]
    for disk in disks:
        disk.mkdir()
    block = {**RESUME, "nvme_path": list(map(str, disks))}
    case = {"steps": 2, "block": block, "ends": True}
    statuses, said = ends_of(tmp_path, {**case, "dies_removing": 1}, 1, "killed")
    assert statuses == [-9], said[-3000:]
    assert [len(list(disk.glob("ds_fuyou/*"))) for disk in disks] == [1, 0]
    statuses, said = ends_of(tmp_path, case, 1, "again")
    assert statuses == [0], said[-3000:]
    assert "this run starts from its beginning" in said


def test_a_rank_that_cannot_look_ends_all(tmp_path: Path) -> None:
    """The others do not wait for it, nor begin."""
    disks = [tmp_path / f"disk{number}" for number in (0, 1)]
    for disk in disks:
        disk.mkdir()
    (disks[1] / "ds_fuyou").touch()
    case = {"steps": 1, "block": {**RESUME, "nvme_path": f"{tmp_path}/disk{{rank}}"}, "ends": True}
    statuses, said = ends_of(tmp_path, case, 2, "log")
    assert all(status not in (0, -9) for status in statuses)
    assert "rank 1 could not look for state files to go on from: FuyouStorageError: " in said, said[-3000:]
    assert "STEP" not in said
