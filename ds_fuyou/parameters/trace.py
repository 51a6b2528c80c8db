# SPDX-License-Identifier: Apache-2.0
"""The recorded order of parameter use in one step, and what it says comes next."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["AccessTrace"]


class AccessTrace:
    """Predicts by the order of the last step; follows a changed order by looking for where it continues.

    Items are parameter indices. A step is everything between two calls of :meth:`end_step`: forward and backward of
    all its micro-batches, and whatever evaluation or generation ran in between.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._recording: list[int] = []
        self._places: dict[int, list[int]] = {}
        self._cursor = 0

    def use(self, item: int) -> None:
        """``item`` is needed now."""
        self._recording.append(item)
        if self._cursor < len(self._order) and self._order[self._cursor] == item:
            self._cursor += 1
            return
        later = [place for place in self._places.get(item, ()) if place >= self._cursor]
        if later:
            self._cursor = later[0] + 1
        elif self._places.get(item):
            self._cursor = self._places[item][0] + 1

    def upcoming(self) -> Iterator[int]:
        """What comes next, in order, once round: after the end of the step its beginning follows."""
        for place in range(self._cursor, len(self._order)):
            yield self._order[place]
        for place in range(min(self._cursor, len(self._order))):
            yield self._order[place]

    def end_step(self) -> None:
        """The recorded order becomes the prediction."""
        if self._recording:
            self._order = self._recording
            self._places = {}
            for place, item in enumerate(self._order):
                self._places.setdefault(item, []).append(place)
        self._recording = []
        self._cursor = 0

    def first_uses(self) -> list[int]:
        """Items in the order of their first use in the last step: the forward order."""
        return sorted(self._places, key=lambda item: self._places[item][0])
