# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints that are being written, and those that a killed save left.

While ranks write into a hidden folder each holds a shared lock on a file in it, which goes when the folder has its
name. So a folder with such a file that nobody locks was left by a save that did not end. The file says which save made
it: of two that begin at once only one makes it, and the other one is refused. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_fuyou.checkpoint import atomic
from ds_fuyou.checkpoint.atomic import LOCK_NAME
from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.locks import try_lock
from ds_fuyou.storage.probe import LOCAL_FILESYSTEMS, filesystem_type

__all__ = ["IN_USE", "Unfinished", "WritingLock", "discard_left", "find_unfinished", "remove_unfinished"]

IN_USE = "another process writes a checkpoint there; wait for its end, or save to another tag or folder"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_PATIENCE_SECS = 2.0
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)

_held: weakref.WeakSet[WritingLock] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked child (a data loader's worker): one that outlives the run does not hold its locks."""
    for lock in [*_held]:
        lock.close()


os.register_at_fork(after_in_child=_let_go)


class WritingLock:
    """Says that this process writes into ``folder``, which is made, as long as the object is there.

    The file says who made it: ``says``, if this did.
    """

    def __init__(self, folder: Path, says: str = "", *, is_first: bool = False) -> None:
        """``is_first``: somebody else's file is an error.

        Raises:
            OSError: the folder or the file cannot be made; FileExistsError if ``is_first`` and another one is there.
        """
        self._file = file = folder / LOCK_NAME
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            self.is_new = True
            """This made the file."""
            try:
                try:
                    self._fd = fd = os.open(file, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
                except FileExistsError:
                    if is_first:
                        raise
                    self._fd = fd = os.open(file, _FLAGS)
                    self.is_new = False
            except FileNotFoundError:  # somebody has just removed the folder
                continue
            self.close = weakref.finalize(self, os.close, fd)
            self.close.atexit = False  # a checkpoint may yet be written then
            """Lets go of the lock, or, in a forked child, leaves it to its parent. Idempotent."""
            with contextlib.suppress(FileNotFoundError):
                if _lock(fd, fcntl.LOCK_SH) and os.path.samestat(os.fstat(fd), os.stat(file)):
                    break
            self.close()
        _held.add(self)
        if self.is_new and says:
            try:
                os.write(fd, says.encode())
                os.fsync(fd)  # other machines read it
            except OSError:
                atomic.discard(folder)
                self.close()
                raise

    def is_in_place(self) -> bool:
        """Nobody has put another folder there meanwhile."""
        try:
            return self.close.alive and os.path.samestat(os.fstat(self._fd), os.stat(self._file))
        except OSError:
            return False

    def maker(self) -> str:
        """What the file says. Raises OSError if it cannot be read."""
        return os.pread(self._fd, 4096, 0).decode(errors="replace")

    def release(self) -> None:
        """This process writes there no more. So, too, where a child that is about to start another program still has
        the descriptor."""
        if self.close.alive:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.close()


def discard_left(folder: Path) -> None:
    """Clears what a save that was cut short left of ``folder``, if it is there.

    Raises:
        FuyouStorageError: another process writes into it.
        OSError: its lock cannot be opened.
    """
    while True:
        try:
            fd = os.open(folder / LOCK_NAME, _FLAGS)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ESTALE):  # there is one, and it is no link
                raise
            atomic.discard(folder)
            return
        try:
            if not _is_free(fd, os.fspath(folder)):
                raise FuyouStorageError(errno.EBUSY, IN_USE, os.fspath(folder))
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.lstat(folder / LOCK_NAME)):
                    atomic.discard(folder)
                    return
        finally:
            os.close(fd)


def _is_free(fd: int, what: str) -> bool:
    """Waits a moment for who looks at it only, or clears it, too."""
    try:
        return try_lock(fd, _PATIENCE_SECS, what)
    except FuyouStorageError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return True


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
            if atomic.is_incomplete(hidden.name) and _is_ours(hidden):
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
            atomic.remove_hidden(folder.path)
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
            if filesystem_type(file.fileno()) not in LOCAL_FILESYSTEMS:
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
