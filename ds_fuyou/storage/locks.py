# SPDX-License-Identifier: Apache-2.0
"""Locks of files, which vanish with the process that holds them, however it ends.

[Note: a directory that others can open]
Who can open a directory can lock it, and keep it locked for ever. So the lock of one that is not this user's alone (an
administrator made it for several users) is not the directory's: it is one of a file in it that this user made, and
nobody else can open. Its name is drawn at random, so that nobody takes it first. Two processes that find none at once
make one each; so all there are have to be held, taken in the order of their names, and looked for again afterwards:
whoever comes later needs one of those that an earlier one holds.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import time

from ds_fuyou.errors import FuyouStorageError

__all__ = ["lock_directory", "try_lock"]

logger = logging.getLogger("ds_fuyou")

_POLL_SECS = 0.02
_TELL_SECS = 5.0


def try_lock(fd: int, limit_secs: float, what: str) -> bool:
    """Waits for an exclusive flock up to the limit; says what it waits for when that lasts.

    Raises:
        FuyouStorageError: the filesystem has no such locks.
    """
    begin, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited = time.monotonic() - begin
        except OSError as error:
            message = "the filesystem must support flock; name an nvme_path on a local disk"
            raise FuyouStorageError(error.errno or errno.ENOLCK, message, what) from error
        if waited >= limit_secs:
            return False
        if waited >= _TELL_SECS and not told:
            told = True
            logger.info("waiting for the lock of %s, which another process holds", what)
        time.sleep(_POLL_SECS)


def lock_directory(dir_fd: int, limit_secs: float, what: str) -> list[int] | None:
    """The descriptors that hold the lock, ``dir_fd`` or others; None if it stays taken up to the limit. See [Note: a
    directory that others can open].

    Raises:
        FuyouStorageError: the filesystem has no such locks.
        OSError: no file can be made there.
    """
    found = os.fstat(dir_fd)
    if found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
        return [dir_fd] if try_lock(dir_fd, limit_secs, what) else None
    begin = time.monotonic()
    while True:
        names = _own_files(dir_fd)
        if not names:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(f"{_prefix()}{secrets.token_hex(8)}", flags, 0o600, dir_fd=dir_fd))
            continue
        held: list[int] = []
        try:
            for name in names:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                held.append(os.open(name, flags, dir_fd=dir_fd))
                if not try_lock(held[-1], limit_secs - (time.monotonic() - begin), what):
                    return None
            if _own_files(dir_fd) == names:
                taken, held = held, []
                return taken
        finally:
            for fd in held:
                os.close(fd)


def _prefix() -> str:
    return f".lock-{os.geteuid()}-"


def _own_files(dir_fd: int) -> list[str]:
    """Names of those that this user alone can open, in order."""
    found = []
    with os.scandir(dir_fd) as entries:
        for entry in entries:
            if entry.name.startswith(_prefix()):
                status = entry.stat(follow_symlinks=False)
                is_mine = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
                if is_mine and stat.S_ISREG(status.st_mode):
                    found.append(entry.name)
    return sorted(found)
