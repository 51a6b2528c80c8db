# SPDX-License-Identifier: Apache-2.0
"""A save that does not end well: the earlier checkpoint stays whole, and the script hears of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.harness.runner import HERE, differences, ds_config, environment, free_port, run_case, with_fuyou
from tests.parity.cases import block

CASE = {"steps": 2, "model": {}, "config": ds_config()}


def run(what: str, case: dict, directory: Path) -> tuple[int, str]:
    (directory / "swap").mkdir(exist_ok=True)
    file = directory / "case.json"
    file.write_text(json.dumps(with_fuyou(case, block(str(directory / "swap"), "all"))))
    done = subprocess.run(
        [sys.executable, str(HERE / "save_worker.py"), str(file), what, str(directory / "folder")],
        env=environment(0, 1, free_port()),
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stderr


def result(what: str, case: dict, directory: Path) -> dict:
    status, output = run(what, case, directory)
    assert status == 0, output[-4000:]
    found: dict = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
    return found


def test_a_full_disk_costs_neither_the_run_nor_the_earlier_checkpoint(tmp_path: Path) -> None:
    said = result("failures", CASE, tmp_path)
    assert "0.00 GB are free" in said["too small"]
    assert said["too small left"] == []
    assert "No space left on device" in said["full"]
    assert said["full left"] == []
    assert said["latest"] == "best"
    kept = run_case(
        {**with_fuyou(CASE, block(str(tmp_path / "swap"), "all")), "load": str(tmp_path / "folder/saved")},
        tmp_path,
        "kept",
    )
    again = run_case(with_fuyou(CASE, block(str(tmp_path / "swap"), "all")), tmp_path, "again")
    for key in ("losses", "norms", "applied", "scales", "rates"):
        again[0][key] = []
    assert differences(again, kept) == []


def test_a_killed_save_leaves_the_checkpoint_it_was_to_replace(tmp_path: Path) -> None:
    status, output = run("killed", CASE, tmp_path)
    assert status == -signal.SIGKILL, output[-4000:]
    folder = tmp_path / "folder"
    assert (folder / ".incomplete-best").is_dir()
    assert (folder / "latest").read_text() == "best"
    block_ = block(str(tmp_path / "swap"), "all")
    kept = run_case({**with_fuyou(CASE, block_), "load": str(folder), "save": str(folder)}, tmp_path, "kept")
    again = run_case(with_fuyou(CASE, block_), tmp_path, "again")
    for key in ("losses", "norms", "applied", "scales", "rates"):
        again[0][key] = []
    assert differences(again, kept) == []


def test_saving_and_loading_need_no_memory_for_the_model(tmp_path: Path) -> None:
    """12 bytes a parameter are written and read; two chunks of them may be in memory."""
    case = {**CASE, "model": {"num_layers": 12, "width": 640, "vocabulary": 1000}, "zero_init": True}
    found = result("memory", case, tmp_path)
    assert found["numel"] > 10_000_000
    assert found["save"] < 2 * found["numel"], found
    assert found["load"] < 2 * found["numel"], found
