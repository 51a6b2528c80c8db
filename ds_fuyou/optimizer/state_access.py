# SPDX-License-Identifier: Apache-2.0
"""Reads and replaces the fp32 state between steps: checkpoints, ``safe_get/set_full_*``. Training thread only."""

from __future__ import annotations

import enum
import errno
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.memory import aligned_tensor, round_up_to_page
from ds_fuyou.optimizer.coded_states import decode, encode
from ds_fuyou.optimizer.layout import Chunk, ParamSpan, overlap
from ds_fuyou.storage.io import IoLane, Transfer, storage_error
from ds_fuyou.storage.types import PAGE_BYTES, Extent

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["ROUNDED", "NewState", "StateAccess", "part_of", "prefix"]

_NUM_COMING = 3  # states that are being read, while one is made
_NUM_BLOCKS = 7  # those, that one, and those being written


class Rounded(enum.Enum):
    """P16 that follows from P32."""

    ROUNDED = enum.auto()


ROUNDED = Rounded.ROUNDED


class NewState(NamedTuple):
    """What takes a chunk's place. ``parts``: by P32 and each moment its values, fp32 and 1-D, or where a file holds
    them, or None for zeros. ``params``: P16, None if it stays as it is. ``compare``: is given the parts when they have
    come, before anything is replaced, and may raise.
    """

    chunk: int
    parts: Sequence[torch.Tensor | Sequence[Extent] | None]
    params: torch.Tensor | Rounded | None = None
    compare: Callable[[Sequence[torch.Tensor]], None] | None = None


class _Coming(NamedTuple):
    """A new state on its way into ``state``, the chunk's part of ``block``."""

    new: NewState
    block: torch.Tensor
    state: torch.Tensor
    transfers: list[Transfer]


class _Blocks:
    """Memory that new states pass through, used again and again: new pages would cost as much as a copy."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._spare: list[torch.Tensor] = []
        self._num_made = 0
        self._writing: deque[tuple[torch.Tensor | None, list[Transfer]]] = deque()

    def take(self) -> torch.Tensor:
        """Waits for the oldest writes where all are in use."""
        while not self._spare and self._num_made == _NUM_BLOCKS:
            self._wait_oldest()
        if self._spare:
            return self._spare.pop()
        self._num_made += 1
        return aligned_tensor(self._num_bytes)

    def give_back(self, block: torch.Tensor | None, writing: list[Transfer]) -> None:
        """When these writes have ended."""
        self._writing.append((block, writing))
        while len(self._writing) > _NUM_BLOCKS - _NUM_COMING:
            self._wait_oldest()

    def wait(self) -> None:
        """For all writes."""
        while self._writing:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        block, writing = self._writing.popleft()
        for transfer in writing:
            transfer.wait()
        if block is not None:
            self._spare.append(block)


class _Read(NamedTuple):
    """A read in flight, none from memory, and the parts that it brings: into ``block`` where the slot has another
    layout than ``state``.
    """

    chunk: Chunk
    num_parts: int
    has_moments: bool
    state: torch.Tensor
    block: torch.Tensor | None = None
    transfer: Transfer | None = None


class _Kept(NamedTuple):
    """What was read last, of that generation: the next parameter is mostly of the same chunk. Without moments P32."""

    chunk: int
    generation: int
    parts: list[torch.Tensor]


class StateAccess:
    """The state of chunks as lists ``[P32, moments...]`` of fp32 tensors, 1-D, in host memory."""

    def __init__(self, core: OutOfCoreOptimizer) -> None:
        self._core = core
        self._num_parts = 1 + len(core.kind.moments)
        self._most_bytes = max(self.num_bytes(chunk) for chunk in core.layout.chunks)
        self._has_moments = [False] * len(core.layout.chunks)
        """Whether moments were ever written; until then they are zero and not read."""
        self._kept: _Kept | None = None

    def updated(self, index: int) -> None:
        """The chunk got its first update: its moments are on storage from now on."""
        self._has_moments[index] = True

    def forget(self) -> None:
        """Frees what is kept of the last read."""
        self._kept = None

    def without_moments(self) -> list[int]:
        """Chunks that no update has touched."""
        return [index for index, has in enumerate(self._has_moments) if not has]

    def read(self, index: int) -> list[torch.Tensor]:
        """A copy of one chunk's state; waits for its last update."""
        return next(self.read_all([index]))[1]

    def read_all(
        self, indices: Iterable[int], *, with_moments: bool = True
    ) -> Generator[tuple[Chunk, list[torch.Tensor]]]:
        """Copies of chunks' states in the order given, the next one being read while one is used.

        Without moments P32 alone is read, and compared.
        """
        self._core.wait_all()
        ahead: _Read | None = None
        for index in indices:
            started = self._start_reading(index, with_moments)
            if ahead is not None:
                yield ahead.chunk, self._finish_reading(ahead)
            ahead = started
        if ahead is not None:
            yield ahead.chunk, self._finish_reading(ahead)

    def _start_reading(self, index: int, with_moments: bool) -> _Read:
        core = self._core
        chunk = core.layout.chunks[index]
        num_parts = self._num_parts if with_moments else 1
        state = aligned_tensor(num_parts * _part_bytes(chunk))
        if core.place.state(index) is not None:
            self.copy_resident(chunk, state, with_moments=with_moments)
            return _Read(chunk, num_parts, with_moments, state)
        block = self.memory_for_block(chunk)
        has_moments = with_moments and self._has_moments[index]
        where = self.stored(chunk, core.slot(index), state, block, has_moments=has_moments)
        transfer = core.io.read(*where, f"reading the state of chunk {index}")
        return _Read(chunk, num_parts, has_moments, state, block, transfer)

    def _finish_reading(self, read: _Read) -> list[torch.Tensor]:
        chunk, state = read.chunk, read.state
        if read.transfer is not None:
            read.transfer.wait()
            holds = self.decoded(chunk, read.block, state, has_moments=read.has_moments)
            is_whole = read.num_parts == self._num_parts
            if not holds or not self._core.pipeline.state_holds(chunk.index, state.data_ptr(), with_moments=is_whole):
                begin = self._core.state_extents(chunk.index)[0]
                what = f"reading the state of chunk {chunk.index}"
                raise storage_error(what, errno.EBADMSG, begin.fd, begin.offset, self._core.path_of)
        return self.parts(chunk, state)

    def num_bytes(self, chunk: Chunk) -> int:
        """Of a chunk's state as readers see it."""
        return self._core.place.whole.num_bytes(chunk.numel)

    def copy_resident(self, chunk: Chunk, state: torch.Tensor, *, with_moments: bool) -> None:
        """A state in memory, whole; or P32 alone."""
        place, resident = self._core.place, self._core.place.state(chunk.index)
        if resident is None:
            raise FuyouStateError(f"the state of chunk {chunk.index} is not in memory")
        own = place.resident_of(chunk)
        layout = own if with_moments else own.master_alone
        decode(layout, chunk.numel, resident[: layout.num_bytes(chunk.numel)], state)

    def block_bytes(self, chunk: Chunk) -> int:
        """What :meth:`stored` takes: a block as it is in a slot, and P16; 0 where that is whole as it is."""
        stored = self._core.place.stored_of(chunk)
        return 0 if stored.is_whole else stored.num_bytes(chunk.numel) + round_up_to_page(chunk.numel * 2)

    def memory_for_block(self, chunk: Chunk) -> torch.Tensor | None:
        """None where it is whole as it is."""
        num_bytes = self.block_bytes(chunk)
        return aligned_tensor(num_bytes) if num_bytes else None

    def stored(
        self, chunk: Chunk, slot: int, state: torch.Tensor, block: torch.Tensor | None, *, has_moments: bool
    ) -> tuple[Sequence[Extent], torch.Tensor]:
        """What of a slot is to be read where: into ``state``, a whole block, or for :meth:`decoded` into ``block``.
        Moments that were never written stay as they are: zeros.
        """
        place, numel = self._core.place, chunk.numel
        layout = place.stored_of(chunk) if has_moments else place.stored.master_alone
        num_bytes = layout.num_bytes(numel)
        extents = prefix(place.state_extents(chunk.index, slot), num_bytes)
        if block is None:
            return extents, state[:num_bytes]
        if layout.is_split and not place.residency.params[chunk.index]:
            extents += place.param_extents(chunk.index, slot)
        return extents, block[: sum(extent.num_bytes for extent in extents)]

    def decoded(self, chunk: Chunk, block: torch.Tensor | None, state: torch.Tensor, *, has_moments: bool) -> bool:
        """``state`` := what was read. False if that says nothing: it was not written so."""
        place = self._core.place
        if block is None:
            return True
        layout = place.stored_of(chunk) if has_moments else place.stored.master_alone
        has_params = layout.is_split and not place.residency.params[chunk.index]
        num_bytes = layout.num_bytes(chunk.numel)
        return decode(layout, chunk.numel, block if has_params else block[:num_bytes], state)

    def parts(self, chunk: Chunk, state: torch.Tensor) -> list[torch.Tensor]:
        """Views of a state block, ``state``, or of its first parts: no byte more."""
        return [part.view(torch.float32)[: chunk.numel] for part in state.split(_part_bytes(chunk))]

    def write(self, index: int, parts: Sequence[torch.Tensor], params: torch.Tensor | None = None) -> None:
        """Replaces one chunk's state, see :meth:`write_all`."""
        self.write_all([NewState(index, parts, params)])

    def write_all(self, states: Iterable[NewState], path_of: Callable[[int], Path | None] | None = None) -> None:
        """Replaces chunks' states and P16; updates prepared from the old ones are dropped. What comes from files is
        read ahead, and all is written behind. ``path_of``: those files, for messages.

        What lives on storage is overwritten in place, and no commit stands from then until the next step's.

        Raises:
            FuyouStorageError: something could not be read or written.
        """
        core = self._core
        core.wait_all()
        core.wait_copied()
        lane = core.io.sharing(path_of or core.path_of)
        blocks, coming = _Blocks(self._most_bytes), deque[_Coming]()
        try:
            for state in states:
                core.drop_prepared(state.chunk)
                coming.append(self._start_filling(state, blocks, lane))
                if len(coming) > _NUM_COMING:
                    self._replace(coming.popleft(), blocks)
            while coming:
                self._replace(coming.popleft(), blocks)
            blocks.wait()
        finally:  # whoever opened the files closes them
            for each in coming:
                for transfer in each.transfers:
                    transfer.wait_ended()

    def _start_filling(self, new: NewState, blocks: _Blocks, lane: IoLane) -> _Coming:
        """Brings a new state into memory: its own, if it lives there and is whole."""
        place = self._core.place
        chunk, resident = self._core.layout.chunks[new.chunk], place.state(new.chunk)
        block = resident if resident is not None and place.resident.is_whole else blocks.take()
        state, transfers = block[: self.num_bytes(chunk)], []
        for part, source in zip(state.split(_part_bytes(chunk)), new.parts, strict=True):
            num_bytes = chunk.numel * 4
            if source is None:
                part.zero_()
            elif isinstance(source, torch.Tensor):
                part.view(torch.float32)[: chunk.numel].copy_(source)
                part[num_bytes:].zero_()
            else:
                part[num_bytes:].zero_()
                transfers.append(lane.read(source, part, f"reading chunk {new.chunk} of a checkpoint"))
        return _Coming(new, block, state, transfers)

    def _replace(self, coming: _Coming, blocks: _Blocks) -> None:
        """A state that has come takes the place of the old one."""
        core, index = self._core, coming.new.chunk
        self._kept = None
        place, chunk, resident = core.place, core.layout.chunks[index], core.place.state(index)
        for transfer in coming.transfers:
            transfer.wait()
        parts = self.parts(chunk, coming.state)
        if coming.new.compare is not None:
            coming.new.compare(parts)
        for part in parts:
            core.layout.clear_padding(chunk, part)
        writing: list[Transfer] = []
        layout = place.stored_of(chunk) if resident is None else place.resident_of(chunk)
        stored = coming.state if layout.is_whole else encode(layout, chunk.numel, coming.state, resident)
        if layout.rounds:  # what was rounded is the state from now on
            decode(layout, chunk.numel, stored, coming.state)
        if resident is None:
            core.commits.withdraw()
            writing.append(core.io.write(core.state_extents(index), stored, f"writing the state of chunk {index}"))
        self._has_moments[index] = True
        core.pipeline.replace_state(index, coming.state.data_ptr(), has_moments=True)
        core.pipeline.set_has_high(index)
        params = coming.new.params
        if params is ROUNDED:
            params = parts[0].to(core.options.param_dtype)
        if isinstance(params, torch.Tensor):
            writing += core.replace_params(chunk, params)
        blocks.give_back(None if coming.block is resident else coming.block, writing)

    # ---- P16 that is written by others than updates --------------------------------------------------------

    def params_edited(self, chunks: Iterable[int]) -> None:
        """P16 of these chunks in memory was edited: split masters do not follow from it any more."""
        for index in chunks:
            self._core.pipeline.params_edited(index)

    def keep_masters(self, chunks: Sequence[int]) -> None:
        """Before P16 of these chunks is edited on storage, where split masters are put together with it: their upper
        halves are written beside. At no instant is a committed state without what completes it.
        """
        core = self._core
        mine = [index for index in chunks if not core.place.residency.params[index]]
        if not core.place.stored.is_split or core.store is None or not mine:
            return
        for index in mine:
            core.drop_prepared(index)
            core.wait_idle(index)
        core.mover.settle()
        lacking = [i for i in mine if core.place.state(i) is None and not core.pipeline.has_high(i)]
        if lacking:
            core.wait_copied()
        written: list[tuple[int, torch.Tensor]] = []
        reads = (self._start_reading(index, with_moments=False) for index in lacking)
        coming = deque(islice(reads, _NUM_COMING))
        while coming:
            read = coming.popleft()
            self._finish_reading(read)
            halves = encode(core.place.stored.master_alone, read.chunk.numel, read.state, read.block)
            written.append((read.chunk.index, halves))
            coming.extend(islice(reads, 1))
        at = {index: core.place.stored.offsets(core.layout.chunks[index].numel)["joints"] for index, _ in written}
        self._write_parts([(index, 0, halves[: at[index]]) for index, halves in written])
        self._write_parts([(index, at[index], halves[at[index] :][:PAGE_BYTES]) for index, halves in written])
        for index, _ in written:
            core.pipeline.set_has_high(index)

    def _write_parts(self, parts: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        """(chunk, first byte in its block, bytes); durable when it returns, where a record stands."""
        core = self._core
        writes = [
            core.io.write(
                part_of(core.state_extents(index), begin, len(values)), values, f"writing P32 of chunk {index}"
            )
            for index, begin, values in parts
        ]
        for write in writes:
            write.wait()
        if writes and core.store is not None and not core.commits.is_withdrawn:
            core.store.sync_data()

    def read_param(self, span: ParamSpan, part: int) -> torch.Tensor:
        """One parameter's fp32 value (part 0) or moment, a copy."""
        layout = self._core.layout
        indices = layout.chunks_of_param[span.index]
        read: Iterable[tuple[Chunk, list[torch.Tensor]]]
        if len(indices) == 1:
            chunk = layout.chunks[indices[0]]
            read = [(chunk, self._looked_at(chunk, num_parts=part + 1))]
        else:  # the next one is read while one is copied
            read = self.read_all(indices, with_moments=part > 0)
        pieces = []
        for chunk, parts in read:
            begin, end = overlap(span, chunk)
            pieces.append(parts[part][begin - chunk.begin : end - chunk.begin])
        return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)

    def _looked_at(self, chunk: Chunk, num_parts: int) -> list[torch.Tensor]:
        """So many parts of a chunk's state, or more, until the next call; not to be changed."""
        core, kept = self._core, self._kept
        core.wait_all()
        resident = core.place.state(chunk.index)
        if resident is not None and core.place.resident_of(chunk).is_whole:
            return self.parts(chunk, resident)
        if kept is not None and kept[:2] == (chunk.index, core.generation) and len(kept.parts) >= num_parts:
            return kept.parts
        self._kept = None
        [(_, parts)] = self.read_all([chunk.index], with_moments=num_parts > 1)
        self._kept = _Kept(chunk.index, core.generation, parts)
        return parts

    def write_param(self, span: ParamSpan, part: int, values: torch.Tensor) -> None:
        """Replaces one parameter's fp32 value or moment; P16 follows with the next step, as in stock."""
        core = self._core
        if part == 0:
            core.params.left_behind(span)
        for index in core.layout.chunks_of_param[span.index]:
            chunk = core.layout.chunks[index]
            begin, end = overlap(span, chunk)
            parts = self._looked_at(chunk, self._num_parts)
            new = parts[part].clone()
            new[begin - chunk.begin : end - chunk.begin].copy_(values.view(-1)[begin - span.begin : end - span.begin])
            core.layout.clear_padding(chunk, new)
            replaced = [*parts[:part], new, *parts[part + 1 :]]
            self.write(index, replaced)
            if core.place.state(index) is None and not core.place.stored_of(chunk).rounds:
                self._kept = _Kept(index, core.generation, replaced)


def _part_bytes(chunk: Chunk) -> int:
    return round_up_to_page(chunk.numel * 4)


def part_of(extents: Sequence[Extent], begin: int, num_bytes: int) -> list[Extent]:
    """Bytes ``[begin, begin + num_bytes)`` of a run of extents."""
    taken = []
    for extent in prefix(extents, begin + num_bytes):
        skipped = min(begin, extent.num_bytes)
        begin -= skipped
        if extent.num_bytes > skipped:
            taken.append(Extent(extent.fd, extent.offset + skipped, extent.num_bytes - skipped))
    return taken


def prefix(extents: Sequence[Extent], num_bytes: int) -> list[Extent]:
    """The first ``num_bytes`` of a run of extents."""
    taken = []
    for extent in extents:
        if num_bytes <= 0:
            break
        part = min(extent.num_bytes, num_bytes)
        taken.append(Extent(extent.fd, extent.offset, part))
        num_bytes -= part
    return taken
