# SPDX-License-Identifier: Apache-2.0
"""Reads and replaces published P16 of single parameters, and keeps edits that a step must not undo.

[Note: edits of P16]
A script that edits a gathered parameter changes P16, not P32. The next update of that parameter narrows P32 over it, as
in stock. A step in which the parameter has no gradient leaves it alone; but its chunk may be written for the sake of
other parameters, whole. What it would lose is read before and written back after.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from ds_fuyou.lanes.memory import PAGE_BYTES, aligned_tensor, round_up_to_page
from ds_fuyou.optimizer.layout import ParamSpan
from ds_fuyou.storage.store import Extent

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["ParamAccess"]


class ParamAccess:
    """P16 as 1-D tensors in the model dtype. Used by the training thread alone."""

    def __init__(self, core: OutOfCoreOptimizer) -> None:
        self._core = core
        self._edited: set[int] = set()
        self._behind: set[int] = set()

    def pages(self, span: ParamSpan) -> tuple[int, int, list[Extent]]:
        """(first byte, end) of the pages of the sub-group that hold the span, and where they are published."""
        core, itemsize = self._core, self._core.options.param_dtype.itemsize
        low, high = span.begin * itemsize // PAGE_BYTES * PAGE_BYTES, round_up_to_page(span.end * itemsize)
        extents: list[Extent] = []
        for index in core.layout.chunks_of_param[span.index]:
            chunk = core.layout.chunks[index]
            begin, end = max(low, chunk.begin * itemsize), min(high, round_up_to_page(chunk.end * itemsize))
            extents.extend(core.param_range(span.sub_group, core.pipeline.slot(index), begin, end))
        return low, high, extents

    def read(self, span: ParamSpan) -> torch.Tensor:
        """A copy, from wherever it lives; waits for the parameter's update."""
        core = self._core
        core.wait_param(span)
        if core.options.params_tier == "cpu":
            return core.param_view(span).clone()
        memory, begin, _ = self._read_pages(span)
        return memory[begin : begin + span.numel].clone()

    def write(self, span: ParamSpan, values: torch.Tensor) -> None:
        """Replaces P16, not P32; waits for the parameter's update."""
        core = self._core
        core.wait_param(span)
        if core.options.params_tier == "cpu":
            core.param_view(span).copy_(values.view(-1))
            return
        memory, begin, extents = self._read_pages(span)
        memory[begin : begin + span.numel].copy_(values.view(-1))
        core.io.write(extents, memory.view(torch.uint8), f"writing parameter {span.name}").wait()

    def _read_pages(self, span: ParamSpan) -> tuple[torch.Tensor, int, list[Extent]]:
        """The pages that hold a span, in the model dtype; the place of its first element; where they came from."""
        dtype = self._core.options.param_dtype
        low, high, extents = self.pages(span)
        memory = aligned_tensor(high - low)
        self._core.io.read(extents, memory, f"reading parameter {span.name}").wait()
        return memory.view(dtype), span.begin - low // dtype.itemsize, extents

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
