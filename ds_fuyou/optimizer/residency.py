# SPDX-License-Identifier: Apache-2.0
"""Which chunks of each class are in host memory; all others live on storage.

[Note: which chunks are resident]
A plan gives shares; chunks are whole. Every byte resident saves the same traffic, whichever chunk it belongs to, so
what decides is what a chunk on storage makes others wait for. Backward delivers the gradients of the first block last,
and the next forward needs that block first: its read, update and (for P16 on storage) write stand in a row between two
passes, with nothing left to hide behind. The last block has the rest of backward and nearly all of forward. A resident
state defers its update to ``step()``, which costs the first blocks nothing, because their gradients arrive just before
it. So states become resident in deadline order, the smallest forward position first. Updates that wait for ``step()``
run in the same order: while they update what is resident, the reads of the rest are under way. G16 of such a chunk is
always read again, so it is worth most in memory beside a resident state: the same order once more.

P16 is read in every pass, and handed out of the update that made it before it is written: its deadline costs nothing.
If all that is on storage came last in forward, storage would be idle before, but for what look-ahead holds. So it is
spread over the model (:func:`spread_evenly`), by runs of whole parameters: one of which a part is on storage is read
like one that is there as a whole, its other part copied, and there may be one at each end of a run.

A resident state with a spare block defers nothing: its update goes from the one to the other, in backward, and they
change places when ``step()`` has published it. The last of the resident ones have most time for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds_fuyou.optimizer.layout import Chunk, FlatLayout, overlap

__all__ = ["ChunkResidency", "spread_evenly"]

_RUN_CHUNKS = 4
"""Of neighbours that P16 is kept of together, where there are as many runs."""


@dataclass(frozen=True)
class ChunkResidency:
    """For every chunk, by index: whether its P16, its P32 and moments, its G16 are in host memory; and whether states
    that are have a second block there, so that their updates, too, may begin in backward.
    """

    params: tuple[bool, ...]
    states: tuple[bool, ...]
    grads: tuple[bool, ...]
    spares: tuple[bool, ...] = ()

    @classmethod
    def of_shares(
        cls, layout: FlatLayout, params: float, states: float, grads: float, spares: float = 0.0
    ) -> ChunkResidency:
        """As many chunks of each class as its share (0 to 1, of the elements) holds; spare blocks for those states in
        memory whose gradients come first.

        Never more than the share: chunks are at most ``chunk_bytes``, so what is lost is less than one of them.
        """
        resident = _first(layout, states)
        return cls(_spread(layout, params), resident, _first(layout, grads), _last_of(layout, resident, spares))

    def keeps_slots(self, chunk: int) -> bool:
        """Whether a part of the chunk lives in slots on storage."""
        return not (self.params[chunk] and self.states[chunk])

    @property
    def needs_storage(self) -> bool:
        return not (all(self.params) and all(self.states) and all(self.grads))


def spread_evenly(sizes: Sequence[int], uses: Sequence[Sequence[int]], room: float) -> list[bool]:
    """Which of pieces of these ``sizes`` are in host memory, that has so much ``room`` for them: as much of any stretch
    of the ``uses``, which need these pieces, by number, as of all. So what is read beside a pass is read from its begin
    to its end. First come uses of far more than others need (embeddings): memory for reads has to hold two of the
    largest on storage.
    """
    room, total = room * (1 + 1e-9), sum(sizes)
    needed = [sum(sizes[piece] for piece in use) for use in uses]
    large = 2 * sum(size * size for size in needed) / max(1, sum(needed))
    stays, kept = [False] * len(sizes), 0

    def missing(use: Sequence[int]) -> int:
        return sum(sizes[piece] for piece in use if not stays[piece])

    def keep(use: Sequence[int]) -> None:
        nonlocal kept
        more = missing(use)
        if kept + more <= room:
            kept += more
            for piece in use:
                stays[piece] = True

    for use, size in zip(uses, needed, strict=True):
        if size > large:
            keep(use)
    before, passed, seen = kept, 0, set(itertools.compress(range(len(sizes)), stays))
    share = (room - kept) / max(1, total - kept)
    for use in uses:
        passed += sum(sizes[piece] for piece in use if piece not in seen)
        seen.update(use)
        if kept - before + missing(use) / 2 <= share * passed:
            keep(use)
    for piece in range(len(sizes)):  # what is left of the room
        keep((piece,))
    return stays


def _spread(layout: FlatLayout, share: float) -> tuple[bool, ...]:
    """By runs of parameters, each of which has most of a chunk: they are in memory with the chunks at both ends."""
    most = max(1, min(_RUN_CHUNKS, len(layout.chunks) // _RUN_CHUNKS))
    runs: list[dict[int, None]] = []
    for owner in dict.fromkeys(_owner(layout, chunk) for chunk in _in_order(layout)):
        if not runs or len(runs[-1]) >= most:
            runs.append({})
        runs[-1].update(dict.fromkeys(layout.chunks_of_param[owner]))  # neighbours may have a chunk in common
    room = round(share * layout.numel)
    return tuple(spread_evenly([chunk.numel for chunk in layout.chunks], [*map(tuple, runs)], room))


def _owner(layout: FlatLayout, chunk: Chunk) -> int:
    """The parameter that has most of a chunk."""

    def held(param: int) -> int:
        begin, end = overlap(layout.params[param], chunk)
        return end - begin

    return max(chunk.params, key=held)


def _in_order(layout: FlatLayout) -> list[Chunk]:
    return sorted(layout.chunks, key=lambda c: (c.position, c.index))


def _first(layout: FlatLayout, share: float) -> tuple[bool, ...]:
    return _fitting(layout, _in_order(layout), share)


def _last_of(layout: FlatLayout, states: tuple[bool, ...], share: float) -> tuple[bool, ...]:
    resident = [chunk for chunk in layout.chunks if states[chunk.index]]
    return _fitting(layout, sorted(resident, key=lambda c: (-c.position, -c.index)), share)


def _fitting(layout: FlatLayout, chunks: Iterable[Chunk], share: float) -> tuple[bool, ...]:
    """The first of ``chunks`` that hold no more than the share of all elements."""
    left = round(share * layout.numel)
    taken = set()
    for chunk in chunks:
        left -= chunk.numel
        if left < 0:
            break
        taken.add(chunk.index)
    return tuple(chunk.index in taken for chunk in layout.chunks)
