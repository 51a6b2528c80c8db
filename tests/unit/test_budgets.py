# SPDX-License-Identifier: Apache-2.0
"""Budgets that the machine does not have are refused before anything is built; what is not free is warned about."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_fuyou.config import FuyouConfig, PlanOverrides
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.host.available_memory import AUTO_TENTHS, available_host_bytes, total_host_bytes
from ds_fuyou.planner.plan import MIB
from ds_fuyou.storage.probe import PathFacts
from ds_fuyou.zero.run import run_design, run_store
from ds_fuyou.zero.run.budgets import check_budgets
from ds_fuyou.zero.run.neighbours import machine

pytestmark = pytest.mark.usefixtures("untold")


def test_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    total = total_host_bytes()
    with pytest.raises(FuyouConfigError, match=rf"fuyou.dram_budget_bytes must not .* the machine has {total}; lower"):
        check_budgets(FuyouConfig(dram_budget_bytes=total + 1))
    with monkeypatch.context() as three:
        three.setenv("LOCAL_SIZE", "3")
        with pytest.raises(FuyouConfigError, match="for each of 3 ranks has"):
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
    here = machine()
    others = [(here, {"own"}, 10), (here, {"shared", "own"}, 100), ("elsewhere", {"mine"}, 1000), (here, {"mine"}, 7)]
    monkeypatch.setattr(run_store, "of_every_rank", lambda value: [value, *others])
    devices = {Path("/a"): "mine", Path("/b"): "shared"}
    monkeypatch.setattr(run_store, "probe_path", lambda path: PathFacts(0, "ext4", False, True, devices[path]))
    assert run_store._bytes_of_others([Path("/a")], 5) == 7
    assert run_store._bytes_of_others([Path("/a"), Path("/b")], 5) == 107


@pytest.mark.parametrize(("free", "others", "is_told"), [(300, 9000, True), (300, 400, False), (9000, 300, False)])
def test_the_rank_with_far_less_memory_than_another_says_so(
    free: int, others: int, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is no other than the one whose group has a limit: all plan with what it has."""

    def least(*values: float) -> list[float]:
        of_another = others * MIB * AUTO_TENTHS // 10
        return [min(value, sign * of_another) for value, sign in zip(values, (1, -1), strict=True)]

    monkeypatch.setattr(run_design, "least", least)
    monkeypatch.setattr(run_design, "free_memory_of_rank", lambda: free * MIB)
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
    assert found == min(free, others) * MIB * AUTO_TENTHS // 10
    assert ("all plan with the least" in caplog.text) == is_told
