# SPDX-License-Identifier: Apache-2.0
"""Collectives on the stand-in device lie in the order of streams, and whoever asks for one does not wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.forked import finish, start
from tests.harness.ports import free_port
from tests.harness.runner import environment


@pytest.mark.parametrize("delay", [0.0, 0.003])
def test_they_are_in_the_order_of_streams(delay: float, tmp_path: Path) -> None:
    script, port = Path(__file__).with_name("collectives_script.py"), free_port()
    device = {"STANDIN": json.dumps({"seed": 1, "delay_secs": delay})}
    logs = [tmp_path / f"log{rank}" for rank in range(2)]
    processes = [start(script, [], environment(rank, 2, port) | device, log) for rank, log in enumerate(logs)]
    finish(processes)
    said = [log.read_text() for log in logs]
    assert not any(process.exitcode for process in processes), "\n".join(said)
    found = [json.loads(text.partition("FOUND ")[2].splitlines()[0]) for text in said]
    for rank, each in enumerate(found):
        assert each["host waits"] == 0
        assert not each["completed"]
        assert each["sums"] == [[3.0], [3.0], [1.0, 2.0], [3.0], [2.0]]
        assert each["after"] == [3.0]
        assert each["trips"] == []
        assert rank == 1 or each["before the others have come"] == [1.0]
    assert "a collective has failed" in found[0]["left alone"]
