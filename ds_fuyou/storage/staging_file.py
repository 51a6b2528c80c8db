# SPDX-License-Identifier: Apache-2.0
"""An anonymous file for parameters that ``zero.Init`` builds before their final place is known.

It has no name (O_TMPFILE, or unlinked at once), so nothing of it outlives the process, however that ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.host.memory import HostPool
from ds_fuyou.storage.anonymous import open_anonymous
from ds_fuyou.storage.io import IoLane, Transfer
from ds_fuyou.storage.store import Extent

__all__ = ["StagingFile"]

_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2


class StagingFile:
    """Append-only extents of page multiples. ``read`` and ``write`` return when they are complete."""

    def __init__(self, directory: Path, make_io: Callable[[], IoLane]) -> None:
        self._directory = directory
        self._fd = open_anonymous(directory, "stage parameters")
        self._size = 0
        self._pools: list[HostPool] = []
        self._io = make_io()
        # A model that no engine took lets go of its file when it is gone itself.
        self._close = weakref.finalize(self, _closed, self._io, self._fd)

    def reserve(self, num_bytes: int) -> int:
        """Allocates the next ``num_bytes`` on disk; returns their offset."""
        offset = self._size
        try:
            os.posix_fallocate(self._fd, offset, num_bytes)
        except OSError as error:
            facts = os.statvfs(self._directory)
            message = (
                f"staging the parameters needs {num_bytes} more bytes, {facts.f_bavail * facts.f_frsize} are free; "
                "free space or give another nvme_path"
            )
            raise FuyouStorageError(error.errno or errno.ENOSPC, message, str(self._directory), offset) from error
        self._size += num_bytes
        return offset

    def write(self, offset: int, memory: torch.Tensor) -> None:
        self._io.write([Extent(self._fd, offset, memory.numel())], memory, "staging a parameter").wait()

    def read(self, offset: int, memory: torch.Tensor) -> None:
        self.begin_read(offset, memory).wait()

    def begin_read(self, offset: int, memory: torch.Tensor, priority: int = 0) -> Transfer:
        """Starts filling ``memory`` (whole pages); it belongs to the transfer until that has ended."""
        extents = [Extent(self._fd, offset, memory.numel())]
        return self._io.read(extents, memory, "reading a staged parameter", priority)

    def register(self, pool: HostPool) -> None:
        """Announces memory that many reads will go to; it stays mapped until :meth:`close`."""
        self._pools.append(pool)
        self._io.pin(pool)

    def forget(self, offset: int, num_bytes: int) -> None:
        """Gives the blocks back to the filesystem where it can punch holes; elsewhere they stay until close."""
        libc = ctypes.CDLL(None, use_errno=True)
        mode = ctypes.c_int(_FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE)
        libc.fallocate(ctypes.c_int(self._fd), mode, ctypes.c_int64(offset), ctypes.c_int64(num_bytes))

    def close(self) -> None:
        """Waits for what is in flight; the file is gone afterwards. Idempotent."""
        self._close()


def _closed(io: IoLane, fd: int) -> None:
    io.close()
    os.close(fd)
