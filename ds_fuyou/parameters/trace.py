# SPDX-License-Identifier: Apache-2.0
"""The recorded order of parameter use, and what it says comes next.

[Note: the prediction]
What comes next is what came next when the same had come before: the history of uses repeats itself with a *period*, and
its last ``period`` uses are the next ones. As long as every use is the predicted one the period stays. One that is
expected a few places on (one place for every 16 uses of the period, eight at most) moves the prediction on by what was
left out, unless that is the end of a step; in a period of 128 uses or more, up to six in a row that are not (two
experts of three matrices) are exceptions, which leave it where it is. Others are looked up: of the last places where it
was used, and of the last ones where it was used behind the same item (after many tokens those of a step before them),
the one counts that has the longest common past with now, of equal ones the latest. What follows the end of a step is a
step like it, unless its end was expected. So a step of many micro-batches repeats as a whole, a token of a generation
follows the one before it, and a batch of an evaluation the batch before it, whoever runs them; where their kind changes
it is wrong a few times.

[Note: what is doubtful]
In such a period, what was expected and left out, or stood where exceptions came, is doubtful: walks ahead pass it by,
and it counts neither among the places to what is expected later, nor, where it is an exception itself, among the six
(but 64 of any kind in a row are looked up). To be used where it is expected outweighs two times that it is not, so a
layer that is left out now and then is read ahead; when 128 uses in a row were expected all are trusted again. So of a
token that uses 6 of 64 experts the layers' other parameters are read ahead, and experts when it is known which.
"""

from __future__ import annotations

import bisect
import heapq
import sys
from collections.abc import Callable, Hashable, Iterable
from itertools import islice, takewhile
from typing import Any

__all__ = ["AccessTrace", "Ahead"]

LONGEST_TRACE = 1 << 17
"""Uses remembered: an evaluation, or serving without steps, may last for days."""
_MOST_PLACES = 16
_MOST_LOOKED_AT = 512
_LONGEST_PAST = 256
_NEAR = 8
_USES_NEAR = 16
_LONG = _NEAR * _USES_NEAR
_MOST_HELD = 6
_MOST_DOUBTFUL = 64
_RIGHT = 128
_MOST_DOUBTS = 2
_FARTHEST = 256
_STEP = object()


class AccessTrace:
    """Items are parameters; places count all uses since the begin, ends of steps among them. What is expected has the
    places where it was before: they hold until the next turn.
    """

    def __init__(self) -> None:
        self.period = 0
        self.turn = 0
        """Grows whenever the prediction goes on elsewhere, and at the end of a step."""
        self._history: list[Any] = []
        self._forgotten = 0
        self._places: dict[Hashable, list[int]] = {}
        self._step = (0, 0)  # where the last step began, and where it ended
        self._next_step: tuple[int, int | None] = (-1, None)  # at a turn
        self._held = 0  # uses in a row that were not expected, and changed nothing
        self._doubts: dict[Hashable, int] = {}  # of what was left out once: above 0 it is doubtful
        self._num_right = self._num_wrong = 0  # uses in a row that were expected, and that were not

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
        period, turn = self.period, self.turn
        is_expected = period and self._history[-period] is item
        self._note(item)
        if is_expected:
            self._held = self._num_wrong = 0
            self._num_right += 1
            if self._doubts:
                self._trust(item)
            return
        self._num_right, self._num_wrong = 0, self._num_wrong + 1
        if turn != self.turn or not self._shift(item, period):  # a turn: some of the past was forgotten
            self._look_up(item)
            self.period = min(self.period, len(self._history))

    def is_doubtful(self, item: Hashable) -> bool:
        """Whether it was not used of late where it was expected, as one expert of many."""
        return self._doubts.get(item, 0) > 0

    def _trust(self, item: Hashable) -> None:
        """``item`` was used where it was expected. So are all others, if many in a row were."""
        doubt = self._doubts.get(item)
        if doubt is not None:
            self._doubts[item] = max(doubt - 2, -_MOST_DOUBTS)
        if self._num_right >= _RIGHT:
            self.turn += any(doubt > 0 for doubt in self._doubts.values())  # walks come to them again
            self._doubts.clear()

    def _doubt(self, place: int, num_items: int) -> None:
        """What was expected from ``place`` of the history on did not come."""
        if self.period >= _LONG:
            for item in takewhile(lambda item: item is not _STEP, self._history[place : place + num_items]):
                self._doubts[item] = min(self._doubts.get(item, 0) + 1, _MOST_DOUBTS)

    def end_step(self) -> None:
        """What follows is a step like the one that ended, unless more of the past says otherwise."""
        began = max(self._step[1], self._forgotten)
        self.turn += 1
        self._held = 0
        if began == self.now:
            return
        expected = self._history[-self.period] if self.period else None
        self._note(_STEP)
        if expected is not _STEP:
            self.period = min(self.now - began, len(self._history))
        self._step = (began, self.now)

    @property
    def cursor(self) -> int:
        """The place whose item is expected now. What is expected after it is what came after it, up to :attr:`now`."""
        return self._forgotten + len(self._history) - self.period

    def at(self, place: int) -> Any:
        """What was used at ``place``: from :attr:`cursor` on, what is expected."""
        return self._history[place - self._forgotten]

    def next_place(self, item: Hashable) -> int | None:
        """The first place of ``item`` from :attr:`cursor` on; None if it is not expected."""
        places = self._places.get(item)
        if not places or not self.period or places[-1] < (cursor := self.cursor):
            return None
        return places[bisect.bisect_left(places, cursor)]

    def place_after(self, item: Hashable, place: int) -> int | None:
        """The first place of ``item`` behind ``place``, which may be a period on; None if it is not expected."""
        first = self.next_place(item)
        if first is None:
            return None
        places = self._places[item]
        index = bisect.bisect_right(places, place)
        return places[index] if index < len(places) else first + self.period

    def next_step(self) -> int | None:
        """Where the step ends; None if none is expected to."""
        if self._next_step[0] != self.turn:
            self._next_step = (self.turn, self.next_place(_STEP))  # only a turn passes it
        return self._next_step[1]

    def first_uses(self) -> list[Any]:
        """Items in the order of their first use in the last step: the forward order."""
        begin, end = (max(0, place - self._forgotten) for place in self._step)
        return [item for item in dict.fromkeys(self._history[begin:end]) if item is not _STEP]

    def is_step(self, item: Any) -> bool:
        return item is _STEP

    def _note(self, item: Hashable) -> None:
        history, places = self._history, self._places.get(item)
        now = self._forgotten + len(history)
        if places is None:
            self._places[item] = [now]
        else:
            places.append(now)
        history.append(item)
        if len(history) > 2 * LONGEST_TRACE:
            self._forget()

    def _shift(self, item: Hashable, period: int) -> bool:
        """After a use that was not expected, if it may be an exception (another expert, a layer left out): what was
        expected goes on behind the item, if it is expected within a few places (doubtful ones do not count), or where
        it was.
        """
        near = min(_NEAR, period // _USES_NEAR)
        history = self._history
        begin = len(history) - 1 - period
        for place in range(begin, min(begin + _FARTHEST, len(history) - 1)):
            if history[place] is item and place > begin:
                self._doubt(begin, place - begin)
                self.period = len(history) - 1 - place
                return True
            near -= not self.is_doubtful(history[place])
            if near < 0 or history[place] is _STEP:
                break
        if period < _LONG or self._held >= _MOST_HELD or self._num_wrong > _MOST_DOUBTFUL:
            return False
        self._held += not self.is_doubtful(item)
        self.period = period + 1
        return True

    def _look_up(self, item: Hashable) -> None:
        self._doubt(len(self._history) - 1 - self.period, self._held + 1)
        self.turn += 1
        self._held = 0
        here = self.now - 1
        places = self._places[item][-_MOST_LOOKED_AT - 1 : -1]
        if len(self._history) > 1:
            places = sorted({*places[-_MOST_PLACES:], *self._behind(self._history[-2], places)})
        longest, best = 0, None
        for place in reversed(places):
            length = self._common_past(place, here)
            if length > longest:
                longest, best = length, place
            if longest == _LONGEST_PAST:
                break
        if best is not None:
            self.period = here - best
        elif self.period:
            self.period += 1  # never seen: what was expected comes after it

    def _behind(self, before: Any, places: list[int]) -> list[int]:
        """The last of these places that are behind that item."""
        history, forgotten = self._history, self._forgotten
        behind = (place for place in reversed(places) if place > forgotten and history[place - forgotten - 1] is before)
        return list(islice(behind, _MOST_PLACES))

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
    """Walks ahead of the trace, over each place once; :meth:`gone` leads it back to a place.

    ``wants(item, is_next_step)``: whether an item concerns this walk. It goes a period ahead, by as many places at a
    time as :meth:`allow` says.
    """

    def __init__(self, trace: AccessTrace, wants: Callable[[Any, bool], bool]) -> None:
        self._trace, self._wants = trace, wants
        self._place = 0
        self._left = sys.maxsize
        self._again: list[int] = []  # a heap
        self._is_again: set[int] = set()
        self._turn = -1

    def allow(self, num_places: int) -> None:
        """The walk ends after as many, until it is allowed more: a turn does not cost a whole walk at once."""
        self._left = num_places

    def peek(self) -> Any | None:
        """The next item, until :meth:`pop`; None where the walk ends."""
        trace, again = self._trace, self._again
        if self._turn != trace.turn:
            self._follow()
        if self._left <= 0:
            return None
        cursor = trace.cursor
        while again and again[0] < cursor:
            self._is_again.discard(heapq.heappop(again))
        if again:
            return trace.at(again[0])
        place = self._place = max(self._place, cursor)
        end = trace.now
        if place >= end:
            return None
        step = trace.next_step()
        while place < end and self._left > 0:
            item = trace.at(place)
            if (
                not trace.is_step(item)
                and not trace.is_doubtful(item)
                and self._wants(item, step is not None and place > step)
            ):
                self._place = place
                return item
            place += 1
            self._left -= 1
        self._place = place
        return None

    def pop(self) -> None:
        """Past the item that :meth:`peek` gave."""
        self._left -= 1
        if self._again:
            self._is_again.discard(heapq.heappop(self._again))
        else:
            self._place += 1

    def place(self) -> int:
        """Of the item that :meth:`peek` gave."""
        return self._again[0] if self._again else self._place

    def gone(self, item: Any) -> None:
        """The item went away, or came after all: if the walk has passed its next use, it comes to it again."""
        if self._turn != self._trace.turn:
            self._follow()
        place = self._trace.next_place(item)
        if place is None or place >= self._place or place in self._is_again or self._trace.is_doubtful(item):
            return
        step = self._trace.next_step()
        if self._wants(item, step is not None and place > step):
            heapq.heappush(self._again, place)
            self._is_again.add(place)

    def _follow(self) -> None:
        self._turn, self._place = self._trace.turn, self._trace.cursor
        self._again.clear()
        self._is_again.clear()
