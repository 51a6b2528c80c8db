# SPDX-License-Identifier: Apache-2.0
"""Values from outside put into chunks, wherever these live: at the start, and when a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_fuyou.host.memory import aligned_tensor, bring_in_pages
from ds_fuyou.optimizer.coded_states import encode
from ds_fuyou.optimizer.layout import Chunk, FlatLayout, ParamSpan, overlap
from ds_fuyou.optimizer.placement import ChunkPlacement
from ds_fuyou.optimizer.state_access import prefix
from ds_fuyou.storage.io import IoLane, Transfer

__all__ = ["ChunkValues", "gather"]

Source = Callable[[ParamSpan], torch.Tensor]
"""The values of a parameter's partition, 1-D."""


def gather(layout: FlatLayout, chunk: Chunk, source: Source, dtype: torch.dtype) -> torch.Tensor:
    """A chunk of ``dtype``, 1-D, put together from its parameters' partitions."""
    values = torch.empty(chunk.numel, dtype=dtype, device="cpu")
    for index in chunk.params:
        span = layout.params[index]
        begin, end = overlap(span, chunk)
        piece = source(span)[begin - span.begin : end - span.begin]
        values[begin - chunk.begin : end - chunk.begin].copy_(piece)
    layout.clear_padding(chunk, values)
    return values


class ChunkValues:
    """Writes whole chunks. Training thread only.

    ``slot_of(chunk)`` says where a chunk's published values are; ``replaced(chunk, address)`` is told of P32 that is
    written to storage, whose moments are zeros.
    """

    def __init__(
        self,
        layout: FlatLayout,
        place: ChunkPlacement,
        io: IoLane,
        slot_of: Callable[[int], int],
        replaced: Callable[[int, int], None],
        param_dtype: torch.dtype,
    ) -> None:
        self._layout, self._place, self._io, self._slot_of = layout, place, io, slot_of
        self._replaced = replaced
        self._dtype = param_dtype

    def initialize(self, source: Source, progress: Callable[[int], None]) -> None:
        """P32 and P16 of every chunk from ``source``, in the model dtype; moments on storage stay a flag, and in memory
        the zeros that new pages are: once, before anything else is written.

        ``progress`` is called with the number of elements done.
        """
        pending: list[Transfer] = []
        for chunk in self._layout.chunks:
            values = gather(self._layout, chunk, source, self._dtype)
            pending += [*self._put_p32(chunk, values), *self.put_params(chunk, values)]
            while len(pending) > 4:
                pending.pop(0).wait()
            progress(chunk.numel)
        for transfer in pending:
            transfer.wait()

    def _put_p32(self, chunk: Chunk, values: torch.Tensor) -> list[Transfer]:
        place, state = self._place, self._place.state(chunk.index)
        part = place.whole.num_master_bytes(chunk.numel)
        if state is not None and not bring_in_pages(state.data_ptr(), state.nbytes):
            state.zero_()  # it is: that its memory is taken now, and what is free is known
        if state is not None and not place.resident.is_split:
            state[:part].view(torch.float32)[: chunk.numel].copy_(values)
            return []
        memory = aligned_tensor(part)
        memory.view(torch.float32)[: chunk.numel].copy_(values)
        layout = place.stored.master_alone
        if state is not None:
            encode(layout, chunk.numel, memory, state)
            return []
        self._replaced(chunk.index, memory.data_ptr())
        stored = encode(layout, chunk.numel, memory) if layout.is_split else memory
        extents = prefix(self._place.state_extents(chunk.index, self._slot_of(chunk.index)), len(stored))
        return [self._io.write(extents, stored, f"writing P32 of chunk {chunk.index}")]

    def put_params(self, chunk: Chunk, values: torch.Tensor) -> list[Transfer]:
        """P16 of a chunk := ``values``, in every version in DRAM or in its place on storage; the writes in flight."""
        if self._place.residency.params[chunk.index]:
            for version in range(self._place.num_param_versions):
                self._place.chunk_params(chunk, version).copy_(values)
            return []
        extents = self._place.param_extents(chunk.index, self._slot_of(chunk.index))
        memory = aligned_tensor(sum(extent.num_bytes for extent in extents))
        memory.view(self._dtype)[: chunk.numel].copy_(values)
        return [self._io.write(extents, memory, f"writing P16 of chunk {chunk.index}")]
