# SPDX-License-Identifier: Apache-2.0
"""A save that does not end well: the earlier checkpoint stays whole, and the script hears of it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.harness.forked import finish, start
from tests.harness.ports import free_port
from tests.harness.runner import HERE, differences, ds_config, environment, run_case, with_fuyou
from tests.parity.cases import block

CASE = {"steps": 2, "model": {}, "config": ds_config()}


def run(what: str, case: dict, directory: Path) -> list[tuple[int, str]]:
    """Exit status and output of every rank."""
    (directory / "swap").mkdir(exist_ok=True)
    file = directory / "case.json"
    file.write_text(json.dumps(with_fuyou(case, block(str(directory / "swap"), "all"))))
    world_size, port = case.get("world_size", 1), free_port()
    logs = [directory / f"{what}.{rank}.log" for rank in range(world_size)]
    arguments = [str(file), what, str(directory / "folder")]
    processes = [
        start(HERE / "save_worker.py", arguments, environment(rank, world_size, port), log)
        for rank, log in enumerate(logs)
    ]
    finish(processes)
    return [(process.exitcode, log.read_text()) for process, log in zip(processes, logs, strict=True)]


def results(what: str, case: dict, directory: Path) -> list[dict]:
    found = []
    for status, output in run(what, case, directory):
        assert status == 0, output[-4000:]
        found.append(json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{"))))
    return found


def test_a_full_disk_costs_neither_the_run_nor_the_earlier_checkpoint(tmp_path: Path) -> None:
    (said,) = results("failures", CASE, tmp_path)
    assert "0.00 GB are free" in said["too small"]
    assert said["too small left"] == []
    assert "No space left on device" in said["full"]
    assert "writing latest failed (Is a directory)" in said["no latest"]
    assert said["full left"] == []
    assert said["latest"] == "best"
    assert said["within"].startswith("FuyouStateError: save_checkpoint() was called within save_checkpoint()")
    assert said["outer"].startswith("global_step")
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
    ((status, output),) = run("killed", CASE, tmp_path)
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


def test_a_byte_that_changed_on_the_disk_is_not_saved(tmp_path: Path) -> None:
    (said,) = results("flipped", CASE, tmp_path)
    assert "FuyouChecksumError" in said["save"]
    assert "the state of chunk 1" in said["save"]
    assert "not those that were written" in said["save"]
    assert said["left"] == []


def test_saving_and_loading_need_no_memory_for_the_model(tmp_path: Path) -> None:
    """12 bytes a parameter are written and read; two chunks of them may be in memory."""
    case = {**CASE, "model": {"num_layers": 12, "width": 640, "vocabulary": 1000}, "zero_init": True}
    (found,) = results("memory", case, tmp_path)
    assert found["numel"] > 10_000_000
    assert found["save"] < 2 * found["numel"], found
    assert found["load"] < 2 * found["numel"], found


def test_a_rank_that_fails_keeps_the_others_from_publishing(tmp_path: Path) -> None:
    said = results("one_rank", {**CASE, "world_size": 2}, tmp_path)
    assert "rank 0 could not save its part" in said[1]["script"]
    assert "No space left on device" in said[0]["script"]
    assert "rank 1 could not save its part" in said[0]["full"]
    assert "No space left on device" in said[1]["full"]
    assert all("same tag" in each["other tag"] for each in said)
    folder = tmp_path / "folder"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".") == ["second"]
    assert (folder / "latest").read_text() == "second"


def test_before_the_first_step_and_frozen_for_the_time_being(tmp_path: Path) -> None:
    """A stock checkpoint without moments, loaded into a trained engine, starts its bias correction anew. Nothing that
    was read ahead of a load is used after it: parameters leave with their module, so that much is.
    """
    run_case({**CASE, "steps": 0, "save": str(tmp_path / "stock")}, tmp_path, "stock")
    leaving = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    case = {
        **CASE,
        "config": ds_config(zero_optimization=leaving),
        "stock": str(tmp_path / "stock"),
        "before": str(tmp_path / "before"),
    }
    (found,) = results("edges", case, tmp_path)
    assert found == {"frozen": True, "exported": [], "again": []}
    ours = with_fuyou({**CASE, "load": str(tmp_path / "before")}, block(str(tmp_path / "swap"), "states"))
    fresh = with_fuyou(CASE, block(str(tmp_path / "swap"), "states"))
    assert differences(run_case(fresh, tmp_path, "fresh"), run_case(ours, tmp_path, "ours")) == []
