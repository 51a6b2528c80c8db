# SPDX-License-Identifier: Apache-2.0
"""Buffers of DeepSpeed's collectives: those of ended runs can be removed, those of running ones and others' never."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_fuyou.cli import clean, main
from ds_fuyou.storage.shared_memory import SHARED_MEMORY, find_buffers, remove_buffer
from tests.harness.forked import finish, start
from tests.harness.limits import HANG_SECS
from tests.harness.ports import free_port
from tests.harness.runner import HERE, environment

HOLD = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
mapped = mmap.mmap(fd, 4096)
os.close(fd)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def buffer(tmp_path: Path) -> Path:
    path = tmp_path / f"deepspeed_allreduce_buffer_{os.getuid()}_10.0.0.1_29500_0"
    path.write_bytes(b"x" * 8192)
    return path


@pytest.fixture
def holder(buffer: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the buffer mapped, and no descriptor of it."""
    command = [sys.executable, "-c", HOLD, str(buffer)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.communicate(timeout=HANG_SECS)


def test_what_nobody_uses_is_found_and_removed(buffer: Path, tmp_path: Path) -> None:
    (found,) = find_buffers(tmp_path)
    assert (found.path, found.num_bytes, found.in_use) == (buffer, 8192, False)
    assert remove_buffer(found)
    assert remove_buffer(found)  # gone is gone
    assert find_buffers(tmp_path) == []


def test_what_a_process_maps_stays(buffer: Path, holder: subprocess.Popen[str], tmp_path: Path) -> None:
    (found,) = find_buffers(tmp_path)
    assert found.in_use
    assert not remove_buffer(found)
    assert buffer.exists()
    holder.communicate(timeout=HANG_SECS)
    assert not find_buffers(tmp_path)[0].in_use


def test_other_files_are_none_of_ours(tmp_path: Path) -> None:
    names = ["deepspeed_allreduce_buffer_99999_a_1_0", f"deepspeed_allreduce_buffer_{os.getuid()}_a", "torch_12_34"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / f"deepspeed_allreduce_buffer_{os.getuid()}_a_1_1").symlink_to(tmp_path / names[0])
    (tmp_path / f"deepspeed_allreduce_buffer_{os.getuid()}_a_1_2").mkdir()
    assert find_buffers(tmp_path) == []


def test_the_command_offers_and_removes(
    buffer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clean, "find_buffers", lambda: find_buffers(tmp_path))
    assert main(["clean"]) == 2
    assert "name an nvme_path, or --shared-memory (0 MB of /dev/shm in 1 buffers" in capsys.readouterr().err
    assert main(["clean", str(tmp_path)]) == 0
    assert "remove with: fuyou clean --shared-memory" in capsys.readouterr().out
    assert main(["clean", "--shared-memory", "--dry-run"]) == 0
    assert f"{buffer}: 8192 bytes would be removed" in capsys.readouterr().out
    assert buffer.exists()
    assert main(["clean", "--shared-memory"]) == 0
    assert f"{buffer}: 8192 bytes removed" in capsys.readouterr().out
    assert main(["clean", "--shared-memory"]) == 0
    assert "no buffers found" in capsys.readouterr().out


def test_the_command_leaves_what_is_in_use(
    buffer: Path,
    holder: subprocess.Popen[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(clean, "find_buffers", lambda: find_buffers(tmp_path))
    assert main(["clean", "--shared-memory"]) == 0
    assert f"{buffer}: in use by a running process, left alone" in capsys.readouterr().out


@pytest.fixture
def aside() -> Iterator[Path]:
    """A folder in shared memory in which nobody else looks for buffers."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield Path(folder)


def files_of(port: int, pids: set[int | None]) -> set[Path]:
    """By their names; others run beside this test. DeepSpeed's buffers name a port, everybody else's a process."""

    def is_ours(name: str) -> bool:
        if name.startswith("deepspeed_"):
            return f"_{port}_" in name
        return bool({str(pid) for pid in pids} & set(re.findall(r"\d+", name)))

    return {path for path in SHARED_MEMORY.iterdir() if is_ours(path.name)}


@pytest.mark.parametrize(
    "ends",
    [
        *(["nothing"], ["exception"], ["SIGTERM"], ["SIGKILL"]),
        *(["nothing"] * 2, ["exception"] * 2, ["SIGTERM"] * 2, ["SIGKILL", "exception"]),
    ],
    ids="-".join,
)
def test_however_ranks_end_what_they_leave_is_offered_and_goes(
    ends: list[str],
    tmp_path: Path,
    aside: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    port, logs = free_port(), [tmp_path / f"log{rank}" for rank in range(len(ends))]
    local = {"LOCAL_SIZE": str(len(ends))}  # as launchers say it: then DeepSpeed's collectives use shared memory
    processes = [
        start(HERE / "ended_run.py", [str(tmp_path), end], environment(rank, len(ends), port) | local, logs[rank])
        for rank, end in enumerate(ends)
    ]
    finish(processes, HANG_SECS)
    left = files_of(port, {process.pid for process in processes})
    for log, process, end in zip(logs, processes, ends, strict=True):
        said = log.read_text()
        had = [line for line in said.splitlines() if line.startswith("SHARED ")]
        assert had, said[-3000:]
        assert f"_{port}_" in had[0], "it was used"
        assert (process.exitcode == 0) == (end == "nothing"), said[-3000:]
        left |= {Path(path) for path in json.loads(had[0].removeprefix("SHARED ")) if Path(path).exists()}
    assert left
    for path in left:
        path.rename(aside / path.name)
    end = time.monotonic() + HANG_SECS
    while any(buffer.in_use for buffer in find_buffers(aside)) and time.monotonic() < end:
        time.sleep(0.01)  # somebody's ``fuyou doctor`` was looking at it
    monkeypatch.setattr(clean, "find_buffers", lambda: find_buffers(aside))
    assert main(["clean", "--shared-memory"]) == 0
    said = capsys.readouterr().out
    assert said.count("bytes removed") == len(left), said
    assert list(aside.iterdir()) == []
