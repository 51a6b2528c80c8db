# SPDX-License-Identifier: Apache-2.0
"""One moved run of bytes, its pieces and their states, and the work in flight on them."""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_fuyou.storage.io import Transfer
from ds_fuyou.storage.swap_space import Lease

__all__ = ["CHANGED", "IN_MEMORY", "HeldBytes", "InFlightIo", "Piece", "PieceState", "Record"]


class PieceState(enum.Enum):
    """Which memory a piece holds. On the way out: WAITING → LEAVING → HOST → WRITING → CLEAN → STORED; on the way back
    STORED → READING → CLEAN → ARRIVED, and to ARRIVED from wherever it is in host memory. A record may be needed, or
    die, while its pieces are in any of them.
    """

    WAITING = enum.auto()  # the record's source on the device: no host memory was free for it yet
    LEAVING = enum.auto()  # the record's source, and host memory: the copy out is in flight
    HOST = enum.auto()  # host memory alone
    WRITING = enum.auto()  # host memory, and a lease on storage that is being written
    CLEAN = enum.auto()  # host memory, and the same bytes on storage
    STORED = enum.auto()  # storage alone
    READING = enum.auto()  # storage, and host memory that is being filled
    ARRIVED = enum.auto()  # the record's target on the device, and storage if it was written; the copy owns the rest


CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation, after it had been "
    "saved; do not modify it, or clone it first"
)

IN_MEMORY = frozenset({PieceState.HOST, PieceState.WRITING, PieceState.CLEAN})


class HeldBytes:
    """Bytes that are on the device on behalf of saved tensors: now, at most, and at most since :meth:`mark`.

    ``all``: of which these are a part, and which counts them too.
    """

    def __init__(self, all: HeldBytes | None = None) -> None:
        self.now = 0
        self.peak = 0
        self.peak_since_mark = 0
        self._all = all

    def add(self, num_bytes: int) -> None:
        """A finaliser takes bytes off in whatever thread: it takes no lock."""
        self.now = now = self.now + num_bytes
        self.peak = max(now, self.peak)
        self.peak_since_mark = max(now, self.peak_since_mark)
        if self._all is not None:
            self._all.add(num_bytes)

    def mark(self) -> None:
        self.peak_since_mark = self.now


@dataclass(eq=False, slots=True)
class Piece:
    """Bytes [begin, begin + num_bytes) of a record.

    Attributes:
        memory: host memory, page-aligned, whole pages.
        lease: where it lies on storage.
        io: the transfer that WRITING and READING wait for.
    """

    begin: int
    num_bytes: int
    state: PieceState = PieceState.WAITING
    memory: torch.Tensor | None = None
    lease: Lease | None = None
    io: InFlightIo | None = None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This piece of the record's bytes."""
        return whole[self.begin : self.begin + self.num_bytes]


Need = tuple[int, int]
"""When backward needs what was saved, of two numbers of savings: what was saved last comes first, ``(its own, 0)``, but
the outputs of a block that is computed again in the order in which they were made, behind the block's inputs:
``(the first of the block's, -its own)``.
"""


@dataclass(eq=False)
class Record:
    """``num_bytes`` of one storage at one version. It dies with the last saved tensor that refers to it.

    Attributes:
        need: the larger, the sooner backward needs it.
        what: names it in errors and traces.
        held: counts what it holds on the device.
        pieces: in order.
        source: the bytes on the device; None when all pieces have left.
        after: mark on the computing stream after which ``source`` holds them.
        unchanged: whether the source still is what it was when it was saved; goes with the source.
        target: the whole record where the device can use it. Where the device is the host the memory of pieces may
            lie in it; then it is arena memory, or its own (``is_own``).
        version: of the target when it was handed out; None while it was not.
        arrival: event that follows the last copy to the target.
        spoilt: why its bytes are lost; "" when they are not.
        stays: what has not left yet will not: backward asked for it, or it could not be copied.
    """

    num_bytes: int
    need: Need
    what: str
    held: HeldBytes
    pieces: list[Piece]
    source: torch.Tensor | None = None
    after: Any = None
    unchanged: Callable[[], bool] | None = None
    target: torch.Tensor | None = None
    is_own: bool = False
    version: int | None = None
    arrival: Any = None
    spoilt: str = ""
    stays: bool = False
    counted_bytes: int = 0
    left: deque[int] | None = None
    reference: weakref.ref[Record] = field(init=False)

    def __post_init__(self) -> None:
        self.reference = weakref.ref(self)

    @classmethod
    def of(cls, num_bytes: int, piece_bytes: int, need: Need, what: str, held: HeldBytes) -> Record:
        """In pieces of ``piece_bytes``, the last one shorter; every record has one at least."""
        begins = range(0, max(num_bytes, 1), piece_bytes)
        pieces = [Piece(begin, min(piece_bytes, num_bytes - begin)) for begin in begins]
        return cls(num_bytes, need, what, held, pieces)

    def count(self, num_bytes: int) -> None:
        """Sets what the record holds on the device."""
        self.held.add(num_bytes - self.counted_bytes)
        self.counted_bytes = num_bytes

    def begin_leaving(self, source: torch.Tensor, after: Any, unchanged: Callable[[], bool], left: deque[int]) -> None:
        """The device holds ``source`` until every piece has left. ``left`` then gets the bytes, also if the record dies
        before, in whatever thread.
        """
        self.source, self.after, self.unchanged, self.left = source, after, unchanged, left
        self.count(self.num_bytes)

    def end_leaving(self) -> None:
        """Every piece has left: the device's memory is let go."""
        self.source = self.after = self.unchanged = None
        self.count(0)
        self._tell_left()

    def stay(self) -> None:
        """No further piece leaves."""
        self.stays = True
        self._tell_left()

    def hand_out(self) -> None:
        """From now on somebody may change the target: then it is not handed out again."""
        if self.version is None and self.target is not None:
            self.version = self.target._version

    def forget_target(self) -> None:
        """It lies on storage as well, or is lost: what was changed is not what was saved."""
        if self.is_changed:
            self.spoilt = CHANGED
        self.target = self.version = None

    @property
    def is_changed(self) -> bool:
        """Whether somebody who was given the target has changed it."""
        return self.target is not None and self.version not in (None, self.target._version)

    def _tell_left(self) -> None:
        left, self.left = self.left, None
        if left is not None:
            left.append(self.num_bytes)

    def __del__(self) -> None:
        self.held.add(-self.counted_bytes)
        self._tell_left()


@dataclass(frozen=True, eq=False)
class InFlightIo:
    """A read or write of one piece. Owns memory and lease until it has ended, whether the record lives or not.

    ``number`` grows in the order of starting. ``began_ns`` is known to a trace alone; 0 without one.
    """

    record: weakref.ref[Record]
    index: int
    transfer: Transfer
    lease: Lease
    what: str
    is_write: bool
    number: int
    began_ns: int

    @property
    def num_bytes(self) -> int:
        return self.transfer.memory.numel()

    def piece(self) -> Piece | None:
        """What it works for, if that lives."""
        record = self.record()
        return record.pieces[self.index] if record is not None else None
