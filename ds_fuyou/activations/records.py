# SPDX-License-Identifier: Apache-2.0
"""One moved run of bytes, its states, and the work in flight on it."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ds_fuyou.activations.copies import InFlightCopy
from ds_fuyou.storage.io import Transfer
from ds_fuyou.storage.swap_space import Lease

__all__ = ["HeldBytes", "InFlightIo", "Record", "RecordState"]


class RecordState(enum.Enum):
    """Which memory a record holds. On the way out: LEAVING → HOST → WRITING → CLEAN → STORED; on the way back
    STORED → READING → CLEAN. A record may be needed, or die, in any of them.
    """

    LEAVING = enum.auto()  # device memory and host memory: the copy out is in flight
    HOST = enum.auto()  # host memory alone
    WRITING = enum.auto()  # host memory, and a lease on storage that is being written
    CLEAN = enum.auto()  # host memory, and the same bytes on storage
    STORED = enum.auto()  # storage alone
    READING = enum.auto()  # storage, and host memory that is being filled


class HeldBytes:
    """Bytes that are on the device on behalf of saved tensors, now and at most."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


@dataclass(eq=False)
class Record:
    """``num_bytes`` of one storage at one version. It dies with the last saved tensor that refers to it.

    Attributes:
        sequence: increases in the order of saving; the larger, the sooner backward needs it.
        what: names it in errors and traces.
        memory: host memory, page-aligned, at least ``num_bytes``.
        leases: where it lies on storage, in order.
        copy_out: the copy that LEAVING waits for.
        unchanged: whether the source still is what it was when the copy began; asked when it has ended.
        coming: bytes on their way to the device, or there.
    """

    num_bytes: int
    sequence: int
    what: str
    state: RecordState
    held: HeldBytes
    memory: torch.Tensor | None = None
    leases: list[Lease] = field(default_factory=list)
    copy_out: InFlightCopy | None = None
    unchanged: Callable[[], bool] | None = None
    io: InFlightIo | None = None
    coming: InFlightCopy | None = None
    spoilt: bool = False
    counted_bytes: int = 0

    def count(self, num_bytes: int) -> None:
        """Sets what the record holds on the device."""
        self.held.add(num_bytes - self.counted_bytes)
        self.counted_bytes = num_bytes

    def __del__(self) -> None:
        self.held.now -= self.counted_bytes


@dataclass(frozen=True, eq=False)
class InFlightIo:
    """A read or write of one record. Owns memory and leases until it has ended, whether the record lives or not.

    ``began_ns`` is known to a trace alone; 0 without one.
    """

    record: weakref.ref[Record]
    transfer: Transfer
    leases: tuple[Lease, ...]
    what: str
    is_write: bool
    began_ns: int

    @property
    def num_bytes(self) -> int:
        return self.transfer.memory.numel()
