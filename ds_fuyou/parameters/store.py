# SPDX-License-Identifier: Apache-2.0
"""The parameters of one engine: what is read ahead, what is handed out, and whose memory it is. Knows no DeepSpeed.

[Note: the way of a parameter]
Each :class:`Partition` has a source (the optimizer's chunks, or pages that ``zero.Init`` wrote) and a state
(:class:`Presence`). ``use`` says that somebody needs it now: it is made available, by waiting for its update and its
read if it must be, and the trace moves on. ``move_on`` then starts reads of what the trace expects, as far as the pools
reach, and offers what comes next to the borrower, who may gather it ahead of its use. ``copied`` says that the device
copies from it, ``release`` that nobody uses it any more, ``step_applied`` that steps changed the values. ``in_order``
announces uses that the trace cannot know: of a list that is gathered, or saved.

[Note: what stays]
Released values stay in their pool as long as a later use of them is expected before a step changes them. A read that
somebody waits for takes the memory of those that are used last. So does a read ahead, but only of what is used later
than it. That alone would fill memory with what comes next, whatever that is, and a model that is used from its begin to
its end again and again would be read whole each time: when a read is early, what will be the last one to be used at its
own time may not have been used yet. So of values that are still to be used reads ahead have a quarter of the pool.
Beyond it, while no more than that is in flight, they take what would be given up for them at the time of their use,
too: what is used later than all come back that are used before them. Backward uses in the opposite order what forward
used, so in a step storage reads while kept values are used, and no byte is read for that. In a model that is used from
begin to end there is no such thing: of ``M`` bytes that a token needs about ``M - 3/4 * pool`` are read for it, and
none if the model fits. While all that is expected is shown to the borrower, a use moves the order on and nothing else.

[Note: what may differ between ranks]
Which reads have ended differs; a gather must be the same collective everywhere, and an offered parameter is gathered
ahead. One walk offers, in the order of next use. On one rank it offers what has come, up to a quarter of the pools, and
ends where no read has started: that may have to take the memory of what comes behind it. On several it goes by
position: everything that is used within the next :data:`OFFER_BYTES` or so of the order, which is the same on all
ranks, and before the step ends, is waited for and offered. Where storage is slower than the device they would wait for
it one module later; waiting earlier delays the last module, not the pace. What stays is not offered by staying: it
differs, too, and so does whether what is gathered is in memory as well (KEPT, or GATHERED). Hence several ranks that
read look at every use, also while all is shown.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ds_fuyou.host.device import Device
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.parameters.announced import Announced
from ds_fuyou.parameters.kept import NEVER
from ds_fuyou.parameters.partition import Partition, Presence
from ds_fuyou.parameters.size_class import SMALL_BYTES, SizeClass
from ds_fuyou.parameters.trace import AccessTrace, Ahead
from ds_fuyou.storage.io import IoLane
from ds_fuyou.storage.location import ValuesRead
from ds_fuyou.telemetry.trace import Lane, LaneTrace

__all__ = ["OFFER_BYTES", "Borrower", "ParameterStore"]

OFFER_BYTES = 8 * 1024 * 1024
"""How far ahead of their use, in bytes of the order, several ranks wait for parameters; or twice the largest, so that
one crosses the link while another is gathered; or a quarter of the look-ahead (what is gathered ahead on the host keeps
its memory), at least the largest, if that is less and the pool has room for it, the last one that is offered, and one
in use. One is always offered.
"""
_MOST_OFFERED = 32
_SMALL_REACH = 8
"""How many times as far ahead as large ones small ones may be read. Storage serves in the order of requests, so a small
one that is asked for as late as a large one that is used behind it would be waited for as long.
"""
_PLACES_A_CALL = 64  # that a walk ahead passes at once; or twice as many as a module with more parameters used
_NOT_SHOWN = (Presence.AWAY, Presence.READING, Presence.KEPT)
_SHOWN = (Presence.HERE, Presence.GATHERED)
_PENDING_COPIES = 3  # victims whose copies have not ended that are passed over: DeepSpeed has as many gathers in flight


class Borrower(Protocol):
    """Whose tensors the values are put into."""

    def here(self, partition: Partition, values: torch.Tensor) -> None:
        """The values are in memory, which is the borrower's until :meth:`away`."""

    def away(self, partition: Partition) -> None:
        """They are not: a gather has to ask for them."""

    def is_idle(self, partition: Partition) -> bool:
        """Whether no gather of it is in flight or in use."""


class ParameterStore:
    """Used by the training thread alone. Read memory is two pools of together ``read_bytes``, or a little more where
    two of the largest partition need it (:meth:`_divided`); memory beyond them is taken only as the last way
    (:meth:`_memory_for`), and where the host computes for what is gathered together (:meth:`in_order`).
    """

    def __init__(
        self,
        borrower: Borrower,
        device: Device,
        io: IoLane,
        *,
        read_bytes: int,
        keep_below: int = 0,
        is_alone: bool = True,
        lanes: LaneTrace | None = None,
    ) -> None:
        """``keep_below``: partitions of fewer bytes stay shown once they are read, until a step changes them."""
        self.trace = AccessTrace()
        self.num_demand_reads = self.num_ahead_reads = self.num_overflows = 0
        self.waited_secs = 0.0
        self._borrower, self._device, self._io, self._lanes = borrower, device, io, lanes
        self._read_bytes, self._keep_below, self._is_alone = read_bytes, keep_below, is_alone
        self.partitions: list[Partition] = []
        self._size_classes: list[SizeClass] = []
        self._size_class_of: dict[Partition, SizeClass] = {}
        self._offers = Ahead(self.trace, self._may_offer)
        self._offered: dict[Partition, int] = {}  # and not used yet, for this place
        self._offered_bytes = 0
        self._offer_bytes = OFFER_BYTES
        self._started: set[Partition] = set()  # whose reads may not have ended
        self._num_used, self._num_places = 0, _PLACES_A_CALL  # since walks went on last; how far they may go
        self._dropped: list[ValuesRead] = []  # reads whose values nobody wants, until they have ended
        self._announced: Announced | None = None
        self._num_hidden = 0  # of those that are in memory for good: at most so many are not shown
        self._turn = -1
        self._is_settled = False  # all that is expected is shown, so there is nothing to read, to keep or to offer
        self._look_at = 0  # the place from which on it is worth looking again whether that is so

    def take(self, partitions: Iterable[Partition], read_bytes: int | None = None) -> None:
        """Serves these from here on. Once, because the pools are sized by them; or again after :meth:`let_go`, with
        ``read_bytes``."""
        if read_bytes is not None:
            self._read_bytes = read_bytes
        self.partitions = list(partitions)
        stored = [partition for partition in self.partitions if partition.num_bytes]
        small = [partition for partition in stored if partition.num_bytes < SMALL_BYTES]
        large = [partition for partition in stored if partition.num_bytes >= SMALL_BYTES]
        for members, num_bytes in zip((large, small), self._divided(large, small), strict=True):
            if not members:
                continue
            size_class = SizeClass(members, num_bytes, self.trace, self._device)
            self._size_classes.append(size_class)
            self._size_class_of.update(dict.fromkeys(members, size_class))
            self._io.register_memory(size_class.memory.pool)
        if self._is_alone:
            self._offer_bytes = sum(size_class.ahead_bytes for size_class in self._size_classes)
        else:
            largest = max((partition.size_bytes for partition in self.partitions), default=0)
            self._offer_bytes = max(OFFER_BYTES, 2 * largest)
            if self._size_classes and not self._size_classes[0].holds_all:  # the one of large ones, if there are any
                most = min(max(self._read_bytes // 4, largest), self._size_classes[0].beside_two_bytes)
                self._offer_bytes = min(self._offer_bytes, most)
        for partition in self.partitions:
            partition.store = self
        self._count_hidden()

    def _divided(self, large: Sequence[Partition], small: Sequence[Partition]) -> tuple[int, int]:
        """Bytes of the two pools: by what there is of each, but more for small ones, up to a quarter or what they all
        take. Large ones keep room for two of the largest and what is offered; what lacks for that is taken besides.
        """
        read_bytes = self._read_bytes
        of_large, of_small = (sum(partition.num_bytes for partition in members) for members in (large, small))
        share = read_bytes * of_small // max(1, of_large + of_small)
        small_bytes = max(share, min(_SMALL_REACH * share, read_bytes // 4, of_small))
        largest = max((partition.num_bytes for partition in large), default=0)
        least = min(read_bytes - share, 2 * largest + max(read_bytes // 4, largest))
        return max(least, read_bytes - small_bytes), small_bytes

    def _count_hidden(self) -> None:
        self._num_hidden = sum(not p.num_bytes and p.presence is not Presence.HERE for p in self.partitions)

    def _may_offer(self, partition: Partition, is_next_step: bool) -> bool:
        return not (is_next_step and (partition.source.changes or not self._is_alone))

    # ---- for people -----------------------------------------------------------------------------------------

    @property
    def reads(self) -> bool:
        """Whether any of the parameters come from storage when they are used."""
        return bool(self._size_classes)

    @property
    def holds_all(self) -> bool:
        """Whether the pools have room for all of them, in whatever pieces."""
        return all(size_class.holds_all for size_class in self._size_classes)

    @property
    def read_bytes(self) -> int:
        """As planned: the same on all ranks."""
        return self._read_bytes

    @property
    def capacity_bytes(self) -> int:
        return sum(size_class.memory.pool.capacity_bytes for size_class in self._size_classes)

    @property
    def used_bytes(self) -> int:
        return sum(size_class.memory.pool.used_bytes for size_class in self._size_classes)

    @property
    def peak_bytes(self) -> int:
        """The most that each pool held, added up."""
        return sum(size_class.memory.pool.peak_bytes for size_class in self._size_classes)

    # ---- one partition --------------------------------------------------------------------------------------

    def use(self, *partitions: Partition) -> None:
        """Somebody is about to need these: moves the order on, and makes them available if nobody gathered them yet.
        What must be read for that is read together.
        """
        if self._is_settled and all(partition.presence in _SHOWN for partition in partitions):
            for partition in partitions:
                self.trace.use(partition)
            return
        self._is_settled = False
        self._num_used += len(partitions)
        needed = []
        for partition in partitions:
            self.trace.use(partition)
            if self._offered or self._size_classes:
                self._is_used(partition)
                if partition.num_bytes:
                    self._size_class_of[partition].passed(partition.num_bytes)
            if partition.presence is Presence.KEPT:
                size_class = self._size_class_of[partition]
                if self._borrower.is_idle(partition):
                    self.fetch(partition)
                else:
                    size_class.kept.add(partition)
            elif partition.presence in (Presence.AWAY, Presence.READING) and self._borrower.is_idle(partition):
                needed.append(partition)
        if len(needed) > 1 and self._announced is None:
            for partition in needed:
                if partition.presence is Presence.AWAY and partition.num_bytes and partition.source.is_ready():
                    self._start_now(partition)
        for partition in needed:
            self.fetch(partition)

    def fetch(self, partition: Partition) -> torch.Tensor:
        """The published values, HERE; waits for their update and their read."""
        self._is_used(partition)
        if self._announced is not None:
            self._announced.used(partition)
            self._read_announced(self._announced)
        if partition.presence is Presence.KEPT and partition.values is not None:
            self._size_class_of[partition].kept.discard(partition)
            self._show(partition, partition.values)
        elif partition.presence is Presence.AWAY:
            partition.source.wait()
            memory = partition.source.memory()
            if memory is not None:
                self._show(partition, memory)
            else:
                self._start_now(partition)
        if partition.presence is Presence.READING:
            self._show(partition, self._arrive(partition))
        if partition.values is None:  # GATHERED: the device has them, and the host's memory is gone
            return partition.copy()
        return partition.values

    def release(self, partition: Partition) -> bool:
        """Nobody uses the values any more; whether the borrower loses them."""
        if partition.presence is Presence.HERE:
            if not partition.num_bytes or partition.num_bytes < self._keep_below:
                return False
            self._is_used(partition)
            self._keep(partition)
        elif partition.presence is Presence.GATHERED:
            self._leave(partition)
        elif partition.presence in (Presence.KEPT, Presence.READING):
            self._is_used(partition)
            self._walk_again(partition)
        return True

    def copied(self, partition: Partition, event: Any = None) -> bool:
        """The device copies from the values until ``event``, or has them already, and nobody else needs them; whether
        the borrower loses them.
        """
        stays = not partition.num_bytes or partition.num_bytes < self._keep_below
        if stays or partition.presence is not Presence.HERE or partition.values is None:
            return False
        partition.copy_event = event
        if not self._may_stay(partition):
            self._free(partition)
            partition.presence = Presence.GATHERED
        else:
            partition.presence, self._is_settled = Presence.KEPT, False
            self._size_class_of[partition].kept.add(partition)
        return True

    def lend(self, partition: Partition) -> None:
        """A script gathers the values and may write to them, which does not count unless it says so: where the gathered
        tensor is the read memory, it is not used again."""
        if self._device.is_host and self._is_alone and partition.num_bytes:
            partition.is_lent = True

    def forget(self, partition: Partition) -> None:
        """Its source was rewritten, or is about to be: what was read of it is old."""
        if partition.num_bytes and partition.presence is not Presence.AWAY:
            is_idle = self._borrower.is_idle(partition)
            self._leave(partition)
            if is_idle:
                self._borrower.away(partition)
            else:
                partition.presence = Presence.GATHERED

    def before_write(self) -> None:
        """Values on storage are about to be written in place, by whole pages, which neighbours share: reads that are in
        flight end first, or they would bring old bytes where the checksums are new ones."""
        started, self._started = self._started, set()
        self._end_reads(partition.read for partition in started if partition.read is not None)

    def _is_used(self, partition: Partition) -> None:
        size_class = self._size_class_of.get(partition)
        if size_class is not None:
            size_class.used(partition)
        self._not_offered(partition)

    def _not_offered(self, partition: Partition) -> None:
        if self._offered.pop(partition, None) is not None:
            self._offered_bytes -= partition.size_bytes

    def _may_stay(self, partition: Partition) -> bool:
        size_class = self._size_class_of.get(partition)
        takes_memory = self._announced is not None and self._announced.own
        if size_class is None or not partition.is_pooled or partition.is_lent or takes_memory:
            return False
        return size_class.kept.place(partition) != NEVER

    def _keep(self, partition: Partition) -> None:
        """HERE → KEPT or AWAY. The caller tells the borrower."""
        if not self._may_stay(partition):
            self._leave(partition)
            return
        partition.presence, self._is_settled = Presence.KEPT, False
        self._size_class_of[partition].kept.add(partition)
        self._walk_again(partition)

    def _leave(self, partition: Partition) -> None:
        self._lose(partition)
        self._walk_again(partition)

    def _lose(self, partition: Partition) -> None:
        if partition.read is not None:
            self._dropped.append(partition.read)
        self._is_used(partition)
        self._free(partition)
        partition.presence, partition.read, self._is_settled = Presence.AWAY, None, False

    def _free(self, partition: Partition) -> None:
        """Lets the memory of the values go, when the device has ended its copy."""
        size_class = self._size_class_of.get(partition)
        if size_class is not None:
            size_class.kept.discard(partition)
            if partition.copy_event is not None and partition.values is not None:
                size_class.memory.keep_until(partition.copy_event, partition.values)
        partition.values = partition.copy_event = None

    def _walk_again(self, partition: Partition) -> None:
        size_class = self._size_class_of.get(partition)
        is_away = partition.presence is Presence.AWAY
        if size_class is not None and is_away:
            size_class.ahead.gone(partition)
        if size_class is None or not is_away or not self._is_alone:
            self._offers.gone(partition)  # one rank offers it when it has come

    def _show(self, partition: Partition, values: torch.Tensor) -> None:
        if not partition.num_bytes:
            self._num_hidden -= 1
        partition.show(values)
        self._borrower.here(partition, values)

    def _arrive(self, partition: Partition) -> torch.Tensor:
        """The values of one that is READING; waits."""
        read = partition.read
        if read is None:
            raise RuntimeError("a partition that is READING has a read")
        self.waited_secs += read.wait()
        if self._lanes is not None:
            ended_ns = time.perf_counter_ns()
            self._lanes.add(Lane.STORAGE_READ, read.what, partition.started_ns, ended_ns, read.num_bytes)
        return read.values

    def _start(self, partition: Partition, memory: torch.Tensor, priority: int, *, is_pooled: bool) -> None:
        partition.read = partition.source.start_reading(memory, priority)
        partition.presence, partition.is_pooled, partition.is_lent = Presence.READING, is_pooled, False
        self._started.add(partition)
        partition.started_ns = time.perf_counter_ns() if self._lanes is not None else 0

    def _start_now(self, partition: Partition) -> None:
        memory, is_pooled = self._memory_for(partition)
        self._start(partition, memory, priority=-1, is_pooled=is_pooled)
        self.num_demand_reads += 1

    # ---- memory ---------------------------------------------------------------------------------------------

    def _memory_for(self, partition: Partition) -> tuple[torch.Tensor, bool]:
        """Memory for a read that somebody waits for, and whether it is the pool's.

        A full pool gives up what is used last, then (a device with memory of its own) waits for copies, which end by
        themselves, then gives up what was read ahead, the last of it first. What is left then is in use, and the read
        takes memory of its own.
        """
        size_class = self._size_class_of[partition]
        own = self._announced is not None and self._announced.own
        while not own:
            memory = size_class.memory.try_allocate(partition.num_bytes)
            if memory is not None:
                return memory, True
            if not (
                self._evict(size_class, after=-1, waits=True)
                or (not self._device.is_host and size_class.memory.wait_for_copy())
                or self._give_up_last(size_class)
            ):
                self.num_overflows += 1
                break
        return aligned_tensor(partition.num_bytes), False

    def _memory_ahead(self, size_class: SizeClass, partition: Partition, place: int) -> torch.Tensor | None:
        """Memory for a read ahead: what is free, or what is used later. As far as a quarter of the pool reaches; beyond
        it only what the pool would give up for this read, too, if it came when it is needed.
        """
        wanted = partition.num_bytes
        memory = size_class.memory.try_allocate(wanted)
        if memory is not None:
            return memory
        freed, room = 0, size_class.ahead_bytes - size_class.unused_bytes(self.trace.cursor)
        after = place
        if room < wanted:
            if not size_class.may_go_on:
                return None
            after = size_class.comes_back(place)
        while memory is None and freed < 2 * wanted:
            evicted = self._evict(size_class, after=after, waits=False)
            if not evicted:
                return None
            freed += evicted
            memory = size_class.memory.try_allocate(wanted)
        return memory

    def _evict(self, size_class: SizeClass, *, after: int, waits: bool) -> int:
        """Gives up the kept values that are used last, if that is after the place ``after``; how many bytes. Values
        that the device still copies from are passed over, unless there are no others and the caller ``waits``.
        """
        pending: list[Partition] = []
        found = None
        while len(pending) <= _PENDING_COPIES and (found := size_class.kept.pop_last(after)) is not None:
            if found.copy_event is None or found.copy_event.query():
                found.copy_event = None
                break
            pending.append(found)
            found = None
        if found is None and waits and pending:
            found = pending.pop(0)
        for partition in pending:
            size_class.kept.add(partition)
        if found is None:
            return 0
        if found.copy_event is not None:
            found.copy_event.synchronize()
            found.copy_event = None
        size_class.used(found)
        self._free(found)
        found.presence = Presence.AWAY if self._borrower.is_idle(found) else Presence.GATHERED
        size_class.ahead.gone(found)
        return found.num_bytes

    def _give_up_last(self, size_class: SizeClass) -> bool:
        """Takes back the memory of what is used last of all that was read ahead; False if there is none. What several
        ranks have offered stays: it is the same on all of them.
        """
        announced = self._announced.reading if self._announced is not None else ()
        for partition in reversed(size_class.in_flight):
            if partition.presence is Presence.READING and partition.read is not None and partition not in announced:
                partition.read.wait()
                partition.read = None
                self._lose(partition)
                size_class.ahead.gone(partition)  # whether memory lacks differs between ranks: offers go on as they are
                return True
        for partition in sorted(self._offered, key=self._last_first) if self._is_alone else ():
            if self._size_class_of.get(partition) is size_class and self._borrower.is_idle(partition):
                self._leave(partition)
                self._borrower.away(partition)
                return True
        return False

    # ---- ahead of use ---------------------------------------------------------------------------------------

    def move_on(self) -> None:
        """After :meth:`use`: reads what comes next, offers what has come."""
        if self._is_settled and self._turn == self.trace.turn and self._announced is None:
            return
        self._is_settled = False
        if self._dropped:
            self._dropped = [read for read in self._dropped if not read.done()]
        if self._announced is not None:
            self.look_ahead()
            return
        if not self._size_classes and not self._num_hidden:
            return
        self._num_places, self._num_used = max(_PLACES_A_CALL, 2 * self._num_used), 0
        for size_class in self._size_classes:
            self._collect(size_class)
        if self._is_alone:
            self.look_ahead()
            self._offer()
        else:
            self._follow()
            self._offer()
            self.look_ahead()
        if self.trace.now >= self._look_at:
            self._look_at = self.trace.now + len(self.partitions)
            self._is_settled = (
                (self._is_alone or not self._size_classes)
                and not self._offered
                and all(
                    partition.presence in _SHOWN or self.trace.next_place(partition) is None
                    for partition in self.partitions
                )
            )

    def _collect(self, size_class: SizeClass) -> None:
        """READING → KEPT, of reads that have ended, in their order."""
        in_flight = size_class.in_flight
        while in_flight:
            partition = in_flight[0]
            if partition.presence is Presence.READING and partition.read is not None and partition.is_pooled:
                if not partition.read.done():
                    break
                partition.values = self._arrive(partition)
                partition.presence, partition.read = Presence.KEPT, None
                size_class.kept.add(partition)
                if self._is_alone:
                    self._offers.gone(partition)
            in_flight.popleft()

    def _follow(self) -> None:
        """After a turn the walks begin anew; what was offered counts for its next use, or is taken back."""
        if self._turn == self.trace.turn:
            return
        self._turn, step = self.trace.turn, self.trace.next_step()
        for size_class in self._size_classes:
            size_class.turned()
        for partition in list(self._offered):
            place = self.trace.next_place(partition)
            if place is None or not self._may_offer(partition, step is not None and place > step):
                self._take_back(partition)
            else:
                self._offered[partition] = place

    def _take_back(self, partition: Partition) -> None:
        """It stays in the pool, expected or not: whatever turns once may turn again."""
        self._not_offered(partition)
        if partition.num_bytes and partition.presence is Presence.HERE and self._borrower.is_idle(partition):
            if partition.is_pooled and not partition.is_lent:
                partition.presence = Presence.KEPT
                self._size_class_of[partition].kept.add(partition)
                self._walk_again(partition)
            else:
                self._leave(partition)
            self._borrower.away(partition)

    def _last_first(self, partition: Partition) -> int:
        """What was offered for a use that was left out, then what is used last."""
        place = self._offered[partition]
        return -NEVER if place < self.trace.cursor else -place

    def look_ahead(self) -> None:
        """Starts reads in the announced or the expected order, until there is no memory or an update that is not
        published is met."""
        if self._announced is not None:
            self._read_announced(self._announced)
            return
        self._follow()
        for size_class in self._size_classes:
            ahead = size_class.ahead
            ahead.allow(max(_PLACES_A_CALL, min(self._num_places, size_class.num_ahead)))
            while (partition := ahead.peek()) is not None:
                if partition.presence is Presence.AWAY and self._borrower.is_idle(partition):
                    if not partition.source.is_ready():
                        break
                    place = ahead.place()
                    memory = self._memory_ahead(size_class, partition, place)
                    if memory is None:
                        break
                    self._start(partition, memory, priority=0, is_pooled=True)
                    size_class.in_flight.append(partition)
                    size_class.read_ahead(partition, place)
                    self.num_ahead_reads += 1
                ahead.pop()

    def _offer(self) -> None:
        """In the order of use: one rank what has come, several by position, see [Note: what may differ between ranks].
        What is used later than the next one gives way to it.
        """
        offers = self._offers
        offers.allow(self._num_places)
        while (partition := offers.peek()) is not None:
            place = offers.place()
            if not partition.num_bytes and self._is_alone:
                if not self._publish(partition):
                    break
            elif self._is_alone and partition.presence is Presence.AWAY and self._borrower.is_idle(partition):
                break  # what comes behind it may have to go for it
            elif (
                partition.presence is Presence.KEPT or (not self._is_alone and partition.presence in _NOT_SHOWN)
            ) and self._borrower.is_idle(partition):
                if not self._has_room(partition, place):
                    break
                if partition.presence is Presence.KEPT and partition.values is not None:
                    size_class = self._size_class_of[partition]
                    size_class.kept.discard(partition)
                    if not self._is_alone:
                        size_class.used(partition)  # reads ahead have room behind the window
                    self._show(partition, partition.values)
                else:
                    self.fetch(partition)
                self._offered[partition] = place
                self._offered_bytes += partition.size_bytes
            offers.pop()

    def _has_room(self, partition: Partition, place: int) -> bool:
        """Several ranks offer one more as long as the limit is not reached; one keeps below it."""
        wanted = partition.size_bytes if self._is_alone else 1
        while self._offered and (
            self._offered_bytes + wanted > self._offer_bytes or len(self._offered) >= _MOST_OFFERED
        ):
            places = self._offered.values()
            if max(places) <= place and min(places) >= self.trace.cursor:
                return False
            self._take_back(min(self._offered, key=self._last_first))
        return True

    def _publish(self, partition: Partition) -> bool:
        """Shows values that are in memory; False if they are not published yet."""
        if partition.presence is Presence.AWAY:
            if not partition.source.is_ready():
                return False
            memory = partition.source.memory()
            if memory is not None:
                self._show(partition, memory)
        return True

    # ---- announced uses ---------------------------------------------------------------------------------------

    @contextmanager
    def in_order(self, partitions: Sequence[Partition], *, is_saved: bool = False) -> Iterator[None]:
        """Inside, these are fetched in this order, once, and read ahead of that.

        ``is_saved``: whoever fetches them keeps them. Where the host computes on one rank the gathered tensors are the
        read memory: it is taken from the system then, not from the pool, and nothing of it stays here. Without, what
        the pool does not hold is taken from the system there, too: all of it is gathered together. Inside of another
        announcement this one changes nothing.
        """
        if self._announced is not None or not self._size_classes:
            yield
            return
        shares = self._device.is_host and self._is_alone
        for partition in partitions:
            if partition.presence is Presence.HERE:
                self._is_used(partition)  # whoever asks for those that are away takes it for granted
        if shares and is_saved:
            for partition in partitions:
                if partition.presence in (Presence.KEPT, Presence.READING):
                    self._leave(partition)
                elif partition.num_bytes and partition.presence is Presence.HERE and self._borrower.is_idle(partition):
                    self._leave(partition)
                    self._borrower.away(partition)
        largest = max((partition.num_bytes for partition in partitions), default=0)
        limit_bytes = max(2 * largest, self.capacity_bytes // 2)
        announced = self._announced = Announced(partitions, limit_bytes, own=shares and is_saved)
        try:
            self.look_ahead()
            yield
        finally:
            self._announced = None
            for partition in announced.reading:
                if partition.presence is Presence.READING and not partition.is_pooled:
                    self._leave(partition)

    def _read_announced(self, announced: Announced) -> None:
        order = announced.order
        while order and announced.num_bytes < announced.limit_bytes:
            partition = order[0]
            if partition.presence is Presence.AWAY and self._borrower.is_idle(partition):
                if not partition.source.is_ready():
                    return
                memory, is_pooled = self._memory_announced(partition, own=announced.own)
                if memory is None:
                    return
                self._start(partition, memory, priority=0, is_pooled=is_pooled)
                self._size_class_of[partition].in_flight.append(partition)
                announced.started(partition)
                self.num_ahead_reads += 1
            order.popleft()

    def _memory_announced(self, partition: Partition, *, own: bool) -> tuple[torch.Tensor | None, bool]:
        size_class = self._size_class_of[partition]
        memory = None if own else size_class.memory.try_allocate(partition.num_bytes)
        if memory is not None:
            return memory, True
        while not own and memory is None and self._evict(size_class, after=-1, waits=False):
            memory = size_class.memory.try_allocate(partition.num_bytes)
        if memory is None and self._device.is_host and self._is_alone:
            self.num_overflows += not own
            return aligned_tensor(partition.num_bytes), False
        return memory, True

    # ---- the step, and the end --------------------------------------------------------------------------------

    def step_applied(self) -> None:
        """A step changed what steps change: its next use waits for its update. What is published is read ahead."""
        self._is_settled = False
        for partition in self.partitions:
            if partition.presence is not Presence.AWAY and partition.source.changes:
                self._lose(partition)
                self._borrower.away(partition)
        self._count_hidden()
        self.trace.end_step()
        self.look_ahead()

    def let_go(self, *, forgets: bool = False) -> None:
        """Of all that was read; between two steps, until :meth:`take`, for sources that become others. Waits for what
        is in flight, reads and copies. Values that somebody has stay where they are, and do not come back. ``forgets``:
        the order, too, as others are served then.
        """
        for partition in self.partitions:
            self.forget(partition)
        self._end_reads(self._dropped)
        self._dropped.clear()  # pages of a pool go back when nothing of it is in use
        for size_class in self._size_classes:
            while size_class.memory.wait_for_copy():
                pass
            self._io.forget_memory(size_class.memory.pool)
            size_class.memory.close()
        if forgets:
            self.trace = AccessTrace()
        self._forget_order()

    def _end_reads(self, reads: Iterable[ValuesRead]) -> None:
        for read in reads:
            for transfer in read.transfers:
                transfer.wait_ended()

    def _forget_order(self) -> None:
        self._offers = Ahead(self.trace, self._may_offer)
        for held in (self._dropped, self._started, self._offered, self._size_class_of, self._size_classes):
            held.clear()
        self._offered_bytes = 0
        self._is_settled, self._turn, self._look_at = False, -1, 0

    def unpin(self) -> None:
        """Takes the pools' registrations back, until :meth:`pin`. No copy may be in flight."""
        for size_class in self._size_classes:
            size_class.memory.unpin()

    def pin(self) -> None:
        for size_class in self._size_classes:
            size_class.memory.pin()

    def close(self) -> None:
        """Waits for what is in flight and lets the memory go. The device has ended its copies."""
        reads = [*self._dropped, *(p.read for p in self.partitions if p.read is not None)]
        for partition in self.partitions:
            if partition.store is self:
                if partition.presence is not Presence.AWAY:
                    self._borrower.away(partition)
                partition.move(partition.source)
                partition.store = None
        self._end_reads(reads)
        for size_class in self._size_classes:
            size_class.kept.clear()
            size_class.memory.close()
        # A destroyed engine may be referenced for long, and with it this object: no values go with it.
        self.trace = AccessTrace()
        self.partitions.clear()
        self._forget_order()
