# SPDX-License-Identifier: Apache-2.0
"""Buffers of DeepSpeed's collectives: those of ended runs can be removed, those of running ones and others' never."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_fuyou.cli import clean, main
from ds_fuyou.storage.shared_memory import SHARED_MEMORY, find_buffers, remove_buffer
from tests.harness.limits import HANG_SECS
from tests.harness.ports import free_port
from tests.harness.runner import ds_config, run_case, with_fuyou

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


def test_what_a_run_leaves_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr("tests.harness.runner.free_port", lambda: port)
    monkeypatch.setenv("LOCAL_SIZE", "1")  # as launchers say it: then DeepSpeed's collectives use shared memory
    before = set(SHARED_MEMORY.iterdir())
    case = {"model": {}, "steps": 2, "config": ds_config()}
    run_case(with_fuyou(case, {"nvme_path": str(tmp_path)}), tmp_path / "run", "leaves")
    new = set(SHARED_MEMORY.iterdir()) - before
    left = {path.name: path for path in new if f"_{port}_" in path.name}
    found = {item.path.name: item for item in find_buffers() if f"_{port}_" in item.path.name}
    assert left
    assert found.keys() == left.keys()
    assert not any(item.in_use for item in found.values())
    assert not [path for path in new if "fuyou" in path.name]  # others run beside this test
