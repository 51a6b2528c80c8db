# SPDX-License-Identifier: Apache-2.0
"""The recorded order of parameter use, and what it says comes next.

[Note: the prediction]
What comes next is what came next when the same had come before: the history of uses repeats itself with a *period*, and
its last ``period`` uses are the next ones. As long as every use is the predicted one the period stays. One that is not
is looked up: of the places where it was used before the one counts that has the longest common past with now, of equal
ones the latest. So a step of many micro-batches repeats as a whole, a token of a generation follows the one before it,
and a batch of an evaluation the batch before it, whoever runs them; where their kind changes it is wrong once or twice.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Hashable, Iterable
from typing import Any

__all__ = ["AccessTrace", "Ahead"]

LONGEST_TRACE = 1 << 17
"""Uses remembered: an evaluation, or serving without steps, may last for days."""
_MOST_PLACES = 16
_LONGEST_PAST = 256
_STEP = object()


class AccessTrace:
    """Items are parameters; places count all uses since the begin, ends of steps among them."""

    def __init__(self) -> None:
        self.period = 0
        self.turn = 0
        """Grows whenever the prediction does not simply go on."""
        self._history: list[Any] = []
        self._forgotten = 0
        self._places: dict[Hashable, list[int]] = {}
        self._step = (0, 0)  # where the last step began, and where it ended

    @property
    def now(self) -> int:
        """The place of the next use."""
        return self._forgotten + len(self._history)

    def expect(self, items: Iterable[Hashable]) -> None:
        """Before the first use: items are used in this order, once or again and again."""
        for item in items:
            self._note(item)
        self.period = len(self._history)
        self._step = (self.now, self.now)
        self.turn += 1

    def use(self, item: Hashable) -> None:
        """``item`` is needed now."""
        expected = self._history[-self.period] if self.period else None
        self._note(item)
        if expected is not item:
            self._look_up(item)

    def end_step(self) -> None:
        """What follows is a step like the one that ended, unless more of the past says otherwise."""
        began = max(self._step[1], self._forgotten)
        self.turn += 1
        if began == self.now:
            return
        expected = self._history[-self.period] if self.period else None
        self._note(_STEP)
        if expected is not _STEP:
            self.period = self.now - began
        self._step = (began, self.now)

    def at(self, place: int) -> Any:
        """What is used at ``place``, from :attr:`now` to a period later."""
        return self._history[place - self.period - self._forgotten]

    def next_place(self, item: Hashable) -> int | None:
        """Where ``item`` is used next within a period."""
        places = self._places.get(item)
        if not places or not self.period:
            return None
        later = bisect.bisect_left(places, self.now - self.period)
        return places[later] + self.period if later < len(places) else None

    def next_step(self) -> int | None:
        """Where the step ends; None if none ends within a period."""
        return self.next_place(_STEP)

    def first_uses(self) -> list[Any]:
        """Items in the order of their first use in the last step: the forward order."""
        begin, end = (max(0, place - self._forgotten) for place in self._step)
        return [item for item in dict.fromkeys(self._history[begin:end]) if item is not _STEP]

    def is_step(self, item: Any) -> bool:
        return item is _STEP

    def _note(self, item: Hashable) -> None:
        self._places.setdefault(item, []).append(self.now)
        self._history.append(item)
        if len(self._history) > 2 * LONGEST_TRACE:
            self._forget()

    def _look_up(self, item: Hashable) -> None:
        self.turn += 1
        *earlier, here = self._places[item]
        longest, best = 0, None
        for place in reversed(earlier[-_MOST_PLACES:]):
            length = self._common_past(place, here)
            if length > longest:
                longest, best = length, place
        if best is not None:
            self.period = here - best
        elif self.period:
            self.period += 1  # never seen: what was expected comes after it

    def _common_past(self, place: int, here: int) -> int:
        """How many uses up to ``place`` are those up to ``here``."""
        first, second, history = place - self._forgotten, here - self._forgotten, self._history
        length = 0
        while length < _LONGEST_PAST and length <= first and history[first - length] is history[second - length]:
            length += 1
        return length

    def _forget(self) -> None:
        num_forgotten = len(self._history) - LONGEST_TRACE
        del self._history[:num_forgotten]
        self._forgotten += num_forgotten
        for item in list(self._places):
            places = self._places[item]
            del places[: bisect.bisect_left(places, self._forgotten)]
            if not places:
                del self._places[item]
        if self.period > len(self._history):
            self.period = len(self._history)
            self.turn += 1


class Ahead:
    """Walks ahead of the trace, over each place once; a place whose item went away again comes once more.

    ``wants(item, is_next_step)``: whether an item concerns this walk. It goes a period ahead.
    """

    def __init__(self, trace: AccessTrace, wants: Callable[[Any, bool], bool]) -> None:
        self._trace, self._wants = trace, wants
        self._place = 0
        self._again: list[int] = []
        self._turn = -1

    def peek(self) -> Any | None:
        """The next item, until :meth:`pop`; None where the walk ends."""
        self._follow()
        trace, again = self._trace, self._again
        while again and again[0] < trace.now:
            heapq.heappop(again)
        if again:
            return trace.at(again[0])
        self._place = max(self._place, trace.now)
        end = trace.now + trace.period
        step = trace.next_step() if self._place < end else None
        while self._place < end:
            item = trace.at(self._place)
            if not trace.is_step(item) and self._wants(item, step is not None and self._place > step):
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
        """Of the item that :meth:`peek` gave."""
        return self._again[0] if self._again else self._place

    def gone(self, item: Any) -> None:
        """The item is not there any more: if the walk has passed its next use, it comes to it again."""
        self._follow()
        place, step = self._trace.next_place(item), self._trace.next_step()
        if place is not None and place < self._place and self._wants(item, step is not None and place > step):
            heapq.heappush(self._again, place)

    def _follow(self) -> None:
        if self._turn != self._trace.turn:
            self._turn, self._place = self._trace.turn, self._trace.now
            self._again.clear()
