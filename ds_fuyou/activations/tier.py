# SPDX-License-Identifier: Apache-2.0
"""Moves records device → host memory → storage, and back ahead of need.

[Note: threads and ownership of swapped activations]
No thread is started here. Autograd's hooks call :meth:`SwapTier.put` in the training thread and :meth:`SwapTier.take`
in the thread that runs backward; one lock makes them take turns. Storage works in the threads of the I/O engine, a
device's copies on its own streams. What these touch is owned by an in-flight object (:class:`InFlightIo`,
:class:`InFlightCopy`) until it has ended, so a record may die at any time, in any thread: the graph is freed, forward
raised, backward was never called. Its host memory then returns to the arena and its lease to the swap space by
reference counting alone; nothing has to be cleaned up, and nothing can be forgotten. Finalisers take no lock.

Who gives way: host memory is the arena and nothing else. When it is full, :meth:`put` first forgets host copies of
what is on storage already (the oldest first: backward needs it last), then waits for the oldest write, so forward runs
no further ahead than storage follows. Reads ahead take what is free and never wait. A read that backward waits for
takes memory of its own if it must, so nothing deadlocks.

Activations share the I/O engine with parameters and optimizer states. Writes in flight are bounded in bytes, so that a
read which something waits for never queues behind many of them; demand reads go first.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ds_fuyou.activations.copies import CopyLane, InFlightCopy
from ds_fuyou.activations.records import HeldBytes, InFlightIo, Record, RecordState
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.device import Device
from ds_fuyou.host.memory import HostPool, aligned_tensor, round_up_to_page
from ds_fuyou.storage.io import IoLane
from ds_fuyou.storage.swap_space import SwapSpace
from ds_fuyou.telemetry.trace import Lane, LaneTrace

__all__ = ["StorageHome", "SwapCounters", "SwapTier"]

_DEMAND, _AHEAD, _WRITE = -1, 0, 1  # priorities in the engine; optimizer jobs have larger numbers
_IN_MEMORY = (RecordState.HOST, RecordState.WRITING, RecordState.CLEAN)


@dataclass(frozen=True)
class StorageHome:
    """Where records go beyond host memory, and how hard they may press on the shared engine."""

    io: IoLane
    space: SwapSpace
    eager: bool = True  # write at once; otherwise when the arena is half full
    max_write_bytes: int = 16 * 1024 * 1024
    max_read_bytes: int = 64 * 1024 * 1024


@dataclass
class SwapCounters:
    """Since the start: bytes that left the device, and came back to it; bytes to and from storage; seconds that the
    calling thread waited; bytes of reads that found no room in the arena.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    waited_secs: float = 0.0
    overflow_bytes: int = 0


class SwapTier:
    """Host memory of ``arena_bytes``, and storage behind it if ``storage`` is given."""

    def __init__(
        self,
        arena_bytes: int,
        copies: CopyLane,
        storage: StorageHome | None,
        device: Device | None = None,
        *,
        trace: LaneTrace | None = None,
    ) -> None:
        self.copies = copies
        self.storage = storage
        self.held = HeldBytes()
        self.counters = SwapCounters()
        self._trace = trace
        self._arena = HostPool(arena_bytes, device)
        if storage is not None:
            storage.io.register_memory(self._arena)
        self._lock = threading.RLock()
        self._flights: deque[InFlightIo] = deque()
        self._copying: deque[InFlightCopy] = deque()  # owns them: a record may die before its copy has ended
        self._leaving: deque[weakref.ref[Record]] = deque()
        self._bytes_in_flight = {True: 0, False: 0}  # by is_write
        self._unwritten: dict[int, weakref.ref[Record]] = {}
        self._clean: dict[int, weakref.ref[Record]] = {}
        self._next_sequence = 0
        self.num_demand_reads = 0
        self._closed = False

    @property
    def arena_bytes(self) -> int:
        return self._arena.capacity_bytes

    @property
    def arena_used_bytes(self) -> int:
        return self._arena.used_bytes

    @property
    def arena_peak_bytes(self) -> int:
        return int(self._arena.pool.peak_bytes)

    # ---- out: device → host memory → storage --------------------------------------------------------------

    def put(self, source: torch.Tensor, what: str, unchanged: Callable[[], bool] | None) -> Record | None:
        """Starts moving ``source`` (flat bytes on the device) out; waits only when host memory is full.

        ``unchanged`` tells whether the source was left alone since this call. Returns None when there is no room and
        no storage: the caller then leaves the tensor where it is.

        Raises:
            FuyouStorageError: storage is full, or an earlier write failed.
        """
        with self._lock:
            if self._closed:
                raise FuyouStateError("activations are saved after the engine was closed; build a new engine")
            self._reap()
            self._next_sequence += 1
            record = Record(source.numel(), self._next_sequence, what, RecordState.LEAVING, self.held)
            memory_bytes = round_up_to_page(record.num_bytes)
            if self.storage is not None and memory_bytes > self._arena.capacity_bytes // 2:
                self._write_through(self.storage, source, record)
            else:
                memory = self._room(memory_bytes)
                if memory is None:
                    return None
                self._leave(record, source, memory, unchanged)
            self.counters.out_bytes += record.num_bytes
            if self.storage is not None:
                self._pump(self.storage)
            return record

    def _leave(
        self, record: Record, source: torch.Tensor, memory: torch.Tensor, unchanged: Callable[[], bool] | None
    ) -> None:
        begin = 0 if self._trace is None else time.perf_counter_ns()
        record.memory = memory
        record.copy_out = self.copies.copy_out(source, memory[: record.num_bytes])
        if record.copy_out is None:
            record.state = RecordState.HOST
        else:
            record.unchanged = unchanged
            record.count(record.num_bytes)
            self._copying.append(record.copy_out)
            self._leaving.append(weakref.ref(record))
        if self._trace is not None:
            self._trace.add(Lane.COPY_OUT, record.what, begin, time.perf_counter_ns())
        self._unwritten[record.sequence] = weakref.ref(record)

    def _settle_copies(self) -> None:
        """Lets go of device memory whose copy has ended, and of copies that nobody waits for."""
        while self._leaving:
            record = self._leaving[0]()
            if record is not None and record.copy_out is not None:
                if not record.copy_out.done():
                    break
                self._settle_copy(record)
            self._leaving.popleft()
        self._copying = deque(copy for copy in self._copying if not copy.done())

    def _settle_copy(self, record: Record) -> None:
        """The copy out has ended, or is waited for: LEAVING → HOST."""
        if record.copy_out is not None:
            record.copy_out.wait()
        record.spoilt = record.unchanged is not None and not record.unchanged()
        record.copy_out = record.unchanged = None
        record.state = RecordState.HOST
        record.count(0)

    def _room(self, num_bytes: int) -> torch.Tensor | None:
        """Arena memory, after as much forgetting and waiting as it takes; None when neither can help."""
        while True:
            memory = self._arena.try_allocate(num_bytes)
            if memory is not None or not self._make_room():
                return memory

    def _make_room(self) -> bool:
        """One step towards free host memory; False when there is none left."""
        if self._forget_oldest_clean(self._next_sequence):
            return True
        if self.storage is None:
            return False
        oldest = next((flight for flight in self._flights if flight.is_write), None)
        if oldest is not None:
            self._wait_flight(oldest)
            self._reap()
            return True
        return self._start_oldest_write(self.storage, wait_for_copy=True)

    def _forget_oldest_clean(self, below: int) -> bool:
        """Drops the host copy of the record needed last, if it was saved before number ``below``."""
        for sequence in sorted(self._clean):
            if sequence >= below:
                return False
            record = self._clean.pop(sequence)()
            if record is not None and record.state is RecordState.CLEAN and record.coming is None:
                record.memory, record.state = None, RecordState.STORED
                return True
        return False

    def _pump(self, storage: StorageHome) -> None:
        """Keeps the storage write lane busy, within its bound."""
        while self._bytes_in_flight[True] < storage.max_write_bytes:
            if not storage.eager and self._arena.used_bytes * 2 < self._arena.capacity_bytes:
                return
            if not self._start_oldest_write(storage, wait_for_copy=False):
                return

    def _start_oldest_write(self, storage: StorageHome, *, wait_for_copy: bool) -> bool:
        """Writes the record that was saved first; False when there is none, or its copy is still under way."""
        while self._unwritten:
            sequence = next(iter(self._unwritten))
            record = self._unwritten[sequence]()
            if record is not None and record.state is RecordState.LEAVING:
                copying = record.copy_out is not None and not record.copy_out.done()
                if copying and not wait_for_copy:
                    return False
                self._settle_copy(record)
            if record is not None and record.state is RecordState.HOST and record.memory is not None:
                lease = storage.space.lease(record.memory.numel())
                record.leases = [lease]
                record.state = RecordState.WRITING
                record.io = self._start_io(storage, record, record.memory, is_write=True)
                del self._unwritten[sequence]
                return True
            del self._unwritten[sequence]
        return False

    def _write_through(self, storage: StorageHome, source: torch.Tensor, record: Record) -> None:
        """A record too large for the arena goes to storage in pieces, and is there when this returns."""
        piece_bytes = max(self._arena.capacity_bytes // 4 // 4096 * 4096, 4096)
        record.count(record.num_bytes)
        pieces = []
        for begin in range(0, record.num_bytes, piece_bytes):
            part = source[begin : begin + piece_bytes]
            memory = self._room(round_up_to_page(part.numel()))  # waits for earlier pieces; so nothing here owns theirs
            if memory is None:
                memory = self._own_memory(round_up_to_page(part.numel()))
            copy = self.copies.copy_out(part, memory[: part.numel()])
            if copy is not None:
                copy.wait()
            piece = Record(part.numel(), record.sequence, record.what, RecordState.WRITING, self.held)
            piece.leases = [storage.space.lease(memory.numel())]
            self._start_io(storage, piece, memory, is_write=True)
            del memory, copy
            record.leases += piece.leases
            pieces.append(piece)
        for flight in [flight for flight in self._flights if flight.record() in pieces]:
            self._wait_flight(flight)
        self._reap()
        record.state = RecordState.STORED
        record.count(0)

    # ---- in: storage → host memory → device ---------------------------------------------------------------

    def take(self, record: Record) -> torch.Tensor:
        """The record's bytes on the device, flat, ready for the stream that computes.

        Raises:
            FuyouStorageError: it could not be read back.
            RuntimeError: the tensor was changed in place while it was being copied out.
        """
        with self._lock:
            if record.copy_out is not None and record.unchanged is not None and record.unchanged():
                return record.copy_out.source  # it has not left yet
            if record.coming is None:
                self._to_host(record)
            if record.spoilt:
                raise RuntimeError(
                    f"{record.what}: a tensor needed for gradient computation was modified by an in-place operation "
                    f"after it had been saved; do not modify it, or clone it first"
                )
            if record.counted_bytes == 0:
                self.counters.in_bytes += record.num_bytes
                record.count(record.num_bytes)
            self._copy_in(record)
            if record.coming is not None:
                return self.copies.make_visible(record.coming)
            if record.memory is None:
                raise FuyouStateError(f"{record.what} must be in host memory, it is {record.state.name}")
            return record.memory[: record.num_bytes]

    def is_intact(self, record: Record) -> bool:
        """Whether the record holds what its source was when it was saved; waits for the copy out."""
        with self._lock:
            if record.state is RecordState.LEAVING:
                self._settle_copy(record)
            return not record.spoilt

    def _copy_in(self, record: Record) -> None:
        if record.coming is None and record.memory is not None:
            record.coming = self.copies.copy_in(record.memory[: record.num_bytes])
            if record.coming is not None:
                self._copying.append(record.coming)

    def _to_host(self, record: Record) -> None:
        """Waits until the bytes are in host memory, reading them now if nobody did before."""
        begin = 0 if self._trace is None else time.perf_counter_ns()
        if record.state is RecordState.LEAVING:
            self._settle_copy(record)
        if record.state is RecordState.STORED:
            self._start_read(record, demand=True)
        if record.state is RecordState.READING and record.io is not None:
            flight = record.io
            self._wait_flight(flight)
            self._finish(flight)
        elif record.state in _IN_MEMORY:
            return
        if self._trace is not None and self.copies.device_is_host:  # a device's own clock tells when it waited
            self._trace.add(Lane.WAIT, record.what, begin, time.perf_counter_ns())

    def read_ahead(self, needed: Iterable[Record], soon: Iterable[Record]) -> None:
        """Starts reading ``needed``, given in the order in which backward will ask, as far as memory and the bound on
        reads allow; starts copying to the device what of ``soon`` is in host memory.
        """
        with self._lock:
            self._reap()
            for record in needed:
                if record.state is RecordState.STORED and not self._start_read(record, demand=False):
                    break
            if self.copies.device_is_host:
                return
            for record in soon:
                if record.state in _IN_MEMORY and not record.spoilt:
                    self._copy_in(record)

    def _start_read(self, record: Record, *, demand: bool) -> bool:
        storage = self.storage
        if storage is None:
            raise FuyouStateError(f"{record.what} is on storage, but this tier has none")
        if self._closed:
            raise FuyouStateError(f"{record.what} is gone: the engine was closed between forward and backward")
        self.num_demand_reads += demand
        if not demand and self._bytes_in_flight[False] >= storage.max_read_bytes:
            return False
        num_bytes = sum(lease.extent.num_bytes for lease in record.leases)
        memory = self._arena.try_allocate(num_bytes)
        while memory is None and self._forget_oldest_clean(record.sequence):
            memory = self._arena.try_allocate(num_bytes)
        if memory is None:
            if not demand:
                return False
            memory = self._own_memory(num_bytes)
        record.memory = memory
        record.state = RecordState.READING
        record.io = self._start_io(storage, record, memory, is_write=False, demand=demand)
        return True

    def _own_memory(self, num_bytes: int) -> torch.Tensor:
        """Memory outside of the arena, for what cannot wait."""
        self.counters.overflow_bytes += num_bytes
        return aligned_tensor(num_bytes)

    # ---- I/O in flight ------------------------------------------------------------------------------------

    def _start_io(
        self, storage: StorageHome, record: Record, memory: torch.Tensor, *, is_write: bool, demand: bool = False
    ) -> InFlightIo:
        extents = [lease.extent for lease in record.leases]
        if is_write:
            transfer = storage.io.write(extents, memory, f"writing {record.what}", _WRITE)
        else:
            transfer = storage.io.read(extents, memory, f"reading {record.what}", _DEMAND if demand else _AHEAD)
        began = 0 if self._trace is None else time.perf_counter_ns()
        flight = InFlightIo(weakref.ref(record), transfer, tuple(record.leases), record.what, is_write, began)
        self._flights.append(flight)
        self._bytes_in_flight[is_write] += flight.num_bytes
        return flight

    def _wait_flight(self, flight: InFlightIo) -> None:
        """Blocks until it has ended; what it brought is looked at by :meth:`_finish`."""
        self.counters.waited_secs += flight.transfer.wait_ended()

    def _reap(self) -> None:
        """Finishes every transfer that has ended; raises the first failure when all of them are accounted for."""
        if self._copying:
            self._settle_copies()
        failure: OSError | None = None
        for flight in [flight for flight in self._flights if flight.transfer.done()]:
            try:
                self._finish(flight)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _finish(self, flight: InFlightIo) -> None:
        """Accounts for one ended transfer and moves its record on."""
        self._flights.remove(flight)
        self._bytes_in_flight[flight.is_write] -= flight.num_bytes
        if self._trace is not None:
            lane = Lane.STORAGE_WRITE if flight.is_write else Lane.STORAGE_READ
            self._trace.add(lane, flight.what, flight.began_ns, time.perf_counter_ns(), flight.num_bytes)
        record = flight.record()
        if record is not None:
            record.io = None
        try:
            flight.transfer.wait()
        except OSError:
            if record is not None:
                self._undo(record, flight)
            raise
        if flight.is_write:
            self.counters.written_bytes += flight.num_bytes
        else:
            self.counters.read_bytes += flight.num_bytes
        if record is not None:
            record.state = RecordState.CLEAN
            self._clean[record.sequence] = weakref.ref(record)

    def _undo(self, record: Record, flight: InFlightIo) -> None:
        """After a failure the record is where it was before."""
        if flight.is_write:
            record.state, record.leases = RecordState.HOST, []
            self._unwritten[record.sequence] = weakref.ref(record)
        else:
            record.state, record.memory = RecordState.STORED, None

    def poll(self) -> None:
        """Takes note of what has ended and forgets what is dead. Raises a failure that nobody has seen yet."""
        with self._lock:
            self._reap()
            for table in (self._unwritten, self._clean):
                for sequence in [number for number, reference in table.items() if reference() is None]:
                    del table[sequence]

    def close(self) -> None:
        """Waits for what is in flight and gives memory and storage back. Saved tensors on storage are lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for flight in list(self._flights):
                flight.transfer.wait_ended()
            for copy in self._copying:
                copy.wait()
            self._copying.clear()
            self._flights.clear()
            self._unwritten.clear()
            self._clean.clear()
            self._arena.give_back()
            if self.storage is not None:
                self.storage.space.close()
