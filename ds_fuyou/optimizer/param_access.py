# SPDX-License-Identifier: Apache-2.0
"""Reads and replaces published P16 of single parameters, and keeps edits that a step must not undo.

[Note: edits of P16]
A script that edits a gathered parameter changes P16, not P32. The next update of that parameter narrows P32 over it, as
in stock. A step in which the parameter has no gradient leaves it alone; but its chunk may be written for the sake of
other parameters, whole. What it would lose is read before and written back after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ds_fuyou.host.memory import PAGE_BYTES, aligned_tensor, round_up_to_page
from ds_fuyou.optimizer.layout import ParamSpan, overlap
from ds_fuyou.storage.io import Transfer
from ds_fuyou.storage.store import Extent

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["ParamAccess", "ParamRead"]


@dataclass(frozen=True)
class ParamRead:
    """A parameter on its way into memory: reads in flight, which own the memory, and the view that will hold it."""

    span: ParamSpan
    transfers: tuple[Transfer, ...]
    values: torch.Tensor

    def done(self) -> bool:
        return all(transfer.done() for transfer in self.transfers)

    def wait(self) -> float:
        """Until the values are there; returns the seconds waited. Raises FuyouStorageError if a read failed."""
        return sum(transfer.wait() for transfer in self.transfers)


class ParamAccess:
    """P16 as 1-D tensors in the model dtype. Used by the training thread alone."""

    def __init__(self, core: OutOfCoreOptimizer) -> None:
        self._core = core
        self._edited: set[int] = set()
        self._behind: set[int] = set()

    def page_range(self, span: ParamSpan) -> tuple[int, int]:
        """(first byte, end) of the pages of the sub-group's flat P16 that hold the span."""
        itemsize = self._core.options.param_dtype.itemsize
        return span.begin * itemsize // PAGE_BYTES * PAGE_BYTES, round_up_to_page(span.end * itemsize)

    def start_reading(self, span: ParamSpan, memory: torch.Tensor, what: str, priority: int = 0) -> ParamRead:
        """Brings the published values into ``memory`` (bytes, as many as :meth:`page_range` spans).

        Chunks in DRAM are copied at once, the others read from storage.
        """
        core, dtype = self._core, self._core.options.param_dtype
        low, _ = self.page_range(span)
        begin = span.begin * dtype.itemsize - low
        values = memory[begin : begin + span.numel * dtype.itemsize].view(dtype)
        for chunk, part in self._resident_parts(span, values):
            part.copy_(chunk)
        reads = [
            core.io.read(extents, memory[first - low : end - low], what, priority=priority)
            for first, end, extents in self._stored_runs(span)
        ]
        return ParamRead(span, tuple(reads), values)

    def _resident_parts(self, span: ParamSpan, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(what a chunk in DRAM publishes of the span, the same elements of ``values``)."""
        core = self._core
        for index in core.layout.chunks_of_param[span.index]:
            if not core.place.residency.params[index]:
                continue
            chunk = core.layout.chunks[index]
            begin, end = overlap(span, chunk)
            own = core.place.chunk_params(chunk, core.param_version)
            yield own[begin - chunk.begin : end - chunk.begin], values[begin - span.begin : end - span.begin]

    def _stored_runs(self, span: ParamSpan) -> list[tuple[int, int, list[Extent]]]:
        """Runs of the span's pages on storage: first byte and end in the sub-group, where they are published."""
        core, itemsize = self._core, self._core.options.param_dtype.itemsize
        low, high = self.page_range(span)
        runs: list[tuple[int, int, list[Extent]]] = []
        for index in core.layout.chunks_of_param[span.index]:
            if core.place.residency.params[index]:
                continue
            chunk = core.layout.chunks[index]
            start = chunk.begin * itemsize  # a multiple of a page: see CUT_ELEMENTS
            begin, end = max(low, start), min(high, round_up_to_page(chunk.end * itemsize))
            extents = core.place.param_pages(index, core.pipeline.slot(index), begin - start, end - start)
            if runs and runs[-1][1] == begin:
                runs[-1] = (runs[-1][0], end, [*runs[-1][2], *extents])
            else:
                runs.append((begin, end, list(extents)))
        return runs

    def read(self, span: ParamSpan) -> torch.Tensor:
        """A copy, from wherever it lives; waits for the parameter's update."""
        core = self._core
        core.wait_param(span)
        if core.place.is_in_memory(span):
            return core.param_view(span).clone()
        return self._read_pages(span)[1].clone()

    def write(self, span: ParamSpan, values: torch.Tensor) -> None:
        """Replaces P16, not P32; waits for the parameter's update."""
        core = self._core
        core.wait_param(span)
        values = values.view(-1)
        if core.place.is_in_memory(span):
            core.param_view(span).copy_(values)
            return
        memory, there = self._read_pages(span)
        there.copy_(values)
        for chunk, part in self._resident_parts(span, there):
            chunk.copy_(part)
        low, _ = self.page_range(span)
        what = f"writing parameter {span.name}"
        for begin, end, extents in self._stored_runs(span):
            core.io.write(extents, memory[begin - low : end - low], what).wait()

    def _read_pages(self, span: ParamSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages that hold a span, as bytes, and the span's values in them."""
        low, high = self.page_range(span)
        memory = aligned_tensor(high - low)
        read = self.start_reading(span, memory, f"reading parameter {span.name}")
        read.wait()
        return memory, read.values

    # ---- [Note: edits of P16] ------------------------------------------------------------------------------

    def edited(self, span: ParamSpan) -> None:
        """The script wrote P16 of a parameter."""
        self._edited.add(span.index)

    def left_behind(self, span: ParamSpan) -> None:
        """The script wrote P32: the next step narrows it into P16, whether the parameter has a gradient or not."""
        self._behind.add(span.index)

    def replaced(self, params: Collection[int]) -> None:
        """P16 and P32 of these parameters were loaded together."""
        self._edited.difference_update(params)
        self._behind.difference_update(params)

    def due(self, arrived: set[int]) -> set[int]:
        """Parameters whose P16 the step writes."""
        return arrived | self._behind

    def before_step(self, arrived: set[int], chunks: Collection[int]) -> list[tuple[ParamSpan, torch.Tensor]]:
        """Edits to be written back after the step that writes ``chunks``."""
        self._edited -= self.due(arrived)
        self._behind.clear()
        layout = self._core.layout
        spans = [layout.params[index] for index in sorted(self._edited)]
        spans = [span for span in spans if any(chunk in chunks for chunk in layout.chunks_of_param[span.index])]
        return [(span, self.read(span)) for span in spans]

    def after_step(self, kept: list[tuple[ParamSpan, torch.Tensor]]) -> None:
        for span, values in kept:
            self.write(span, values)
