# SPDX-License-Identifier: Apache-2.0
"""The rule for "auto" tiers, its budget, and overrides of single values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.plan import MIB, PlanInput, make_plan

GIB = 1024 * MIB
GIVEN = PlanInput(
    numel=1_000_000_000,
    param_bytes_each=2,
    grad_bytes_each=2,
    num_moments=2,
    largest_param_numel=50_000_000,
    dram_budget_bytes=64 * GIB,
    num_cpus=8,
)


@pytest.mark.parametrize(
    ("budget", "tiers"),
    [
        (64 * GIB, ("cpu", "cpu", "cpu")),
        (14 * GIB, ("nvme", "cpu", "cpu")),
        (10 * GIB, ("cpu", "nvme", "cpu")),
        (5 * GIB, ("cpu", "nvme", "nvme")),
        (3 * GIB, ("nvme", "nvme", "cpu")),
        (1 * GIB, ("nvme", "nvme", "nvme")),
    ],
)
def test_the_placement_that_fits_and_moves_least_is_taken(budget: int, tiers: tuple[str, str, str]) -> None:
    given = replace(GIVEN, dram_budget_bytes=budget)
    plan = make_plan(given, {})
    assert (plan.params_tier, plan.optimizer_tier, plan.gradients_tier) == tiers
    assert plan.resident_bytes(given) <= budget
    assert plan.needs_storage == ("nvme" in tiers)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_tier_that_the_user_chose_is_kept(tier: str) -> None:
    plan = make_plan(replace(GIVEN, params_tier=tier, gradients_tier=tier), {})
    assert (plan.params_tier, plan.gradients_tier) == (tier, tier)


def test_two_versions_of_parameters_count_where_updates_speculate() -> None:
    given = replace(GIVEN, optimizer_tier="nvme")
    both = make_plan(given, {})
    one = make_plan(replace(given, may_speculate=False), {})
    assert both.double_params
    assert not one.double_params
    assert both.resident_bytes(given) - one.resident_bytes(given) == 2 * GIVEN.numel


def test_what_cannot_fit_is_refused_with_the_bytes_needed_and_found() -> None:
    with pytest.raises(FuyouConfigError, match=r"needs \d+ MiB .* is 100 MiB; raise it"):
        make_plan(replace(GIVEN, dram_budget_bytes=100 * MIB), {})
    with pytest.raises(FuyouConfigError, match="set more tiers to nvme"):
        make_plan(replace(GIVEN, dram_budget_bytes=8 * GIB, optimizer_tier="cpu"), {})


def test_less_memory_never_moves_fewer_bytes() -> None:
    """And every plan fits its budget, whatever the user fixed."""
    each = {"params_tier": 3 * 2, "optimizer_tier": 2 * 12, "gradients_tier": 2 * 2}
    for fixed in ({}, {"gradients_tier": "nvme"}, {"params_tier": "nvme"}, {"optimizer_tier": "nvme"}):
        moved = []
        for gib in range(20, 0, -1):
            given = replace(GIVEN, dram_budget_bytes=gib * GIB, **fixed)
            plan = make_plan(given, {})
            assert plan.resident_bytes(given) <= given.dram_budget_bytes
            moved.append(sum(num_bytes for tier, num_bytes in each.items() if getattr(plan, tier) == "nvme"))
        assert moved == sorted(moved)


def test_single_values_are_overridden() -> None:
    wanted = {"chunk_bytes": MIB, "staging_bytes": 8 * MIB, "slots": 1, "num_threads": 3, "queue_depth": None}
    plan = make_plan(GIVEN, wanted)
    assert (plan.chunk_bytes, plan.staging_bytes, plan.slots, plan.num_threads) == (MIB, 8 * MIB, 1, 3)
    assert plan.queue_depth == make_plan(GIVEN, {}).queue_depth


@pytest.mark.parametrize(("num_cpus", "device_is_host", "threads"), [(8, False, 7), (8, True, 8), (1, False, 1)])
def test_a_core_stays_free_unless_the_device_is_the_host(num_cpus: int, device_is_host: bool, threads: int) -> None:
    given = replace(GIVEN, num_cpus=num_cpus, device_is_host=device_is_host)
    assert make_plan(given, {}).num_threads == threads
