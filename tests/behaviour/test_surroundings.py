# SPDX-License-Identifier: Apache-2.0
"""Scripts that fork, that save at their end, that train in a process of multiprocessing's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.ports import free_port
from tests.harness.runner import environment

ROOT = Path(__file__).parents[2]


def said(run_python, folder: Path, *arguments: str) -> str:
    folder.mkdir(exist_ok=True)
    script = str(ROOT / "tests/behaviour/surroundings.py")
    done = run_python([script, arguments[0], str(folder), *arguments[1:]], **environment(0, 1, free_port()))
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout + done.stderr


def states_in(folder: Path) -> list[Path]:
    return list(folder.glob("ds_fuyou/*-rank0"))


def test_a_script_may_save_at_its_end(run_python, tmp_path: Path) -> None:
    found = said(run_python, tmp_path / "swap", "saves_at_exit")
    assert "SAVED global_step3 latest" in found
    assert "the optimizer is closed" not in found
    assert not states_in(tmp_path / "swap"), "the end was a clean one"


def test_a_forked_child_has_no_states_and_says_nothing(run_python, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = said(run_python, tmp_path / "swap", "forks")
    for tier in ("nvme", "cpu"):
        assert found.count(f"CHILD {tier} forked forked forked\n") == 3
        assert f"PARENT {tier} True" in found
    assert found.count("mean of steps") == 2, "one a run of the parent's"
    assert not (tmp_path / "swap" / "nvme.json").exists(), "the trace is where it was when the engine was built"
    assert len(json.loads((tmp_path / "nvme.json").read_text())["traceEvents"]) > 10


@pytest.mark.parametrize("kind", ["full", "pipe", "none"])
def test_a_run_that_can_say_nothing_trains(kind: str, run_python, tmp_path: Path) -> None:
    """As in stock."""
    found = said(run_python, tmp_path / "swap", "trains_without_stderr", kind)
    assert "TRAINED 3" in found


@pytest.mark.parametrize("status", ["0", "3"])
def test_a_process_of_multiprocessing_ends_as_a_script_does(status: str, run_python, tmp_path: Path) -> None:
    found = said(run_python, tmp_path / "swap", "trains_in_a_child", status)
    assert f"ENDED {status}" in found
    assert found.count("mean of steps") == 1
    assert bool(states_in(tmp_path / "swap")) == (status == "3"), "after a clean end there is nothing to go on from"
    assert len(json.loads((tmp_path / "swap" / "trace.json").read_text())["traceEvents"]) > 10
