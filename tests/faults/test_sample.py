# SPDX-License-Identifier: Apache-2.0
"""Samples of what `make faults` and `make fuzz` do in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import fuzz
from tests.faults.sweep import EFFECTS, STARTS, can_answer, kind_of, outcomes_of, preload_library

SEED = 0


@pytest.mark.parametrize(
    "engine", ["io_uring", pytest.param("threads", marks=pytest.mark.thorough if can_answer() else ())]
)
def test_a_run_that_an_operation_fails_is_told_of_it_and_can_be_gone_on_from(engine: str, tmp_path: Path) -> None:
    """One operation at random for every fault, in runs that begin, and that go on from what a run left."""
    if engine == "io_uring" and not can_answer():
        pytest.skip("the results of empty io_uring requests can be chosen since Linux 6.10")
    log = tmp_path / "log"
    orders = {"path": str(tmp_path / "runs"), "engines": [engine], "starts": STARTS, "effects": EFFECTS}
    found = list(outcomes_of({**orders, "late_secs": 0.3, "sample": 1, "seed": SEED}, preload_library(tmp_path), log))
    assert [f for f in found if kind_of(f) == "wrong"] == [], log.read_text(errors="replace")[-3000:]
    assert len(found) == len(STARTS) * len(EFFECTS)
    assert sum(bool(f["struck"]) for f in found) >= len(found) - 2, found


def test_hostile_documents_are_read_or_refused_in_one_line() -> None:
    counts, wrong = fuzz.sweep(1500, SEED)
    assert wrong == []
    assert sum(number for (_, verdict), number in counts.items() if verdict == "refused") > 1000
