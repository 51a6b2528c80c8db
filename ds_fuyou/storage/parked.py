# SPDX-License-Identifier: Apache-2.0
"""Parked parameters: on storage, updated by no optimizer. What ``zero.Init`` built, frozen ones, a destroyed engine's.

They lie in pieces over all paths, in files without a name: nothing of them outlives the process. One space serves
everybody in the process who names the same paths; it goes with the last value in it.

What an engine reads is compared with what was written, page by page (``csrc/io/page_sums.h``). An engine knows sums of
what it wrote or read itself; to the next one, values go with a number that stands for all of their pages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.lifetime import register_closer
from ds_fuyou.storage.location import Location, StoredRun, ValuesRead
from ds_fuyou.storage.swap_space import Lease, SwapSpace
from ds_fuyou.storage.types import Extent

__all__ = ["HEAD_BYTES", "PIECE_BYTES", "ParkedSpace", "ParkedValues"]

PIECE_BYTES = 8 * 1024 * 1024
"""Larger values are cut, so that all paths work at one read."""

HEAD_BYTES = 256
"""So many stay in memory, too: who wants to know whether these are the values of another process reads nothing."""

_BEHIND = 1 << 62  # a priority: behind all that training reads


class ParkedSpace:
    """Storage of one process for values, and an I/O engine for those that no training engine reads. Training thread."""

    _of_paths: ClassVar[weakref.WeakValueDictionary[tuple[str, ...], ParkedSpace]] = weakref.WeakValueDictionary()

    def __init__(
        self, paths: tuple[str, ...], engine: str, weights: Sequence[float] | None, *, checksum: bool = True
    ) -> None:
        self.checksum = checksum
        self.space = SwapSpace([Path(path) for path in paths], what="parameters", weights=weights)
        self._engine = engine
        self._io: list[IoLane] = []
        self.readers: weakref.WeakSet[IoLane] = weakref.WeakSet()
        """Lanes of engines that know, or knew, what pages hold."""
        self._close = weakref.finalize(self, _closed, self._io, self.space, self.readers)
        self._close.atexit = False
        register_closer(self._close, behind_others=True)  # engines read from here until they are closed

    @classmethod
    def at(
        cls, paths: tuple[str, ...], engine: str, weights: Sequence[float] | None, *, checksum: bool = True
    ) -> ParkedSpace:
        """The space of these paths; an open one if there is one, as it was opened first. ``weights``: as of
        :class:`SwapSpace`.

        Raises:
            FuyouStorageError: a path is not writable.
        """
        found = cls._of_paths.get(paths)
        if found is None or not found._close.alive:
            found = cls._of_paths[paths] = cls(paths, engine, weights, checksum=checksum)
        return found

    @property
    def io(self) -> IoLane:
        """An engine of its own, started at need; :meth:`rest` stops it."""
        if not self._io:
            settings = IoSettings.for_paths(self._engine, self.space.num_paths)
            self._io.append(IoLane(settings, self.space.path_of))
        return self._io[0]

    def rest(self) -> None:
        """Stops the I/O engine until it is needed again. Waits for what is in flight."""
        while self._io:
            self._io.pop().close()

    def park(self, what: str, values: torch.Tensor) -> ParkedValues:
        """Writes values (1-D) to storage; returns when they are there.

        Raises:
            FuyouStorageError: storage is full, or the write failed.
        """
        pieces = self.space.leases(values.numel() * values.element_size(), PIECE_BYTES)
        parked = ParkedValues(self, what, values.numel(), values.dtype, pieces)
        parked.write(values)
        return parked


def _nobody_reads() -> None:
    """Nothing to wait for."""


def _closed(lanes: list[IoLane], space: SwapSpace, readers: weakref.WeakSet[IoLane]) -> None:
    """What is opened with the same descriptors later must not be compared with what lay here."""
    while lanes:
        lanes.pop().close()
    for lane in list(readers):
        if lane.engine is not None:
            lane.forget(space.files)
    space.close()


class ParkedValues:
    """A source of the parameter store. Its pieces return to the space with it."""

    changes = False

    def __init__(self, space: ParkedSpace, what: str, numel: int, dtype: torch.dtype, pieces: list[Lease]) -> None:
        self.space = space
        self._pieces = pieces
        self._lane: IoLane | None = None
        self._digest: int | None = None
        self.head = torch.empty(0, dtype=dtype)
        """The first :data:`HEAD_BYTES` of what was written last."""
        self._known_to: object = None  # the engine that knows what the pages hold
        self._before_write: Callable[[], object] = _nobody_reads
        self.num_bytes = sum(piece.extent.num_bytes for piece in pieces)
        self.size_bytes = numel * dtype.itemsize
        run = StoredRun(0, self.num_bytes, tuple(piece.extent for piece in pieces))
        self._location = Location(what, numel, dtype, self.num_bytes, runs=(run,))

    @property
    def io(self) -> IoLane:
        """What reads and writes them."""
        lane = self._lane if self._lane is not None else self.space.io
        if self.space.checksum and lane.identity is not self._known_to:
            self._known_to = lane.identity
            if self._digest is None:
                lane.watch(self._extents)
            else:
                lane.expect(self._extents, self._digest)
        return lane

    @property
    def _extents(self) -> tuple[Extent, ...]:
        return self._location.runs[0].extents

    def read_by(self, lane: IoLane | None) -> None:
        """An engine's I/O lane serves these values from here on; None gives it back."""
        self._lane = None
        if lane is not None:
            self._lane = lane.sharing(self.space.space.path_of)
            self.space.readers.add(lane)

    def read_behind(self, wait: Callable[[], object]) -> None:
        """Writes wait for ``wait``, which ends with the thread that :meth:`pieces` were given to."""
        self._before_write = wait

    def pieces(self) -> Callable[[], Iterator[tuple[int, torch.Tensor]]]:
        """For another thread: ``(first element, values)``, one read ahead, each to be used before the next is asked
        for. The lane that serves them now must not be closed, and nothing written, before that thread has ended.

        Raises:
            FuyouStorageError: a piece could not be read.
        """
        lane, location = self.io.sharing(self.space.space.path_of), self._location

        extents, what = self._extents, f"reading {location.what} for a checkpoint"

        def read(kept: ParkedValues = self) -> Iterator[tuple[int, torch.Tensor]]:
            # Its pieces are leased to nobody else while this reads.
            memory = [aligned_tensor(max(extent.num_bytes for extent in extents)) for _ in range(2)]
            begin, ahead = 0, lane.read(extents[:1], memory[0], what, _BEHIND)
            for number in range(len(extents)):
                ahead.wait()
                if number + 1 < len(extents):
                    ahead = lane.read(extents[number + 1 : number + 2], memory[(number + 1) % 2], what, _BEHIND)
                values = memory[number % 2][: extents[number].num_bytes].view(location.dtype)
                values = values[: location.numel - begin]
                yield begin, values
                begin += values.numel()

        return read

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing updates them."""

    def memory(self) -> torch.Tensor | None:
        return None

    def start_reading(self, memory: torch.Tensor, priority: int = 0) -> ValuesRead:
        return self._location.start_reading(self.io, memory, priority)

    def location(self) -> Location:
        return self._location

    def write(self, values: torch.Tensor) -> None:
        """Replaces them in their place; returns when that is done. Waits for who copies them, first."""
        self._before_write()
        memory = aligned_tensor(self.num_bytes)
        self._location.view(memory).copy_(values.view(-1))
        self.head = self._location.view(memory)[: HEAD_BYTES // self._location.dtype.itemsize].clone()
        lane, self._digest = self.io, None
        lane.write(self._extents, memory, f"writing {self._location.what}").wait()
        if self.space.checksum:
            self._digest = lane.digest(self._extents)
