# SPDX-License-Identifier: Apache-2.0
"""A sample of the crashes of the store alone that `make crash` makes 100,000 of."""

from __future__ import annotations

from tests.durability.store_crashes import sweep


def test_kills_and_power_cuts_leave_a_whole_committed_state() -> None:
    made, wrong = sweep(seed=0, num_kills=60, num_cuts=4000)
    assert wrong == []
    assert made == {"kills": 60, "power cuts": 4000}
