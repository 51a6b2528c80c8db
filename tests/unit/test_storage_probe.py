# SPDX-License-Identifier: Apache-2.0
"""What is said of a path is true, nothing is left in it, and O_DIRECT is claimed only where it works."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
from pathlib import Path

import pytest

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.probe import enable_direct, probe_path
from tests.unit.storage_support import PAGE, all_files


def test_facts_of_a_directory(tmp_path: Path) -> None:
    facts = probe_path(tmp_path)
    device = tmp_path.stat().st_dev
    assert facts.device == f"{os.major(device)}:{os.minor(device)}"
    assert facts.filesystem != "unknown"
    assert 0 < facts.free_bytes <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert all_files(tmp_path) == []


def test_memory_is_told_from_disk() -> None:
    facts = probe_path(Path("/dev/shm"))
    assert (facts.filesystem, facts.is_tmpfs, facts.supports_direct) == ("tmpfs", True, False)


def test_where_no_more_files_can_be_opened_it_says_so(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open("/dev/null", os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 64, before[1]))
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        os.close(opened.pop())  # for the directory
        with pytest.raises(FuyouStorageError, match=r"raise the limit of open files \(ulimit -n\)"):
            probe_path(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in opened:
            os.close(fd)


def test_without_unnamed_files_a_named_one_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, named = os.open, []

    def open_named_only(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        named.append(str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_named_only)
    assert probe_path(tmp_path).filesystem
    assert any(name.startswith(".ds_fuyou-probe-") for name in named)
    assert all_files(tmp_path) == []


def test_a_filesystem_that_takes_the_flag_but_no_transfer_is_not_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, PAGE)
    monkeypatch.setattr(os, "preadv", refuse)
    assert "direct reads of 4096 bytes fail" in enable_direct(fd)
    assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    os.close(fd)


def test_a_filesystem_without_the_flag_is_not_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    facts = probe_path(tmp_path)
    assert not facts.supports_direct
