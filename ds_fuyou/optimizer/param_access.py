# SPDX-License-Identifier: Apache-2.0
"""Published P16 of single parameters: where it is, reading and replacing it, and edits that a step must not undo.

[Note: edits of P16]
A script that edits a gathered parameter changes P16, not P32. The next update of that parameter narrows P32 over it, as
in stock. A step in which the parameter has no gradient leaves it alone; but its chunk may be written for the sake of
other parameters, whole. What it would lose is read before and written back after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch

from ds_fuyou.host.memory import PAGE_BYTES, round_up_to_page
from ds_fuyou.optimizer.layout import ParamSpan, overlap
from ds_fuyou.storage.io import IoLane
from ds_fuyou.storage.location import Location, StoredRun, ValuesRead

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["ParamAccess", "PublishedSpan"]


class PublishedSpan:
    """P16 of one parameter as the applied steps left it: a source of the parameter store."""

    changes = True

    def __init__(self, core: OutOfCoreOptimizer, span: ParamSpan) -> None:
        self._core, self.span = core, span
        self._is_in_memory = core.place.is_in_memory(span)
        low, high = core.params.page_range(span)
        self.num_bytes = 0 if self._is_in_memory else high - low
        self.size_bytes = span.numel * core.options.param_dtype.itemsize
        self._views: dict[int, torch.Tensor] = {}  # by version

    @property
    def io(self) -> IoLane:
        return self._core.io

    def is_ready(self) -> bool:
        return self._core.is_updated(self.span)

    def wait(self) -> None:
        self._core.wait_updated(self.span)

    def memory(self) -> torch.Tensor | None:
        if not self._is_in_memory:
            return None
        version = self._core.param_version
        if version not in self._views:
            self._views[version] = self._core.param_view(self.span)
        return self._views[version]

    def start_reading(self, memory: torch.Tensor, priority: int = 0) -> ValuesRead:
        return self._core.params.start_reading(self.span, memory, priority)

    def location(self) -> Location:
        self._core.wait_param(self.span)
        return self._core.params.location(self.span)

    def write(self, values: torch.Tensor) -> None:
        self._core.params.edited(self.span)
        memory = self.memory()
        if memory is None or memory.data_ptr() != values.data_ptr():  # else they were written in their place
            self._core.params.write(self.span, values)


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

    def start_reading(self, span: ParamSpan, memory: torch.Tensor, priority: int) -> ValuesRead:
        """Brings the published values into ``memory``. Those that an update has yet to write are copied out of staging
        memory: then nobody waits for their write. Wait for the update first."""
        core, copied = self._core, set()
        low, high = self.page_range(span)
        for index in core.layout.chunks_of_param[span.index]:
            if not core.place.residency.params[index]:
                start, begin, end = self._chunk_pages(index, low, high)
                if core.copy_updated(index, begin - start, memory[begin - low : end - low]):
                    copied.add(index)
        return self.location(span, without=copied).start_reading(core.io, memory, priority)

    def _chunk_pages(self, index: int, low: int, high: int) -> tuple[int, int, int]:
        """Of the sub-group's flat P16: the chunk's first byte, and the range of its pages in [low, high)."""
        chunk, itemsize = self._core.layout.chunks[index], self._core.options.param_dtype.itemsize
        start = chunk.begin * itemsize  # a multiple of a page: see CUT_ELEMENTS
        return start, max(low, start), min(high, round_up_to_page(chunk.end * itemsize))

    def location(self, span: ParamSpan, without: Collection[int] = ()) -> Location:
        """Where the published values are, but for those of the chunks ``without``: chunks in DRAM, and pages of the
        others' slots. Wait for them to be there first."""
        dtype = self._core.options.param_dtype
        low, high = self.page_range(span)
        return Location(
            what=f"parameter {span.name}",
            numel=span.numel,
            dtype=dtype,
            num_bytes=high - low,
            skip=span.begin * dtype.itemsize - low,
            runs=tuple(self._stored_runs(span, low, high, without)),
            parts=tuple(self._resident_parts(span)),
        )

    def _resident_parts(self, span: ParamSpan) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element of the span, what a chunk in DRAM publishes from there)."""
        core = self._core
        for index in core.layout.chunks_of_param[span.index]:
            if core.place.residency.params[index]:
                chunk = core.layout.chunks[index]
                begin, end = overlap(span, chunk)
                own = core.place.chunk_params(chunk, core.param_version)
                yield begin - span.begin, own[begin - chunk.begin : end - chunk.begin]

    def _stored_runs(self, span: ParamSpan, low: int, high: int, without: Collection[int]) -> Iterator[StoredRun]:
        """Runs of the span's pages on storage, counted from ``low``, where they are published."""
        core = self._core
        last: StoredRun | None = None
        for index in core.layout.chunks_of_param[span.index]:
            if core.place.residency.params[index] or index in without:
                continue
            start, begin, end = self._chunk_pages(index, low, high)
            extents = core.place.param_pages(index, core.slot(index), begin - start, end - start)
            if last is not None and last.end == begin - low:
                last = StoredRun(last.begin, end - low, (*last.extents, *extents))
                continue
            if last is not None:
                yield last
            last = StoredRun(begin - low, end - low, tuple(extents))
        if last is not None:
            yield last

    def read(self, span: ParamSpan) -> torch.Tensor:
        """A copy, from wherever it lives; waits for the parameter's update."""
        core = self._core
        core.wait_param(span)
        if core.place.is_in_memory(span):
            return core.param_view(span).clone()
        return self.location(span).read(core.io)

    def write(self, span: ParamSpan, values: torch.Tensor) -> None:
        """Replaces P16, not P32; waits for the parameter's update, and where it is on storage for the last commit."""
        core = self._core
        core.wait_param(span)
        core.states.params_edited(core.layout.chunks_of_param[span.index])  # of the update waited for, too
        if core.place.is_in_memory(span):
            core.param_view(span).copy_(values.view(-1))
            return
        core.before_params_change(core.layout.chunks_of_param[span.index])
        self.location(span).write(core.io, values)

    # ---- [Note: edits of P16] ------------------------------------------------------------------------------

    def edited(self, span: ParamSpan) -> None:
        """The script wrote P16 of a parameter."""
        self._edited.add(span.index)
        self._core.states.params_edited(self._core.layout.chunks_of_param[span.index])

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
        for span, values in kept:  # no commit names the slots of this step yet
            self._core.wait_param(span)
            self._core.states.params_edited(self._core.layout.chunks_of_param[span.index])
            if self._core.place.is_in_memory(span):
                self._core.param_view(span).copy_(values)
            else:
                self._core.states.keep_masters(self._core.layout.chunks_of_param[span.index])
                self.location(span).write(self._core.io, values)
