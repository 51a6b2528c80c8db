# SPDX-License-Identifier: Apache-2.0
"""Chunks change between host memory and storage while training runs.

[Note: how a state moves]
By way of its chunk's next update, which reads the state where it is and leaves it where it shall be: what comes to
memory is read and not written, what leaves is written and not read. No step waits for it, no byte is moved for its sake
alone, and the bits are those of the update. A chunk is

* *due* from the begin of a step's last micro-batch on, ``step_bytes`` of them at a time. Its state is not read ahead,
  and it is not updated before ``step()``: what moves is never dropped.
* *moving* from that ``step()`` on, when its update is queued, until the update has ended. What comes to memory counts
  as being there from the begin, since from then on there is one version of it; what leaves until the end.

What lies on storage is right at every instant. An update that moves a chunk ends behind the commit of the step before,
as every other, so no record names a place that the chunk had left or not reached. A record that is ordered while any
state is in memory, or on its way, says so (``states_in_memory``), and stands alone: nobody goes on from it, nor from
the one before, whose places are given back when that record stands. Room for what leaves is taken, durably, before
anything moves ([Note: the order of growing and shrinking] in storage/growing.py). If there is none, nothing moves; if
it cannot be written although there was, it stays in memory. Both are told, and training goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ds_fuyou.errors import FuyouError, FuyouStateError
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.optimizer.layout import Chunk
from ds_fuyou.optimizer.worker import Worker

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["ChunkMover", "MoveCounts"]

logger = logging.getLogger("ds_fuyou")


@dataclass
class MoveCounts:
    """How many chunks' states moved since the start."""

    num_to_memory: int = 0
    num_to_storage: int = 0


class _Release:
    """Regions to be given back, by the committer."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.ended = threading.Event()


class ChunkMover:
    """What is to be moved, what the next step moves, and what moves. Used by the training thread alone."""

    def __init__(self, core: OutOfCoreOptimizer, worker: Worker) -> None:
        self._core, self._place, self._worker = core, core.place, worker
        self._ends = False
        self._room: Callable[[], int] | None = None
        self._target: tuple[bool, ...] | None = None
        self._step_bytes = 0
        self._due: dict[int, Chunk] = {}
        self._moving: dict[int, bool] = {}  # whether to memory
        self._vacated: set[str] = set()
        self._releases: list[_Release] = []
        self.counts = MoveCounts()
        self.failure: FuyouError | None = None
        """Why the last target is not reached, and is given up."""

    # ---- asking -------------------------------------------------------------------------------------------

    def move_to(
        self,
        states: tuple[bool, ...],
        step_bytes: int,
        budget_bytes: int | None = None,
        room: Callable[[], int] | None = None,
    ) -> None:
        """From the next step on states go to where ``states`` says (by chunk: in memory), about ``step_bytes`` in a
        step, one chunk at least; those that leave memory first. Takes the place of what was asked for before.

        To be called between steps: after one was applied, before the next backward. Waits for what moves now.

        ``budget_bytes``: the most on storage. ``room``: bytes of host memory for staging memory now, and when all has
        moved; where they are fewer than it should have, it has what it must. Without, it has what it should.

        Raises:
            FuyouStorageError: no room on storage; what was asked for before stays.
            FuyouMemoryError: none for what passes between the two; nothing more moves.
            FuyouStateError: within a step, or there is no store.
        """
        core = self._core
        core.check()
        if not core.window.is_empty:
            raise FuyouStateError("chunks can be moved between steps only: a backward has begun")
        now = self._place.residency.states
        if states == now and not self._moving:
            self._end(None)
            return
        if core.store is None:
            raise FuyouStateError("this run has no state files: everything was built in host memory")
        self.settle(wait=True)
        now = self._place.residency.states
        self._await_releases()
        leaving = [c for c in core.layout.chunks if now[c.index] and not states[c.index]]
        specs, regions = [self._place.state_spec(chunk) for chunk in leaving], core.store.regions
        core.store.reserve([spec for spec in specs if spec.name not in regions], budget_bytes)
        try:
            core.fit_staging(replace(self._place.residency, states=states), None if room is None else room())
        except FuyouError:
            self._end(None)
            raise
        self._room = room
        self._target, self._step_bytes, self.failure = states, step_bytes, None
        core.return_lent()  # what leaves will need more of it than was left when it was lent
        core.placed_anew()
        self._vacated.update(self._unused())
        self._vacated.difference_update(spec.name for spec in specs)

    def stop(self) -> None:
        """Nothing more moves than what does."""
        if self._target is not None:
            self._end(None)

    @property
    def is_idle(self) -> bool:
        """Nothing is to be moved, or moves, and all space is given back."""
        is_still = self._target is None and not self._moving and not self._vacated
        return is_still and all(release.ended.is_set() for release in self._releases)

    @property
    def target(self) -> tuple[bool, ...] | None:
        """By chunk: whether its state is to be in host memory; None where nothing more moves than what does."""
        return self._target

    @property
    def is_moving(self) -> bool:
        """Whether any update moves its chunk now."""
        return bool(self._moving)

    @property
    def staying(self) -> tuple[bool, ...]:
        """By chunk: its state is in memory, and will not have left by the next step."""
        now, target = self._place.residency.states, self._target or self._place.residency.states
        return tuple(is_in and target[i] and self._moving.get(i, True) for i, is_in in enumerate(now))

    def is_due(self, index: int) -> bool:
        """Whether the next step that is applied moves the chunk: until then nothing is to work on its state."""
        return index in self._due

    # ---- the step -----------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Before updates are asked for, and when the commit of the last step is ordered."""
        if self._target is None and not self._moving and not self._vacated and not self._releases:
            return
        self.settle()
        self._choose()
        if self._target is not None and not self._due and not self._moving and not self._core.has_snapshot:
            self._end(None)
        if self._vacated and not self._moving and self._target is None:
            self._release()
        self._releases = [release for release in self._releases if not release.ended.is_set()]

    def _wanted(self) -> Iterator[Chunk]:
        """Chunks that are not where they shall be, those that leave memory first, in deadline order."""
        target, now = self._target, self._place.residency.states
        if target is None:
            return
        chunks = sorted(self._core.layout.chunks, key=lambda chunk: (not now[chunk.index], chunk.position))
        yield from (chunk for chunk in chunks if now[chunk.index] != target[chunk.index])

    def _choose(self) -> None:
        """What the next step moves. What shall come to memory waits until what leaves has left."""
        self._due.clear()
        if self._core.has_snapshot:
            return
        room = self._step_bytes
        leaves = not all(self._moving.values())
        for chunk in self._wanted():
            if chunk.index in self._moving:
                continue
            is_leaving = self._place.residency.states[chunk.index]
            if leaves and not is_leaving:
                return
            leaves = leaves or is_leaving
            room -= self._place.state_spec(chunk).num_bytes
            if room < 0 and self._due:
                return
            self._due[chunk.index] = chunk

    def start(self, index: int) -> None:
        """The chunk's update of a published step is about to be queued: it moves the chunk if that is due."""
        chunk = self._due.get(index)
        if chunk is None or self._core.has_snapshot:
            return
        place = self._place
        resident, num_bytes = place.state(index), place.resident_of(chunk).num_bytes(chunk.numel)
        try:
            memory = aligned_tensor(num_bytes, inherited=False) if resident is None else None
        except FuyouError as error:
            self._end(error)
            return
        self._worker.ask(self._core.pipeline.set_destination, index, self._core.spec_of(chunk, memory))
        del self._due[index]
        self._moving[index] = memory is not None
        if memory is not None:
            place.put_state(index, memory)
            self._vacated.add(place.state_spec(chunk).name)
            self._core.placed_anew()

    def settle(self, *, wait: bool = False) -> None:
        """Takes note of what has moved; ``wait``: until everything has that began to."""
        core = self._core
        for index, to_memory in list(self._moving.items()):
            if not self._has_moved(index, wait=wait):
                continue
            del self._moving[index]
            if to_memory:
                self.counts.num_to_memory += 1
            elif core.pipeline.is_resident(index):
                self._end(FuyouStateError(f"the state of chunk {index} could not be written: it stays in host memory"))
            else:
                self.counts.num_to_storage += 1
                self._place.drop_state(index)
                core.placed_anew()

    def _has_moved(self, index: int, *, wait: bool) -> bool:
        pipeline = self._core.pipeline
        if wait:
            self._worker.wait(
                lambda t: pipeline.wait_moved(index, t), lambda: f"the update of chunk {index}, which moves it"
            )
            return True
        try:
            return bool(pipeline.wait_moved(index, 0.0))
        except RuntimeError:
            self._worker.check()
            raise

    def step_ended(self) -> None:
        """The step was applied: when all has moved, staging memory is made as large as it has to be now."""
        if not self._ends or self._target is not None or self._moving:  # what leaves needs the memory that it passes
            return
        if self._room is not None:  # through two chunks at a time every step is slow: that is worth a wait
            self._core.return_lent()
        if self._core.staging.used_bytes:  # read ahead in vain, say: a later step will do
            return
        self._ends = False
        try:
            self._core.fit_staging(self._place.residency, None if self._room is None else self._room())
        except FuyouError as error:
            logger.warning("staging memory stays as large as it is: %s", error)

    # ---- ends ---------------------------------------------------------------------------------------------

    def _end(self, failure: FuyouError | None) -> None:
        """The target is reached, or given up. What was reserved for what stays is given back."""
        self._target = None
        self._due.clear()
        self._core.placed_anew()
        if failure is not None:
            self.failure = failure
            logger.warning("chunks are not moved any further, training goes on: %s", failure)
        self._vacated.update(self._unused())
        self._ends = True

    def _unused(self) -> Iterator[str]:
        """Regions of states that are in memory and do not leave it."""
        store, now, target = self._core.store, self._place.residency.states, self._target
        regions = {} if store is None else store.regions
        for chunk in self._core.layout.chunks if regions else ():
            name = self._place.state_spec(chunk).name
            leaves = chunk.index in self._moving or (target is not None and not target[chunk.index])
            if now[chunk.index] and not leaves and name in regions:
                yield name

    def _release(self) -> None:
        """Behind the commit that was ordered last, which names none of them."""
        release = _Release(self._vacated)
        self._vacated = set()
        self._releases.append(release)
        self._core.commits.release(release.names, release.ended.set)

    def _await_releases(self) -> None:
        for release in self._releases:
            self._worker.wait(release.ended.wait, lambda: "space on storage to be given back")
        self._releases.clear()
