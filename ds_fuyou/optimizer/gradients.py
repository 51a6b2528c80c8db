# SPDX-License-Identifier: Apache-2.0
"""G16: the gradients of one step, kept until ``step()`` has validated, in DRAM or spilled to storage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.host.memory import PageLocks, aligned_tensor, round_up_to_page
from ds_fuyou.optimizer.layout import Chunk, FlatLayout, ParamSpan, overlap
from ds_fuyou.planner.plan import GRADIENT_BUFFERS
from ds_fuyou.storage.io import IoLane, Transfer
from ds_fuyou.storage.store import Extent

__all__ = ["DramGradients", "GradientMemory", "Piece", "StoredGradients"]

logger = logging.getLogger("ds_fuyou")


class Piece(NamedTuple):
    """A part of a parameter's gradient, writable: the values written in this step, once ``reading`` has ended."""

    values: torch.Tensor
    reading: Transfer | None = None


class GradientMemory(Protocol):
    """One gradient element for every parameter element of this rank, in the accumulation dtype."""

    waited_secs: float
    """Time the training thread stood waiting for transfers of gradients."""
    relieve: Callable[[], bool]
    """Waits until the oldest copy from the device has ended and hands it on; False if there is none."""

    @property
    def may_wait(self) -> bool:
        """Whether a gradient that comes may wait for memory, while others are written."""

    @property
    def lent_bytes(self) -> int:
        """Memory in use that others lent."""

    def pieces(self, span: ParamSpan) -> list[Piece]:
        """Memory that together is the gradient of ``span``."""

    def values(self, span: ParamSpan) -> list[torch.Tensor]:
        """The same to read: views that hold until the next call. What left DRAM stays where it is."""

    def pointer(self, chunk: int) -> int:
        """Address of the chunk's gradient in DRAM, 0 when it is on storage only."""

    def begin_last(self) -> None:
        """The last micro-batch of the step begins: what is sealed from now on is final as far as backward knows."""

    def seal(self, chunk: int) -> None:
        """The chunk's gradient is complete for now: it may leave DRAM."""

    def seal_all(self, but: Collection[int] = ()) -> None:
        """Backward of a micro-batch has ended; what is still copied into the chunks ``but`` is sealed later."""

    def check(self) -> None:
        """Raises FuyouStorageError if a write that has ended failed."""

    def end_step(self) -> None:
        """No gradient of the last step is needed any more."""

    def return_lent(self) -> None:
        """Between steps, when no update works: memory that others lent is theirs again."""

    def let_go(self) -> None:
        """Between two windows, when no update works: the memory goes, and none is registered with a device any more."""

    def close(self, *, told: bool = False) -> None:
        """Waits for transfers in flight and lets the memory go. Logs what failed, unless it was ``told`` before."""


class DramGradients:
    """The whole class in DRAM: one flat tensor a sub-group."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, locks: PageLocks) -> None:
        self._layout, self._locks = layout, locks
        self.waited_secs = 0.0
        self.relieve: Callable[[], bool] = lambda: False
        itemsize = dtype.itemsize
        self._flat: list[torch.Tensor] = []
        try:
            for numel in layout.sub_group_numels:
                memory = locks.lock(aligned_tensor(round_up_to_page(numel * itemsize), inherited=False))
                self._flat.append(memory.view(dtype)[:numel])
        except BaseException:
            for flat in self._flat:
                locks.unlock(flat)
            raise
        self._pieces = [[Piece(self._flat[span.sub_group][span.begin : span.end])] for span in layout.params]

    @property
    def may_wait(self) -> bool:
        return False

    @property
    def lent_bytes(self) -> int:
        return 0

    def pieces(self, span: ParamSpan) -> list[Piece]:
        return self._pieces[span.index]

    def values(self, span: ParamSpan) -> list[torch.Tensor]:
        return [piece.values for piece in self._pieces[span.index]]

    def pointer(self, chunk: int) -> int:
        spec = self._layout.chunks[chunk]
        flat = self._flat[spec.sub_group]
        return flat.data_ptr() + spec.begin * flat.element_size()

    def begin_last(self) -> None:
        """Nothing changes."""

    def seal(self, chunk: int) -> None:
        """Stays."""

    def seal_all(self, but: Collection[int] = ()) -> None:
        """Stays."""

    def check(self) -> None:
        """Nothing is written."""

    def end_step(self) -> None:
        """The next step overwrites."""

    def return_lent(self) -> None:
        """Nobody lends."""

    def let_go(self) -> None:
        for flat in self._flat:
            self._locks.unlock(flat)
        self.close()

    def close(self, *, told: bool = False) -> None:
        """Nothing is in flight; the memory goes with its last view."""
        self._pieces.clear()
        self._flat.clear()


@dataclass
class _Open:
    """A chunk's gradient in memory, to be changed."""

    memory: torch.Tensor
    parts: Sequence[torch.Tensor]
    """What of it each parameter of the chunk has."""
    reading: Transfer | None = None
    """Brings the sum so far from storage."""
    is_lent: bool = False
    """The memory is lent until the last micro-batch: what is in it need not leave before."""


@dataclass(frozen=True)
class _Sealed:
    """A chunk's gradient in memory that is written to storage."""

    memory: torch.Tensor
    writing: Transfer
    is_lent: bool


class StoredGradients:
    """One buffer a chunk while its gradients arrive; afterwards the chunk's gradient lives on storage.

    Chunks given to :meth:`keep` stay in DRAM instead. A buffer that is taken while ``max_buffers`` sealed ones are
    alive waits for the oldest write, after which an update that still needs that gradient reads it from storage
    (``detach``).

    [Note: sums on storage]
    Gradients of further micro-batches are added to what is there. Backward delivers them in the order of the
    micro-batch before: the next ``max_buffers`` chunks of that order are read ahead. As far as ``lend`` gives memory, a
    chunk keeps its buffer until the last micro-batch, and moves nothing before.

    An entry leaves its dictionary only when its transfer has ended and nothing works on its memory any more: whatever
    is raised in between (a failed write, a signal) leaves the memory owned here until :meth:`close`. The training
    thread alone calls this.
    """

    def __init__(
        self,
        layout: FlatLayout,
        dtype: torch.dtype,
        io: IoLane,
        extents: Callable[[int], tuple[Extent, ...]],
        detach: Callable[[int, int], None],
        locks: PageLocks,
        max_buffers: int = GRADIENT_BUFFERS,
        lend: Callable[[int], torch.Tensor | None] = lambda num_bytes: None,
    ) -> None:
        """``lend(num_bytes)``: memory that goes back with its last alias, or None."""
        self._layout, self._dtype, self._io, self._extents = layout, dtype, io, extents
        self._detach, self._locks, self._lend = detach, locks, lend
        self._max_buffers = max_buffers
        # A parameter opens all of its chunks. To register memory costs a device milliseconds: it keeps them.
        self._most_free = max(max_buffers, *map(len, layout.chunks_of_param)) if locks.pins else max_buffers
        self.relieve: Callable[[], bool] = lambda: False
        self.waited_secs = 0.0
        self._is_last = False
        self._numels = [[end - begin for begin, end in self._overlaps(chunk)] for chunk in layout.chunks]
        self._kept: dict[int, _Open] = {}
        self._open: dict[int, _Open] = {}
        self._num_lent = 0  # of the open ones
        self._ahead: dict[int, _Open] = {}  # read ahead and not used yet: storage holds the same
        self._sealed: dict[int, _Sealed] = {}
        self._free: list[torch.Tensor] = []
        self._stored: set[int] = set()
        self._last_read: tuple[int, torch.Tensor] | None = None  # neighbours are read one after another
        self._largest = max(round_up_to_page(c.numel * dtype.itemsize) for c in layout.chunks)
        self._order: list[int] = []  # chunks in the order of the micro-batch before
        self._used: dict[int, None] = {}  # in the order of this one
        self._next_ahead = 0

    def keep(self, chunks: Iterable[int]) -> None:
        """Gives these chunks memory for good, all or none. To be called before any gradient arrives.

        Raises:
            FuyouMemoryError: there is none.
            FuyouStateError: a device that pins refuses it.
        """
        kept: dict[int, torch.Tensor] = {}
        try:
            for index in chunks:
                kept[index] = self._locks.lock(aligned_tensor(self._num_bytes(index), inherited=False))
        except BaseException:
            for memory in kept.values():
                self._locks.unlock(memory)
            raise
        self._kept.update((index, self._entry(index, memory)) for index, memory in kept.items())

    def _overlaps(self, chunk: Chunk) -> Iterator[tuple[int, int]]:
        return (overlap(self._layout.params[index], chunk) for index in chunk.params)

    def _entry(self, index: int, memory: torch.Tensor, *, is_lent: bool = False) -> _Open:
        numels = self._numels[index]
        return _Open(memory, memory.view(self._dtype)[: sum(numels)].split(numels), is_lent=is_lent)

    def _num_bytes(self, index: int) -> int:
        return round_up_to_page(self._layout.chunks[index].numel * self._dtype.itemsize)

    @property
    def may_wait(self) -> bool:
        return len(self._kept) < len(self._layout.chunks)

    @property
    def lent_bytes(self) -> int:
        entries: list[_Open | _Sealed] = [*self._open.values(), *self._sealed.values()]
        return sum(entry.memory.nbytes for entry in entries if entry.is_lent)

    # ---- views --------------------------------------------------------------------------------------------

    def pieces(self, span: ParamSpan) -> list[Piece]:
        pieces = []
        for index in self._layout.chunks_of_param[span.index]:
            entry = self._to_change(index)
            pieces.append(Piece(entry.parts[span.index - self._layout.chunks[index].params[0]], entry.reading))
        return pieces

    def values(self, span: ParamSpan) -> list[torch.Tensor]:
        return [self._view(span, index, self._present(index)) for index in self._layout.chunks_of_param[span.index]]

    def _view(self, span: ParamSpan, index: int, memory: torch.Tensor) -> torch.Tensor:
        chunk = self._layout.chunks[index]
        begin, end = overlap(span, chunk)
        return memory.view(self._dtype)[begin - chunk.begin : end - chunk.begin]

    def _memory(self, index: int) -> torch.Tensor | None:
        """The chunk's gradient in DRAM, whatever it waits for there; None when it is on storage only."""
        if index in self._open:
            return self._open[index].memory
        if index in self._sealed:
            return self._sealed[index].memory
        return self._kept[index].memory if index in self._kept else None

    def _to_change(self, index: int) -> _Open:
        """The chunk's open buffer, and what reads into it. A sealed one is taken back when its write has ended."""
        self._last_read = None
        if index in self._kept:
            return self._kept[index]
        if index in self._sealed:
            sealed = self._sealed[index]
            self.waited_secs += sealed.writing.wait()
            if index in self._stored:
                self._add_open(index, self._entry(index, sealed.memory, is_lent=sealed.is_lent))
            del self._sealed[index]
            if index not in self._open:  # of the step before
                self._give_back(sealed.memory, sealed.is_lent)
                self._add_open(index, self._take(index))
        elif index in self._ahead:
            self._add_open(index, self._ahead[index])
            del self._ahead[index]
        elif index not in self._open:
            self._add_open(index, self._take(index))
        entry = self._open[index]
        if index not in self._used:
            self._used[index] = None
            self._read_ahead()
        if entry.reading is not None and entry.reading.done():
            entry.reading.wait()  # says if it failed
            entry.reading = None
        return entry

    def _add_open(self, index: int, entry: _Open) -> None:
        self._open[index] = entry
        self._num_lent += entry.is_lent

    def _drop_open(self, index: int) -> None:
        self._num_lent -= self._open.pop(index).is_lent

    def _present(self, index: int) -> torch.Tensor:
        """The chunk's gradient to read: where it is in DRAM, or a copy of what is on storage."""
        entry = self._open.get(index) or self._ahead.get(index)
        if entry is not None:
            if entry.reading is not None:
                self.waited_secs += entry.reading.wait()
            return entry.memory
        there = self._memory(index)
        if there is not None:
            return there
        if self._last_read is None or self._last_read[0] != index:
            self._last_read = None
            memory = aligned_tensor(self._num_bytes(index))
            self.waited_secs += self._start_reading(index, memory).wait()
            self._last_read = (index, memory)
        return self._last_read[1]

    def _start_reading(self, index: int, memory: torch.Tensor) -> Transfer:
        return self._io.read(self._extents(index), memory, f"reading the gradient of chunk {index}")

    # ---- buffers ------------------------------------------------------------------------------------------

    def _take(self, index: int) -> _Open:
        """A buffer for a chunk that is not in memory; its sum so far is on the way if there is one."""
        lent = None if self._is_last else self._lend(self._num_bytes(index))
        if lent is not None:
            entry = self._entry(index, lent, is_lent=True)
        else:
            while len(self._open) - self._num_lent > 2 * self._max_buffers and self.relieve():
                pass
            while len(self._sealed) >= self._max_buffers:
                self._retire(next(iter(self._sealed)))
            entry = self._entry(index, self._buffer())
        if index in self._stored:
            entry.reading = self._start_reading(index, entry.memory)
        return entry

    def _buffer(self) -> torch.Tensor:
        return self._free.pop() if self._free else self._locks.lock(aligned_tensor(self._largest, inherited=False))

    def _give_back(self, memory: torch.Tensor, is_lent: bool) -> None:
        if is_lent:
            return
        self._free.append(memory)
        while len(self._free) > self._most_free:
            self._locks.unlock(self._free.pop())

    def _retire(self, index: int) -> None:
        sealed = self._sealed[index]
        self.waited_secs += sealed.writing.wait()
        self._detach(index, sealed.memory.data_ptr())
        del self._sealed[index]
        self._give_back(sealed.memory, sealed.is_lent)

    def _read_ahead(self) -> None:
        """Starts reading what the order of the micro-batch before says comes next. Waits for nothing: while writes are
        so late that their buffers and those read ahead are twice ``max_buffers``, nothing more is read.
        """
        while len(self._ahead) < self._max_buffers and self._next_ahead < len(self._order):
            while len(self._sealed) >= self._max_buffers and next(iter(self._sealed.values())).writing.done():
                self._retire(next(iter(self._sealed)))
            if len(self._sealed) + len(self._ahead) >= 2 * self._max_buffers:
                return
            index = self._order[self._next_ahead]
            self._next_ahead += 1
            if index in self._used or index in self._open or index in self._sealed or index not in self._stored:
                continue
            memory = self._buffer()
            entry = self._entry(index, memory)
            entry.reading = self._start_reading(index, memory)
            self._ahead[index] = entry

    def pointer(self, chunk: int) -> int:
        there = self._memory(chunk)
        return 0 if there is None else there.data_ptr()

    # ---- the micro-batch and the step ---------------------------------------------------------------------

    def begin_last(self) -> None:
        self._is_last = True

    def seal(self, chunk: int) -> None:
        entry = self._open.get(chunk)
        if entry is None or (entry.is_lent and not self._is_last):
            return
        if entry.reading is not None:  # a gradient came and was added: this has ended, or the sum would have failed
            self.waited_secs += entry.reading.wait()
        while entry.is_lent and len(self._sealed) >= self._max_buffers:
            self._retire(next(iter(self._sealed)))
        writing = self._io.write(self._extents(chunk), entry.memory, f"writing the gradient of chunk {chunk}")
        self._sealed[chunk] = _Sealed(entry.memory, writing, entry.is_lent)
        self._stored.add(chunk)
        self._drop_open(chunk)

    def seal_all(self, but: Collection[int] = ()) -> None:
        for chunk in [chunk for chunk in self._open if chunk not in but]:
            self.seal(chunk)
        if self._is_last:
            self._drop_ahead()
        elif self._used:
            self._order, self._used, self._next_ahead = list(self._used), {}, 0
            self._read_ahead()

    def _drop_ahead(self) -> None:
        for index in list(self._ahead):
            entry = self._ahead[index]
            if entry.reading is not None:
                entry.reading.wait_ended()  # nobody needs it: whether it failed does not matter
            del self._ahead[index]
            self._give_back(entry.memory, entry.is_lent)

    def check(self) -> None:
        for sealed in self._sealed.values():
            if sealed.writing.done():
                sealed.writing.wait()

    def end_step(self) -> None:
        self._drop_ahead()
        for index in [index for index, entry in self._open.items() if entry.is_lent]:
            reading = self._open[index].reading
            if reading is not None:
                reading.wait_ended()
            self._drop_open(index)
        self._stored.clear()
        self._last_read = None
        self._is_last = False
        self._order, self._used, self._next_ahead = [], {}, 0

    def return_lent(self) -> None:
        for index in [index for index, entry in self._sealed.items() if entry.is_lent]:
            self._retire(index)

    def let_go(self) -> None:
        for index in list(self._sealed):
            self._retire(index)
        for memory in (*self._free, *(entry.memory for entry in (*self._open.values(), *self._kept.values()))):
            self._locks.unlock(memory)
        self.close()

    def close(self, *, told: bool = False) -> None:
        for sealed in self._sealed.values():
            try:
                sealed.writing.wait()
            except FuyouStorageError as error:  # the run has ended: it keeps nothing from closing
                if not told:
                    logger.error("closed after a failure: %s", error)
                told = True
        for entry in (*self._open.values(), *self._ahead.values()):
            if entry.reading is not None:
                entry.reading.wait_ended()
        for owner in (self._sealed, self._kept, self._open, self._ahead):
            owner.clear()
        self._free.clear()
