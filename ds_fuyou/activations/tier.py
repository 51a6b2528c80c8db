# SPDX-License-Identifier: Apache-2.0
"""Moves records, piece by piece, device → host memory → storage, and back ahead of need.

[Note: threads and ownership of swapped activations]
No thread is started here. Autograd's hooks call :meth:`SwapTier.put` in the training thread and :meth:`SwapTier.take`
in the thread that runs backward; one lock makes them take turns. Storage works in the threads of the I/O engine, a
device's copies on its own streams. What these touch is owned by an in-flight object (:class:`InFlightIo`,
:class:`InFlightCopy`) until it has ended, so a record may die at any time, in any thread: the graph is freed, forward
raised, backward was never called. Its host memory then returns to the arena and its leases to the swap space by
reference counting alone; nothing has to be cleaned up, and nothing can be forgotten. Finalisers take no lock.

A record larger than a piece is many pieces, each with a state of its own: while one is written, the next is copied, and
they lie on all paths in turn. Nothing has to fit the arena but a piece. What a hook finds ended it moves on
(:meth:`SwapTier._progress`); it asks the oldest transfers and copies alone, so its work is in what has ended.

[Note: who waits, and why nothing deadlocks]
Host memory is the arena and nothing else. What leaves a device and finds none is WAITING: it stays where it is, and the
hook goes on; a later one sends it. So :meth:`put` waits only when more than the arena holds, beside the record itself,
is still on the device on its behalf; or when all that forward leaves there is more than the device has room for, a few
records excepted: the host runs ahead, and would launch a whole pass before anything has left. (Where the device is the
host nothing can stay, so it waits when the arena is full.)

Reads ahead never wait. A read that backward waits for does, for as much of the arena as one piece
(:meth:`SwapTier._make_room`). A wait is for the oldest write, copy or read in flight. Each of these ends by itself: the
engine and the streams need neither the lock nor the waiting thread, streams wait only for what was issued before, and
what has ended can be moved on or forgotten. Every byte of the arena is in one of: a copy out (then it is written), a
write or a read (then it is clean), clean (then it is forgotten), a copy in (then it is free). So after finitely many
waits the arena is empty, and a piece fits an empty arena. What a device is given back lies in the device's memory;
where that is the host, in the arena if there is a run for it, or in memory of its own, as it lay before it was saved.
Where there is no storage nothing waits for host memory: a record that does not fit is not taken.

Activations share the I/O engine with parameters and optimizer states. Transfers in flight are bounded on each path, so
that what something waits for never queues behind many of them; demand reads go first.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import torch

from ds_fuyou.activations.arena import Arena
from ds_fuyou.activations.copies import CopyLane, InFlightCopy
from ds_fuyou.activations.records import CHANGED, IN_MEMORY, HeldBytes, InFlightIo, Need, Piece, PieceState, Record
from ds_fuyou.activations.traffic import StorageHome, StorageTraffic
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.device import Device
from ds_fuyou.host.memory import HostPool, aligned_tensor, round_up_to_page
from ds_fuyou.telemetry.trace import Lane, LaneTrace

__all__ = ["SOON_BYTES", "StorageHome", "SwapCounters", "SwapTier"]

SOON_BYTES = 128 * 1024 * 1024
"""Of the device, for what comes back before backward asks, and for what leaves it where there is no room; one record
may exceed it."""

_ON_DEVICE = (PieceState.WAITING, PieceState.LEAVING)
_Place = tuple["weakref.ref[Record]", int]  # a piece: its record, and its number there


@dataclass
class SwapCounters:
    """Since the start: bytes that left the device, and came back to it; bytes to and from storage; seconds that the
    calling thread waited; bytes that came back to memory of their own where the device is the host.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    waited_secs: float = 0.0
    overflow_bytes: int = 0


class SwapTier:
    """Host memory of at most ``arena_bytes``, and storage behind it if ``storage`` is given."""

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
        self.num_demand_reads = 0
        self._trace = trace
        self._arena = Arena(arena_bytes, device, self._register, self._forget)
        self._piece_bytes = self._arena.piece_bytes
        self._soon_bytes = min(SOON_BYTES, self._arena.capacity_bytes)
        self._lock = threading.RLock()
        self._traffic: StorageTraffic | None = None
        if storage is not None:
            self._traffic = StorageTraffic(storage, self._piece_bytes, self._arena.capacity_bytes, trace)
        self._waiting: deque[weakref.ref[Record]] = deque()  # their first pieces may have left
        self._copies_out: deque[tuple[InFlightCopy, _Place]] = deque()
        self._copies_in: deque[tuple[InFlightCopy, weakref.ref[Record]]] = deque()
        self._unwritten: deque[_Place] = deque()
        self._clean: list[tuple[Need, int, weakref.ref[Record]]] = []  # a heap: needed last first; some are gone
        self._on_device_bytes = 0  # of records that have not left the device
        self._left: deque[int] = deque()  # bytes that have, and are not taken off yet; finalisers append
        self._beside: Callable[[], Record | None] = lambda: None  # what was read ahead beside the arena last
        self._next_sequence = 0
        self._closed = False

    def _register(self, pool: HostPool) -> None:
        if self.storage is not None:
            self.storage.io.register_memory(pool)

    def _forget(self, pool: HostPool) -> None:
        if self.storage is not None:
            self.storage.io.forget_memory(pool)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in host memory, on its way to it or from it."""
        with self._lock:
            self._note_ended()
            return self.arena_used_bytes == 0

    def narrow(self, arena_bytes: int) -> None:
        """Less host memory from now on, of which half is a home at most. It must be empty."""
        with self._lock:
            self._arena.narrow(arena_bytes)
            if self._traffic is not None and self.storage is not None:
                kept_bytes = min(self.storage.kept_bytes, self.arena_bytes // 2)
                self.storage = self._traffic.home = replace(self.storage, kept_bytes=kept_bytes)
                self._traffic.bound(self._piece_bytes, self.arena_bytes)

    @property
    def arena_bytes(self) -> int:
        return self._arena.capacity_bytes

    @property
    def kept_bytes(self) -> int:
        """Of host memory, for what is swapped and need not be written."""
        return self.arena_bytes if self.storage is None else min(self.arena_bytes, self.storage.kept_bytes)

    @property
    def arena_used_bytes(self) -> int:
        return self._arena.used_bytes

    @property
    def arena_peak_bytes(self) -> int:
        return self._arena.peak_bytes

    def unpin(self) -> None:
        """Takes the arena's registrations back, until :meth:`pin`. No copy may be in flight."""
        self._arena.unpin()

    def pin(self) -> None:
        self._arena.pin()

    # ---- out: device → host memory → storage --------------------------------------------------------------

    @property
    def num_saved(self) -> int:
        """So far: before a block begins, what its outputs are ``made_after``."""
        return self._next_sequence

    def put(
        self,
        source: torch.Tensor,
        what: str,
        unchanged: Callable[[], bool],
        *,
        made_after: int | None = None,
        room_bytes: float = math.inf,
    ) -> Record | None:
        """Starts moving ``source`` (flat bytes on the device) out; who waits is told above. ``made_after``: for a
        recomputation of a block that began after so many. ``room_bytes``: of the device, for all that is held there.

        ``unchanged`` tells whether the source was left alone since this call. Returns None when there is no room and
        no storage: the caller then leaves the tensor where it is.

        Raises:
            FuyouStorageError: storage is full, or an earlier write failed.
        """
        with self._lock:
            if self._closed:
                raise FuyouStateError("activations are saved after the engine was closed; build a new engine")
            self._progress()
            self._next_sequence += 1
            number = self._next_sequence
            need = (number, 0) if made_after is None else (made_after + 1, -number)
            record = Record.of(source.numel(), self._piece_bytes, need, what, self.held)
            begin = 0 if self._trace is None else time.perf_counter_ns()
            if self.copies.device_is_host:
                has_room = self._put_on_host(record, source)
            else:
                has_room = self._put_from_device(record, source, unchanged, room_bytes)
            if not has_room:
                return None
            if self._trace is not None:
                self._trace.add(Lane.COPY_OUT, what, begin, time.perf_counter_ns())
            self.counters.out_bytes += record.num_bytes
            return record

    def has_storage_for(self, num_bytes: int) -> bool:
        """Whether storage has room for so much, and for all that waits or lies in host memory, written or not."""
        if self.storage is None:
            return True
        with self._lock:
            return num_bytes + self._on_device_bytes + self._arena.used_bytes <= self.storage.space.room_bytes

    def _put_on_host(self, record: Record, source: torch.Tensor) -> bool:
        """Copies now. In one run, so that backward may use it there; what is too large for that in pieces."""
        whole = None
        if self.storage is None or round_up_to_page(record.num_bytes) <= self._arena.largest_block_bytes:
            whole = self._room(record.num_bytes)
            if whole is None and self.storage is None:
                return False
        record.target = whole
        for index, piece in enumerate(record.pieces):
            memory = self._room(piece.num_bytes) if whole is None else _pages_of(whole, piece)
            piece.memory = self._own_memory(piece.num_bytes) if memory is None else memory
            self.copies.copy_out(piece.of(source), piece.memory[: piece.num_bytes], None)
            piece.state = PieceState.HOST
            if self.storage is not None:
                self._unwritten.append((record.reference, index))
            del memory
            self._write_more()
        return True

    def _put_from_device(
        self, record: Record, source: torch.Tensor, unchanged: Callable[[], bool], room_bytes: float
    ) -> bool:
        """Sends what host memory is free for. Where there is storage the rest follows. Waits as long as too much beside
        this record is still on the device.
        """
        if self.storage is None:
            memories = [self._arena.try_allocate(piece.num_bytes) for piece in record.pieces]
            if any(memory is None for memory in memories):
                return False
            for piece, memory in zip(record.pieces, memories, strict=True):
                piece.memory = memory
        record.begin_leaving(source, self.copies.mark(), unchanged, self._left)
        self._on_device_bytes += record.num_bytes
        self._waiting.append(record.reference)
        self._leave_more()
        most = self._arena.capacity_bytes if self.storage is not None else math.inf

        def is_enough() -> bool:
            beside = self._on_device_bytes - record.num_bytes
            return beside <= most and (beside <= self._soon_bytes or self.held.now <= room_bytes)

        self._let_leave(is_enough)
        return True

    def let_leave(self, num_bytes: int, room_bytes: float) -> bool:
        """Whether the device, which has ``room_bytes`` for all that is held there, has them for so much more, beside a
        few records that are leaving it; waits for the others of these.
        """
        with self._lock:
            self._note_ended()
            if self.held.now - self._on_device_bytes + num_bytes > room_bytes:
                return False
            self._let_leave(
                lambda: self._on_device_bytes <= self._soon_bytes or self.held.now + num_bytes <= room_bytes
            )
        return True

    def _let_leave(self, is_enough: Callable[[], bool]) -> None:
        """Waits until it is, or nothing is leaving."""
        while not is_enough():
            if not (self._wait_for_copy_out() or (self._waiting and self._make_room())):
                return
            self._progress()

    def _leave_more(self) -> None:
        """Starts copies of what waits on the device, in order, as far as there is host memory for it."""
        while self._waiting:
            record = self._waiting[0]()
            if record is not None and record.source is not None and not record.stays:
                for index, piece in enumerate(record.pieces):
                    if piece.state is PieceState.WAITING and not self._leave(record, index, piece, record.source):
                        return
            self._waiting.popleft()

    def _leave(self, record: Record, index: int, piece: Piece, source: torch.Tensor) -> bool:
        """Starts the copy of one piece; False when there is no host memory for it."""
        if piece.memory is None:
            piece.memory = self._free_memory(piece.num_bytes, (self._next_sequence + 1, 0))  # its own pieces too
            if piece.memory is None:
                return False
        copy = self.copies.copy_out(piece.of(source), piece.memory[: piece.num_bytes], record.after)
        piece.state = PieceState.LEAVING
        if copy is None:
            self._has_left(record.reference, index)
        else:
            self._copies_out.append((copy, (record.reference, index)))
        return True

    def _has_left(self, reference: weakref.ref[Record], index: int) -> None:
        """The copy of a piece has ended: LEAVING → HOST. With the last one the device lets go of the source."""
        record = reference()
        if record is None:
            return
        if record.unchanged is not None and not record.unchanged():
            record.spoilt = CHANGED
        record.pieces[index].state = PieceState.HOST
        if self.storage is not None:
            self._unwritten.append((reference, index))
        if index == len(record.pieces) - 1 and not any(piece.state in _ON_DEVICE for piece in record.pieces):
            record.end_leaving()  # they leave in order; but one that could not be copied has not left

    def _write_more(self, *, at_least_one: bool = False) -> bool:
        """Keeps the storage write lane busy, within its bound; whether a write was started."""
        traffic, started = self._traffic, False
        while traffic is not None and self._unwritten:
            if not (at_least_one and not started):
                if not traffic.has_room(is_write=True):
                    break
                if self._arena.used_bytes < traffic.home.kept_bytes:
                    break
            reference, index = self._unwritten[0]
            record = reference()
            piece = record.pieces[index] if record is not None else None
            if record is not None and piece is not None and piece.state is PieceState.HOST:
                started = self._write(traffic, record, index, piece) or started
            self._unwritten.popleft()
        return started

    def _write(self, traffic: StorageTraffic, record: Record, index: int, piece: Piece) -> bool:
        if piece.memory is None:
            return False
        piece.lease = traffic.home.space.lease(piece.memory.numel())
        piece.io = traffic.start_write(record, index, piece.memory, piece.lease)
        piece.state = PieceState.WRITING
        return True

    # ---- host memory --------------------------------------------------------------------------------------

    def _free_memory(self, num_bytes: int, below: Need) -> torch.Tensor | None:
        """Arena memory, after forgetting what is needed later than ``below`` and is on storage; never waits."""
        while True:
            memory = self._arena.try_allocate(num_bytes)
            if memory is not None or not self._forget_last_clean(below):
                return memory

    def _room(self, num_bytes: int) -> torch.Tensor | None:
        """Arena memory, after as much forgetting and waiting as it takes; None when neither can help."""
        while True:
            memory = self._arena.try_allocate(num_bytes)
            if memory is not None or not self._make_room():
                return memory

    def _make_room(self) -> bool:
        """One step towards free host memory; False when there is none left. See the note above."""
        if self._forget_last_clean((self._next_sequence + 1, 0)):
            return True
        if self._wait_for_io(is_write=True):
            self._write_more()  # the next one begins while this thread waits for another
            return True
        if self._wait_for_copy_out() or self._write_more(at_least_one=True):
            return True
        return self._wait_for_copy_in() or self._wait_for_io(is_write=False)

    def _wait_for_io(self, *, is_write: bool) -> bool:
        """Waits for the oldest write, or read; False when there is none."""
        flight = self._traffic.oldest(is_write=is_write) if self._traffic is not None else None
        if flight is not None:
            self._wait_and_finish(flight)
        return flight is not None

    def _wait_for_copy_out(self) -> bool:
        """Waits for the oldest; False when there is none."""
        if not self._copies_out:
            return False
        begin = time.perf_counter()
        self._end_copy_out(InFlightCopy.wait)
        self.counters.waited_secs += time.perf_counter() - begin
        self._write_more()
        return True

    def _wait_for_copy_in(self) -> bool:
        """Waits for the oldest; False when there is none."""
        if not self._copies_in:
            return False
        begin = time.perf_counter()
        self._end_copy_in(InFlightCopy.wait)
        self.counters.waited_secs += time.perf_counter() - begin
        return True

    def _forget_last_clean(self, below: Need) -> bool:
        """Drops the host copy of what is needed last, if that is later than ``below``: of a piece, or of a
        record that lies in one run.
        """
        while self._clean and self._clean[0][0] < below:
            _, index, reference = heapq.heappop(self._clean)
            record = reference()
            if record is None or record.pieces[index].state is not PieceState.CLEAN:
                continue
            pieces = [record.pieces[index]]
            if record.target is not None and self.copies.device_is_host:
                pieces = record.pieces
                if record.is_own or any(piece.state is not PieceState.CLEAN for piece in pieces):
                    continue  # with the last piece that becomes clean it is in the heap again
                record.forget_target()
            for piece in pieces:
                piece.memory, piece.state = None, PieceState.STORED
            return True
        return False

    def _own_memory(self, num_bytes: int) -> torch.Tensor:
        """Where the device is the host, memory beside the arena for what comes back, as on a device."""
        self.counters.overflow_bytes += num_bytes
        return aligned_tensor(round_up_to_page(num_bytes))

    # ---- in: storage → host memory → device ---------------------------------------------------------------

    def take(self, record: Record) -> torch.Tensor:
        """The record's bytes on the device, flat, ready for the stream that computes.

        Raises:
            FuyouStorageError: it could not be read back.
            RuntimeError: the tensor was changed in place while it was being copied out, or by whoever it was given to.
        """
        with self._lock:
            record.stay()
            if record.source is not None and not record.spoilt:
                if record.unchanged is None or record.unchanged():
                    return record.source  # it has not left yet
                record.spoilt = CHANGED
            if record.is_changed:
                record.spoilt = CHANGED
            if record.spoilt:
                raise RuntimeError(f"{record.what}: {record.spoilt}")
            begin = 0 if self._trace is None else time.perf_counter_ns()
            waited = self._bring_to_host(record) if self.copies.device_is_host else self._bring_to_device(record)
            if (
                waited and self._trace is not None and self.copies.device_is_host
            ):  # a device's own clock tells when it waited
                self._trace.add(Lane.WAIT, record.what, begin, time.perf_counter_ns())
            if record.target is None:
                raise FuyouStateError(f"{record.what} must be on the device, it is in {record.pieces[0].state.name}")
            self._count_in(record)
            record.hand_out()
            return self.copies.make_visible(record.target[: record.num_bytes], record.arrival)

    def _count_in(self, record: Record) -> None:
        if record.counted_bytes == 0:
            self.counters.in_bytes += record.num_bytes
            record.count(record.num_bytes)

    def is_intact(self, record: Record) -> bool:
        """Whether what the source was when it was saved can be had: there, or where it has gone."""
        with self._lock:
            intact = record.unchanged is None or record.unchanged()
            return intact and not record.spoilt and not record.is_changed

    def _bring_to_device(self, record: Record) -> bool:
        """Everything is in the target, or on the way there; whether this waited for storage."""
        self._copy_in(record)
        self.num_demand_reads += bool(self._stored(record))
        started, waited = 0, False
        for index, piece in enumerate(record.pieces):
            while started < len(record.pieces) and self._start_read(record, started, is_demand=started <= index):
                started += 1
            if piece.io is not None and piece.state is PieceState.READING:
                self._wait_and_finish(piece.io)
                waited = True
            self._copy_in(record, index)
        return waited

    def _bring_to_host(self, record: Record) -> bool:
        """Everything is in the target; whether this waited for storage."""
        if record.target is None:
            record.target = self._free_memory(record.num_bytes, record.need)
            record.is_own = record.target is None
            if record.target is None:
                record.target = self._own_memory(record.num_bytes)
        stored = self._stored(record)
        self.num_demand_reads += bool(stored)
        for index in stored:
            self._start_read(record, index, is_demand=True)
        waited = False
        for piece in record.pieces:
            if piece.io is not None and piece.state is PieceState.READING:
                self._wait_and_finish(piece.io)
                waited = True
            place = _pages_of(record.target, piece)
            if piece.memory is not None and piece.memory.data_ptr() != place.data_ptr():
                self.copies.copy_in([(piece.memory, place)])
                piece.memory = place
        return waited

    def _stored(self, record: Record) -> list[int]:
        return [index for index, piece in enumerate(record.pieces) if piece.state is PieceState.STORED]

    def _copy_in(self, record: Record, index: int | None = None) -> None:
        """Starts copies to the device of the pieces that are in host memory, or of one of them."""
        pieces = record.pieces if index is None else record.pieces[index : index + 1]
        found = [piece for piece in pieces if piece.state in IN_MEMORY and piece.memory is not None]
        if not found:
            return
        if record.target is None:
            record.target = self.copies.new_target(record.num_bytes)
            self._count_in(record)
        parts = [(p.memory[: p.num_bytes], p.of(record.target)) for p in found if p.memory is not None]
        copy = self.copies.copy_in(parts)
        for piece in found:
            piece.state, piece.memory = PieceState.ARRIVED, None
        if copy is not None:
            record.arrival = copy.event
            self._copies_in.append((copy, record.reference))

    def read_ahead(self, needed: Iterable[Record], soon: Iterable[Record]) -> None:
        """Starts reading ``needed``, given in the order in which backward will ask, as far as memory and the bound on
        reads allow; starts copying to the device what of ``soon`` is in host memory, in that order, as far as it takes
        no more of the device than what is needed next should.
        """
        with self._lock:
            self._note_ended()  # and sends nothing more out: backward needs first what was saved last
            for record in needed:
                if not self._read_ahead(record):
                    break
            if self.copies.device_is_host:
                return
            num_bytes = 0
            for record in soon:
                if num_bytes >= self._soon_bytes:
                    return
                if record.source is None and not record.spoilt:
                    try:
                        self._copy_in(record)
                    except torch.OutOfMemoryError:  # nobody asks for it yet
                        return
                    num_bytes += record.num_bytes

    def _read_ahead(self, record: Record) -> bool:
        """Starts reading all of it that is on storage alone; False when that is not possible now."""
        stored = self._stored(record)
        if not stored:
            return True
        if self._traffic is None or not self._traffic.has_room(is_write=False):
            return False
        if self.copies.device_is_host and record.target is None:
            record.target = self._free_memory(record.num_bytes, record.need)
            if record.target is None and not self._read_ahead_beside(record):
                return False
        return all(self._start_read(record, index, is_demand=False) for index in stored)

    def _read_ahead_beside(self, record: Record) -> bool:
        """Where the device is the host: what never fits the arena comes back early to memory of its own, one record at
        a time; whether that is its turn.
        """
        before = self._beside()
        if round_up_to_page(record.num_bytes) <= self._arena.largest_block_bytes or (before and not before.stays):
            return False
        record.target, record.is_own = self._own_memory(record.num_bytes), True
        self._beside = record.reference
        return True

    def _start_read(self, record: Record, index: int, *, is_demand: bool) -> bool:
        """Starts reading a piece that is on storage alone; False when it must wait and nobody waits for it."""
        piece = record.pieces[index]
        if piece.state is not PieceState.STORED:
            return True
        traffic = self._traffic
        if traffic is None or piece.lease is None:
            raise FuyouStateError(f"{record.what} is on storage, but this tier has none")
        if self._closed:
            raise FuyouStateError(f"{record.what} is gone: the engine was closed between forward and backward")
        if not is_demand and not traffic.has_room(is_write=False):
            return False
        if self.copies.device_is_host and record.target is not None:
            memory: torch.Tensor | None = _pages_of(record.target, piece)
        else:
            memory = self._room(piece.num_bytes) if is_demand else self._free_memory(piece.num_bytes, record.need)
        if memory is None:
            if is_demand:
                raise FuyouStateError(
                    f"{record.what}: no host memory is free for {piece.num_bytes} bytes of it, of {self.arena_bytes}; "
                    f"raise plan.activation_bytes"
                )
            return False
        piece.io = traffic.start_read(record, index, memory, piece.lease, is_demand=is_demand)
        piece.memory, piece.state = memory, PieceState.READING
        return True

    # ---- what has ended -----------------------------------------------------------------------------------

    def _progress(self) -> None:
        """Moves on what has ended, and sends out what follows."""
        self._note_ended()
        self._leave_more()
        self._write_more()

    def _note_ended(self) -> None:
        """Moves on what has ended; raises the first failure when everything is accounted for."""
        while self._copies_out and self._end_copy_out(InFlightCopy.done):
            pass
        while self._copies_in and self._end_copy_in(InFlightCopy.done):
            pass
        while self._left:
            self._on_device_bytes -= self._left.popleft()
        if self._traffic is not None:
            self._finish_all(self._traffic.ended())

    def _end_copy_out(self, has_ended: Callable[[InFlightCopy], bool | None]) -> bool:
        """Moves on the piece of the oldest copy out, if that has ended; what cannot be copied stays on the device."""
        copy, (reference, index) = self._copies_out[0]
        record = reference()
        try:
            if has_ended(copy) is False:
                return False
        except BaseException:
            self._copies_out.popleft()
            if record is not None:
                record.pieces[index].state, record.pieces[index].memory = PieceState.WAITING, None
                record.stay()
            raise
        self._copies_out.popleft()
        self._has_left(reference, index)
        return True

    def _end_copy_in(self, has_ended: Callable[[InFlightCopy], bool | None]) -> bool:
        """Lets go of the host memory of the oldest copy in, if that has ended."""
        copy, reference = self._copies_in[0]
        record = reference()
        try:
            if has_ended(copy) is False:
                return False
        except BaseException as error:
            self._copies_in.popleft()
            if record is not None:
                record.spoilt = f"it could not be copied to the device ({error})"
            raise
        self._copies_in.popleft()
        return True

    def _finish_all(self, flights: Iterable[InFlightIo]) -> None:
        failure: OSError | None = None
        for flight in flights:
            try:
                self._finish(flight)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _wait_and_finish(self, flight: InFlightIo) -> None:
        self.counters.waited_secs += flight.transfer.wait_ended()
        self._finish(flight)

    def _finish(self, flight: InFlightIo) -> None:
        """Accounts for one ended transfer and moves its piece on; after a failure it is where it was before."""
        if self._traffic is not None:
            self._traffic.remove(flight)
        record = flight.record()
        piece = flight.piece()
        if piece is not None:
            piece.io = None
        try:
            flight.transfer.wait()
        except OSError:
            if record is not None and piece is not None:
                self._undo(record, piece, flight)
            raise
        if flight.is_write:
            self.counters.written_bytes += flight.num_bytes
        else:
            self.counters.read_bytes += flight.num_bytes
        if record is not None and piece is not None and piece.state in (PieceState.WRITING, PieceState.READING):
            piece.state = PieceState.CLEAN
            heapq.heappush(self._clean, (record.need, flight.index, record.reference))

    def _undo(self, record: Record, piece: Piece, flight: InFlightIo) -> None:
        if flight.is_write:
            piece.lease = None
            if piece.state is PieceState.WRITING:
                piece.state = PieceState.HOST
                self._unwritten.appendleft((record.reference, flight.index))
        else:
            piece.state, piece.memory = PieceState.STORED, None

    def poll(self) -> None:
        """Takes note of everything that has ended and forgets what is dead. Raises a failure that nobody has seen."""
        with self._lock:
            if self._traffic is not None:
                self._finish_all([flight for flight in self._traffic if flight.transfer.done()])
            self._progress()
            self._waiting = deque(reference for reference in self._waiting if reference() is not None)
            self._unwritten = deque(place for place in self._unwritten if place[0]() is not None)
            self._clean = [entry for entry in self._clean if entry[2]() is not None]
            heapq.heapify(self._clean)

    def close(self) -> None:
        """Waits for what is in flight and gives memory and storage back. Saved tensors on storage are lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ending = ExitStack()  # from the last line to the first, each after what it waits for
            if self.storage is not None:
                ending.callback(self.storage.close)
            ending.callback(self._arena.give_back)
            for what in (self._clean, self._unwritten, self._waiting, self._copies_in, self._copies_out):
                ending.callback(what.clear)
            for copy, _ in (*self._copies_out, *self._copies_in):
                ending.callback(_wait_unless_failed, copy)
            if self._traffic is not None:
                for flight in self._traffic:
                    ending.callback(self._traffic.remove, flight)
                    ending.callback(flight.transfer.end)
            with ending:
                pass


def _wait_unless_failed(copy: InFlightCopy) -> None:
    with suppress(RuntimeError):  # of a device that has failed: it copies nothing any more
        copy.wait()


def _pages_of(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece's whole pages in the memory of its record."""
    return whole[piece.begin : piece.begin + round_up_to_page(piece.num_bytes)]
