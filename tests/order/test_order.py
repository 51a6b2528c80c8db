# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom, how failures of a worker reach the script, and how a run ends."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import forked
from tests.harness.cpu_info import python_path
from tests.harness.limits import HANG_SECS
from tests.harness.ports import free_port
from tests.harness.runner import environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def start(name: str, swap: Path, tiers: str) -> subprocess.Popen[str]:
    swap.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "tests.order.scenarios", name, str(swap), tiers],
        cwd=ROOT,
        env={**environment(0, 1, free_port()), "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=HANG_SECS)
    finally:
        process.kill()


def run(name: str, swap: Path, tiers: str) -> dict[str, Any]:
    """What a scenario found: how its interpreter ends does not matter, so it is forked."""
    swap.mkdir()
    log = swap.with_name("log")
    process = forked.start(HERE / "scenarios.py", [name, str(swap), tiers], environment(0, 1, free_port()), log)
    forked.finish([process])
    said = log.read_text(errors="replace")
    assert process.exitcode == 0, said[-4000:]
    line = next(line for line in said.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


def files(swap: Path) -> list[str]:
    return [str(path) for path in swap.glob("**/*") if path.is_file()]


@pytest.mark.parametrize("tiers", ["states", "all"])
def test_only_the_module_that_owns_a_late_chunk_waits(tiers: str, tmp_path: Path) -> None:
    found = run("late_chunk", tmp_path / "swap", tiers)
    assert found == {"step": False, "first block": False, "head": True}
    assert files(tmp_path / "swap") == []


@pytest.mark.parametrize(("name", "number"), [("read_error", errno.EIO), ("write_error", errno.ENOSPC)])
@pytest.mark.parametrize("tiers", ["states", "all"])
def test_a_failed_transfer_is_an_exception_by_the_next_step(name: str, number: int, tiers: str, tmp_path: Path) -> None:
    found = run(name, tmp_path / "swap", tiers)
    assert found["step"] in (0, 1)
    assert found["errno"] == number
    assert found["path"].startswith(str(tmp_path / "swap"))
    assert found["offset"] >= 0
    left = {Path(file).name for file in files(tmp_path / "swap")}
    assert not left or "commit.json" in left, "what was committed stays, and nothing else"


def test_a_failed_commit_is_an_exception_by_the_next_step(tmp_path: Path) -> None:
    found = run("no_commit", tmp_path / "swap", "states")
    assert found["step"] in (0, 1)
    assert found["errno"] == errno.EROFS
    assert "commit" in found["what"]


def test_short_transfers_are_completed(tmp_path: Path) -> None:
    assert run("short", tmp_path / "swap", "all") == {"generation": 3}


def test_an_exception_of_the_script_ends_the_run_and_keeps_what_was_committed(tmp_path: Path) -> None:
    process = start("script_fails", tmp_path / "swap", "all")
    _, err = finish(process)
    assert process.returncode == 1
    assert "ZeroDivisionError: a mistake of the script" in err
    assert "fuyou recover" in err.splitlines()[-1]
    assert files(tmp_path / "swap") != []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_and_keeps_what_was_committed(number: signal.Signals, tmp_path: Path) -> None:
    process = start("forever", tmp_path / "swap", "all")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("FOUND"):
            break
    assert files(tmp_path / "swap") != []
    process.send_signal(number)
    finish(process)
    assert process.returncode != 0
    assert files(tmp_path / "swap") != []
