# SPDX-License-Identifier: Apache-2.0
"""Predictions from a measured profile are the closed form's, with this run's bytes and rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_fuyou.planner.policies import Updates
from ds_fuyou.planner.profiled import alternatives, predict, prediction_table, profile_line
from tests.planner.profiles import PLACEMENT, PROFILE


def test_a_device_of_its_own_hides_what_is_shorter() -> None:
    found = predict(PROFILE, PLACEMENT)
    assert found.iteration_secs == pytest.approx(4.0)
    assert found.bound == "compute"
    assert found.lane_secs["compute"] == pytest.approx(4.0)
    assert (found.lane_secs["storage read"], found.lane_secs["storage write"]) == pytest.approx((0.6, 1.2))
    assert (found.read_bytes, found.write_bytes) == pytest.approx((1.2e9, 1.2e9))
    assert found.lane_secs["cpu optimizer"] == pytest.approx(1.0)
    assert found.thread_secs == pytest.approx(4.0)


def test_a_host_that_computes_itself_adds_up_what_its_cores_do() -> None:
    storage = replace(PROFILE.storage, cpu_secs_per_byte=1e-9)
    found = predict(replace(PROFILE, device_is_host=True, storage=storage), PLACEMENT)
    assert found.iteration_secs == pytest.approx(4.0 + 1.0 + 2.4e9 * 1e-9 / 2)
    assert found.thread_secs == pytest.approx(found.iteration_secs)
    assert found.bound == "cores"


def test_when_updates_start_decides_what_they_hide_behind() -> None:
    slow = replace(PROFILE, forward_secs=0.1, backward_secs=0.2)  # 1.8 s of storage bound everything
    secs = {
        updates: predict(slow, replace(PLACEMENT, updates=updates)).iteration_secs
        for updates in (Updates.DEADLINE, Updates.FORWARD, Updates.STEP)
    }
    assert secs[Updates.DEADLINE] == pytest.approx(1.8)
    assert secs[Updates.FORWARD] == pytest.approx(0.2 + 1.8)
    assert secs[Updates.STEP] == pytest.approx(0.1 + 0.2 + 1.8)
    deferred = replace(PLACEMENT, updates=Updates.FORWARD, staging_bytes=0.25 * 1.2e9)
    assert predict(slow, deferred).iteration_secs == pytest.approx(0.75 * 1.8 + 0.25 * 1.8), "both bound by storage"
    long = replace(PROFILE, forward_secs=0.1, backward_secs=1.0)
    assert predict(long, deferred).iteration_secs == pytest.approx(0.75 * 1.8 + 1.0), "backward hides what it takes"
    roomy = predict(long, replace(deferred, staging_bytes=2e9)).iteration_secs
    assert roomy == pytest.approx(1.0 + 1.0, rel=0.1), "no more is moved to backward than it has time for"
    stored = replace(deferred, params=0.0)  # P16: 0.2e9 bytes read in each pass, and written with the states
    forward = (0.1 + 0.75 * 0.6) + (0.2 + 1.2)
    assert predict(long, stored).iteration_secs == pytest.approx(forward + 1.0, rel=0.05), "written before it is read"
    resident = predict(slow, replace(PLACEMENT, states=1.0))
    assert resident.iteration_secs == pytest.approx(0.2 + 1.0), "a resident state waits for step()"


def test_shares_and_widths_are_counted() -> None:
    wide = replace(PLACEMENT, params=0.5, states=0.25, grads=0.0, param_bytes=4, state_bytes=8, grad_bytes=4)
    found = predict(PROFILE, replace(wide, updates=Updates.FORWARD))
    assert found.read_bytes == pytest.approx(1e8 * (2 * 2 + 0.75 * 8 + 4))
    assert found.write_bytes == pytest.approx(1e8 * (2 + 0.75 * 8 + 4))
    deferred = 0.25 * 4  # of gradients, those of resident states, which wait for step()
    assert predict(PROFILE, wide).read_bytes == pytest.approx(1e8 * (2 * 2 + 0.75 * 8 + deferred)), (
        "the rest: not read back"
    )
    assert wide.host_bytes == pytest.approx(1e8 * (2 * 4 * 0.5 + 8 * 0.25))


def test_accumulation_and_swapped_activations_are_counted() -> None:
    found = predict(replace(PROFILE, accumulation=3), replace(PLACEMENT, swapped_bytes=1e8))
    assert found.lane_secs["compute"] == pytest.approx(12.0)
    assert (found.read_bytes, found.write_bytes) == pytest.approx((1.2e9 + 3e8, 1.2e9 + 3e8))


def test_seconds_hold_where_no_operator_was_recorded() -> None:
    assert predict(replace(PROFILE, blocks=()), PLACEMENT).lane_secs["compute"] == pytest.approx(4.0)


def test_alternatives_are_told_with_what_they_cost() -> None:
    slow = replace(PROFILE, forward_secs=0.1, backward_secs=0.2)
    chosen, others = predict(slow, PLACEMENT), alternatives(slow, PLACEMENT)
    assert len(others) == 7
    assert [other.iteration_secs for other in others] == sorted(other.iteration_secs for other in others)
    assert others[0].placement.states == 1.0
    table = prediction_table(chosen, others, budget_bytes=1.5e9)
    assert "chosen  host memory  storage          host memory  0.60 GB" in table
    assert "1.60 GB, too much" in table
    assert "storage write 1.200 s" in table.splitlines()[-1]
    line = profile_line(slow)
    for text in ("0.1 TFLOP/s", "100 M parameters/s", "2.00 GB/s read, 1.00 write, 1.33 mixed"):
        assert text in line
    assert alternatives(replace(slow, storage=None), replace(PLACEMENT, states=1.0)) == []
