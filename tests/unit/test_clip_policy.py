# SPDX-License-Identifier: Apache-2.0
"""When updates may start in backward."""

from __future__ import annotations

import pytest

from ds_fuyou.optimizer.clip_policy import ClipPolicy, UpdateStart


def after(policy: str, refused: list[bool], possible: bool = True) -> UpdateStart:
    chosen = ClipPolicy(policy, possible)
    for one in refused:
        chosen.record(one)
    return chosen.choose()


@pytest.mark.parametrize("policy", ["auto", "defer", "speculate"])
def test_without_a_spare_slot_updates_defer(policy: str) -> None:
    assert after(policy, [], possible=False) is UpdateStart.DEFER


def test_a_fixed_policy_does_not_learn() -> None:
    assert after("speculate", [True] * 20) is UpdateStart.SPECULATE
    assert after("defer", [False] * 20) is UpdateStart.DEFER


@pytest.mark.parametrize(
    ("refused", "start"),
    [
        ([], UpdateStart.SPECULATE),
        ([True], UpdateStart.SPECULATE),
        ([True, True], UpdateStart.DEFER),
        ([True, True] + [False] * 6, UpdateStart.SPECULATE),
        ([True, True, True] + [False] * 5, UpdateStart.DEFER),
        ([True] * 8 + [False] * 8, UpdateStart.SPECULATE),
    ],
)
def test_auto_speculates_unless_a_quarter_of_recent_steps_was_refused(refused: list[bool], start: UpdateStart) -> None:
    assert after("auto", refused) is start
