# SPDX-License-Identifier: Apache-2.0
"""The states of all chunks as one step left them, taken away chunk by chunk while training goes on.

Which updates wait for it, and which hand over what they replace, is the pipeline's: [Note: kept states] in
``csrc/pipeline/kept_states.cpp``. Here states are read where they lie, while nothing else of this rank moves, or first
if an update waits for them, and compared with their checksums. Where storage bounds a step it is never idle, and nearly
all states are handed over.

Where chunks have three slots nothing on storage is handed over, and no update waits for it. States are read when
storage has been idle for a while, and after every so many bytes that training has moved (:class:`Pace`). They are read
ahead of all else: behind it they would hardly come. So are, for their checksums, states that the file system shares
with the checkpoint's file: those are cloned at once.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.host.waiting import SLICE_SECS
from ds_fuyou.optimizer.layout import Chunk
from ds_fuyou.optimizer.state_access import part_of
from ds_fuyou.planner.plan import SAVE_BLOCKS, SAVE_BLOCKS_READ
from ds_fuyou.storage.io import Transfer, storage_error
from ds_fuyou.storage.types import PAGE_BYTES, Extent

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["Pace", "Snapshot"]

_NUM_READING = SAVE_BLOCKS_READ
_NUM_LENT = SAVE_BLOCKS - _NUM_READING
Clone = Callable[[Chunk, Sequence[Sequence[Extent]]], list[Extent] | None]

_TIMES = 8  # as many bytes are training's as are the checkpoint's, or as long is storage idle
_NEW_FILE = 2  # bytes that a byte of a new file costs
_LOOK_SECS = 0.02  # after which storage may have become idle
_BEHIND, _FIRST = 1 << 62, 0  # priorities of reads; those of updates lie between


@dataclass(frozen=True)
class _Taken:
    """A chunk's state on its way: in memory that the pipeline filled, or that a transfer fills."""

    chunk: Chunk
    block: torch.Tensor
    state: torch.Tensor
    """The chunk's part of the block."""
    slot: int
    transfers: Sequence[Transfer] = ()
    has_moments: bool = True
    coded: torch.Tensor | None = None
    """What was read, where a slot has another layout."""
    is_lent: bool = False
    clone: Sequence[Extent] = ()
    """Where it is read from instead of its slot."""

    def is_there(self) -> bool:
        return all(transfer.done() for transfer in self.transfers)


class Pace:
    """Of what is copied behind training, one piece after the other: the next one is due when training has moved eight
    times as much, or storage was idle for eight times as long as the last one took: training that has such gaps is in
    no hurry, and what is copied in shorter ones is in its way.

    Not a share of the time: a copy that waits for others would wait again, the longer the busier storage is.

    ``moved``: bytes that training has moved so far.
    """

    def __init__(self, moved: Callable[[], int], now: Callable[[], float] = time.perf_counter) -> None:
        self._moved, self._now = moved, now
        self._due, self._rest_secs = 0.0, 0.0
        self._idle_at, self._idle_since = 0, now()
        self._begun = 0.0

    def is_due(self, is_idle: bool) -> bool:
        """To be asked often. ``is_idle``: nothing is in flight."""
        moved, now = self._moved(), self._now()
        if moved != self._idle_at or not is_idle:
            self._idle_at, self._idle_since = moved, now
        return moved >= self._due or now - self._idle_since >= self._rest_secs

    def begin(self) -> None:
        self._due, self._rest_secs, self._begun = math.inf, math.inf, self._now()

    def end(self, num_bytes: int) -> None:
        """So many were moved since :meth:`begin`."""
        self._idle_at, self._idle_since = self._moved(), self._now()
        self._due = self._idle_at + _TIMES * num_bytes
        self._rest_secs = _TIMES * (self._idle_since - self._begun)


class Snapshot:
    """Made by the training thread, between two steps; then used by one thread. One at a time."""

    def __init__(self, core: OutOfCoreOptimizer) -> None:
        self._core = core
        self._pipeline = core.pipeline
        self._without_moments = frozenset(core.states.without_moments())
        self._ended = threading.Event()
        self._is_given_up = False
        self._hurries = threading.Event()
        self._pace = Pace(self._moved)
        self._may_wait = core.options.num_slots > 2
        """No update waits for it."""
        self._clone: Clone | None = None
        self._cloned: list[tuple[Chunk, int, list[Extent]]] = []
        chunks = core.layout.chunks
        # As gradients come, so that updates find most of what they would overwrite copied.
        order = sorted(chunks, key=lambda chunk: chunk.position, reverse=True)
        size = max(core.states.num_bytes(chunk) for chunk in chunks)
        hands_over = core.options.num_slots < 3 or any(core.place.residency.states)
        lent = [aligned_tensor(size) for _ in range(_NUM_LENT if hands_over else 0)]
        self._lent = {memory.data_ptr(): memory for memory in lent}
        self._spare = [aligned_tensor(size) for _ in range(_NUM_READING)]
        largest = max(chunks, key=core.states.block_bytes)
        made = {memory.data_ptr(): core.states.memory_for_block(largest) for memory in self._spare}
        self._coded = {address: memory for address, memory in made.items() if memory is not None}
        """Beside spare blocks."""
        self._io = core.io.sharing(_path_of)  # a read that fails costs the checkpoint, not the run
        self._pipeline.keep_states([chunk.index for chunk in order])  # last: from here on updates wait
        try:
            for address in self._lent:
                self._pipeline.lend_buffer(address)
        except BaseException:
            self.close()
            raise

    def states(self, clone: Clone | None = None) -> Generator[tuple[Chunk, list[torch.Tensor]]]:
        """Every chunk once, ``[P32, moments...]``, to be used before the next one is asked for. When it ends, also by
        an exception, nothing waits for this snapshot any more. ``clone``: of a chunk, from where its parts lie to
        where they are to be; None if that cannot be done.

        Raises:
            FuyouStorageError: a state could not be read.
            FuyouChecksumError: a state is not what the run wrote.
            RuntimeError: the pipeline failed before the states were there.
        """
        self._clone = clone if self._core.place.stored.is_whole else None
        num_left = len(self._core.layout.chunks)
        reading: deque[_Taken] = deque()
        try:
            while num_left or reading:
                while num_left and self._spare:
                    self._check()
                    before = len(self._cloned)
                    taken = self._take(reading)
                    num_left -= (taken is not None) + len(self._cloned) - before
                    if taken is not None:
                        reading.append(taken)
                    elif reading and len(self._cloned) == before:
                        break
                if not reading:
                    break
                taken = reading.popleft()
                self._settle(taken)
                yield taken.chunk, self._core.states.parts(taken.chunk, taken.state)
                if taken.transfers:
                    self._pace.end(_bytes_read(taken) + _NEW_FILE * len(taken.state))
                if taken.is_lent:
                    self._pipeline.lend_buffer(taken.block.data_ptr())
                else:
                    self._spare.append(taken.block)
            yield from self._read_clones()
        finally:
            self.close()

    def _check(self) -> None:
        if self._is_given_up or self._ended.is_set():
            raise FuyouStateError("the states of this step were let go before they were copied")

    def _read_clones(self) -> Generator[tuple[Chunk, list[torch.Tensor]]]:
        """As :class:`Pace` says, unless somebody waits for the checkpoint."""
        for chunk, slot, extents in self._cloned:
            while not (self._hurries.is_set() or self._pace.is_due(self._is_idle())):
                self._hurries.wait(_LOOK_SECS)
            self._check()
            self._pace.begin()
            block = self._spare[0]
            state = block[: self._core.states.num_bytes(chunk)]
            state[sum(extent.num_bytes for extent in extents) :].zero_()
            what = f"reading the state of chunk {chunk.index} for a checkpoint"
            taken = _Taken(chunk, block, state, slot, [self._io.read(extents, state, what, _FIRST)], clone=extents)
            self._settle(taken)
            yield chunk, self._core.states.parts(chunk, state)
            self._pace.end(_bytes_read(taken))

    def _moved(self) -> int:
        return sum(lane.num_bytes for lane in self._io.stats().values())

    def _is_idle(self, num_own: int = 0) -> bool:
        """But for what is read here."""
        return bool(self._io.engine.num_in_flight <= num_own)

    def _take(self, reading: Collection[_Taken]) -> _Taken | None:
        """The next state: those that an update handed over or waits for come before the others."""
        core = self._core
        is_idle = self._is_idle(sum(not taken.is_there() for taken in reading))
        is_due = self._hurries.is_set() or (self._pace.is_due(is_idle) if self._may_wait else is_idle)
        timeout_secs = 0.0 if reading else SLICE_SECS if is_due else _LOOK_SECS
        kept = self._pipeline.take_kept(timeout_secs, is_due or self._clone is not None)
        if kept is None:
            return None
        index, slot, address, is_wanted = kept
        chunk, slot = core.layout.chunks[index], core.slot_on_storage(index, slot)
        num_bytes = core.states.num_bytes(chunk)
        if address:
            block = self._lent[address]
            return _Taken(chunk, block, block[:num_bytes], slot, is_lent=True)
        if core.place.state(index) is None and self._clones(chunk, slot):
            return None
        block = self._spare.pop()
        state = block[:num_bytes]
        resident = core.place.state(index)
        if resident is not None:
            core.states.copy_resident(chunk, state, with_moments=True)
            self._pipeline.release_kept(index)
            return _Taken(chunk, block, state, slot)
        has_moments = index not in self._without_moments
        priority = _FIRST if is_wanted or self._may_wait or self._hurries.is_set() else _BEHIND
        self._pace.begin()
        coded = self._coded.get(block.data_ptr())
        where = core.states.stored(chunk, slot, state, coded, has_moments=has_moments)
        if not has_moments:
            state[core.place.whole.num_master_bytes(chunk.numel) :].zero_()
        what = f"reading the state of chunk {index} for a checkpoint"
        return _Taken(chunk, block, state, slot, [self._io.read(*where, what, priority)], has_moments, coded)

    def _clones(self, chunk: Chunk, slot: int) -> bool:
        """Whether the file has the state now, and its place may be overwritten."""
        part_bytes, num_moments = 4 * chunk.numel, len(self._core.kind.moments)
        if self._clone is None or part_bytes % PAGE_BYTES:
            return False
        num_parts = 1 if chunk.index in self._without_moments else 1 + num_moments
        extents = self._core.place.state_extents(chunk.index, slot)
        found = self._clone(chunk, [part_of(extents, n * part_bytes, part_bytes) for n in range(num_parts)])
        if found is None:
            self._clone = None  # it will not be otherwise for the next
            return False
        self._cloned.append((chunk, slot, found))
        self._pipeline.release_kept(chunk.index)
        return True

    def _settle(self, taken: _Taken) -> None:
        """Until it is there and compared; then the place that it lies in may be overwritten."""
        index = taken.chunk.index
        for transfer in taken.transfers:
            transfer.wait()
        states, chunk = self._core.states, taken.chunk
        holds = states.decoded(chunk, taken.coded, taken.state, has_moments=taken.has_moments)
        if not holds or not self._pipeline.kept_holds(index, taken.state.data_ptr()):
            begin = (taken.clone or self._core.place.state_extents(index, taken.slot))[0]
            what = f"reading the state of chunk {index}"
            raise storage_error(what, errno.EBADMSG, begin.fd, begin.offset, _path_of)
        if taken.transfers and not taken.clone:
            self._pipeline.release_kept(index)

    def hurry(self) -> None:
        """Somebody waits for the end of :meth:`states`. From any thread."""
        self._hurries.set()

    def give_up(self) -> None:
        """:meth:`states` ends soon, by an exception. From any thread."""
        self._is_given_up = True
        self._hurries.set()

    def wait(self, timeout_secs: float) -> bool:
        """Until nothing of it is needed where it lies."""
        return self._ended.wait(timeout_secs)

    def close(self) -> None:
        """Nothing waits for this snapshot any more. Idempotent."""
        if not self._ended.is_set():
            self._pipeline.drop_kept()
            self._lent.clear()
            self._spare.clear()
            self._coded.clear()
            self._ended.set()


def _bytes_read(taken: _Taken) -> int:
    return sum(transfer.memory.nbytes for transfer in taken.transfers)


def _path_of(fd: int) -> Path | None:
    """A state file's, or that of a checkpoint that shares its blocks."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        return None
