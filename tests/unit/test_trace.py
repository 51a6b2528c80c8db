# SPDX-License-Identifier: Apache-2.0
"""The recorded order predicts, and a changed order is followed."""

from __future__ import annotations

import pytest

from ds_fuyou.parameters.trace import AccessTrace


def recorded(*items: int) -> AccessTrace:
    trace = AccessTrace()
    for item in items:
        trace.use(item)
    trace.end_step()
    return trace


def test_nothing_is_predicted_before_the_first_step_has_ended() -> None:
    trace = AccessTrace()
    trace.use(1)
    assert list(trace.upcoming()) == []


def test_what_follows_in_the_last_step_comes_next() -> None:
    trace = recorded(1, 2, 3, 3, 2, 1)
    assert list(trace.upcoming()) == [1, 2, 3, 3, 2, 1]
    trace.use(1)
    trace.use(2)
    assert list(trace.upcoming()) == [3, 3, 2, 1, 1, 2]


def test_a_skipped_layer_moves_the_prediction_on() -> None:
    trace = recorded(1, 2, 3, 4)
    trace.use(1)
    trace.use(3)
    assert next(trace.upcoming()) == 4


def test_an_evaluation_in_between_starts_again() -> None:
    trace = recorded(1, 2, 3)
    for item in (1, 2, 3, 1):
        trace.use(item)
    assert next(trace.upcoming()) == 2


def test_an_unknown_item_leaves_the_prediction() -> None:
    trace = recorded(1, 2)
    trace.use(99)
    assert list(trace.upcoming()) == [1, 2]


def test_a_step_without_use_keeps_the_order() -> None:
    trace = recorded(1, 2)
    trace.end_step()
    assert list(trace.upcoming()) == [1, 2]


def test_first_uses_are_the_forward_order() -> None:
    assert recorded(5, 3, 5, 4, 3).first_uses() == [5, 3, 4]


def test_serving_without_steps_is_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_fuyou.parameters.trace.LONGEST_TRACE", 6)
    assert list(recorded(*[9] * 10, 1, 2, 3, 3, 2, 1).upcoming()) == [1, 2, 3, 3, 2, 1]
