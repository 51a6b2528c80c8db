# SPDX-License-Identifier: Apache-2.0
"""``checkpoint.save: background``: what is saved is what was there at the call, and whatever follows is defined."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds_fuyou.cli import main
from ds_fuyou.zero.saving.checkpoint_engine import CopiedScripts
from tests.harness.forked import finish, start
from tests.harness.limits import HANG_SECS
from tests.harness.ports import free_port
from tests.harness.runner import HERE, ds_config, environment, with_fuyou
from tests.parity.cases import block

CASE = {"steps": 2, "model": {}, "config": ds_config(gradient_clipping=0.8)}


def written_case(
    what: str, directory: Path, tiers: str = "all", slots: int = 2, durable: bool = False, **more: object
) -> Path:
    (directory / "swap").mkdir(exist_ok=True)
    given = {**block(str(directory / "swap"), tiers, slots=slots), "checkpoint": {"save": "background"}}
    given |= {"durable": True} if durable else {}
    case = with_fuyou({**CASE, **more}, given)
    file = directory / f"{what}.json"
    file.write_text(json.dumps(case))
    return file


def run(what: str, directory: Path, **more) -> list[tuple[int, str]]:  # type: ignore[no-untyped-def]
    """Exit status and output of every rank."""
    file = written_case(what, directory, **more)
    world_size, port = more.get("world_size", 1), free_port()
    logs = [directory / f"{what}.{rank}.log" for rank in range(world_size)]
    arguments = [str(file), what, str(directory / "folder")]
    processes = [
        start(HERE / "background_worker.py", arguments, environment(rank, world_size, port), log)
        for rank, log in enumerate(logs)
    ]
    finish(processes)
    return [(process.exitcode, log.read_text()) for process, log in zip(processes, logs, strict=True)]


def results(what: str, directory: Path, **more) -> list[dict]:  # type: ignore[no-untyped-def]
    found = []
    for status, output in run(what, directory, **more):
        assert status == 0, output[-4000:]
        found.append(json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{"))))
    return found


@pytest.mark.parametrize(
    ("tiers", "slots", "free_steps", "world_size"),
    [
        ("all", 2, 1, 1),  # with two slots one step is made before anything is written
        ("states", 2, 1, 2),
        ("half", 2, 0, 1),
        ("none", 2, 0, 2),
        ("twice", 2, 0, 2),
        ("most_twice", 2, 0, 1),
        ("grads_cpu", 1, 0, 1),
        ("all", 3, 4, 1),  # with three all of them
        ("states", 3, 4, 2),
        ("half", 3, 0, 2),
    ],
)
def test_what_is_saved_is_what_was_there(
    tiers: str, slots: int, free_steps: int, world_size: int, tmp_path: Path
) -> None:
    given = {"tiers": tiers, "slots": slots, "world_size": world_size, "free_steps": free_steps}
    found = results("exact", tmp_path, **given)
    undisturbed = results("exact", tmp_path, undisturbed=True, **given)
    for each, alone in zip(found, undisturbed, strict=True):
        assert each["before"] == [[".incomplete-behind", "waited"], "waited"]
        assert each["in_use"] == ["in use by a running process, left alone"]
        assert each["after"] == [["behind", "waited"], "behind"]
        assert each["same"]
        assert each["scripts stay"]
        assert each["digest"] == alone["digest"]


def test_scripts_beside_checkpoints_are_copied_once_and_when_somebody_has_changed_them(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text("its own")
    (tmp_path / "second.py").write_text("older than that")
    calls = []

    def copy(target: str) -> None:
        calls.append(target)
        for name in ("first.py", "second.py"):
            Path(target, name).write_text("newer")

    scripts = CopiedScripts()
    for _ in range(3):
        scripts.copy(copy, tmp_path)
        assert {file.name: file.read_text() for file in tmp_path.glob("*.py")} == {
            "users.py": "its own",
            "first.py": "newer",
            "second.py": "newer",
        }
    assert len(calls) == 1
    (tmp_path / "users.py").write_text("is no business of ours")
    scripts.copy(copy, tmp_path)
    assert len(calls) == 1
    (tmp_path / "first.py").unlink()
    scripts.copy(copy, tmp_path)
    assert len(calls) == 2
    (tmp_path / "second.py").write_text("edited")
    scripts.copy(copy, tmp_path)
    assert len(calls) == 3
    other = tmp_path / "other"
    other.mkdir()
    scripts.copy(copy, other)
    assert len(calls) == 4


@pytest.mark.parametrize(("tiers", "world_size"), [("all", 1), ("all", 2), ("states", 2)])
def test_frozen_parameters_are_written_behind_the_call(tiers: str, world_size: int, tmp_path: Path) -> None:
    model = {"frozen": ["blocks.0.down", "blocks.0.up"]}
    for found in results("frozen", tmp_path, tiers=tiers, model=model, world_size=world_size):
        assert found["called"] < found["frozen"]
        assert found["waited"], "the edit came before all was copied"
        assert found["edited"]
        assert found["same"]


@pytest.mark.parametrize(("tiers", "world_size"), [("all", 1), ("half", 2), ("most_twice", 1)])
def test_whatever_follows_leaves_it_what_it_was(tiers: str, world_size: int, tmp_path: Path) -> None:
    found = results("followed", tmp_path, tiers=tiers, world_size=world_size, two_steps=str(tmp_path / "two_steps"))
    tags = ("again", "asleep", "edited", "evaluated", "loaded", "saved", "set")
    assert found == [dict.fromkeys(tags, True)] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_engine_that_is_destroyed_finishes_it(world_size: int, tmp_path: Path) -> None:
    results("destroyed", tmp_path, world_size=world_size)
    assert [path.name for path in (tmp_path / "folder").iterdir() if path.is_dir()] == ["last"]
    assert (tmp_path / "folder" / "latest").read_text() == "last"


def test_a_process_that_ends_by_an_exception_finishes_it(tmp_path: Path) -> None:
    ((found, output),) = run("excepted", tmp_path)
    assert found == 1, output[-4000:]
    assert (tmp_path / "folder" / "latest").read_text() == "last"
    assert (tmp_path / "folder" / "last").is_dir()


def ended(what: str, directory: Path, **more: object) -> subprocess.CompletedProcess[str]:
    """An interpreter of its own: threads end in another order there."""
    script = [sys.executable, HERE / "background_worker.py", written_case(what, directory, **more)]
    return subprocess.run(
        [*script, what, directory / "folder"],
        env=environment(0, 1, free_port()),
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
        check=False,
    )


@pytest.mark.parametrize(("what", "status"), [("left", 0), ("preempted", 0), ("excepted", 1)])
def test_an_interpreter_that_ends_finishes_it(what: str, status: int, tmp_path: Path) -> None:
    process = ended(what, tmp_path)
    assert process.returncode == status, process.stderr[-4000:]
    assert (tmp_path / "folder" / "latest").read_text() == "last"
    assert [path.name for path in (tmp_path / "folder").iterdir() if path.is_dir()] == ["last"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_an_interpreter_that_a_signal_ends_gives_it_up(number: int, status: int, tmp_path: Path) -> None:
    process = ended("signalled", tmp_path, signal=number)
    assert process.returncode == status, process.stderr[-4000:]
    assert "folder/last was given up: a signal ended the process" in process.stderr
    assert "the state of the last step stays in" in process.stderr
    assert [path.name for path in (tmp_path / "folder").iterdir() if path.is_dir()] == [".incomplete-last"]
    assert not (tmp_path / "folder" / "latest").exists()


def test_a_killed_process_leaves_no_folder_and_clean_or_the_next_save_clears_what_it_left(tmp_path: Path) -> None:
    ((status, output),) = run("killed", tmp_path)
    assert status == -signal.SIGKILL, output[-4000:]
    folder = tmp_path / "folder"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [".incomplete-second", "first"]
    assert (folder / "latest").read_text() == "first"
    shutil.copytree(folder, tmp_path / "copy")
    assert main(["clean", str(tmp_path / "copy")]) == 0
    assert [path.name for path in (tmp_path / "copy").iterdir() if path.is_dir()] == ["first"]
    (found,) = results("interrupted", tmp_path)
    assert found == {"said": "KeyboardInterrupt", "there": [".incomplete-first", "first", "second"]}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_disk_that_fills_up_meanwhile_is_told_by_the_next_step(world_size: int, tmp_path: Path) -> None:
    *others, failed = results("failing", tmp_path, world_size=world_size)
    assert "FuyouStorageError: writing a checkpoint failed (No space left on device)" in failed["step"]
    assert f"zero_pp_rank_{world_size - 1}_mp_rank_00_optim_states.pt at byte" in failed["step"]
    assert all(each["step"] == "nothing" for each in others)
    assert not any(f"rank_{world_size - 1}_" in name for name in failed["hidden"]), "they would fill the disk"
    for each in (*others, failed):
        assert each["told once"] == each["wait"] == "nothing"
        assert "Input/output error" in each["joined"]
        assert "Input/output error" in each["asked"], "it is not there, whoever was told by a step"
        assert each["latest"] == "second"
        assert each["there"] == ["second"], "what the others have written would fill the disk, too"
        assert each["digest"] == failed["digest"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_memory_or_a_thread_for_it_a_save_fails_on_all_ranks_and_nothing_waits(
    world_size: int, tmp_path: Path
) -> None:
    every = results("refused", tmp_path, world_size=world_size)
    for said in every:
        assert "bytes of host memory must be mapped" in said["aligned_tensor"]
        assert "the system refuses another thread" in said["start"]
        assert said["there"] == ["third"]
        assert said["digest"] == every[0]["digest"]


def test_a_byte_that_changed_on_the_disk_is_not_saved(tmp_path: Path) -> None:
    (said,) = results("flipped", tmp_path)
    assert "FuyouChecksumError" in said["wait"]
    assert "the state of chunk 1" in said["wait"]
    assert said["there"] == []


def test_where_ranks_save_into_folders_of_their_own_the_call_waits(tmp_path: Path) -> None:
    assert results("apart", tmp_path, world_size=2) == [{"there": ["first"]}] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tag_that_another_process_writes_to_is_refused(world_size: int, tmp_path: Path) -> None:
    first, *others = results("in_use", tmp_path, world_size=world_size)
    assert "another process writes a checkpoint there" in first["refused"]
    assert all("rank 0 could not save its part of a checkpoint: another process" in each["refused"] for each in others)
    for each in (first, *others):
        assert each["theirs"] == [".writing", "theirs"]
        assert all("another one is there" in each[what] for what in ("replaced", "moved"))
        assert not {"second", "third"} & {*each["there"]}
        assert each["latest"] == "first"


def test_a_machine_that_sees_names_late_does_not_publish_again(tmp_path: Path) -> None:
    said = results("late_names", tmp_path, world_size=2)
    assert said == [{"said": "nothing", "there": ["first"], "latest": "first"}] * 2


def test_what_one_rank_meets_before_it_writes_is_raised_by_all(tmp_path: Path) -> None:
    one, other = results("between", tmp_path, world_size=2)
    assert "rank 1 could not save its part of a checkpoint" in one["space"]
    assert "rank 0 could not save its part of a checkpoint" in other["folder"]
    assert all("Input/output error" in each[what] for each in (one, other) for what in ("space", "folder"))
    assert one["there"] == other["there"] == ["first"]
