# SPDX-License-Identifier: Apache-2.0
"""The states of all chunks as one step left them, taken away chunk by chunk while training goes on.

Which updates wait for it, and which hand over what they replace, is the pipeline's: [Note: kept states] in
``csrc/pipeline/kept_states.cpp``. Here states are read where they lie, while nothing else of this rank moves, or first
if an update waits for them, and compared with their checksums. Where storage bounds a step it is never idle, and nearly
all states are handed over.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.host.waiting import SLICE_SECS
from ds_fuyou.optimizer.layout import Chunk
from ds_fuyou.planner.plan import SAVE_BLOCKS
from ds_fuyou.storage.io import Transfer, storage_error

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["Snapshot"]

_NUM_READING = 2
_NUM_LENT = SAVE_BLOCKS - _NUM_READING
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
    transfer: Transfer | None = None
    is_lent: bool = False

    def is_there(self) -> bool:
        return self.transfer is None or self.transfer.done()


class Snapshot:
    """Made by the training thread, between two steps; then used by one thread. One at a time."""

    def __init__(self, core: OutOfCoreOptimizer) -> None:
        self._core = core
        self._pipeline = core.pipeline
        self._without_moments = frozenset(core.states.without_moments())
        self._ended = threading.Event()
        self._is_given_up = False
        chunks = core.layout.chunks
        # As gradients come, so that updates find most of what they would overwrite copied.
        order = sorted(chunks, key=lambda chunk: chunk.position, reverse=True)
        size = max(core.states.num_bytes(chunk) for chunk in chunks)
        self._lent = {memory.data_ptr(): memory for memory in (aligned_tensor(size) for _ in range(_NUM_LENT))}
        self._spare = [aligned_tensor(size) for _ in range(_NUM_READING)]
        self._io = core.io.sharing(core.path_of)  # a read that fails costs the checkpoint, not the run
        self._pipeline.keep_states([chunk.index for chunk in order])  # last: from here on updates wait
        try:
            for address in self._lent:
                self._pipeline.lend_buffer(address)
        except BaseException:
            self.close()
            raise

    def states(self) -> Generator[tuple[Chunk, list[torch.Tensor]]]:
        """Every chunk once, ``[P32, moments...]``, to be used before the next one is asked for. When it ends, also by
        an exception, nothing waits for this snapshot any more.

        Raises:
            FuyouStorageError: a state could not be read.
            FuyouChecksumError: a state is not what the run wrote.
            RuntimeError: the pipeline failed before the states were there.
        """
        num_left = len(self._core.layout.chunks)
        reading: deque[_Taken] = deque()
        try:
            while num_left or reading:
                while num_left and self._spare:
                    if self._is_given_up or self._ended.is_set():
                        raise FuyouStateError("the states of this step were let go before they were copied")
                    taken = self._take(reading)
                    if taken is not None:
                        num_left -= 1
                        reading.append(taken)
                    elif reading:
                        break
                taken = reading.popleft()
                self._settle(taken)
                yield taken.chunk, self._core.states.parts(taken.chunk, taken.state)
                if taken.is_lent:
                    self._pipeline.lend_buffer(taken.block.data_ptr())
                else:
                    self._spare.append(taken.block)
        finally:
            self.close()

    def _take(self, reading: Collection[_Taken]) -> _Taken | None:
        """The next state: those that an update handed over or waits for come before the others."""
        core = self._core
        # What is read here has come, or is what is in flight.
        is_idle = core.io.engine.num_in_flight <= sum(not taken.is_there() for taken in reading)
        timeout_secs = 0.0 if reading else SLICE_SECS if is_idle else _LOOK_SECS
        kept = self._pipeline.take_kept(timeout_secs, is_idle)
        if kept is None:
            return None
        index, slot, address, is_wanted = kept
        chunk, slot = core.layout.chunks[index], core.slot_on_storage(index, slot)
        num_bytes = core.states.num_bytes(chunk)
        if address:
            block = self._lent[address]
            return _Taken(chunk, block, block[:num_bytes], slot, is_lent=True)
        block = self._spare.pop()
        state = block[:num_bytes]
        resident = core.place.state(index)
        if resident is not None:
            state.copy_(resident)
            self._pipeline.release_kept(index)
            return _Taken(chunk, block, state, slot)
        has_moments, priority = index not in self._without_moments, _FIRST if is_wanted else _BEHIND
        extents = core.states.stored_extents(chunk, slot, has_moments=has_moments)
        state[sum(extent.num_bytes for extent in extents) :].zero_()
        what = f"reading the state of chunk {index} for a checkpoint"
        return _Taken(chunk, block, state, slot, self._io.read(extents, state, what, priority))

    def _settle(self, taken: _Taken) -> None:
        """Until it is there and compared; then the place that it lies in may be overwritten."""
        index = taken.chunk.index
        if taken.transfer is not None:
            taken.transfer.wait()
        if not self._pipeline.kept_holds(index, taken.state.data_ptr()):
            begin = self._core.place.state_extents(index, taken.slot)[0]
            what = f"reading the state of chunk {index}"
            raise storage_error(what, errno.EBADMSG, begin.fd, begin.offset, self._core.path_of)
        if taken.transfer is not None:
            self._pipeline.release_kept(index)

    def give_up(self) -> None:
        """:meth:`states` ends soon, by an exception. From any thread."""
        self._is_given_up = True

    def wait(self, timeout_secs: float) -> bool:
        """Until nothing of it is needed where it lies."""
        return self._ended.wait(timeout_secs)

    def close(self) -> None:
        """Nothing waits for this snapshot any more. Idempotent."""
        if not self._ended.is_set():
            self._pipeline.drop_kept()
            self._lent.clear()
            self._spare.clear()
            self._ended.set()
