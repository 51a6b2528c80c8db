# SPDX-License-Identifier: Apache-2.0
"""How many ranks share the machine, its memory, its cores and its disks, whoever started them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from ds_fuyou.zero.run import neighbours
from ds_fuyou.zero.run.neighbours import (
    Neighbours,
    cores_of_rank,
    count_neighbours,
    free_of_rank,
    local_ranks,
    machine,
    ranks_sharing_memory,
    share_of_cores,
)

HERE, LIMIT = machine(), (7, 7)

pytestmark = pytest.mark.usefixtures("untold")


@pytest.fixture(autouse=True)
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_counted", Neighbours())


def count_beside(
    monkeypatch: pytest.MonkeyPatch, ranks: Sequence[object], limit: tuple[int, int] | None = LIMIT
) -> None:
    """``ranks``: what they tell, the first of them for this one."""
    monkeypatch.setattr(neighbours, "memory_limit_holder", lambda: limit)
    monkeypatch.setattr(neighbours, "of_every_rank", lambda mine: [*ranks])
    count_neighbours()


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),  # torchrun
        ({"LOCAL_SIZE": "8", "LOCAL_RANK": "0"}, 8),  # deepspeed
        ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, 4),
        ({"LOCAL_RANK": "3"}, 4),  # who knows: the last rank of the machine, and the least budget of all counts
    ],
)
def test_the_launcher_says_how_many_share_the_machine(
    variables: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert local_ranks() == ranks


@pytest.mark.parametrize("variables", [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1", "SLURM_NTASKS_PER_NODE": "1"}, {}])
def test_ranks_that_no_launcher_counts_are_counted(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's actors are all told that they are the first; a script under Slurm may start ranks by itself."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(neighbours, "usable_cores", lambda: {0, 1, 2, 3})
    count_beside(monkeypatch, [(HERE, LIMIT, {0, 1, 2, 3}), (HERE, LIMIT, {0, 1, 2, 3}), ("there", LIMIT, {0, 1})])
    assert (local_ranks(), ranks_sharing_memory(), cores_of_rank()) == (2, 2, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert (local_ranks(), ranks_sharing_memory()) == (3, 3), "and one that knows more is believed"


def test_containers_with_limits_and_cores_of_their_own_share_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine, one network, three containers; the third has no limit of memory, and the first one's cores."""
    monkeypatch.setattr(neighbours, "usable_cores", lambda: {0, 1})
    count_beside(monkeypatch, [(HERE, (1, 2), {0, 1}), (HERE, (1, 3), {2, 3}), (HERE, None, {0, 1})], (1, 2))
    assert (local_ranks(), ranks_sharing_memory(), cores_of_rank()) == (3, 1, 1)
    count_beside(monkeypatch, [(HERE, (1, 2), {2, 3}), (HERE, None, {0, 1})], None)
    assert (local_ranks(), ranks_sharing_memory(), cores_of_rank()) == (2, 1, 2)


def test_cores_that_a_launcher_bound_are_not_divided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a shell stands between, which has no more than its rank."""
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert cores_of_rank() == 1, "nobody has asked the other one"
    count_beside(monkeypatch, [(HERE, LIMIT, {0, 1}), (HERE, LIMIT, {2, 3})])
    assert (cores_of_rank(), ranks_sharing_memory()) == (2, 2)


def test_cores_are_shared_unless_the_launcher_bound_each_rank_to_its_own() -> None:
    machine = set(range(16))
    assert share_of_cores(machine, machine, 4) == 4
    assert share_of_cores({0, 1, 2, 3}, machine, 4) == 4
    assert share_of_cores({0, 1}, {0, 1}, 4) == 1
    assert share_of_cores(machine, set(), 2) == 8, "the launcher has ended"
    assert cores_of_rank() >= 1


def test_one_core_that_the_launcher_was_bound_to_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(neighbours, "log_once", lambda level, message: said.append(message))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(neighbours, "usable_cores", lambda: {0})
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
