# SPDX-License-Identifier: Apache-2.0
"""Storage without a layout: one anonymous file in every path, handed out in leases that return by themselves.

The files have no name (or lose it at once), so nothing of them outlives the process, however that ends. What is large
is leased in pieces (:meth:`SwapSpace.leases`), which lie on all paths in turn, so that one tensor uses all of them.
"""

from __future__ import annotations

import bisect
import errno
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.anonymous import open_anonymous
from ds_fuyou.storage.data_file import preallocate
from ds_fuyou.storage.types import PAGE_BYTES, Extent

__all__ = ["ACTIVATIONS", "GROWTH_BYTES", "Lease", "SwapSpace"]

ACTIVATIONS = "swapped activations"

GROWTH_BYTES = 64 * 1024 * 1024
"""Files grow by at least this much, fully allocated, so that a write never meets a full disk half-way."""


class Lease:
    """A run of bytes of one file. It returns to the space when the last reference is gone, in whatever thread.

    Attributes:
        path: number of the path that the file is in, from 0.
        extent: where in the file.
    """

    __slots__ = ("__weakref__", "_space", "extent", "path")

    def __init__(self, space: SwapSpace, path: int, extent: Extent) -> None:
        self._space, self.path, self.extent = space, path, extent

    def __del__(self) -> None:
        self._space._returned.append((self.path, self.extent))


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
    """Leases over all paths in turn, each its share in bytes. Thread-safe; :meth:`close` only after all I/O on the
    leases has ended.

    Args:
        directories: existing directories, best one a device.
        budget: most bytes on storage, as it is now; None for what the disks hold.
        what: names in errors what is kept here.
        weights: relative bandwidth of each directory, positive; alike if None.

    Raises:
        FuyouStorageError: a directory is not writable.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        budget: Callable[[], int] | None = None,
        what: str = ACTIVATIONS,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._directories = tuple(directories)
        self._shares = _shares(weights if weights is not None else [1.0] * len(self._directories))
        self._budget = budget
        self._what = what
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, Extent]] = deque()
        self._pid = os.getpid()
        self._fds: list[int] = []
        try:
            for directory in self._directories:
                self._fds.append(open_anonymous(directory, f"keep {what}"))
        except BaseException:
            self.close()
            raise
        self._sizes = [0] * len(self._fds)
        self._free = [_FreeRuns() for _ in self._fds]
        self._turns = [0.0] * len(self._fds)  # bytes that were ever leased of each path, over its share

    @property
    def num_paths(self) -> int:
        return len(self._directories)

    def lease(self, num_bytes: int) -> Lease:
        """``num_bytes`` rounded up to pages, in one piece of one file: of the path that had the least of its share so
        far. Another path is used only where that one has no room.

        Raises:
            FuyouStorageError: ENOSPC when the disks or the budget are exhausted, with bytes needed and free.
        """
        num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            self._collect()
            first, *others = sorted(range(len(self._fds)), key=self._turns.__getitem__)
            refused: OSError | None = None
            for path, may_grow in ((first, True), *((path, False) for path in others), *((p, True) for p in others)):
                begin = self._free[path].take(num_bytes)
                if begin is None and may_grow:
                    try:
                        begin = self._grow(path, num_bytes)
                    except OSError as error:
                        refused = error
                if begin is not None:
                    self._turns[path] += num_bytes / self._shares[path]
                    if path != first:  # a path that was full for a while must not get all that comes after
                        self._turns[first] = max(self._turns[first], min(self._turns[other] for other in others))
                    return Lease(self, path, Extent(self._fds[path], begin, num_bytes))
            raise self._full(num_bytes, refused)

    def leases(self, num_bytes: int, piece_bytes: int) -> list[Lease]:
        """``num_bytes`` in pieces of at most ``piece_bytes`` (a multiple of 4096), in order, over all paths in turn;
        the last piece is rounded up to pages.

        Raises:
            FuyouStorageError: as :meth:`lease`; what was leased for it has returned.
        """
        begins = range(0, num_bytes, piece_bytes)
        return [self.lease(min(piece_bytes, num_bytes - begin)) for begin in begins]

    def _grow(self, path: int, num_bytes: int) -> int:
        """Enlarges a file and takes the piece from its end; raises OSError when there is no room."""
        begin = self._sizes[path]
        growth = max(num_bytes, GROWTH_BYTES)
        if self._budget is not None:
            growth = min(growth, (self._budget() - sum(self._sizes)) // PAGE_BYTES * PAGE_BYTES)
        for size in dict.fromkeys((growth, num_bytes)):
            if size < num_bytes:
                raise OSError(errno.ENOSPC, "nvme_budget_bytes is used up")
            try:
                preallocate(self._fds[path], size, begin)
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
        budget = "" if self._budget is None else f", nvme_budget_bytes leaves {self._budget() - sum(self._sizes)}"
        smaller = ', use smaller batches or activations.mode "recompute"' if self._what == ACTIVATIONS else ""
        message = (
            f"{self._what}: storage needs {num_bytes} more bytes beside the {self.num_bytes} in use "
            f"({'; '.join(free)}{budget}); free space or add an nvme_path{smaller}"
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
        return sum(math.ceil(num_bytes * share / GROWTH_BYTES) * GROWTH_BYTES for share in self._shares)

    @property
    def leased_bytes(self) -> int:
        """Bytes in leases that have not returned; all paths together."""
        with self._lock:
            self._collect()
            return sum(self._sizes) - sum(free.num_bytes for free in self._free)

    @property
    def room_bytes(self) -> int:
        """What could be leased now: of the files, and of what they may grow by."""
        with self._lock:
            self._collect()
            found = [os.statvfs(directory) for directory in self._directories]
            disks = {facts.f_fsid: facts.f_bavail * facts.f_frsize for facts in found}  # paths may share one
            growth = sum(disks.values())
            if self._budget is not None:
                growth = min(growth, self._budget() - sum(self._sizes))
            return max(0, growth) + sum(free.num_bytes for free in self._free)

    @property
    def files(self) -> list[Extent]:
        """All of them, as a whole; none of a closed space."""
        return [Extent(fd, 0, num_bytes) for fd, num_bytes in zip(self._fds, self._sizes, strict=False)]

    def path_of(self, fd: int) -> Path:
        """The directory behind a descriptor, for error messages."""
        return self._directories[self._fds.index(fd)] if fd in self._fds else self._directories[0]

    def close(self) -> None:
        """Closes the files, which then are gone, also where a forked child still has them. Idempotent."""
        fds, self._fds = self._fds, []
        for fd in fds:
            if os.getpid() == self._pid:
                with suppress(OSError):  # the disk's, say: it is closed all the same
                    os.ftruncate(fd, 0)
            os.close(fd)


def _shares(weights: Sequence[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]
