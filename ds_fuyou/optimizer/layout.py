# SPDX-License-Identifier: Apache-2.0
"""Where every parameter lies in the flat space of its stock sub-group, and how that space is cut into chunks.

Stock ZeRO-3 lays the partitions of a sub-group's parameters end to end. Results depend on where the CPU
kernels are called, so chunks are cut *inside* sub-groups, at multiples of :data:`CUT_ELEMENTS` counted from
the sub-group's start: a multiple of the kernels' vector block (128 elements) and of a page in 16-bit types.
A cut that falls near a block boundary is rounded *up*, so that a chunk may hold a few elements of the next
block's first parameter; backward delivers that parameter earlier, so nothing waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CUT_ELEMENTS = 2048

__all__ = [
    "CUT_ELEMENTS",
    "Chunk",
    "FlatLayout",
    "LayoutEntry",
    "LayoutLimits",
    "ParamSpan",
    "build_layout",
    "overlap",
    "own_numel",
]


@dataclass(frozen=True)
class ParamSpan:
    """One parameter partition of this rank: elements [begin, end) of its sub-group's flat space, of which the last
    ``padding`` are no element of the parameter."""

    index: int
    name: str
    block: str
    sub_group: int
    begin: int
    end: int
    padding: int = 0

    @property
    def numel(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Chunk:
    """The unit of the out-of-core optimizer: elements [begin, end) of a sub-group. ``param_begins``: where parameters
    begin behind its first element, counted from there."""

    index: int
    sub_group: int
    begin: int
    end: int
    position: int
    params: tuple[int, ...]
    param_begins: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return self.end - self.begin


LayoutEntry = tuple[str, str, int, int]
"""A parameter to be laid out: name, block, numel, forward position."""


@dataclass(frozen=True)
class LayoutLimits:
    """Largest and smallest chunk, in elements. Runs below the smallest are merged with their neighbours."""

    max_elements: int = 4 * 1024 * 1024
    min_elements: int = 512 * 1024


@dataclass(frozen=True)
class FlatLayout:
    params: tuple[ParamSpan, ...]
    chunks: tuple[Chunk, ...]
    sub_group_numels: tuple[int, ...]
    chunks_of_param: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        return sum(self.sub_group_numels)

    def share_of(self, resident: Sequence[bool]) -> float:
        """Of a class, by elements; ``resident`` is by chunk."""
        return sum(chunk.numel for chunk in self.chunks if resident[chunk.index]) / self.numel

    def clear_padding(self, chunk: Chunk, values: torch.Tensor) -> None:
        """Zeros for what a chunk's values, 1-D, have behind the end of parameters: stock leaves there what memory held,
        and moments of few bits share a scale with it.
        """
        for span in map(self.params.__getitem__, chunk.params):
            begin, end = overlap(span, chunk)
            begin = max(begin, span.end - span.padding)
            if begin < end:
                values[begin - chunk.begin : end - chunk.begin].zero_()


def overlap(span: ParamSpan, chunk: Chunk) -> tuple[int, int]:
    """[begin, end) of the elements that a parameter and a chunk share, counted from the sub-group's start."""
    return max(span.begin, chunk.begin), min(span.end, chunk.end)


def own_numel(part: int, numel: int, rank: int) -> int:
    """Of the ``part`` elements of ``rank``'s partition those that a parameter of ``numel`` elements has."""
    return max(0, min(part, numel - rank * part))


def build_layout(
    sub_groups: Sequence[Sequence[LayoutEntry]],
    limits: LayoutLimits | None = None,
    padding: Mapping[str, int] = MappingProxyType({}),
) -> FlatLayout:
    """Cuts every sub-group; order is the flat order. ``padding``: of parameters by name, where there is any.

    Chunks are numbered by sub-group and offset; ``position`` is the smallest forward position among the
    parameters a chunk holds (its deadline in the next forward).
    """
    limits = limits or LayoutLimits()
    params: list[ParamSpan] = []
    positions: list[int] = []
    chunks: list[Chunk] = []
    numels: list[int] = []
    for sub_group, entries in enumerate(sub_groups):
        first = len(params)
        offset = 0
        for name, block, numel, position in entries:
            span = ParamSpan(len(params), name, block, sub_group, offset, offset + numel, padding.get(name, 0))
            params.append(span)
            positions.append(position)
            offset += numel
        numels.append(offset)
        for begin, end in _cut(params[first:], offset, limits):
            held = tuple(p.index for p in params[first:] if p.begin < end and begin < p.end)
            deadline = min(positions[i] for i in held)
            inside = tuple(params[i].begin - begin for i in held if params[i].begin > begin)
            chunks.append(Chunk(len(chunks), sub_group, begin, end, deadline, held, inside))
    of_param: list[list[int]] = [[] for _ in params]
    for chunk in chunks:
        for index in chunk.params:
            of_param[index].append(chunk.index)
    return FlatLayout(tuple(params), tuple(chunks), tuple(numels), tuple(tuple(c) for c in of_param))


def _cut(spans: Sequence[ParamSpan], total: int, limits: LayoutLimits) -> list[tuple[int, int]]:
    """Chunk bounds of one sub-group: block runs, merged below the minimum, split above the maximum."""
    bounds = [0]
    for previous, span in itertools.pairwise(spans):
        cut = min(_round_up(span.begin), total)
        if span.block != previous.block and cut - bounds[-1] >= limits.min_elements:
            bounds.append(cut)
    if total - bounds[-1] < limits.min_elements and len(bounds) > 1:
        bounds.pop()
    if bounds[-1] != total:
        bounds.append(total)
    pieces: list[tuple[int, int]] = []
    for begin, end in itertools.pairwise(bounds):
        num_pieces = -(-(end - begin) // limits.max_elements)
        step = _round_up(-(-(end - begin) // num_pieces))
        pieces.extend((at, min(at + step, end)) for at in range(begin, end, step))
    return pieces


def _round_up(numel: int) -> int:
    return -(-numel // CUT_ELEMENTS) * CUT_ELEMENTS
