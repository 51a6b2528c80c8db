# SPDX-License-Identifier: Apache-2.0
"""A gap is told when it lasts, once, with its cause and its numbers."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from ds_fuyou.planner.watch import LASTING, Cause, Finding, LaneWatch, StepMeasurement, left_of_storage, slowed
from tests.planner.profiles import PROFILE, predicted

GOOD = StepMeasurement(
    secs=4.0,
    outside_secs=0.0,
    compute_secs=3.9,
    read_secs=0.7,
    write_secs=1.4,
    update_secs=1.2,
    read_bytes=1.2e9,
    write_bytes=1.2e9,
    num_updated=100e6,
    num_elements=200.0,
)


def _watch() -> LaneWatch:
    planned = predicted()
    return LaneWatch(planned, planned.thread_secs, PROFILE.num_elements)


def _steps(watch: LaneWatch, step: StepMeasurement, count: int) -> list[Finding]:
    return [finding for _ in range(count) for finding in watch.step(step)]


def test_a_run_as_planned_says_nothing() -> None:
    assert _steps(_watch(), GOOD, 30) == []


def test_a_gap_must_last_and_is_told_once() -> None:
    watch, slow = _watch(), replace(GOOD, compute_secs=6.0, secs=6.1)
    assert _steps(watch, GOOD, LASTING) == []
    assert _steps(watch, slow, LASTING - 1) == []
    assert _steps(watch, GOOD, 1) == []
    (finding,) = _steps(watch, slow, 3 * LASTING)
    assert finding.cause is Cause.COMPUTE, "that the whole step is longer follows from it"
    assert "6.000 s in 5 steps in a row, planned were 4.000 s (+50 %)" in finding.text
    assert not finding.cause.replans


def test_a_gap_that_stays_takes_no_memory_and_another_watch_over_the_plan_does_not_tell_it_again() -> None:
    watch, slow = _watch(), replace(GOOD, compute_secs=6.0, secs=6.1)
    tracemalloc.start()
    try:
        _steps(watch, slow, 100)
        before = tracemalloc.get_traced_memory()[0]
        _steps(watch, slow, 5000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 50_000
    later = LaneWatch(predicted(), 4.0, PROFILE.num_elements, watch.usual(), told=watch.told)
    assert _steps(later, slow, 3 * LASTING) == []


def test_a_lane_is_measured_against_its_own_first_steps() -> None:
    watch = _watch()
    _steps(watch, GOOD, LASTING)
    (finding,) = _steps(watch, replace(GOOD, write_secs=2.8), 20)
    assert (finding.cause, finding.ratio) == (Cause.WRITES, 0.5)
    assert "0.43 GB/s in 5 steps in a row, until then it was 0.86 GB/s" in finding.text
    assert finding.cause.replans
    later = LaneWatch(predicted(), 4.0, 200, watch.usual())
    assert _steps(later, replace(GOOD, write_secs=2.8), 20) == [], "what was told is what a new plan counts on"
    (finding,) = _steps(later, replace(GOOD, update_secs=2.4, read_secs=0.8), 20)
    assert finding.cause is Cause.UPDATES


def test_another_batch_explains_everything_else() -> None:
    watch = _watch()
    longer = replace(GOOD, num_elements=400.0, compute_secs=8.0, secs=8.0)
    (finding,) = _steps(watch, longer, 2 * LASTING)
    assert finding.cause is Cause.WORKLOAD
    assert "400 elements in 5 steps in a row, the plan was made for 200" in finding.text
    assert _steps(_watch(), replace(GOOD, num_elements=220.0), 20) == []


def test_more_bytes_and_an_unexplained_step_are_told() -> None:
    (finding,) = _steps(_watch(), replace(GOOD, read_bytes=2.4e9, read_secs=1.4), 20)
    assert finding.cause is Cause.BYTES
    assert "3.60 GB a step" in finding.text
    for secs in (6.0, 2.0):
        (finding,) = _steps(_watch(), replace(GOOD, secs=secs), 20)
        assert (finding.cause, finding.measured) == (Cause.STEP, secs)


def test_what_a_script_does_between_steps_is_no_gap_nor_is_a_step_whose_lanes_went_on_meanwhile() -> None:
    """Storage that bounds a step of 4 s may have done some of its work outside, and then it waits for less inside."""
    for inside in (2.0, 4.0, 4.9):
        assert _steps(_watch(), replace(GOOD, secs=inside + 60, outside_secs=60.0), 20) == []
    (finding,) = _steps(_watch(), replace(GOOD, secs=66.0, outside_secs=60.0), 20)
    assert (finding.cause, finding.measured) == (Cause.STEP, 6.0)
    (finding,) = _steps(_watch(), replace(GOOD, secs=2.0, outside_secs=1.0), 20)
    assert (finding.cause, finding.measured) == (Cause.STEP, 2.0)


def test_a_step_that_compiled_when_it_was_measured_is_found_out_but_not_a_shorter_batch() -> None:
    quick = replace(GOOD, compute_secs=1.9, secs=2.0)
    (finding,) = _steps(_watch(), quick, 20)
    assert (finding.cause, finding.expected, finding.measured) == (Cause.LESS_COMPUTE, 4.0, 1.9)
    assert _steps(_watch(), replace(GOOD, compute_secs=2.1), 20) == []
    short = predicted(replace(PROFILE, forward_secs=0.1, backward_secs=0.3))
    noisy = replace(GOOD, compute_secs=0.1, secs=short.iteration_secs)
    assert _steps(LaneWatch(short, 9.0, PROFILE.num_elements), noisy, 20) == [], "nothing compiles that quickly"
    shorter = replace(quick, num_elements=100.0)
    assert [found.cause for found in _steps(_watch(), shorter, 20)] == [Cause.WORKLOAD]


def test_another_batch_is_waited_out_as_long_as_told_and_explains_the_wait() -> None:
    planned = predicted()
    watch = LaneWatch(planned, planned.thread_secs, PROFILE.num_elements, patience={Cause.WORKLOAD: 4 * LASTING})
    longer = replace(GOOD, num_elements=400.0, compute_secs=8.0, secs=8.0)
    assert _steps(watch, longer, 4 * LASTING - 1) == []
    assert _steps(watch, GOOD, 1) == []
    assert _steps(watch, longer, 4 * LASTING - 1) == []
    (finding,) = _steps(watch, longer, 1)
    assert finding.cause is Cause.WORKLOAD
    assert "in 20 steps in a row" in finding.text


def test_batches_of_no_known_size_are_not_compared() -> None:
    planned = predicted()
    assert _steps(LaneWatch(planned, planned.thread_secs, 0), GOOD, 2 * LASTING) == []
    assert _steps(_watch(), replace(GOOD, num_elements=0.0), 2 * LASTING) == []


def test_storage_that_was_found_slower_is_found_faster_again_when_that_lasts() -> None:
    planned, usual = predicted(), {Cause.READS: 1e9, Cause.WRITES: 0.43e9}
    fast = replace(GOOD, read_secs=0.7, write_secs=1.4)  # twice as fast, both
    assert _steps(LaneWatch(planned, 4.0, 200, usual), fast, 30) == [], "what was not planned for is nobody's gain"
    patience = {Cause.WRITES_AGAIN: 2 * LASTING}
    watch = LaneWatch(planned, 4.0, 200, usual, patience, slowed=[Cause.WRITES])
    assert _steps(watch, fast, 2 * LASTING - 1) == []
    assert _steps(watch, replace(GOOD, write_secs=2.8), 1) == [], "throttled by turns"
    assert _steps(watch, fast, 2 * LASTING - 1) == []
    (finding,) = _steps(watch, fast, 1)
    assert (finding.cause, finding.ratio) == (Cause.WRITES_AGAIN, pytest.approx(2, rel=0.01))
    assert finding.cause.replans
    assert "0.86 GB/s in 10 steps in a row, until then it was 0.43 GB/s" in finding.text
    assert watch.usual()[Cause.WRITES] == finding.measured


def test_a_disk_that_is_slower_both_ways_is_slower_once_where_both_mix() -> None:
    rates = PROFILE.storage
    assert rates is not None
    left = left_of_storage({}, [Finding(Cause.READS, 2e9, 1e9, ""), Finding(Cause.COMPUTE, 1.0, 0.5, "")])
    left = left_of_storage(left, [Finding(Cause.WRITES, 1e9, 0.5e9, "")])
    slower = slowed(rates, left)
    assert (slower.read, slower.write) == (rates.read / 2, rates.write / 2)
    assert slower.mixed == pytest.approx(rates.mixed / 2)
    assert slowed(rates, {}) == rates


def test_a_disk_that_is_faster_again_is_as_it_was_measured_at_most() -> None:
    again = [Finding(cause, 1e9, 9e9, "") for cause in (Cause.READS_AGAIN, Cause.WRITES_AGAIN)]
    assert left_of_storage({Cause.READS: 0.5, Cause.WRITES: 0.1}, again) == {Cause.READS: 1.0, Cause.WRITES: 0.9}
