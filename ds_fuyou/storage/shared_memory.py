# SPDX-License-Identifier: Apache-2.0
"""What runs that ended left in shared memory: the buffers of DeepSpeed's collectives on the CPU.

Each rank makes one file of 69 MB, named by user, address, port and rank (``csrc/cpu/comm/shm.cpp``), and nobody ever
removes it. This package itself puts nothing there.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SHARED_MEMORY", "SharedBuffer", "find_buffers", "remove_buffer"]

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"deepspeed_allreduce_buffer_(\d+)_.+_\d+_\d+")


@dataclass(frozen=True)
class SharedBuffer:
    """A buffer of this user. ``in_use``: some process, of whatever container, has it open or mapped."""

    path: Path
    num_bytes: int
    in_use: bool


def find_buffers(folder: Path = SHARED_MEMORY) -> list[SharedBuffer]:
    """Those of this user, by name; no links."""
    found = []
    for path in sorted(folder.glob("deepspeed_allreduce_buffer_*")):
        match = _NAME.fullmatch(path.name)
        try:
            with _opened(path) as fd:
                status = os.fstat(fd)
                mine = match is not None and int(match[1]) == os.getuid() and status.st_uid == os.geteuid()
                if mine:
                    found.append(SharedBuffer(path, status.st_blocks * 512, not _is_mine_alone(fd)))
        except OSError:  # gone, a link, or of somebody else
            continue
    return found


def remove_buffer(buffer: SharedBuffer) -> bool:
    """Whether it is gone: not while a process uses it, asked again at the last moment.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        with _opened(buffer.path) as fd:
            if not _is_mine_alone(fd):
                return False
            # Whoever opens it from here on waits until the lease ends, and then finds it without a name.
            os.unlink(buffer.path)
    except FileNotFoundError:
        return True
    return True


def _is_mine_alone(fd: int) -> bool:
    """Whether nobody else has the file open or mapped: the kernel gives a lease for writing then alone."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK
    except OSError:
        return False


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Who wants the file while it is leased has a signal sent to this process, which would end it."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)
        signal.signal(signal.SIGIO, before)
