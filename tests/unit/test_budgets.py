# SPDX-License-Identifier: Apache-2.0
"""Budgets that the machine does not have are refused before anything is built; what is not free is warned about."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_fuyou.config import FuyouConfig, PlanOverrides
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.host.available_memory import available_host_bytes, total_host_bytes
from ds_fuyou.planner.plan import MIB
from ds_fuyou.storage.probe import PathFacts
from ds_fuyou.zero.run import budgets, run_design, run_store
from ds_fuyou.zero.run.budgets import (
    check_budgets,
    cores_of_rank,
    count_local_ranks,
    free_of_rank,
    local_ranks,
    share_of_cores,
)

LAUNCHERS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHERS, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


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
    monkeypatch.setattr(budgets, "_counted", 1)
    hosts: list[object] = []

    def of_every_rank(here: tuple[str, str]) -> list[object]:
        hosts[:] = [here, (here[0], "another machine of that name"), here, ("another", here[1])]
        return hosts

    monkeypatch.setattr(budgets, "of_every_rank", of_every_rank)
    count_local_ranks()
    assert local_ranks() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert local_ranks() == 3, "and one that knows more is believed"


def test_cores_are_shared_unless_the_launcher_bound_each_rank_to_its_own() -> None:
    machine = set(range(16))
    assert share_of_cores(machine, machine, 4) == 4
    assert share_of_cores({0, 1, 2, 3}, machine, 4) == 4
    assert share_of_cores({0, 1}, {0, 1}, 4) == 1
    assert share_of_cores(machine, set(), 2) == 8, "the launcher has ended"
    assert cores_of_rank() >= 1


def test_one_core_that_the_launcher_was_bound_to_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(budgets, "log_once", lambda level, message: said.append(message))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(budgets, "usable_cores", lambda: {0})
    assert cores_of_rank() == 1
    assert not said, "a container of one core is none of OpenMP's doing"
    monkeypatch.setattr(budgets, "openmp_cores", lambda: {0})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert cores_of_rank() == 1
    assert not said, "the launcher has more: it gave this rank one"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert cores_of_rank() == 1
    (message,) = said
    assert "may use one core of 64" in message
    assert "OMP_PROC_BIND" in message


def test_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    total = total_host_bytes()
    with pytest.raises(FuyouConfigError, match=rf"fuyou.dram_budget_bytes must not .* the machine has {total}; lower"):
        check_budgets(FuyouConfig(dram_budget_bytes=total + 1))
    with monkeypatch.context() as three:
        three.setenv("LOCAL_SIZE", "3")
        with pytest.raises(FuyouConfigError, match="for the 3 ranks here"):
            check_budgets(FuyouConfig(dram_budget_bytes=total // 2))
    with pytest.raises(
        FuyouConfigError, match=r"fuyou\.gpu_budget_bytes must not exceed .* the device has \d+; lower it"
    ):
        check_budgets(FuyouConfig(gpu_budget_bytes=2 * total))


@pytest.mark.parametrize("name", ["staging_bytes", "prefetch_bytes", "activation_bytes"])
def test_a_pool_larger_than_the_machine_is_refused_by_name(name: str) -> None:
    config = FuyouConfig(plan=PlanOverrides(**{name: 10**18}))
    with pytest.raises(FuyouConfigError, match=rf"fuyou\.plan\.{name} must not exceed what there is: 10+ bytes"):
        check_budgets(config)


def test_more_than_is_free_is_warned_about(told: Callable[[], str]) -> None:
    check_budgets(FuyouConfig())
    check_budgets(FuyouConfig(dram_budget_bytes=available_host_bytes() // 2, gpu_budget_bytes=1 << 20))
    assert told() == ""
    check_budgets(FuyouConfig(dram_budget_bytes=total_host_bytes()))
    assert "dram_budget_bytes asks for" in told()


def test_a_disk_a_rank_is_counted_for_that_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that use a disk of this one count, those with their own, or on another machine, do not."""
    here = os.uname().nodename
    others = [(here, {"own"}, 10), (here, {"shared", "own"}, 100), ("elsewhere", {"mine"}, 1000), (here, {"mine"}, 7)]
    monkeypatch.setattr(run_store, "of_every_rank", lambda value: [value, *others])
    devices = {Path("/a"): "mine", Path("/b"): "shared"}
    monkeypatch.setattr(run_store, "probe_path", lambda path: PathFacts(0, "ext4", False, True, devices[path]))
    assert run_store._bytes_of_others([Path("/a")], 5) == 7
    assert run_store._bytes_of_others([Path("/a"), Path("/b")], 5) == 107


@pytest.mark.parametrize(
    ("users", "bytes_of_rank"),
    [
        ([("here", {"1", "2"})], 300.0),
        ([("here", {"1", "2"}), ("here", {"1", "2"})], 150.0),
        ([("here", {"1", "2"}), ("here", {"3"})], 300.0),
        ([("here", {"1", "2"}), ("here", {"2", "3"}), ("here", {"2"})], 100.0 + 200.0 / 3),
        ([("here", {"1", "2"}), ("there", {"1", "2"})], 300.0),
    ],
    ids=["alone", "shared", "a disk each", "one shared", "another machine"],
)
def test_a_device_is_shared_by_the_ranks_that_use_it(users: list, bytes_of_rank: float) -> None:
    assert free_of_rank({"1": 100.0, "2": 200.0}, "here", users) == pytest.approx(bytes_of_rank)


@pytest.mark.parametrize(("free", "others", "is_told"), [(300, 9000, True), (300, 400, False), (9000, 300, False)])
def test_the_rank_with_far_less_memory_than_another_says_so(
    free: int, others: int, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is no other than the one whose group has a limit: all plan with what it has."""

    def least(*values: float) -> list[float]:
        of_another = others * MIB * run_design.AUTO_TENTHS // 10
        return [min(value, sign * of_another) for value, sign in zip(values, (1, -1), strict=True)]

    monkeypatch.setattr(run_design, "least", least)
    monkeypatch.setattr(run_design, "available_host_bytes", lambda: free * MIB)
    monkeypatch.setattr(run_design, "copied_later_bytes", lambda: 0)
    config = SimpleNamespace(dram_budget_bytes="auto")
    model: Any = SimpleNamespace(
        activation=SimpleNamespace(config=config),
        trained=(),
        planned_frozen=list,
        device=SimpleNamespace(is_unified=False),
    )
    with caplog.at_level(logging.WARNING):
        found = run_design.TrainedModel.host_budget(model)
    assert found == min(free, others) * MIB * run_design.AUTO_TENTHS // 10
    assert ("all plan with the least" in caplog.text) == is_told
