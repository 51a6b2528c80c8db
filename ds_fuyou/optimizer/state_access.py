# SPDX-License-Identifier: Apache-2.0
"""Reads and replaces the fp32 state between steps: checkpoints, ``safe_get/set_full_*``. Training thread only."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ds_fuyou.host.memory import aligned_tensor, round_up_to_page
from ds_fuyou.optimizer.layout import Chunk, ParamSpan, overlap
from ds_fuyou.storage.io import Transfer, storage_error
from ds_fuyou.storage.store import Extent

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["StateAccess", "prefix"]

_NUM_WRITING = 4  # transfers of states and of P16, while the next state is made


class _Read(NamedTuple):
    """A read in flight: the transfer, None from memory, and the parts that it brings."""

    chunk: Chunk
    num_parts: int
    state: torch.Tensor
    transfer: Transfer | None


class StateAccess:
    """The state of chunks as lists ``[P32, moments...]`` of fp32 tensors, 1-D, in host memory."""

    def __init__(self, core: OutOfCoreOptimizer) -> None:
        self._core = core
        self._num_parts = 1 + len(core.kind.moments)
        self._has_moments = [False] * len(core.layout.chunks)
        """Whether moments were ever written; until then they are zero and not read."""

    def updated(self, index: int) -> None:
        """The chunk got its first update: its moments are on storage from now on."""
        self._has_moments[index] = True

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
        resident = core.place.state(index)
        if resident is not None:
            return _Read(chunk, num_parts, resident[: num_parts * _part_bytes(chunk)].clone(), None)
        state = aligned_tensor(num_parts * _part_bytes(chunk))
        has_moments = with_moments and self._has_moments[index]
        extents = self.stored_extents(chunk, core.slot(index), has_moments=has_moments)
        transfer = core.io.read(extents, state, f"reading the state of chunk {index}")
        return _Read(chunk, num_parts, state, transfer)

    def _finish_reading(self, read: _Read) -> list[torch.Tensor]:
        chunk, state = read.chunk, read.state
        if read.transfer is not None:
            read.transfer.wait()
            is_whole = read.num_parts == self._num_parts
            if not self._core.pipeline.state_holds(chunk.index, state.data_ptr(), with_moments=is_whole):
                begin = self._core.state_extents(chunk.index)[0]
                what = f"reading the state of chunk {chunk.index}"
                raise storage_error(what, errno.EBADMSG, begin.fd, begin.offset, self._core.path_of)
        return self.parts(chunk, state)

    def num_bytes(self, chunk: Chunk) -> int:
        """Of a chunk's state block."""
        return self._num_parts * _part_bytes(chunk)

    def stored_extents(self, chunk: Chunk, slot: int, *, has_moments: bool) -> list[Extent]:
        """Where the parts of a state lie that were ever written to a slot. What is read into zeros gives zeros."""
        num_parts = self._num_parts if has_moments else 1
        return prefix(self._core.place.state_extents(chunk.index, slot), num_parts * _part_bytes(chunk))

    def parts(self, chunk: Chunk, state: torch.Tensor) -> list[torch.Tensor]:
        """Views of a state block, ``state``, or of its first parts: no byte more."""
        return [part.view(torch.float32)[: chunk.numel] for part in state.split(_part_bytes(chunk))]

    def write(self, index: int, parts: Sequence[torch.Tensor], params: torch.Tensor | None = None) -> None:
        """Replaces one chunk's state, see :meth:`write_all`."""
        self.write_all([(index, parts, params)])

    def write_all(self, states: Iterable[tuple[int, Sequence[torch.Tensor], torch.Tensor | None]]) -> None:
        """Replaces chunks' states, and their P16 where it is not None; updates prepared from the old ones are dropped.
        Those before are written while the next one is given.

        What lives on storage is overwritten in place, and no commit stands from then until the next step's.
        """
        core = self._core
        core.wait_all()
        core.wait_copied()
        writing: deque[Transfer] = deque()
        for index, parts, params in states:
            core.drop_prepared(index)
            writing += self._start_writing(index, parts)
            if params is not None:
                writing += core.replace_params(core.layout.chunks[index], params)
            while len(writing) > _NUM_WRITING:
                writing.popleft().wait()
        for transfer in writing:
            transfer.wait()

    def _start_writing(self, index: int, parts: Sequence[torch.Tensor]) -> list[Transfer]:
        core = self._core
        chunk, resident, transfers = core.layout.chunks[index], core.place.state(index), []
        state = aligned_tensor(self.num_bytes(chunk)) if resident is None else resident
        for own, values in zip(self.parts(chunk, state), parts, strict=True):
            own.copy_(values)
        if resident is None:
            core.commits.withdraw()
            transfers.append(core.io.write(core.state_extents(index), state, f"writing the state of chunk {index}"))
        self._has_moments[index] = True
        core.pipeline.replace_state(index, state.data_ptr(), has_moments=True)
        return transfers

    def read_param(self, span: ParamSpan, part: int) -> torch.Tensor:
        """One parameter's fp32 value (part 0) or moment, a copy."""
        pieces = []
        for chunk, parts in self.read_all(self._core.layout.chunks_of_param[span.index]):
            begin, end = overlap(span, chunk)
            pieces.append(parts[part][begin - chunk.begin : end - chunk.begin])
        return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)

    def write_param(self, span: ParamSpan, part: int, values: torch.Tensor) -> None:
        """Replaces one parameter's fp32 value or moment; P16 follows with the next step, as in stock."""
        if part == 0:
            self._core.params.left_behind(span)
        for index in self._core.layout.chunks_of_param[span.index]:
            chunk = self._core.layout.chunks[index]
            begin, end = overlap(span, chunk)
            parts = self.read(index)
            new = values.view(-1)[begin - span.begin : end - span.begin]
            parts[part][begin - chunk.begin : end - chunk.begin].copy_(new)
            self.write(index, parts)


def _part_bytes(chunk: Chunk) -> int:
    return round_up_to_page(chunk.numel * 4)


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
