# SPDX-License-Identifier: Apache-2.0
"""Values that stay in a pool while nobody uses them, and which of them go first."""

from __future__ import annotations

import heapq
import itertools

from ds_fuyou.parameters.partition import Partition
from ds_fuyou.parameters.trace import AccessTrace

__all__ = ["NEVER", "Kept"]

NEVER = 1 << 62
"""The place of a use that nobody expects."""


class Kept:
    """The one that is used last goes first: then the fewest bytes are read again (Belady's rule)."""

    def __init__(self, trace: AccessTrace) -> None:
        self._trace = trace
        self._place_of: dict[Partition, int] = {}
        self._latest: list[tuple[int, int, Partition]] = []  # a heap, with entries that do not hold any more
        self._numbers = itertools.count()
        self._turn = trace.turn
        self._ordered_at = -1  # all places were found: not at each of many turns, but also as uses are left out

    def place(self, partition: Partition) -> int:
        """Of its next use, as far as these values serve it."""
        return self._served(partition, self._trace.next_place(partition))

    def place_after(self, partition: Partition, behind: int) -> int:
        """Of its first use behind a place, as far as the values of its next use serve it."""
        return self._served(partition, self._trace.place_after(partition, behind))

    def _served(self, partition: Partition, place: int | None) -> int:
        """:data:`NEVER` where a step changes the values before."""
        step = self._trace.next_step()
        if place is None or (partition.source.changes and step is not None and place > step):
            return NEVER
        return place

    def add(self, partition: Partition) -> None:
        """Of one that is there already the place is found again."""
        place = self._place_of[partition] = self.place(partition)
        heapq.heappush(self._latest, (-place, next(self._numbers), partition))
        if len(self._latest) > 2 * len(self._place_of) + 64:
            self._order()

    def _order(self) -> None:
        self._latest = [(-place, next(self._numbers), partition) for partition, place in self._place_of.items()]
        heapq.heapify(self._latest)

    def discard(self, partition: Partition) -> None:
        self._place_of.pop(partition, None)

    def pop_last(self, after: int) -> Partition | None:
        """Takes out the one that is used last, if that is after the place ``after``."""
        age, num_values = self._trace.now - self._ordered_at, len(self._place_of)
        if age >= num_values // 4 and (self._turn != self._trace.turn or age >= 4 * num_values + 64):
            self._turn, self._ordered_at = self._trace.turn, self._trace.now
            for partition in self._place_of:
                self._place_of[partition] = self.place(partition)
            self._order()
        while self._latest:
            place, _, partition = self._latest[0]
            if self._place_of.get(partition) != -place:
                heapq.heappop(self._latest)
            elif -place <= after:
                return None
            else:
                heapq.heappop(self._latest)
                del self._place_of[partition]
                return partition
        return None

    def clear(self) -> None:
        self._place_of.clear()
        self._latest.clear()
