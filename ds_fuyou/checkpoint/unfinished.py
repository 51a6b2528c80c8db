# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints that are being written, and those that a killed save left.

While ranks write into a hidden folder each holds a shared lock on a file in it, which goes when the folder gets its
name. So a folder with such a file that nobody locks was left by a save that did not end. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_fuyou.checkpoint.atomic import is_incomplete
from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.probe import NETWORK_FILESYSTEMS, filesystem_type

__all__ = ["LOCK_NAME", "Unfinished", "WritingLock", "find_unfinished", "remove_unfinished"]

LOCK_NAME = ".writing"
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)


class WritingLock:
    """Says that this process writes into ``folder``, which is made, as long as the object is there."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError if the folder or the file cannot be made."""
        self._file = file = folder / LOCK_NAME
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # somebody has just removed the folder
                continue
            release = weakref.finalize(self, os.close, fd)
            with contextlib.suppress(FileNotFoundError):
                if _lock(fd, fcntl.LOCK_SH) and os.path.samestat(os.fstat(fd), os.stat(file)):
                    return
            release()

    def end(self) -> None:
        """Nobody writes there any more: the folder is about to get its name."""
        self._file.unlink()


@dataclass(frozen=True)
class Unfinished:
    """A hidden folder of this user. ``why_not``: why it must stay; empty if it may go."""

    path: Path
    num_bytes: int
    why_not: str


def find_unfinished(path: Path) -> list[Unfinished]:
    """In a folder of checkpoints, or one level below it, where tools keep one checkpoint a folder."""
    found = []
    for folder in (path, *_folders(path)):
        for hidden in _folders(folder):
            if is_incomplete(hidden.name) and _is_ours(hidden):
                found.append(Unfinished(hidden, _allocated_bytes(hidden), _why_not(hidden)))
    return found


def remove_unfinished(folder: Unfinished) -> bool:
    """False if somebody writes into it now.

    Raises:
        FuyouStorageError: it cannot be removed.
    """
    try:
        with open(folder.path / LOCK_NAME, "rb") as file:
            if not _lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
                return False
            if not os.path.samestat(os.fstat(file.fileno()), os.lstat(folder.path / LOCK_NAME)):
                return False  # removed and made anew since it was opened
            shutil.rmtree(folder.path)
    except FileNotFoundError:
        pass
    except OSError as error:
        message = "removing what a save left failed"
        raise FuyouStorageError(error.errno or errno.EIO, message, error.filename or os.fspath(folder.path)) from error
    return True


def _lock(fd: int, how: int) -> bool:
    """False if another process has it. Where there are no locks, everybody does."""
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _folders(path: Path) -> Iterator[Path]:
    """None where it cannot be read; links are not followed."""
    try:
        with os.scandir(path) as entries:
            yield from sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return


def _is_ours(folder: Path) -> bool:
    try:
        lock = os.lstat(folder / LOCK_NAME)
        return stat.S_ISREG(lock.st_mode) and lock.st_uid == os.lstat(folder).st_uid == os.geteuid()
    except OSError:
        return False


def _why_not(folder: Path) -> str:
    try:
        with open(folder / LOCK_NAME, "rb") as file:
            if filesystem_type(file.fileno()) in NETWORK_FILESYSTEMS:
                return "another machine may write into it, left alone; remove it by hand"
            is_free = _lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # it has just got its name, or somebody else removes it
        return "in use by a running process, left alone"
    return "" if is_free else "in use by a running process, left alone"


def _allocated_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total
