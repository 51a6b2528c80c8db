# SPDX-License-Identifier: Apache-2.0
"""G16: the gradients of one step, kept until ``step()`` has validated, in DRAM or spilled to storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from ds_fuyou.host.memory import PageLocks, aligned_tensor, round_up_to_page
from ds_fuyou.optimizer.layout import FlatLayout, ParamSpan, overlap
from ds_fuyou.storage.io import IoLane, Transfer
from ds_fuyou.storage.store import Extent

__all__ = ["DramGradients", "GradientMemory", "StoredGradients"]


class GradientMemory(Protocol):
    """One gradient element for every parameter element of this rank, in the accumulation dtype."""

    waited_secs: float
    """Time the training thread stood waiting for transfers of gradients."""

    def pieces(self, span: ParamSpan) -> list[torch.Tensor]:
        """Writable views that together are the gradient of ``span``, with the values written in this step."""

    def values(self, span: ParamSpan) -> list[torch.Tensor]:
        """The same to read: views that hold until the next call. What left DRAM stays where it is."""

    def pointer(self, chunk: int) -> int:
        """Address of the chunk's gradient in DRAM, 0 when it is on storage only."""

    def seal(self, chunk: int) -> None:
        """The chunk's gradient is complete for now: it may leave DRAM."""

    def seal_all(self) -> None:
        """Backward of a micro-batch has ended."""

    def end_step(self) -> None:
        """No gradient of the last step is needed any more."""

    def close(self) -> None:
        """Waits for transfers in flight and lets the memory go."""


class DramGradients:
    """The whole class in DRAM: one flat tensor a sub-group."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, locks: PageLocks) -> None:
        self._layout = layout
        self.waited_secs = 0.0
        itemsize = dtype.itemsize
        sizes = layout.sub_group_numels
        self._flat = [locks.lock(aligned_tensor(round_up_to_page(n * itemsize))).view(dtype)[:n] for n in sizes]

    def pieces(self, span: ParamSpan) -> list[torch.Tensor]:
        return [self._flat[span.sub_group][span.begin : span.end]]

    def values(self, span: ParamSpan) -> list[torch.Tensor]:
        return self.pieces(span)

    def pointer(self, chunk: int) -> int:
        spec = self._layout.chunks[chunk]
        return self._flat[spec.sub_group][spec.begin :].data_ptr()

    def seal(self, chunk: int) -> None:
        """Stays."""

    def seal_all(self) -> None:
        """Stays."""

    def end_step(self) -> None:
        """The next step overwrites."""

    def close(self) -> None:
        """Nothing is in flight; the memory goes with its last view."""
        self._flat.clear()


class StoredGradients:
    """One buffer a chunk while its gradients arrive; afterwards the chunk's gradient lives on storage.

    Chunks given to :meth:`keep` stay in DRAM instead.
    Taking a buffer while ``max_buffers`` sealed ones are alive waits for the oldest write, after which an update that
    still needs that gradient reads it from storage (``detach``). The training thread alone calls this.
    """

    def __init__(
        self,
        layout: FlatLayout,
        dtype: torch.dtype,
        io: IoLane,
        extents: Callable[[int], tuple[Extent, ...]],
        detach: Callable[[int, int], None],
        locks: PageLocks,
        max_buffers: int = 4,
    ) -> None:
        self._layout, self._dtype, self._io, self._extents = layout, dtype, io, extents
        self._detach, self._locks = detach, locks
        self._max_buffers = max_buffers
        self.waited_secs = 0.0
        self._kept: dict[int, torch.Tensor] = {}
        self._open: dict[int, torch.Tensor] = {}
        self._sealed: dict[int, tuple[torch.Tensor, Transfer]] = {}
        self._free: list[torch.Tensor] = []
        self._stored: set[int] = set()
        self._last_read: tuple[int, torch.Tensor] | None = None  # neighbours are read one after another
        self._largest = max(round_up_to_page(c.numel * dtype.itemsize) for c in layout.chunks)

    def keep(self, chunks: Iterable[int]) -> None:
        """Gives these chunks memory for good. To be called before any gradient arrives."""
        for index in chunks:
            num_bytes = round_up_to_page(self._layout.chunks[index].numel * self._dtype.itemsize)
            self._kept[index] = self._locks.lock(aligned_tensor(num_bytes))

    def pieces(self, span: ParamSpan) -> list[torch.Tensor]:
        return self._views(span, self._buffer)

    def values(self, span: ParamSpan) -> list[torch.Tensor]:
        return self._views(span, self._present)

    def _views(self, span: ParamSpan, memory_of: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        views = []
        for index in self._layout.chunks_of_param[span.index]:
            chunk = self._layout.chunks[index]
            begin, end = overlap(span, chunk)
            views.append(memory_of(index).view(self._dtype)[begin - chunk.begin : end - chunk.begin])
        return views

    def _memory(self, index: int) -> torch.Tensor | None:
        """The chunk's gradient in DRAM, whatever it waits for there; None when it is on storage only."""
        if index in self._sealed:
            return self._sealed[index][0]
        return self._kept.get(index, self._open.get(index))

    def _buffer(self, index: int) -> torch.Tensor:
        """The chunk's open buffer. A sealed one is taken back; from storage its values are read again."""
        if index in self._sealed:
            self._open[index], transfer = self._sealed.pop(index)
            self.waited_secs += transfer.wait()
        there = self._memory(index)
        if there is None:
            there = self._take()
            if index in self._stored:
                self._read(index, there)
            self._open[index] = there
        self._last_read = None
        return there

    def _present(self, index: int) -> torch.Tensor:
        """The chunk's gradient to read: where it is in DRAM, or a copy of what is on storage."""
        there = self._memory(index)
        if there is not None:
            return there
        if self._last_read is None or self._last_read[0] != index:
            self._last_read = None
            memory = aligned_tensor(round_up_to_page(self._layout.chunks[index].numel * self._dtype.itemsize))
            self._read(index, memory)
            self._last_read = (index, memory)
        return self._last_read[1]

    def _read(self, index: int, memory: torch.Tensor) -> None:
        what = f"reading the gradient of chunk {index}"
        self.waited_secs += self._io.read(self._extents(index), memory, what).wait()

    def _take(self) -> torch.Tensor:
        while len(self._sealed) >= self._max_buffers:
            self._retire(next(iter(self._sealed)))
        return self._free.pop() if self._free else self._locks.lock(aligned_tensor(self._largest))

    def _retire(self, index: int) -> None:
        memory, transfer = self._sealed.pop(index)
        self.waited_secs += transfer.wait()
        self._detach(index, memory.data_ptr())
        self._free.append(memory)

    def pointer(self, chunk: int) -> int:
        there = self._memory(chunk)
        return 0 if there is None else there.data_ptr()

    def seal(self, chunk: int) -> None:
        if chunk not in self._open:
            return
        memory = self._open.pop(chunk)
        transfer = self._io.write(self._extents(chunk), memory, f"writing the gradient of chunk {chunk}")
        self._sealed[chunk] = (memory, transfer)
        self._stored.add(chunk)

    def end_step(self) -> None:
        self._stored.clear()
        self._last_read = None

    def seal_all(self) -> None:
        """Lets every open buffer leave DRAM: backward has ended."""
        for chunk in list(self._open):
            self.seal(chunk)

    def close(self) -> None:
        for _, transfer in self._sealed.values():
            transfer.wait_ended()  # nobody needs them any more: a write that failed keeps nothing from closing
        self._sealed.clear()
        self._kept.clear()
        self._open.clear()
        self._free.clear()
