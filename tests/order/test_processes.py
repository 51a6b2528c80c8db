# SPDX-License-Identifier: Apache-2.0
"""Children of a training process: workers of data loaders, made while updates are on their way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.cpu_info import python_path
from tests.harness.limits import HANG_SECS
from tests.harness.ports import free_port
from tests.harness.runner import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_data_loaders_get_no_pinned_memory_and_no_files(context: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.order.loaders", str(tmp_path), context],
        cwd=ROOT,
        env={**environment(0, 1, free_port()), "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("FOUND ")).removeprefix("FOUND ")
    )
    assert said["resident"] > 0, "the engine uses it"
    first, second = said["found"][:4], said["found"][4:]
    assert [there["own process"] for there in (*first, *second)] == [False] * 4 + [True] * 4
    assert all(there["stores"] == 1 and there["data files"] == 1 for there in first)
    assert all(there["stores"] == 0 and there["data files"] == 0 for there in second)
    if context == "fork":
        assert [there["resident"] for there in second] == [0] * 4
    assert said["losses"][4:] != said["losses"][:4]
    assert all(loss == loss for loss in said["losses"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "a clean end leaves nothing"
