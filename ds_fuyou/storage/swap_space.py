# SPDX-License-Identifier: Apache-2.0
"""Storage for swapped activations: one anonymous file in every path, handed out in pieces that return by themselves.

The files have no name (or lose it at once), so nothing of them outlives the process, however that ends.
"""

from __future__ import annotations

import bisect
import errno
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.anonymous import open_anonymous
from ds_fuyou.storage.types import PAGE_BYTES, Extent

__all__ = ["GROWTH_BYTES", "Lease", "SwapSpace"]

GROWTH_BYTES = 64 * 1024 * 1024
"""Files grow by at least this much, fully allocated, so that a write never meets a full disk half-way."""


class Lease:
    """A run of bytes of one file. It returns to the space when the last reference is gone, in whatever thread."""

    def __init__(self, space: SwapSpace, path: int, extent: Extent) -> None:
        self._space, self._path, self.extent = space, path, extent

    def __del__(self) -> None:
        self._space._returned.append((self._path, self.extent))


class _FreeRuns:
    """The free runs of one file, sorted, neighbours joined."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._sizes: dict[int, int] = {}

    def take(self, num_bytes: int) -> int | None:
        """The lowest run that is large enough: what is used again and again stays at the front of the file."""
        for place, begin in enumerate(self._begins):
            size = self._sizes[begin]
            if size >= num_bytes:
                del self._begins[place], self._sizes[begin]
                if size > num_bytes:
                    self.give(begin + num_bytes, size - num_bytes)
                return begin
        return None

    def give(self, begin: int, num_bytes: int) -> None:
        place = bisect.bisect_left(self._begins, begin)
        if place < len(self._begins) and self._begins[place] == begin + num_bytes:
            num_bytes += self._sizes.pop(self._begins.pop(place))
        if place > 0:
            before = self._begins[place - 1]
            if before + self._sizes[before] == begin:
                self._sizes[before] += num_bytes
                return
        self._begins.insert(place, begin)
        self._sizes[begin] = num_bytes

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())


class SwapSpace:
    """Leases over all paths in turn. Thread-safe; :meth:`close` only after all I/O on the leases has ended.

    Args:
        directories: existing directories, best one a device.
        budget_bytes: most bytes on storage, None for what the disks hold.

    Raises:
        FuyouStorageError: a directory is not writable.
    """

    def __init__(self, directories: Sequence[Path], budget_bytes: int | None = None) -> None:
        self._directories = tuple(directories)
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, Extent]] = deque()
        self._fds: list[int] = []
        try:
            for directory in self._directories:
                self._fds.append(open_anonymous(directory, "swap activations"))
        except BaseException:
            self.close()
            raise
        self._sizes = [0] * len(self._fds)
        self._free = [_FreeRuns() for _ in self._fds]
        self._next = 0

    def lease(self, num_bytes: int) -> Lease:
        """``num_bytes`` rounded up to pages, in one piece of one file.

        Raises:
            FuyouStorageError: ENOSPC when the disks or the budget are exhausted, with bytes needed and free.
        """
        num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            self._collect()
            order = [(self._next + i) % len(self._fds) for i in range(len(self._fds))]
            self._next = (self._next + 1) % len(self._fds)
            for path in order:
                begin = self._free[path].take(num_bytes)
                if begin is not None:
                    return Lease(self, path, Extent(self._fds[path], begin, num_bytes))
            refused: OSError | None = None
            for path in order:
                try:
                    begin = self._grow(path, num_bytes)
                except OSError as error:
                    refused = error
                    continue
                return Lease(self, path, Extent(self._fds[path], begin, num_bytes))
            raise self._full(num_bytes, refused)

    def _grow(self, path: int, num_bytes: int) -> int:
        """Enlarges a file and takes the piece from its end; raises OSError when there is no room."""
        begin = self._sizes[path]
        growth = max(num_bytes, GROWTH_BYTES)
        if self._budget is not None:
            growth = min(growth, self._budget - sum(self._sizes))
        for size in dict.fromkeys((growth, num_bytes)):
            if size < num_bytes:
                raise OSError(errno.ENOSPC, "nvme_budget_bytes is used up")
            try:
                os.posix_fallocate(self._fds[path], begin, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or size == num_bytes:
                    raise
                continue
            break
        self._sizes[path] = begin + size
        if size > num_bytes:
            self._free[path].give(begin + num_bytes, size - num_bytes)
        return begin

    def _full(self, num_bytes: int, refused: OSError | None) -> FuyouStorageError:
        free = []
        for directory in self._directories:
            facts = os.statvfs(directory)
            free.append(f"{directory}: {facts.f_bavail * facts.f_frsize} free")
        budget = "" if self._budget is None else f", nvme_budget_bytes leaves {self._budget - sum(self._sizes)}"
        message = (
            f"swapping activations needs {num_bytes} more bytes of storage beside the {self.num_bytes} in use "
            f"({'; '.join(free)}{budget}); free space, add an nvme_path, use smaller batches or "
            f'activations.mode "recompute"'
        )
        number = (refused.errno if refused is not None else None) or errno.ENOSPC
        return FuyouStorageError(number, message, str(self._directories[0]))

    def _collect(self) -> None:
        while self._returned:
            path, extent = self._returned.popleft()
            self._free[path].give(extent.offset, extent.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes the files take on storage."""
        return sum(self._sizes)

    def size_for(self, num_bytes: float) -> int:
        """What the files will take when they hold so much: they grow in steps, turn by turn."""
        num_paths = len(self._directories)
        return num_paths * math.ceil(num_bytes / num_paths / GROWTH_BYTES) * GROWTH_BYTES

    @property
    def leased_bytes(self) -> int:
        """Bytes in leases that have not returned."""
        with self._lock:
            self._collect()
            return sum(self._sizes) - sum(free.num_bytes for free in self._free)

    def path_of(self, fd: int) -> Path:
        """The directory behind a descriptor, for error messages."""
        return self._directories[self._fds.index(fd)] if fd in self._fds else self._directories[0]

    def owns(self, fd: int) -> bool:
        return fd in self._fds

    def close(self) -> None:
        """Closes the files, which then are gone. Idempotent."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)
