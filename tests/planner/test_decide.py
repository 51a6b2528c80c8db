# SPDX-License-Identifier: Apache-2.0
"""The one decider: against a grid over all shares, what its seconds are worth, and the same for command and run."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import replace

import pytest

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.activations import ActivationCosts, SavedOutput, costs_of
from ds_fuyou.planner.cost import MOST_ACCUMULATION, ClosedForm, Placement, Workload
from ds_fuyou.planner.decide import Decision, StepTime, decide
from ds_fuyou.planner.document import Residency
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.plan import (
    MIB,
    PlanInput,
    arena_bytes,
    classes_of,
    has_two_versions,
    minimum_lane_bytes,
    resident_bytes,
    stored_bytes,
)
from ds_fuyou.planner.profile import BlockCost, OperatorCost, RunProfile, StorageRates
from ds_fuyou.planner.profiled import placed, placed_again, run_time
from ds_fuyou.simulator.choose import choose
from ds_fuyou.simulator.fit import device_room, rank_facts
from ds_fuyou.simulator.models import with_adapters
from ds_fuyou.simulator.systems import find_policy
from tests.planner.profiles import PROFILE
from tests.planner.support import machine, model
from tests.unit.test_plan import GIB
from tests.unit.test_plan import GIVEN as ROOMY

GIVEN = replace(ROOMY, dram_budget_bytes=10 * GIB)
FAST, SLOW = 50e9, 0.5e9  # bytes a second
BOUNDS = {
    "storage": {"storage": StorageRates(SLOW, SLOW, SLOW, 0.0, 0.0)},
    "storage writes": {"storage": StorageRates(FAST, SLOW, 1e9, 0.0, 0.0)},
    "compute": {"forward_secs": 20.0, "backward_secs": 40.0},
    "adam": {"update_rate": 50e6, "forward_secs": 4.0, "backward_secs": 12.0},
    "link": {"link_up": 0.3e9, "link_down": 0.3e9},
}
USUAL = replace(PROFILE, storage=StorageRates(4e9, 3e9, 4e9, 0.0, 0.0), update_rate=1e9, link_up=20e9, link_down=20e9)
BLOCKS = ActivationCosts(8, 0.1e9, 1e9, 0.1e9, (), 1e9)


def decided(profile: RunProfile, given: PlanInput, costs: ActivationCosts | None = None) -> tuple[Decision, StepTime]:
    steps = run_time(profile, given, activations=costs)
    return decide(given, {}, steps), steps


def test_a_budget_that_was_meant_in_other_units_is_told_in_bytes() -> None:
    given = replace(GIVEN, dram_budget_bytes=16)
    with pytest.raises(FuyouConfigError, match=r"needs \d+ MiB of host memory, dram_budget_bytes is 16 bytes"):
        decided(USUAL, given)


def test_what_is_needed_is_never_shown_as_what_there_is() -> None:
    """Just below of what does, one way of rounding both would show the same."""
    with pytest.raises(FuyouConfigError, match=r"needs \d+ MiB") as refused:
        decided(USUAL, replace(GIVEN, dram_budget_bytes=16))
    needed = int(str(refused.value).split("needs ")[1].split(" MiB")[0])
    too_little = (needed << 20) - (1 << 20)
    while too_little + (1 << 16) < needed << 20:  # the last of these that does not do
        with contextlib.suppress(FuyouConfigError):
            decided(USUAL, replace(GIVEN, dram_budget_bytes=too_little + (1 << 16)))
            break
        too_little += 1 << 16
    with pytest.raises(FuyouConfigError, match=rf"needs {needed} MiB .*, dram_budget_bytes is {needed - 1} MiB"):
        decided(USUAL, replace(GIVEN, dram_budget_bytes=too_little))
    decided(USUAL, replace(GIVEN, dram_budget_bytes=needed << 20))


def test_no_chunk_is_larger_than_the_model() -> None:
    """In the memory that two in flight take."""
    given, stored = replace(GIVEN, numel=100_000, largest_param_numel=1_000), Residency(0.0, 0.0, 0.0)
    assert minimum_lane_bytes(given, stored, 8 * GIB) == minimum_lane_bytes(given, stored, 4 * given.numel)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("accumulation", [1, 8])
@pytest.mark.parametrize("gib", [2, 5, 9, 13, 30])
def test_no_point_of_a_grid_is_faster(bound: str, accumulation: int, gib: int) -> None:
    """Shares of P16, states and gradients in steps of a tenth that fit the same budget with the lanes they need."""
    profile = replace(USUAL, **BOUNDS[bound], accumulation=accumulation)
    given = replace(GIVEN, dram_budget_bytes=gib * GIB)
    found, steps = decided(profile, given)
    plan = found.plan
    assert plan.resident_bytes(given) <= gib * GIB
    grid = [tenth / 10 for tenth in range(11)]
    best = float("inf")
    for shares in itertools.product(grid, repeat=3):
        residency = Residency(*shares)
        needed = resident_bytes(given, residency) + minimum_lane_bytes(given, residency, plan.chunk_bytes)
        lanes = 0 if residency == Residency(1.0, 1.0, 1.0) else 1280 * MIB  # what the plan sets aside for staging
        if needed <= gib * GIB and resident_bytes(given, residency) + min(lanes, gib * GIB // 4) <= gib * GIB:
            best = min(best, steps.secs(steps.placed(given, residency, 0.0)))
    chosen = steps.secs(steps.placed(given, plan.residency, 0.0))
    assert chosen <= best * 1.03


@pytest.mark.parametrize("gib", [3, 6, 10, 15, 22])
@pytest.mark.parametrize("accumulation", [1, 8])
@pytest.mark.parametrize("kind", ["full", "long backward", "frozen", "activations"])
def test_no_point_of_a_grid_is_faster_with_frozen_parameters_and_activations(
    kind: str, accumulation: int, gib: int
) -> None:
    """Shares in quarters, with none or all of what they leave for activations; memory may be left to nobody."""
    given = replace(GIVEN, dram_budget_bytes=gib * GIB, swaps_activations=True)
    profile = replace(USUAL, accumulation=accumulation, forward_secs=0.1, backward_secs=2.0, update_rate=500e6)
    costs = None
    if kind == "long backward":
        profile = replace(profile, backward_secs=10.0, storage=StorageRates(6e9, 6e9, 6e9, 0.0, 0.0))
    elif kind == "frozen":
        given = replace(given, numel=50_000_000, frozen_bytes=20e9)
    elif kind == "activations":
        outputs = tuple(SavedOutput(name, flops, size) for name, flops, size in (("a", 3e9, 2e8), ("b", 1e9, 3e8)))
        costs = replace(BLOCKS, outputs=outputs, block_flops=4.1e9)
        given = replace(given, block_activation_bytes=int(costs.whole_bytes))
        profile = replace(profile, storage=StorageRates(0.5e9, 0.5e9, 0.5e9, 0.0, 0.0), backward_secs=10.0)
    found, steps = decided(profile, given, costs)
    best, names = float("inf"), classes_of(given)
    for shares in itertools.product((0.0, 0.25, 0.5, 0.75, 1.0), repeat=len(names)):
        residency = Residency(**dict(zip(names, shares, strict=True)))
        lanes = max(minimum_lane_bytes(given, residency, found.plan.chunk_bytes), min(1280 * MIB, gib * GIB // 4))
        lanes = 0 if min(shares) == 1 else lanes
        room = gib * GIB - resident_bytes(given, residency) - lanes - arena_bytes(given)
        for part in (0.0, 1.0) if room >= 0 else ():
            place = steps.placed(given, residency, part * room)
            best = min(best, steps.secs(replace(place, staging_bytes=found.plan.staging_bytes)))
    assert found.secs <= best * 1.03, "2 % of it may be given for fewer bytes"


def test_micro_batches_make_parameters_worth_their_memory() -> None:
    """Each reads P16 twice and moves a sum; states move once a step. What hides behind computing is worth nothing."""
    given = replace(GIVEN, dram_budget_bytes=8 * GIB)
    storage_bound = replace(USUAL, **BOUNDS["storage"], forward_secs=0.01, backward_secs=0.02)
    one = placed(given, {}, storage_bound).plan.residency
    many = placed(given, {}, replace(storage_bound, accumulation=8)).plan.residency
    assert one.optimizer > 0.3
    assert (many.parameters, many.gradients) == pytest.approx((1.0, 1.0), abs=0.03)
    computing = placed(given, {}, replace(USUAL, **BOUNDS["storage"], accumulation=8)).plan.residency
    assert computing.optimizer > many.optimizer
    assert 0.73 < computing.parameters < 0.9, "1 s of forward hides 0.5 GB at 0.5 GB/s; 2 % are given for fewer bytes"


def test_states_stay_on_storage_where_their_updates_hide_behind_backward() -> None:
    """In memory they would wait for the next forward, which is short; fast storage costs nothing here."""
    given = replace(GIVEN, dram_budget_bytes=20 * GIB)
    slow_adam = replace(USUAL, **BOUNDS["adam"], storage=StorageRates(FAST, FAST, FAST, 0.0, 0.0))
    assert placed(given, {}, slow_adam).plan.residency.optimizer < 0.5, "as many as the next forward hides"
    assert placed(given, {}).plan.residency.optimizer == 1.0, "where nothing is known the fewest bytes move"


def test_states_move_where_a_measured_step_says_so_and_nothing_else_does() -> None:
    given = replace(GIVEN, dram_budget_bytes=12 * GIB)
    blind = placed(given, {}).plan
    assert blind.residency.optimizer > 0.5
    slow_adam = replace(USUAL, **BOUNDS["adam"], storage=StorageRates(FAST, FAST, FAST, 0.0, 0.0))
    found = placed_again(given, {}, slow_adam, blind)
    assert found is not None
    kept = ("chunk_bytes", "staging_bytes", "prefetch_bytes", "activation_bytes")
    assert all(getattr(found.plan, name) == getattr(blind, name) for name in kept)
    assert found.plan.residency.parameters == blind.residency.parameters
    assert found.plan.residency.gradients == blind.residency.gradients
    assert found.plan.residency.optimizer < blind.residency.optimizer - 0.3
    assert found.plan.host_bytes(given) <= given.dram_budget_bytes
    assert placed_again(given, {}, replace(USUAL, **BOUNDS["storage"]), blind) is None, "it is where it should be"


def test_p16_moves_where_that_makes_a_step_clearly_shorter_still() -> None:
    """Eight micro-batches read it sixteen times; where the block fixes it, or nothing is gained, it stays."""
    given = replace(GIVEN, dram_budget_bytes=8 * GIB)
    often = replace(USUAL, **BOUNDS["storage"], forward_secs=0.01, backward_secs=0.02, accumulation=8)
    blind = placed(given, {}).plan
    assert blind.residency.parameters < 0.5 < blind.residency.optimizer
    found = placed_again(given, {}, often, blind, others=["parameters", "gradients"])
    assert found is not None
    assert found.plan.residency.parameters > 0.95
    assert found.plan.residency.optimizer < blind.residency.optimizer
    assert found.plan.host_bytes(given) <= given.dram_budget_bytes
    there = placed_again(given, {}, often, found.plan, others=["parameters", "gradients"])
    assert there is None, "it is where it should be"
    for fixed in (replace(given, params_tier="nvme"), replace(given, shares={"parameters": 0.0})):
        plan = placed(fixed, {}).plan
        stays = placed_again(fixed, {}, often, plan, others=["parameters", "gradients"])
        assert stays is None or stays.plan.residency.parameters == 0.0
    stays = placed_again(given, {}, often, blind)
    assert stays is None or stays.plan.residency.parameters == blind.residency.parameters
    computing = replace(often, forward_secs=20.0, backward_secs=40.0)
    assert placed_again(given, {}, computing, blind, others=["parameters", "gradients"]) is None


@pytest.mark.parametrize("gib", [3, 4, 9])
def test_updates_wait_where_one_version_of_p16_makes_a_step_clearly_shorter(gib: int) -> None:
    """Micro-batches read P16 often, storage is the bound; not where updates take long, nor where nothing is known."""
    often = replace(USUAL, **BOUNDS["storage"], accumulation=4)
    given = replace(GIVEN, dram_budget_bytes=gib * GIB, weighs_start=True)
    begins = decide(replace(given, weighs_start=False), {}, run_time(often, given))
    found = decide(given, {}, run_time(often, given))
    late = replace(given, may_speculate=False)
    waits = decide(late, {}, run_time(often, late))
    assert (begins.begins, waits.begins) == (True, False)
    assert (found.secs, found.plan) == (waits.secs, waits.plan)
    assert found.secs < 0.95 * begins.secs
    assert found.settled(given) == late
    assert not found.begins
    assert found.plan.host_bytes(late) <= gib * GIB
    assert not found.time.policy.begins_in_backward
    slow_adam = replace(USUAL, **BOUNDS["adam"], accumulation=4)
    for other in (decide(given, {}, run_time(slow_adam, given)), decide(given, {}, run_time(None, given))):
        assert other.begins
        assert other.settled(given) == given


def test_updates_wait_where_two_versions_of_p16_do_not_fit() -> None:
    """Whatever is known: all of it is to be in host memory."""
    given = replace(GIVEN, params_tier="cpu", optimizer_tier="nvme", gradients_tier="nvme", weighs_start=True)
    given = replace(given, dram_budget_bytes=3 * GIB)
    with pytest.raises(FuyouConfigError):
        placed(replace(given, weighs_start=False), {})
    for profile in (None, USUAL):
        found = placed(given, {}, profile)
        assert not found.begins
        assert found.plan.host_bytes(found.settled(given)) <= 3 * GIB
        assert found.plan.host_bytes(given) > 3 * GIB
    with pytest.raises(FuyouConfigError, match="needs"):
        placed(replace(given, dram_budget_bytes=GIB), {})


def test_a_run_comes_to_let_updates_wait_and_to_begin_them_again() -> None:
    given = replace(GIVEN, dram_budget_bytes=4 * GIB, weighs_start=True)
    often = replace(USUAL, **BOUNDS["storage"], accumulation=16)
    every = ["parameters", "gradients"]
    blind = placed(given, {}).plan
    found = placed_again(given, {}, often, blind, others=every, may_speculate=True)
    assert found is not None
    assert not found.begins
    late = found.settled(given)
    assert found.plan.residency.parameters > 0.7
    assert placed_again(late, {}, often, found.plan, others=every, may_speculate=True) is None
    slow_adam = replace(USUAL, **BOUNDS["adam"])
    again = placed_again(late, {}, slow_adam, found.plan, others=every, may_speculate=True)
    assert again is not None
    assert again.begins
    assert again.time.policy.begins_in_backward
    assert again.plan.host_bytes(given) <= given.dram_budget_bytes
    assert placed_again(late, {}, slow_adam, found.plan, others=every, may_speculate=False) is None
    fixed = placed_again(replace(given, weighs_start=False), {}, often, blind, others=every, may_speculate=True)
    assert fixed is None or fixed.begins


def test_updates_begin_in_backward_where_states_have_second_versions_for_that() -> None:
    """Given in the block, or as a run has them: they would stay, for nothing, and beside the budget."""
    given = replace(GIVEN, dram_budget_bytes=4 * GIB, weighs_start=True)
    often = replace(USUAL, **BOUNDS["storage"], accumulation=16)
    assert not placed(given, {}, often).begins
    found = placed(replace(given, shares={"optimizer": 0.1, "optimizer_twice": 0.1}), {}, often)
    assert found.begins
    assert found.plan.residency.optimizer_twice == 0.1
    again = placed_again(given, {}, often, found.plan, others=["parameters", "gradients"], may_speculate=True)
    assert again is None or again.begins


def test_activations_get_host_memory_where_that_is_worth_most() -> None:
    """Storage is the bound and activations cross it twice in each micro-batch."""
    given = replace(GIVEN, swaps_activations=True, dram_budget_bytes=12 * GIB)
    profile = replace(USUAL, **BOUNDS["storage"], accumulation=8)
    found, _ = decided(profile, given, replace(BLOCKS, block_flops=1e15))
    assert found.plan.kept_activation_bytes >= 7e9
    assert found.place.storage_activation_bytes < 1e9
    eager, _ = decided(profile, replace(given, activations_leave_dram=True), replace(BLOCKS, block_flops=1e15))
    assert eager.plan.kept_activation_bytes == 0


def test_a_run_placed_by_its_profile_fits_storage_with_two_slots_or_is_placed_as_if_nothing_were_known() -> None:
    given = replace(GIVEN, dram_budget_bytes=12 * GIB)
    slow_adam = replace(USUAL, **BOUNDS["adam"], storage=StorageRates(FAST, FAST, FAST, 0.0, 0.0))
    stored = stored_bytes(given, placed(given, {}, slow_adam).plan.residency)
    assert stored > 9e9
    small = replace(given, storage_budget_bytes=9e9)
    found = placed(small, {}, slow_adam).plan.residency
    assert stored_bytes(replace(small, durable=True), found) <= 9e9
    none = replace(given, storage_budget_bytes=1e9)
    assert placed(none, {}, slow_adam).plan == placed(given, {}).plan


def test_where_updates_cannot_start_in_backward_nothing_is_gained_by_moving() -> None:
    given = replace(GIVEN, dram_budget_bytes=20 * GIB, gradients_tier="nvme")
    slow_adam = replace(USUAL, **BOUNDS["adam"], storage=StorageRates(FAST, FAST, FAST, 0.0, 0.0))
    plan = placed(given, {}).plan
    assert plan.residency.optimizer == 1.0
    assert placed_again(given, {}, slow_adam, plan) is not None
    assert placed_again(replace(given, may_speculate=False), {}, slow_adam, plan) is None


def test_activations_of_a_mode_that_is_not_decided_yet_take_an_arena_of_other_classes() -> None:
    """And no more: an eighth of the budget, which states come to when nothing is swapped (zero/run/run_moves.py)."""
    given = replace(GIVEN, swaps_activations=True, dram_budget_bytes=12 * GIB)
    storage_bound = replace(USUAL, **BOUNDS["storage"], accumulation=2)
    block = OperatorCost("up/mm", 4e12, 2e9, True)
    known = replace(storage_bound, blocks=(BlockCost("a", 4e12, 1e9, (block,)), BlockCost("b", 4e12, 1e9, (block,))))
    auto, swap = (placed(given, {}, known, mode=mode).plan for mode in ("auto", "swap"))
    assert auto.kept_activation_bytes == 0
    assert auto.activation_bytes == arena_bytes(given) == 12 * GIB // 8 < swap.activation_bytes
    assert auto.resident_bytes(given) > swap.resident_bytes(given)


def test_of_a_frozen_base_memory_holds_what_fits() -> None:
    """30B, 60 GB in 16 bits, read twice a micro-batch; adapters take next to nothing."""
    base = model("30B")
    lora = with_adapters(base, 16)
    assert lora.frozen_bytes == 2.0 * base.params
    for gib, least, most in ((128, 1.0, 1.0), (48, 0.55, 0.8)):
        work, on = Workload(lora, 1, 512), machine(1, gib)
        found = choose(work, on, find_policy("ds_fuyou"))
        assert least <= found.place.frozen <= most
        assert found.place.states == found.place.params == 1.0 or gib < 128
        host = sum(item.num_bytes for item in found.needs.items if item.tier == "cpu")
        assert host <= on.dram_usable_bytes
        read = found.closed.lane_secs[Lane.READ] * on.storage_read
        each_pass = max(0.0, (1 - found.place.frozen) * lora.frozen_bytes - found.place.kept_param_bytes)
        assert read == pytest.approx(2 * each_pass, rel=0.05, abs=5e8)
    full = choose(Workload(base, 1, 512), machine(1, 128), find_policy("ds_fuyou"))
    assert full.iteration_secs > 3 * found.iteration_secs
    assert (
        choose(Workload(with_adapters(base, 16, 4), 1, 512), machine(1, 48), find_policy("ds_fuyou")).place.frozen
        == 1.0
    )


def test_a_placement_that_the_disks_cannot_hold_is_none() -> None:
    roomy, _ = decided(replace(USUAL, **BOUNDS["storage"]), GIVEN)
    stored = (1 - roomy.plan.residency.optimizer) * 12e9
    bounded = replace(GIVEN, storage_budget_bytes=8e9, dram_budget_bytes=14 * GIB)
    found, _ = decided(replace(USUAL, **BOUNDS["compute"]), bounded)
    held = found.plan.residency
    assert 1e9 * (2 * (1 - held.parameters) + 12 * (1 - held.optimizer) + 2 * (1 - held.gradients)) <= 8e9
    assert stored > 0


def test_memory_that_activations_do_not_pass_through_goes_to_the_classes() -> None:
    given = replace(GIVEN, swaps_activations=True, device_room_bytes=20e9, dram_budget_bytes=8 * GIB)
    storage_bound = replace(USUAL, **BOUNDS["storage"])
    found, _ = decided(storage_bound, given, BLOCKS)
    assert found.place.swapped_bytes == 0
    assert found.plan.activation_bytes < arena_bytes(given)
    swapping, _ = decided(storage_bound, replace(given, device_room_bytes=0.0), replace(BLOCKS, block_flops=1e15))
    assert swapping.place.swapped_bytes > 0
    assert swapping.plan.activation_bytes >= arena_bytes(given)
    assert found.plan.resident_bytes(given) > swapping.plan.resident_bytes(given) + 0.9 * arena_bytes(given)


def test_pools_of_a_small_budget_shrink_where_the_step_is_clearly_shorter_for_it() -> None:
    given = replace(GIVEN, largest_param_numel=1_000_000, dram_budget_bytes=3 * GIB)

    def left(bound: str) -> int:
        plan = decide(given, {"chunk_bytes": 2 * MIB}, run_time(replace(USUAL, **BOUNDS[bound]), given)).plan
        assert plan.host_bytes(given) <= given.dram_budget_bytes
        return given.dram_budget_bytes - plan.resident_bytes(given)

    assert left("compute") >= given.dram_budget_bytes // 4, "what passes through host memory has its room"
    assert left("storage") < 0.5 * left("compute")


def test_second_versions_of_states_take_memory_that_does_nothing_else() -> None:
    """Where updates bound a step and all else is in memory; they hide behind backward as well then."""
    slow_adam = replace(USUAL, **BOUNDS["adam"])
    slow_disk = replace(slow_adam, storage=StorageRates(SLOW, SLOW, SLOW, 0.0, 0.0))
    given = replace(GIVEN, dram_budget_bytes=40 * GIB)
    found, steps = decided(slow_disk, given)
    residency = found.plan.residency
    assert (residency.parameters, residency.optimizer, residency.gradients) == (1.0, 1.0, 1.0)
    assert residency.optimizer_twice > 0.5
    assert found.plan.host_bytes(given) <= given.dram_budget_bytes
    once = steps.secs(replace(found.place, states_twice=0.0))
    assert found.secs < 0.9 * once
    assert has_two_versions(given, residency), "P16 too"
    asked = replace(given, dram_budget_bytes=10 * GIB, shares={"optimizer_twice": 0.5})
    held, _ = decided(slow_disk, asked)
    assert held.plan.residency.optimizer_twice == pytest.approx(min(0.5, held.plan.residency.optimizer))
    assert 0.9 * 10 * GIB < held.plan.host_bytes(asked) <= 10 * GIB, "no memory lies idle for what is not there"
    late = replace(given, may_speculate=False, shares={"optimizer_twice": 1.0})
    assert decided(slow_disk, late)[0].plan.residency.optimizer_twice == 0.0
    hidden, _ = decided(replace(USUAL, **BOUNDS["compute"]), given)
    assert hidden.plan.residency.optimizer_twice == 0.0, "nothing is gained"
    tight, _ = decided(slow_disk, replace(given, dram_budget_bytes=14 * GIB))
    assert tight.plan.resident_bytes(given) <= 14 * GIB


def test_a_70b_model_is_decided_in_a_moment() -> None:
    """Counted in closed forms: seconds depend on the machine."""
    calls = 0

    class Counted(StepTime):
        def predicted(self, place: Placement) -> ClosedForm:
            nonlocal calls
            calls += 1
            return super().predicted(place)

        def secs(self, place: Placement) -> float:
            nonlocal calls
            calls += 1
            return super().secs(place)

    work, on, policy = Workload(model("70B"), 16, 1024), machine(12, 256), find_policy("ds_fuyou")
    given = replace(rank_facts(work, on, policy), device_room_bytes=device_room(work, on, policy))
    begin = time.process_time()
    found = decide(given, {}, Counted(work, on, policy, costs_of(work, policy)))
    assert found.secs > 0
    assert calls < 7_500, f"{calls} in {time.process_time() - begin:.2f} s"


def test_a_step_of_more_micro_batches_than_are_simulated_is_placed_as_one_of_the_most() -> None:
    """The command refuses to simulate them; a run trains."""
    many = run_time(None, GIVEN, accumulation=10 * MOST_ACCUMULATION)
    assert many.work.accumulation == MOST_ACCUMULATION
    assert run_time(replace(PROFILE, accumulation=5000), GIVEN).work.accumulation == MOST_ACCUMULATION
