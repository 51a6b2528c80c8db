# SPDX-License-Identifier: Apache-2.0
"""The recorded order of parameter use in one step, and what it says comes next."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["AccessTrace", "Ahead"]

LONGEST_TRACE = 1 << 20
"""Uses remembered of one step: an evaluation, or serving without steps, may last for days."""


class AccessTrace:
    """Predicts by the order of the last step; follows a changed order by looking for where it continues.

    Items are parameters. A step is everything between two calls of :meth:`end_step`: forward and backward of all its
    micro-batches, and whatever evaluation or generation ran in between; its last :data:`LONGEST_TRACE` uses.
    """

    def __init__(self) -> None:
        self.order: list[Any] = []
        self.cursor = 0
        self.turn = 0
        """Grows whenever the prediction does not simply go on: at the end of a step, and where the order changed."""
        self._recording: deque[Any] = deque(maxlen=LONGEST_TRACE)
        self._places: dict[Hashable, list[int]] = {}

    def use(self, item: Hashable) -> None:
        """``item`` is needed now."""
        self._recording.append(item)
        if self.cursor < len(self.order) and self.order[self.cursor] is item:
            self.cursor += 1
            return
        places = self._places.get(item)
        if places:
            later = bisect.bisect_left(places, self.cursor)
            self.cursor = places[later if later < len(places) else 0] + 1
            self.turn += 1

    def next_place(self, item: Hashable) -> int | None:
        """Where ``item`` is used next in this step, or, counted on, in the one after it."""
        places = self._places.get(item)
        if not places:
            return None
        later = bisect.bisect_left(places, self.cursor)
        return places[later] if later < len(places) else places[0] + len(self.order)

    def end_step(self) -> None:
        """The recorded order becomes the prediction."""
        if self._recording:
            self.order = list(self._recording)
            self._places = {}
            for place, item in enumerate(self.order):
                self._places.setdefault(item, []).append(place)
        self._recording.clear()
        self.cursor = 0
        self.turn += 1

    def first_uses(self) -> list[Any]:
        """Items in the order of their first use in the last step: the forward order."""
        return sorted(self._places, key=lambda item: self._places[item][0])


class Ahead:
    """Walks ahead of the trace's cursor, over each place once; a place whose item went away again comes once more.

    ``wants(item, is_next_step)``: whether an item concerns this walk. It goes on into the next step, which is taken
    for the same.
    """

    def __init__(self, trace: AccessTrace, wants: Callable[[Any, bool], bool]) -> None:
        self._trace, self._wants = trace, wants
        self._place = 0
        self._again: list[int] = []
        self._turn = trace.turn

    def peek(self) -> Any | None:
        """The next item, until :meth:`pop`; None where the walk ends."""
        self._follow()
        trace, again = self._trace, self._again
        while again and again[0] < trace.cursor:
            heapq.heappop(again)
        if again:
            return self._at(again[0])
        self._place = max(self._place, trace.cursor)
        end = len(trace.order) + trace.cursor
        while self._place < end:
            item = self._at(self._place)
            if self._wants(item, self._place >= len(trace.order)):
                return item
            self._place += 1
        return None

    def pop(self) -> None:
        """Past the item that :meth:`peek` gave."""
        if self._again:
            heapq.heappop(self._again)
        else:
            self._place += 1

    def place(self) -> int:
        """Of the item that :meth:`peek` gave, in the order of this step and the next."""
        return self._again[0] if self._again else self._place

    def gone(self, item: Any) -> None:
        """The item is not there any more: if the walk has passed its next use, it comes to it again."""
        self._follow()
        place = self._trace.next_place(item)
        if place is not None and place < self._place and self._wants(item, place >= len(self._trace.order)):
            heapq.heappush(self._again, place)

    def _at(self, place: int) -> Any:
        return self._trace.order[place % len(self._trace.order)]

    def _follow(self) -> None:
        if self._turn != self._trace.turn:
            self._turn, self._place = self._trace.turn, self._trace.cursor
            self._again.clear()
