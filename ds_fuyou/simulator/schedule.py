# SPDX-License-Identifier: Apache-2.0
"""Discrete-event engine: tasks on lanes, one at a time a lane, the earliest deadline first. No torch.

Reads and writes are two lanes of one storage: while both work, each runs at ``duplex / 2`` of its own rate.

Updates have one exception to the earliest deadline, as in a run ([Note: order of updates] of the core's pipeline):
while no chunk is read or written, and storage has more to do than updates, the first one in a buffer goes ahead.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.planner.cost import shared_secs
from ds_fuyou.planner.lanes import Lane

__all__ = ["Schedule", "Task"]

_STORAGE = (Lane.READ, Lane.WRITE)


@dataclass(slots=True)
class Task:
    """``secs`` of work for one lane, after ``waits`` others; smallest ``deadline`` first among the ready ones.

    ``takes`` and ``gives`` name a pool of buffers that the start takes one of, and the end gives one back to; ``holds``
    says that it works in one. ``chunk``: of a chunk's first task, all of its tasks; ``is_expected``: it is one of a
    chunk whose first task may start.
    """

    label: str
    lane: Lane
    secs: float
    deadline: float
    waits: int = 0
    then: list[int] = field(default_factory=list)
    takes: str = ""
    gives: str = ""
    is_taken: bool = False
    holds: bool = False
    chunk: tuple[int, ...] = ()
    is_expected: bool = False
    start: float = 0.0
    end: float = 0.0


class Schedule:
    """A graph of tasks and its run. Build with :meth:`add`, then :meth:`run` once."""

    def __init__(self, duplex: float = 1.0, pools: dict[str, int] | None = None) -> None:
        self.tasks: list[Task] = []
        self._duplex = duplex
        self._pools = dict(pools or {})
        self._ready: list[list[tuple[float, int]]] = [[] for _ in Lane]
        self._starved: dict[str, list[tuple[float, int]]] = {name: [] for name in self._pools}
        self._left = [0.0] * len(Lane)  # seconds of work that is expected
        self._loaded: list[tuple[float, int]] = []  # of those that are ready for the CPU, the ones in a buffer
        self._num_moving = 0  # chunks that are read or written

    def add(self, task: Task, *after: int | None) -> int:
        """Adds a task that starts after the given ones (None: no such task); returns its number."""
        number = len(self.tasks)
        for earlier in set(after):
            if earlier is not None:
                self.tasks[earlier].then.append(number)
                task.waits += 1
        self.tasks.append(task)
        return number

    def run(self) -> float:
        """Runs all tasks; fills in their start and end; returns the end of the last one, in seconds."""
        for number, task in enumerate(self.tasks):
            if task.waits == 0:
                self._offer(number)
        now, num_done = 0.0, 0
        running: list[int | None] = [None] * len(Lane)
        left = [0.0] * len(Lane)
        while num_done < len(self.tasks):
            for lane in Lane:
                if running[lane] is None:
                    running[lane] = self._take(lane, now)
                    chosen = running[lane]
                    if chosen is not None:
                        left[lane] = self.tasks[chosen].secs
            shared = running[Lane.READ] is not None and running[Lane.WRITE] is not None
            speed = min(1.0, self._duplex / 2) if shared else 1.0
            speeds = [speed if lane in _STORAGE else 1.0 for lane in Lane]
            active = [lane for lane in Lane if running[lane] is not None]
            if not active:
                raise FuyouStateError(f"{len(self.tasks) - num_done} simulated tasks wait for each other")
            passed = min(left[lane] / speeds[lane] for lane in active)
            now += passed
            for lane in active:
                left[lane] -= passed * speeds[lane]
                number_done = running[lane]
                if left[lane] <= 1e-12 and number_done is not None:
                    running[lane] = None
                    num_done += 1
                    self._finish(number_done, now)
        return now

    def _offer(self, number: int) -> None:
        task = self.tasks[number]
        for other in task.chunk if not task.is_expected else ():
            self.tasks[other].is_expected = True
            self._left[self.tasks[other].lane] += self.tasks[other].secs
        heapq.heappush(self._ready[task.lane], (task.deadline, number))
        if task.holds and task.lane is Lane.CPU:
            heapq.heappush(self._loaded, (task.deadline, number))

    def _take(self, lane: Lane, now: float) -> int | None:
        ready = self._ready[lane]
        if lane is Lane.CPU and not self._num_moving and self._storage_ends_last():
            while self._loaded and self.tasks[self._loaded[0][1]].is_taken:
                heapq.heappop(self._loaded)
            ready = self._loaded or ready
        while ready:
            entry = heapq.heappop(ready)
            task = self.tasks[entry[1]]
            if task.is_taken:  # out of the other list
                continue
            if task.takes:
                if self._pools[task.takes] == 0:
                    heapq.heappush(self._starved[task.takes], entry)
                    continue
                self._pools[task.takes] -= 1
            task.start, task.is_taken = now, True
            self._num_moving += task.holds and lane in _STORAGE
            return entry[1]
        return None

    def _storage_ends_last(self) -> bool:
        left = self._left
        return shared_secs(left[Lane.READ], left[Lane.WRITE], self._duplex) >= left[Lane.CPU]

    def _finish(self, number: int, now: float) -> None:
        task = self.tasks[number]
        task.end = now
        self._num_moving -= task.holds and task.lane in _STORAGE
        if task.is_expected:
            self._left[task.lane] -= task.secs
        if task.gives:
            self._pools[task.gives] += 1
            starved = self._starved[task.gives]
            if starved:
                self._offer(heapq.heappop(starved)[1])
        for later in task.then:
            self.tasks[later].waits -= 1
            if self.tasks[later].waits == 0:
                self._offer(later)
