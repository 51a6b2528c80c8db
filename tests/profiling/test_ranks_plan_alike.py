# SPDX-License-Identifier: Apache-2.0
"""Ranks plan together by the slowest one's numbers, and leave memory together when one of them has none left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.forked import finish, start
from tests.harness.ports import free_port
from tests.harness.runner import environment

SCRIPT = Path(__file__).with_name("ranks_script.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[str]]:
    """What both found, and said."""
    directory, port = tmp_path_factory.mktemp("ranks"), free_port()
    processes = []
    for rank in range(2):
        env = {**environment(rank, 2, port), "DS_FUYOU_PROFILES": str(directory / f"profiles{rank}")}
        processes.append(start(SCRIPT, [str(directory)], env, directory / f"log{rank}"))
    finish(processes)
    logs = [(directory / f"log{rank}").read_text(errors="replace") for rank in range(2)]
    assert [process.exitcode for process in processes] == [0, 0], logs[0][-4000:] + logs[1][-4000:]
    lines = [next(line for line in log.splitlines() if line.startswith("RESULT ")) for log in logs]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines], logs


def test_what_was_measured_is_the_slowest_ranks(ranks: tuple[list[dict[str, Any]], list[str]]) -> None:
    first, second = (found["measured"] for found in ranks[0])
    assert first == second
    assert first["storage"]["read"] < 30e6, "rank 1 has 20 MB/s, rank 0 three times as much"


def test_a_disk_of_one_rank_that_became_slower_is_every_ones(ranks: tuple[list[dict[str, Any]], list[str]]) -> None:
    (first, second), logs = ranks
    assert first["anew"] == second["anew"]
    assert {"READS", "WRITES"} & {*second["causes"]}
    sides = ("read", "write")
    assert min(first["anew"]["storage"][side] / first["measured"]["storage"][side] for side in sides) < 0.7
    assert "plan (made anew)" in logs[0]


def test_states_leave_memory_on_all_ranks_when_one_has_none(ranks: tuple[list[dict[str, Any]], list[str]]) -> None:
    (first, second), logs = ranks
    assert first["shares"] == second["shares"]
    assert first["shares"][1] > 0.2
    assert first["shares"][2] == 0.0
    assert first["resident"] == second["resident"] == 0.0
    assert logs[0].count("host memory is scarce") == 1
    assert first["losses"] != []


def test_who_cannot_decide_says_so_to_all(ranks: tuple[list[dict[str, Any]], list[str]]) -> None:
    first, second = ranks[0]
    assert (first["raised"], second["raised"]) == ("ValueError", "FuyouStateError")
    assert len(first["losses"]) == len(second["losses"]) == 30, "training goes on"


def test_a_rank_that_cannot_measure_leaves_all_without_a_plan(ranks: tuple[list[dict[str, Any]], list[str]]) -> None:
    assert [found["unmeasured"] for found in ranks[0]] == [True, True]
