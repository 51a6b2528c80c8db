# SPDX-License-Identifier: Apache-2.0
"""Which chunks of each class are in host memory; all others live on storage.

[Note: which chunks are resident]
A plan gives shares; chunks are whole. Every byte resident saves the same traffic, whichever chunk it belongs to, so
what decides is what a chunk on storage makes others wait for. Backward delivers the gradients of the first block last,
and the next forward needs that block first: its read, update and (for P16 on storage) write stand in a row between two
passes, with nothing left to hide behind. The last block has the rest of backward and nearly all of forward. A resident
state defers its update to ``step()``, which costs the first blocks nothing, because their gradients arrive just before
it. So chunks become resident in deadline order, the smallest forward position first, in every class. Updates that wait
for ``step()`` run in the same order: while they update what is resident, the reads of the rest are under way. G16 of
such a chunk is always read again, so it is worth most in memory beside a resident state: the same order once more.

A resident state with a spare block defers nothing: its update goes from the one to the other, in backward, and they
change places when ``step()`` has published it. The last of the resident ones have most time for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ds_fuyou.optimizer.layout import Chunk, FlatLayout

__all__ = ["ChunkResidency"]


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
    def by_deadline(
        cls, layout: FlatLayout, params: float, states: float, grads: float, spares: float = 0.0
    ) -> ChunkResidency:
        """As many chunks of each class as its share (0 to 1, of the elements) holds, in deadline order; spare blocks
        for those states in memory whose gradients come first.

        Never more than the share: chunks are at most ``chunk_bytes``, so what is lost is less than one of them.
        """
        resident = _first(layout, states)
        return cls(_first(layout, params), resident, _first(layout, grads), _last_of(layout, resident, spares))

    def keeps_slots(self, chunk: int) -> bool:
        """Whether a part of the chunk lives in slots on storage."""
        return not (self.params[chunk] and self.states[chunk])

    @property
    def needs_storage(self) -> bool:
        return not (all(self.params) and all(self.states) and all(self.grads))


def _first(layout: FlatLayout, share: float) -> tuple[bool, ...]:
    return _fitting(layout, sorted(layout.chunks, key=lambda c: (c.position, c.index)), share)


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
