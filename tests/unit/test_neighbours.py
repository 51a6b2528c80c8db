# SPDX-License-Identifier: Apache-2.0
"""How many ranks share the machine, its memory, its cores and its disks, whoever started them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from ds_fuyou.host.available_memory import MemoryLimit
from ds_fuyou.zero.run import neighbours
from ds_fuyou.zero.run.neighbours import (
    Neighbours,
    cores_of_rank,
    count_neighbours,
    free_memory_of_rank,
    free_of_rank,
    local_ranks,
    machine,
    memory_of_rank,
    share_of_cores,
)

HERE = machine()

pytestmark = pytest.mark.usefixtures("untold")


@pytest.fixture(autouse=True)
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_counted", Neighbours())


def limit(holder: tuple[int, int] | None, gib: int, free: int | None = None) -> MemoryLimit:
    return MemoryLimit(holder, gib << 30, (gib if free is None else free) << 30)


MACHINE = limit(None, 128)


def count_beside(
    monkeypatch: pytest.MonkeyPatch,
    others: Sequence[tuple[str, list[MemoryLimit], set[int]]],
    limits: Sequence[MemoryLimit] = (MACHINE,),
) -> None:
    """``others``: machine, limits and cores of the other ranks."""
    theirs = [(where, [one.holder for one in found], cores) for where, found, cores in others]
    monkeypatch.setattr(neighbours, "memory_limits", lambda: [*limits])
    monkeypatch.setattr(neighbours, "of_every_rank", lambda mine: [mine, *theirs])
    count_neighbours()


def parts_gib() -> tuple[int, int]:
    return memory_of_rank() >> 30, free_memory_of_rank() >> 30


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),  # torchrun
        ({"LOCAL_SIZE": "8", "LOCAL_RANK": "0"}, 8),  # deepspeed
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "1"}, 1),  # of the job, and of this srun
        ({"SLURM_NTASKS_PER_NODE": "8"}, 1),  # a script in a job's own shell
        ({"LOCAL_RANK": "3"}, 4),  # who knows: the last rank of the machine, and the least budget of all counts
    ],
)
def test_the_launcher_says_how_many_share_the_machine(
    variables: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert local_ranks() == ranks


@pytest.mark.parametrize("variables", [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, {}])
def test_ranks_that_no_launcher_counts_are_counted(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's actors are all told that they are the first; a script under Slurm may start ranks by itself."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(neighbours, "usable_cores", lambda: {0, 1, 2, 3})
    count_beside(monkeypatch, [(HERE, [MACHINE], {0, 1, 2, 3}), ("there", [MACHINE], {0, 1})])
    assert (local_ranks(), parts_gib(), cores_of_rank()) == (2, (64, 64), 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (local_ranks(), parts_gib()) == (4, (32, 32)), "and one that knows more is believed"


@pytest.mark.parametrize(
    ("own", "others", "parts"),
    [
        ([limit((1, 2), 60, 50)], [[limit((1, 3), 60)]], (60, 50)),
        ([limit((1, 2), 100)], [[limit((1, number), 100)] for number in (3, 4, 5)], (32, 32)),
        ([limit((1, 2), 100, 90)], [[]], (64, 64)),
        ([], [[limit((1, 2), 100)]], (64, 64)),
        ([limit((1, 2), 90), limit((1, 1), 100)], [[limit((1, 3), 60), limit((1, 1), 100)]], (50, 50)),
        ([limit((1, 2), 120), limit((1, 1), 120)], [[limit((1, 3), 120), limit((1, 1), 120)]] * 3, (30, 30)),
    ],
    ids=["apart", "more than there is", "one unlimited", "the other", "a pod", "steps of a job"],
)
def test_memory_is_shared_in_every_limit_that_holds(
    own: list[MemoryLimit], others: list[list[MemoryLimit]], parts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of control groups, of those around them, and of the machine: each by the ranks that are in it."""
    count_beside(monkeypatch, [(HERE, [*found, MACHINE], {0}) for found in others], [*own, MACHINE])
    assert parts_gib() == parts


def test_a_limit_that_was_set_since_is_taken_for_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    count_beside(monkeypatch, [(HERE, [MACHINE], {0})])
    monkeypatch.setattr(neighbours, "memory_limits", lambda: [limit((1, 2), 40), MACHINE])
    assert parts_gib() == (20, 20)


def test_a_core_is_shared_by_the_ranks_that_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of it where a launcher bound each rank to its own, also where a shell stands between."""
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(neighbours, "openmp_cores", set)
    monkeypatch.setattr(neighbours, "usable_cores", lambda: {0, 1})
    assert cores_of_rank() == 1, "nobody has asked the other one"
    count_beside(monkeypatch, [(HERE, [MACHINE], {2, 3})])
    assert cores_of_rank() == 2
    monkeypatch.setattr(neighbours, "usable_cores", lambda: set(range(16)))
    count_beside(monkeypatch, [(HERE, [MACHINE], {14, 15})])
    assert cores_of_rank() == 15
    count_beside(monkeypatch, [(HERE, [MACHINE], set(range(16)))] * 31)
    assert cores_of_rank() == 1
    monkeypatch.setattr(neighbours, "usable_cores", lambda: set(range(6)))
    count_beside(monkeypatch, [(HERE, [MACHINE], set(range(6)))] * 2)
    assert cores_of_rank() == 2, "six thirds, which no floating-point numbers are"


def test_cores_are_shared_unless_the_launcher_bound_each_rank_to_its_own() -> None:
    every = set(range(16))
    assert share_of_cores(every, every, 4) == 4
    assert share_of_cores({0, 1, 2, 3}, every, 4) == 4
    assert share_of_cores({0, 1}, {0, 1}, 4) == 1
    assert share_of_cores(every, set(), 2) == 8, "the launcher has ended"
    assert cores_of_rank() >= 1


def test_one_core_that_the_launcher_was_bound_to_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(neighbours, "log_once", lambda level, message, **_: said.append(message))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(neighbours, "usable_cores", lambda: {0})
    monkeypatch.setattr(neighbours, "openmp_cores", set)
    assert cores_of_rank() == 1
    assert not said, "a container of one core is none of OpenMP's doing"
    monkeypatch.setattr(neighbours, "openmp_cores", lambda: {0})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert cores_of_rank() == 1
    assert not said, "the launcher has more: it gave this rank one"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert cores_of_rank() == 1
    (message,) = said
    assert "may use one core of 64" in message
    assert "OMP_PROC_BIND" in message


@pytest.mark.parametrize(
    ("users", "bytes_of_rank"),
    [
        ([(HERE, {"1", "2"})], 300.0),
        ([(HERE, {"1", "2"}), (HERE, {"1", "2"})], 150.0),
        ([(HERE, {"1", "2"}), (HERE, {"3"})], 300.0),
        ([(HERE, {"1", "2"}), (HERE, {"2", "3"}), (HERE, {"2"})], 100.0 + 200.0 / 3),
        ([(HERE, {"1", "2"}), ("there", {"1", "2"})], 300.0),
    ],
    ids=["alone", "shared", "a disk each", "one shared", "another machine"],
)
def test_a_device_is_shared_by_the_ranks_that_use_it(users: list, bytes_of_rank: float) -> None:
    assert free_of_rank({"1": 100.0, "2": 200.0}, users) == pytest.approx(bytes_of_rank)
