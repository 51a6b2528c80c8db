# SPDX-License-Identifier: Apache-2.0
"""Predictions from a measured profile are the closed form's, with this run's bytes and rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_fuyou.planner.document import Residency
from ds_fuyou.planner.explain import class_lines, class_rows
from ds_fuyou.planner.hardware import ThreadSecs
from ds_fuyou.planner.plan import CHUNK_BYTES, MIB, arena_bytes, built_plan, resident_bytes
from ds_fuyou.planner.policies import Updates
from ds_fuyou.planner.profile import StorageRates
from ds_fuyou.planner.profiled import profile_line, run_time
from ds_fuyou.simulator.report import plan_text
from ds_fuyou.state_layout import WHOLE, layout_of
from tests.planner.profiles import GIVEN, PLACE, PROFILE, predicted
from tests.planner.support import chosen, machine


def test_a_device_of_its_own_hides_what_is_shorter() -> None:
    found = predicted()
    assert found.iteration_secs == pytest.approx(4.0)
    assert found.bound == "compute"
    assert found.lane_secs["compute"] == pytest.approx(4.0)
    assert (found.lane_secs["storage read"], found.lane_secs["storage write"]) == pytest.approx((0.6, 1.2))
    assert (found.read_bytes, found.write_bytes) == pytest.approx((1.2e9, 1.2e9))
    assert found.lane_secs["cpu optimizer"] == pytest.approx(1.0)
    assert found.thread_secs == pytest.approx(4.0)


def test_a_host_that_computes_itself_adds_up_what_its_cores_do() -> None:
    storage = replace(PROFILE.storage, cpu_secs_per_byte=1e-9)
    found = predicted(replace(PROFILE, device_is_host=True, storage=storage))
    assert found.iteration_secs == pytest.approx(4.0 + 1.0 + 2.4e9 * 1e-9 / 2)
    assert found.thread_secs == pytest.approx(found.iteration_secs)
    assert found.bound == "cores"


def test_a_device_faster_than_its_interpreter_stands_still_for_it() -> None:
    """What threads do themselves is a lane beside the others, of every micro-batch, and of the turn of a step."""
    fast = StorageRates(20e9, 20e9, 20e9, 0.0, 0.0)
    thread = ThreadSecs(0.5, 1.0, 0.25)
    small = replace(PROFILE, forward_secs=0.1, backward_secs=0.2, accumulation=4, storage=fast, thread=thread)
    found = predicted(small)
    assert found.iteration_secs == pytest.approx(4 * 1.5 + 0.25)
    assert found.bound == "training thread"
    assert found.lane_secs["training thread"] == pytest.approx(4 * 1.5 + 0.25)
    assert found.thread_secs == pytest.approx(found.lane_secs["training thread"])
    usual = predicted(replace(PROFILE, thread=thread))
    assert usual.bound == "compute", "3 s of backward hide one"
    assert usual.iteration_secs == pytest.approx(predicted().iteration_secs + 0.25)
    waits = predicted(small, updates=Updates.STEP)
    assert waits.iteration_secs >= found.lane_secs["training thread"]


def test_gradients_that_are_added_on_the_host_may_bound_micro_batches() -> None:
    """Beside forwards and backwards; those of the first micro-batch are copied, and the last one's updates follow."""
    usual = replace(PROFILE, accumulation=4)
    fast, slow = replace(usual, sum_rate=50e6), replace(usual, sum_rate=10e6)  # 2 s and 10 s a micro-batch of 4
    none, hidden, bound = (predicted(profile) for profile in (usual, fast, slow))
    assert hidden.iteration_secs == pytest.approx(none.iteration_secs)
    assert hidden.lane_secs["cpu optimizer"] == pytest.approx(1.0 + 3 * 2.0)
    assert bound.iteration_secs == pytest.approx(none.iteration_secs + 3 * (10.0 - 4.0))
    assert bound.bound == "cpu optimizer"
    assert predicted(slow, updates=Updates.FORWARD).iteration_secs > 3 * 10.0
    assert predicted(replace(slow, accumulation=1)).iteration_secs == pytest.approx(predicted().iteration_secs)


def test_a_run_s_reuse_distance_counts() -> None:
    """In elements of this rank's partitions; P16 of 100 M parameters crosses the link twice, less what stays."""
    found = predicted(given=replace(GIVEN, reused_numel=25_000_000))
    assert predicted().lane_secs["host to device"] == pytest.approx(0.04)
    assert found.lane_secs["host to device"] == pytest.approx(0.035)


def test_what_stays_between_micro_batches_comes_up_once() -> None:
    """Of four forwards three begin with it, whether P16 is in host memory or on storage."""
    usual = replace(PROFILE, accumulation=4)
    for place in (PLACE, replace(PLACE, params=0.0)):
        lanes, fewer = (
            predicted(usual, place, given=replace(GIVEN, staying_numel=numel)).lane_secs for numel in (0, 25_000_000)
        )
        assert lanes["host to device"] == pytest.approx(4 * 0.04)
        assert fewer["host to device"] == pytest.approx(4 * 0.04 - 3 * 0.005)
    assert predicted(given=replace(GIVEN, staying_numel=25_000_000)).lane_secs == predicted().lane_secs


def test_when_updates_start_decides_what_they_hide_behind() -> None:
    slow = replace(PROFILE, forward_secs=0.1, backward_secs=0.2)  # 1.8 s of storage bound everything
    secs = {
        updates: predicted(slow, updates=updates).iteration_secs
        for updates in (Updates.DEADLINE, Updates.FORWARD, Updates.STEP)
    }
    assert secs[Updates.DEADLINE] == pytest.approx(1.8), "beside the last of two blocks are writes that came late"
    even = replace(slow, storage=StorageRates(4e9 / 3, 4e9 / 3, 4e9 / 3, 0.0, 0.0))
    assert predicted(even).iteration_secs == pytest.approx(1.8 + (0.1 + 0.2) / 2), "no gradient, and no write"
    read_ahead = replace(PLACE, staging_bytes=0.15 * 1.2e9 / 0.9)
    assert predicted(even, read_ahead).iteration_secs == pytest.approx(1.8), "beside it staging memory is filled"
    assert secs[Updates.FORWARD] == pytest.approx(0.2 + 1.8)
    assert secs[Updates.STEP] == pytest.approx(0.1 + 0.2 + 1.8)
    waits = Updates.FORWARD
    deferred = replace(PLACE, staging_bytes=0.25 * 1.2e9)
    assert predicted(slow, deferred, waits).iteration_secs == pytest.approx(0.75 * 1.8 + 0.25 * 1.8), (
        "both bound by storage"
    )
    long = replace(PROFILE, forward_secs=0.1, backward_secs=1.0)
    assert predicted(long, deferred, waits).iteration_secs == pytest.approx(0.75 * 1.8 + 1.0), (
        "backward hides what it takes"
    )
    roomy = predicted(long, replace(deferred, staging_bytes=2e9), waits).iteration_secs
    assert roomy == pytest.approx(1.0 + 1.0, rel=0.1), "no more is moved to backward than it has time for"
    stored = replace(deferred, params=0.0)  # P16: 0.2e9 bytes read in each pass, and written with the states
    forward = (0.1 + 0.75 * 0.6) + (0.2 + 1.2)
    assert predicted(long, stored, waits).iteration_secs == pytest.approx(forward + 1.0, rel=0.05), (
        "written before it is read"
    )
    resident = predicted(slow, replace(PLACE, states=1.0))
    assert resident.iteration_secs == pytest.approx(0.2 + 1.0), "a resident state waits for step()"


def test_shares_and_widths_are_counted() -> None:
    place = replace(PLACE, params=0.5, states=0.25, grads=0.0)
    wide = replace(GIVEN, param_bytes_each=4, layout=layout_of(WHOLE, 1), grad_bytes_each=4)
    handed = 0.25 * 2  # P16 that forward has from the updates of resident states, which wait for step()
    for updates in (Updates.FORWARD, Updates.DEADLINE):
        found = predicted(PROFILE, place, updates, wide)
        assert found.read_bytes == pytest.approx(1e8 * (2 * 2 - handed + 0.75 * 8 + 4))
        assert found.write_bytes == pytest.approx(1e8 * (2 + 0.75 * 8 + 4))


def test_frozen_parameters_on_storage_are_read_in_both_passes_of_every_micro_batch() -> None:
    given, twice = replace(GIVEN, frozen_bytes=4e9), replace(PROFILE, accumulation=2)
    half = predicted(twice, replace(PLACE, frozen=0.5), given=given)
    assert half.read_bytes == pytest.approx(1.2e9 + 2 * 2 * 2e9)
    assert half.write_bytes == pytest.approx(1.2e9)
    assert half.lane_secs["host to device"] == pytest.approx(2 * 2 * (4e9 + 0.2e9) / 10e9)
    assert predicted(twice, PLACE, given=given).read_bytes == pytest.approx(1.2e9)


def test_updates_that_are_done_again_cost_what_they_take_twice() -> None:
    slow = replace(PROFILE, forward_secs=0.1, backward_secs=0.2)
    never, sometimes = predicted(slow), predicted(replace(slow, redo_share=0.2))
    again = 0.2 + 1.8  # backward, and then all of the optimizer's work beside forward
    assert sometimes.iteration_secs == pytest.approx(0.8 * never.iteration_secs + 0.2 * again)
    assert run_time(replace(slow, redo_share=0.3), GIVEN).policy.updates is Updates.FORWARD, "the run defers, too"


def test_accumulation_and_swapped_activations_are_counted() -> None:
    found = predicted(replace(PROFILE, accumulation=3), replace(PLACE, swapped_bytes=1e8))
    assert found.lane_secs["compute"] == pytest.approx(12.0)
    assert (found.read_bytes, found.write_bytes) == pytest.approx((1.2e9 + 3e8, 1.2e9 + 3e8))


def test_seconds_hold_where_no_operator_was_recorded() -> None:
    assert predicted(replace(PROFILE, blocks=())).lane_secs["compute"] == pytest.approx(4.0)


def test_of_each_class_the_next_best_home_is_told_with_what_it_costs() -> None:
    slow = replace(PROFILE, forward_secs=0.1, backward_secs=0.2)
    given = replace(GIVEN, dram_budget_bytes=2 * 10**9)
    time = run_time(slow, given)
    plan = built_plan(given, Residency(1.0, 0.0, 1.0), CHUNK_BYTES[0], 0, {})
    rows = {row.name: row for row in class_rows(given, time, PLACE, plan)}
    assert list(rows) == ["P16", "P32 and moments", "G16"]
    states = rows["P32 and moments"]
    assert (states.chosen, states.other, states.bound) == ("on storage", "in host memory", "cpu optimizer")
    assert states.secs == pytest.approx(0.2 + 1.0)
    assert states.lacking_bytes == 0
    tight = replace(given, dram_budget_bytes=10**9)
    (lacking,) = (row for row in class_rows(tight, time, PLACE, plan) if row.name == "P32 and moments")
    assert lacking.lacking_bytes == pytest.approx(1.6e9 - 1e9)
    part = {row.name: row for row in class_rows(given, time, replace(PLACE, states=0.5), plan)}
    assert part["P32 and moments"].chosen == "50 % in host memory"
    assert part["P32 and moments"].secs < 1.8, "of both whole homes the faster one"
    text = "\n".join(class_lines(list(rows.values()), 1.8))
    assert "P32 and moments on storage; in host memory 1.200 s (-0.600), bound by cpu optimizer" in text
    line = profile_line(slow)
    for shown in ("0.1 TFLOP/s", "100 M parameters/s", "2.00 GB/s read, 1.00 write, 1.33 mixed"):
        assert shown in line
    everything = replace(PLACE, states=1.0)
    assert class_rows(given, run_time(replace(slow, storage=None), given), everything, plan) == []


def test_what_lacks_for_another_home_counts_what_passes_through_host_memory() -> None:
    """Pools where anything is on storage, and the arena where activations are swapped; not what they only had because
    nothing else took it.
    """
    given = replace(GIVEN, dram_budget_bytes=10**9, swaps_activations=True)
    time, place = run_time(PROFILE, given), replace(PLACE, grads=0.0, swapped_bytes=1e8)
    residency = Residency(0.5, 0.0, 0.0)
    arena = arena_bytes(given)
    plan = built_plan(given, residency, 2 * MIB, arena, {})
    rows = {row.name: row for row in class_rows(given, time, replace(place, params=0.5), plan)}
    assert plan.staging_bytes + plan.prefetch_bytes + plan.gradient_buffer_bytes > 0.25e9, "all that was left"
    passing = 0.25e9 + arena
    whole = replace(residency, optimizer=1.0)
    assert rows["P32 and moments"].other == "in host memory"
    assert rows["P32 and moments"].lacking_bytes == pytest.approx(resident_bytes(given, whole) + passing - 1e9)
    kept = {row.name: row for row in class_rows(given, time, replace(place, params=0.5, swapped_bytes=0.0), plan)}
    assert rows["P32 and moments"].lacking_bytes - kept["P32 and moments"].lacking_bytes == pytest.approx(arena)


def test_what_cannot_be_is_no_other_home() -> None:
    """Without storage, activations that fit the GPU cannot all leave it while no host memory is for them."""
    found = chosen("6B", 1, on=machine(0, 256))
    assert found.place.swapped_bytes == 0
    assert not any("nan" in line or "inf" in line for line in plan_text(found).splitlines())
