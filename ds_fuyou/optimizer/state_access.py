# SPDX-License-Identifier: Apache-2.0
"""Reads and replaces the fp32 state between steps: checkpoints, ``safe_get/set_full_*``. Training thread only."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ds_fuyou.host.memory import aligned_tensor, round_up_to_page
from ds_fuyou.optimizer.layout import Chunk, ParamSpan, overlap
from ds_fuyou.storage.io import Transfer, storage_error
from ds_fuyou.storage.store import Extent

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["StateAccess", "prefix"]


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
    ) -> Iterator[tuple[Chunk, list[torch.Tensor]]]:
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
            return _Read(chunk, num_parts, resident[: num_parts * self._part_bytes(chunk)].clone(), None)
        state = aligned_tensor(num_parts * self._part_bytes(chunk))
        extents = prefix(core.state_extents(index), min(state.numel(), self._num_stored_bytes(chunk)))
        transfer = core.io.read(extents, state, f"reading the state of chunk {index}")
        return _Read(chunk, num_parts, state, transfer)

    def _finish_reading(self, read: _Read) -> list[torch.Tensor]:
        chunk, state = read.chunk, read.state
        if read.transfer is not None:
            read.transfer.wait()
            state[self._num_stored_bytes(chunk) :].zero_()
            is_whole = read.num_parts == self._num_parts
            if not self._core.pipeline.state_holds(chunk.index, state.data_ptr(), with_moments=is_whole):
                begin = self._core.state_extents(chunk.index)[0]
                what = f"reading the state of chunk {chunk.index}"
                raise storage_error(what, errno.EBADMSG, begin.fd, begin.offset, self._core._path_of)
        return self._parts(chunk, state)

    def _part_bytes(self, chunk: Chunk) -> int:
        return round_up_to_page(chunk.numel * 4)

    def _num_stored_bytes(self, chunk: Chunk) -> int:
        return (self._num_parts if self._has_moments[chunk.index] else 1) * self._part_bytes(chunk)

    def _parts(self, chunk: Chunk, state: torch.Tensor) -> list[torch.Tensor]:
        size = self._part_bytes(chunk)
        return [part.view(torch.float32)[: chunk.numel] for part in state.split(size)]

    def write(self, index: int, parts: Sequence[torch.Tensor], params: torch.Tensor | None = None) -> None:
        """Replaces a chunk's state, and its P16 by ``params``; an update prepared from the old one is dropped.

        What lives on storage is overwritten in place, and no commit stands from then until the next step's.
        """
        core = self._core
        core.wait_all()
        core.drop_prepared(index)
        chunk = core.layout.chunks[index]
        state = aligned_tensor(self._num_parts * self._part_bytes(chunk))
        for own, values in zip(self._parts(chunk, state), parts, strict=True):
            own.copy_(values)
        resident = core.place.state(index)
        if resident is not None:
            resident.copy_(state)
        else:
            core.withdraw_commit()
            core.io.write(core.state_extents(index), state, f"writing the state of chunk {index}").wait()
        self._has_moments[index] = True
        core.pipeline.replace_state(index, state.data_ptr(), has_moments=True)
        if params is not None:
            core.replace_params(chunk, params)

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
