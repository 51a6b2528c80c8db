# SPDX-License-Identifier: Apache-2.0
"""The recorded order of parameter use in one step, and what it says comes next."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator

__all__ = ["AccessTrace"]

LONGEST_TRACE = 1 << 20
"""Uses remembered of one step: an evaluation, or serving without steps, may last for days."""


class AccessTrace:
    """Predicts by the order of the last step; follows a changed order by looking for where it continues.

    Items are parameter indices. A step is everything between two calls of :meth:`end_step`: forward and backward of
    all its micro-batches, and whatever evaluation or generation ran in between; its last :data:`LONGEST_TRACE` uses.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._recording: deque[int] = deque(maxlen=LONGEST_TRACE)
        self._places: dict[int, list[int]] = {}
        self._cursor = 0

    def use(self, item: int) -> None:
        """``item`` is needed now."""
        self._recording.append(item)
        if self._cursor < len(self._order) and self._order[self._cursor] == item:
            self._cursor += 1
            return
        places = self._places.get(item)
        if places:
            later = bisect.bisect_left(places, self._cursor)
            self._cursor = places[later if later < len(places) else 0] + 1

    def upcoming(self) -> Iterator[int]:
        """What comes next, in order, once round: after the end of the step its beginning follows."""
        for place in range(self._cursor, len(self._order)):
            yield self._order[place]
        for place in range(min(self._cursor, len(self._order))):
            yield self._order[place]

    def end_step(self) -> None:
        """The recorded order becomes the prediction."""
        if self._recording:
            self._order = list(self._recording)
            self._places = {}
            for place, item in enumerate(self._order):
                self._places.setdefault(item, []).append(place)
        self._recording.clear()
        self._cursor = 0

    def first_uses(self) -> list[int]:
        """Items in the order of their first use in the last step: the forward order."""
        return sorted(self._places, key=lambda item: self._places[item][0])
