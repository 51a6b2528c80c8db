# SPDX-License-Identifier: Apache-2.0
"""The rule for "auto" tiers, its budget, and overrides of single values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.document import Residency
from ds_fuyou.planner.plan import MIB, Plan, PlanInput, whole_bytes
from ds_fuyou.planner.profiled import placed
from ds_fuyou.state_layout import StateLayout

GIB = 1024 * MIB
GIVEN = PlanInput(
    numel=1_000_000_000,
    param_bytes_each=2,
    grad_bytes_each=2,
    layout=StateLayout("whole", 2),
    largest_param_numel=50_000_000,
    dram_budget_bytes=64 * GIB,
    num_cpus=8,
)


def moved_bytes(plan: Plan, given: PlanInput) -> float:
    """To and from storage in a step: P16 read in both passes and written once, states read and written, gradients
    written and (by updates that wait for ``step()``) read.
    """
    held = plan.residency
    moved = 3 * given.param_bytes_each * (1 - held.parameters)
    moved += sum(given.layout.moved_bytes(held.parameters, held.optimizer))
    return (moved + 2 * given.grad_bytes_each * (1 - held.gradients)) * given.numel


def make_plan(given: PlanInput, overrides: Mapping[str, int | None]) -> Plan:
    """Of a run of which nothing was measured: storage is the bound."""
    return placed(given, overrides).plan


def shares(plan: Plan) -> tuple[float, float, float]:
    return plan.residency.parameters, plan.residency.optimizer, plan.residency.gradients


WHOLE = [Residency(*shares) for shares in itertools.product((0.0, 1.0), repeat=3)]


@pytest.mark.parametrize("gib", [64, 20, 16, 14, 10, 7, 5, 3, 1])
def test_memory_is_filled_and_nothing_whole_that_fits_moves_less(gib: int) -> None:
    """What a quarter of the budget or the lanes do not need is filled, the last class in part."""
    given = replace(GIVEN, dram_budget_bytes=gib * GIB)
    plan = make_plan(given, {})
    stored = plan.residency != Residency(1.0, 1.0, 1.0)
    assert stored == (gib < 16)
    assert (plan.host_bytes(given) if stored else plan.resident_bytes(given)) <= gib * GIB
    if stored:
        filled = plan.resident_bytes(given) + plan.gradient_buffer_bytes
        assert filled >= gib * GIB - max(gib * GIB // 4, 420 * MIB) - 1
    room = gib * GIB * 3 // 4
    for whole in WHOLE:
        other = replace(plan, residency=whole)
        if other.resident_bytes(given) <= room:
            assert moved_bytes(plan, given) <= moved_bytes(other, given) + 1


def test_the_class_that_saves_most_a_byte_is_filled_first() -> None:
    """States save 2 bytes moved a resident byte; P16 3, or 1.5 where updates in backward need two versions."""
    assert shares(make_plan(replace(GIVEN, dram_budget_bytes=14 * GIB), {})) == (
        pytest.approx(0.83, abs=0.01),
        1.0,
        0.0,
    )
    fixed = replace(GIVEN, dram_budget_bytes=8 * GIB)
    assert shares(make_plan(fixed, {}))[0] == 0.0
    assert shares(make_plan(replace(fixed, may_speculate=False), {}))[0] == 1.0


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_tier_that_the_user_chose_is_kept(tier: str) -> None:
    plan = make_plan(replace(GIVEN, params_tier=tier, gradients_tier=tier), {})
    assert shares(plan)[::2] == ((1.0, 1.0) if tier == "cpu" else (0.0, 0.0))


def test_a_share_that_a_plan_fixes_is_kept_unless_a_tier_is_chosen() -> None:
    given = replace(GIVEN, shares={"optimizer": 0.5, "gradients": 0.25})
    assert shares(make_plan(given, {})) == (1.0, 0.5, 0.25)
    assert shares(make_plan(replace(given, optimizer_tier="nvme"), {})) == (1.0, 0.0, 0.25)
    with pytest.raises(FuyouConfigError, match="plan smaller shares"):
        make_plan(replace(given, dram_budget_bytes=6 * GIB), {})


def test_two_versions_of_parameters_count_where_updates_speculate() -> None:
    given = replace(GIVEN, optimizer_tier="nvme")
    both = make_plan(given, {})
    deferring = replace(given, may_speculate=False)
    one = make_plan(deferring, {})
    assert both.resident_bytes(given) - one.resident_bytes(deferring) == 2 * GIVEN.numel


def test_what_cannot_fit_is_refused_with_the_bytes_needed_and_found() -> None:
    with pytest.raises(FuyouConfigError, match=r"needs \d+ MiB .* is 100 MiB; raise it"):
        make_plan(replace(GIVEN, dram_budget_bytes=100 * MIB), {})
    with pytest.raises(FuyouConfigError, match="set more tiers to nvme"):
        make_plan(replace(GIVEN, dram_budget_bytes=8 * GIB, optimizer_tier="cpu"), {})


@pytest.mark.parametrize("mib", [250, 400, 700])
def test_small_budgets_get_small_chunks_and_gradients_fit_them(mib: int) -> None:
    given = replace(GIVEN, largest_param_numel=10_000_000, dram_budget_bytes=mib * MIB)
    plan = make_plan(replace(given, gradients_tier="nvme"), {})
    assert plan.gradient_buffer_bytes > 0
    assert plan.host_bytes(given) <= mib * MIB
    assert (plan.chunk_bytes < 16 * MIB) == (mib < 400)
    with pytest.raises(FuyouConfigError, match=r"needs \d+ MiB .* is 60 MiB"):
        make_plan(replace(given, dram_budget_bytes=60 * MIB), {})
    if mib < 400:
        with pytest.raises(FuyouConfigError, match="raise it"):
            make_plan(given, {"chunk_bytes": 16 * MIB})


def test_less_memory_never_moves_fewer_bytes() -> None:
    """And every plan fits its budget, whatever the user fixed."""
    for fixed in ({}, {"gradients_tier": "nvme"}, {"params_tier": "nvme"}, {"shares": {"optimizer": 0.25}}):
        moved = []
        for gib in range(20, 4, -1):
            given = replace(GIVEN, dram_budget_bytes=gib * GIB, **fixed)
            plan = make_plan(given, {})
            assert plan.resident_bytes(given) <= given.dram_budget_bytes
            moved.append(moved_bytes(plan, given))
        assert moved == sorted(moved)


@pytest.mark.parametrize("gib", [20, 5, 3, 2])
def test_gradients_on_their_way_to_storage_count(gib: int) -> None:
    """17 chunks of 4 million elements, or what of the model is there; the lanes get what is left."""
    given = replace(GIVEN, dram_budget_bytes=gib * GIB, gradients_tier="nvme")
    plan = make_plan(given, {})
    assert plan.gradient_buffer_bytes == (50_000_000 + 8 * plan.chunk_bytes // 4) * 2  # the largest parameter's at once
    assert make_plan(replace(given, largest_param_numel=1_000), {}).gradient_buffer_bytes == 17 * plan.chunk_bytes // 2
    lanes = plan.staging_bytes + plan.prefetch_bytes + plan.gradient_buffer_bytes + plan.activation_bytes
    assert plan.resident_bytes(given) + lanes <= gib * GIB
    assert make_plan(replace(given, gradients_tier="cpu", dram_budget_bytes=20 * GIB), {}).gradient_buffer_bytes == 0
    small = make_plan(replace(given, numel=1_000_000, largest_param_numel=100), {})
    assert small.gradient_buffer_bytes == 2_000_000


def test_single_values_are_overridden() -> None:
    wanted = {"chunk_bytes": MIB, "staging_bytes": 8 * MIB, "slots": 1, "num_threads": 3, "queue_depth": None}
    plan = make_plan(GIVEN, wanted)
    assert (plan.chunk_bytes, plan.staging_bytes, plan.slots, plan.num_threads) == (MIB, 8 * MIB, 1, 3)
    assert plan.queue_depth == make_plan(GIVEN, {}).queue_depth


@pytest.mark.parametrize(("num_cpus", "device_is_host", "threads"), [(8, False, 7), (8, True, 8), (1, False, 1)])
def test_a_core_stays_free_unless_the_device_is_the_host(num_cpus: int, device_is_host: bool, threads: int) -> None:
    given = replace(GIVEN, num_cpus=num_cpus, device_is_host=device_is_host)
    assert make_plan(given, {}).num_threads == threads


SWAPPING = replace(GIVEN, swaps_activations=True)
THIRTEEN = replace(SWAPPING, numel=12_850_000_000, largest_param_numel=110_000_000, num_cpus=16)
"""Width 5120, 40 blocks; at 32 x 1024 tokens one of its activations has 320 MiB, the largest 1280."""


def planned_bytes(given: PlanInput, plan: Plan) -> int:
    return plan.resident_bytes(given) + plan.staging_bytes + plan.prefetch_bytes + plan.activation_bytes


@pytest.mark.parametrize("gib", [96, 128])
def test_the_arena_of_activations_comes_before_what_fills_memory(gib: int) -> None:
    """13B does not fit: states fill memory to the brim, and the arena still holds the tensors of a block."""
    given = replace(THIRTEEN, dram_budget_bytes=gib * GIB)
    plan = make_plan(given, {})
    assert plan.activation_bytes == 2 * GIB
    assert planned_bytes(given, plan) <= gib * GIB
    assert plan.resident_bytes(given) > (gib - 4) * GIB
    known = make_plan(replace(given, block_activation_bytes=5 * GIB, num_paths=4), {})
    assert known.activation_bytes == 10 * GIB + 512 * MIB
    assert make_plan(replace(given, num_paths=32), {}).activation_bytes == 4 * GIB, "every path has its pieces"
    assert make_plan(given, {"activation_bytes": MIB}).activation_bytes == MIB


@pytest.mark.parametrize("gib", [96, 128])
def test_activations_that_stay_get_a_quarter_and_all_that_is_left(gib: int) -> None:
    staying = replace(THIRTEEN, dram_budget_bytes=gib * GIB, activations_stay_in_dram=True)
    plan = make_plan(staying, {})
    assert plan.activation_bytes >= gib * GIB // 4
    assert (gib - 1) * GIB <= planned_bytes(staying, plan) <= gib * GIB
    small = replace(staying, numel=GIVEN.numel, largest_param_numel=GIVEN.largest_param_numel)
    plan = make_plan(small, {})
    assert plan.activation_bytes > (gib - 20) * GIB, "everything else fits, and the rest is theirs"
    assert planned_bytes(small, plan) <= gib * GIB


def test_where_the_device_is_the_host_the_arena_is_a_buffer() -> None:
    assert make_plan(GIVEN, {}).activation_bytes == 0
    on_host = replace(SWAPPING, device_is_host=True)
    assert make_plan(on_host, {}).activation_bytes == 256 * MIB
    assert make_plan(replace(on_host, activations_stay_in_dram=True), {}).activation_bytes == 0, "nothing moves"


def test_an_arena_never_makes_a_plan_impossible() -> None:
    """Whatever the budget: with it the plan fits; where nothing is left for it, a small one has to do."""
    for stays, on_host, tier in itertools.product((False, True), (False, True), ("auto", "cpu", "nvme")):
        given = replace(SWAPPING, activations_stay_in_dram=stays, device_is_host=on_host, optimizer_tier=tier)
        bare = replace(given, swaps_activations=False)
        for gib in (1, 2, 3, 5, 8, 12, 13, 14, 15, 16, 17, 20, 40):
            budget = {"dram_budget_bytes": gib * GIB}
            try:
                make_plan(replace(bare, **budget), {})
            except FuyouConfigError:
                continue
            plan = make_plan(replace(given, **budget), {})
            assert planned_bytes(given, plan) <= gib * GIB * 1.05
            assert (plan.activation_bytes > 0) or (stays and on_host)


@pytest.mark.parametrize("gib", [64, 20, 10, 5, 3, 1])
def test_states_on_their_way_to_a_checkpoint_are_counted(gib: int) -> None:
    """Of the budget, and in what is told; whatever is resident: also host memory is copied before it is written."""
    given = replace(GIVEN, dram_budget_bytes=gib * GIB)
    behind = replace(given, saves_behind=True)
    plan, without = make_plan(behind, {}), make_plan(given, {})
    assert plan.save_bytes == 6 * 3 * plan.chunk_bytes
    assert without.save_bytes == 0
    if gib < 16:
        assert plan.host_bytes(behind) <= gib * GIB
        assert moved_bytes(plan, behind) > moved_bytes(without, given) or gib == 1
    tiny = replace(behind, numel=100, largest_param_numel=50, layout=StateLayout("whole", 1))
    assert make_plan(tiny, {}).save_bytes == 6 * 2 * 400


def test_a_budget_too_small_for_a_checkpoint_behind_training_gets_smaller_chunks() -> None:
    given = replace(
        GIVEN, dram_budget_bytes=600 * MIB, optimizer_tier="nvme", params_tier="nvme", gradients_tier="nvme"
    )
    assert make_plan(given, {}).chunk_bytes == 16 * MIB
    assert make_plan(replace(given, saves_behind=True), {}).chunk_bytes < 16 * MIB


@pytest.mark.parametrize(("gib", "whole"), [(2, False), (4, True), (64, True)])
def test_what_a_given_budget_leaves_keeps_parameters_that_were_read(gib: int, whole: bool) -> None:
    given = replace(GIVEN, dram_budget_bytes=gib * GIB, frozen_bytes=2e8)
    given = replace(given, optimizer_tier="nvme", params_tier="nvme", gradients_tier="nvme")
    before, after = make_plan(given, {}), make_plan(replace(given, keeps_read=True), {})
    assert before.prefetch_bytes == 3 * 100_000_000, "of the largest"
    assert (after.prefetch_bytes == whole_bytes(2e9 + 2e8)) == whole
    assert before.host_bytes(given) <= after.host_bytes(given) <= gib * GIB
    assert after.prefetch_bytes > before.prefetch_bytes
    assert replace(after, prefetch_bytes=before.prefetch_bytes) == before
    assert make_plan(replace(given, keeps_read=True), {"prefetch_bytes": MIB}).prefetch_bytes == MIB
    may_move = replace(given, optimizer_tier="auto", dram_budget_bytes=4 * GIB)
    assert make_plan(may_move, {}).residency.optimizer < 1
    assert make_plan(replace(may_move, keeps_read=True), {}) == make_plan(may_move, {}), "states may need that memory"
    in_memory = replace(given, keeps_read=True, params_tier="cpu", dram_budget_bytes=64 * GIB)
    assert make_plan(in_memory, {}).prefetch_bytes == 256 * MIB


def test_what_frozen_parameters_are_read_to_is_part_of_the_plan() -> None:
    """Two of the largest of them, as of those that are trained, wherever any is on storage; three where there is room,
    or a read could begin only behind a copy to the device.
    """
    given = replace(GIVEN, numel=1_000_000, largest_param_numel=10_000, frozen_bytes=60e9, largest_frozen_bytes=5e8)
    plan = make_plan(replace(given, dram_budget_bytes=2 * GIB), {})
    assert plan.residency.frozen < 1.0
    assert plan.prefetch_bytes == 1.5e9
    assert plan.host_bytes(given) <= 2 * GIB
    assert 1e9 <= make_plan(replace(given, dram_budget_bytes=5 * GIB // 4), {}).prefetch_bytes < 1.5e9
    with pytest.raises(FuyouConfigError, match="the smallest placement"):
        make_plan(replace(given, dram_budget_bytes=GIB // 2), {})
    assert make_plan(given, {}).residency.frozen == 1.0, "all of it fits"


def test_a_budget_that_engines_without_an_optimizer_hold_is_told_with_what_they_hold() -> None:
    said = "dram_budget_bytes is 1024 MiB, 1000 MiB of them held by engines without"
    with pytest.raises(FuyouConfigError, match=said):
        make_plan(replace(GIVEN, dram_budget_bytes=24 * MIB, lent_bytes=1000 * MIB), {})
