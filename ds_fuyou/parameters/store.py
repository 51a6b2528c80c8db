# SPDX-License-Identifier: Apache-2.0
"""The parameters of one engine: what is read ahead, what is handed out, and whose memory it is. Knows no DeepSpeed.

[Note: the way of a parameter]
Each :class:`Partition` has a source (the optimizer's chunks, or pages that ``zero.Init`` wrote) and a state
(:class:`Presence`). ``use`` says that a module needs it now: it is made available, by waiting for its update and its
read if it must be, and the recorded order moves on. ``move_on`` then starts reads of what comes next, as far as the
pools reach, and offers what has come to the borrower, who may gather it ahead of its use. ``copied`` says that the
device copies from it, ``release`` that nobody uses it any more, ``step_applied`` that steps changed the values.

[Note: what may differ between ranks]
Which reads have ended differs; a gather must be the same collective everywhere, and an offered parameter is gathered
ahead. One rank alone offers what has come. Several offer by position: everything that is used within the next
:data:`OFFER_BYTES` of the order, which is the same on all ranks, and wait for it. Where storage is slower than the
device they would wait for it one module later; waiting earlier delays the last module, not the pace.

Two pools: small partitions often stay gathered, and would cut the memory of large ones to pieces.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from ds_fuyou.host.device import Device
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.parameters.memory import ReadMemory
from ds_fuyou.parameters.partition import Partition, Presence
from ds_fuyou.parameters.trace import AccessTrace, Ahead
from ds_fuyou.storage.io import IoLane
from ds_fuyou.storage.location import ValuesRead

__all__ = ["OFFER_BYTES", "SMALL_BYTES", "Borrower", "ParameterStore"]

SMALL_BYTES = 256 * 1024
"""Partitions of fewer bytes have a pool of their own."""
OFFER_BYTES = 8 * 1024 * 1024
"""How far ahead of their use, in bytes of the order, several ranks wait for parameters; one is always offered."""
_OFFERS_AT_ONCE = 64


class Borrower(Protocol):
    """Whose tensors the values are put into."""

    def here(self, partition: Partition, values: torch.Tensor) -> None:
        """The values are in memory, which is the borrower's until :meth:`away`."""

    def away(self, partition: Partition) -> None:
        """They are not: a gather has to ask for them."""

    def is_idle(self, partition: Partition) -> bool:
        """Whether no gather of it is in flight or in use."""


class _SizeClass:
    """Large partitions on storage, or small ones: their pool, and their reads, in the order of their use."""

    def __init__(self, members: Sequence[Partition], wanted_bytes: int, trace: AccessTrace, device: Device) -> None:
        self.memory = ReadMemory([partition.num_bytes for partition in members], wanted_bytes, device)
        self.members = set(members)
        self.ahead = Ahead(trace, self._wants)
        self.reading: deque[Partition] = deque()

    def _wants(self, partition: Partition, is_next_step: bool) -> bool:
        return partition in self.members and not (is_next_step and partition.source.changes)


class ParameterStore:
    """Used by the training thread alone. Read memory is two pools of together ``read_bytes``, or a little more where
    two of the largest partition need it; memory beyond them is taken only as the last way (:meth:`_memory_for`).
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
    ) -> None:
        """``keep_below``: partitions of fewer bytes stay once they are read, until a step changes them."""
        self.trace = AccessTrace()
        self.num_demand_reads = self.num_ahead_reads = self.num_overflows = 0
        self.waited_secs = 0.0
        self._borrower, self._device, self._io = borrower, device, io
        self._read_bytes, self._keep_below, self._is_alone = read_bytes, keep_below, is_alone
        self.partitions: list[Partition] = []
        self._size_classes: list[_SizeClass] = []
        self._size_class_of: dict[Partition, _SizeClass] = {}
        self._offers = Ahead(self.trace, self._may_offer)
        self._offered: dict[Partition, None] = {}  # and not used yet
        self._dropped: list[ValuesRead] = []  # reads whose values nobody wants, until they have ended
        self._sums: list[int] = [0]  # of bytes, over the order that they were made for
        self._sums_of: list[Any] | None = None
        self._turn = -1

    def take(self, partitions: Iterable[Partition]) -> None:
        """Serves these from here on. Once, because the pools are sized by them."""
        self.partitions = list(partitions)
        stored = [partition for partition in self.partitions if partition.num_bytes]
        small = [partition for partition in stored if partition.num_bytes < SMALL_BYTES]
        large = [partition for partition in stored if partition.num_bytes >= SMALL_BYTES]
        total = sum(partition.num_bytes for partition in stored)
        for members in filter(None, (large, small)):
            num_bytes = self._read_bytes * sum(partition.num_bytes for partition in members) // total
            size_class = _SizeClass(members, num_bytes, self.trace, self._device)
            self._size_classes.append(size_class)
            self._size_class_of.update(dict.fromkeys(members, size_class))
            self._io.register_memory(size_class.memory.pool)
        for partition in self.partitions:
            partition.store = self

    def _may_offer(self, partition: Partition, is_next_step: bool) -> bool:
        return not is_next_step and (not self._is_alone or partition not in self._size_class_of)

    # ---- for people -----------------------------------------------------------------------------------------

    @property
    def reads(self) -> bool:
        """Whether any of the parameters come from storage when they are used."""
        return bool(self._size_classes)

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

    def use(self, partition: Partition) -> None:
        """A module is about to need it: moves the order on, and makes it available if nobody gathered it yet."""
        self.trace.use(partition)
        self._offered.pop(partition, None)
        if partition.presence in (Presence.AWAY, Presence.READING) and self._borrower.is_idle(partition):
            self.fetch(partition)

    def fetch(self, partition: Partition) -> torch.Tensor:
        """The published values, HERE; waits for their update and their read."""
        if partition.presence is Presence.READING:
            self._arrive(partition)
        elif partition.presence is Presence.AWAY:
            partition.source.wait()
            memory = partition.source.memory()
            if memory is None:
                memory = self._read_now(partition)
            self._show(partition, memory)
        if partition.values is None:  # GATHERED: the device has them, and the host's memory is gone
            return partition.copy()
        return partition.values

    def release(self, partition: Partition) -> bool:
        """Nobody uses the values any more; whether they leave memory."""
        if partition.presence is Presence.HERE:
            if not partition.num_bytes or partition.num_bytes < self._keep_below:
                return False
            self._leave(partition)
        elif partition.presence is Presence.GATHERED:
            self._leave(partition)
        return True

    def copied(self, partition: Partition, event: Any) -> bool:
        """The device copies from the values until ``event``, and nobody else needs them; whether they leave memory."""
        stays = not partition.num_bytes or partition.num_bytes < self._keep_below
        if stays or partition.presence is not Presence.HERE or partition.values is None:
            return False
        self._size_class_of[partition].memory.keep_until(event, partition.values)
        partition.presence, partition.values = Presence.GATHERED, None
        return True

    def forget(self, partition: Partition) -> None:
        """Its source was rewritten: what was read of it is old. It must not be gathered."""
        self._offered.pop(partition, None)
        if partition.num_bytes and partition.presence is not Presence.AWAY:
            self._leave(partition)
            self._borrower.away(partition)

    def before_write(self) -> None:
        """Values on storage are about to be written in place, by whole pages, which neighbours share: reads that are in
        flight end first, or they would bring old bytes where the checksums are new ones."""
        for size_class in self._size_classes:
            for partition in size_class.reading:
                for transfer in partition.read.transfers if partition.read is not None else ():
                    transfer.wait_ended()

    def _leave(self, partition: Partition) -> None:
        if partition.read is not None:
            self._dropped.append(partition.read)
        partition.presence, partition.read, partition.values = Presence.AWAY, None, None
        self._offered.pop(partition, None)
        size_class = self._size_class_of.get(partition)
        if size_class is not None:
            size_class.ahead.gone(partition)
        self._offers.gone(partition)

    def _show(self, partition: Partition, values: torch.Tensor) -> None:
        partition.show(values)
        self._borrower.here(partition, values)

    def _arrive(self, partition: Partition) -> None:
        """READING → HERE; waits."""
        read = partition.read
        if read is None:
            raise RuntimeError("a partition that is READING has a read")
        self.waited_secs += read.wait()
        self._show(partition, read.values)

    def _start(self, partition: Partition, memory: torch.Tensor, priority: int) -> ValuesRead:
        partition.read = partition.source.location().start_reading(partition.source.io, memory, priority)
        partition.presence = Presence.READING
        return partition.read

    def _read_now(self, partition: Partition) -> torch.Tensor:
        read = self._start(partition, self._memory_for(partition), priority=-1)
        self.num_demand_reads += 1
        self.waited_secs += read.wait()
        return read.values

    def _memory_for(self, partition: Partition) -> torch.Tensor:
        """Memory for a read that somebody waits for.

        On a device with memory of its own a full pool is waited for: first the copies to the device, which end by
        themselves, then what was read ahead is given up, the last of it first. What is left then is in use, and the
        read takes memory of its own. So does the host at once: what is gathered there *is* the pool's memory.
        """
        size_class = self._size_class_of[partition]
        while True:
            memory = size_class.memory.try_allocate(partition.num_bytes)
            if memory is not None:
                return memory
            if self._device.is_host or not (size_class.memory.wait_for_copy() or self._give_up_last(size_class)):
                self.num_overflows += 1
                return aligned_tensor(partition.num_bytes)

    def _give_up_last(self, size_class: _SizeClass) -> bool:
        """Takes back the memory of what is used last of all that was read ahead; False if there is none. What several
        ranks have offered stays: it is the same on all of them.
        """
        while size_class.reading:
            partition = size_class.reading.pop()
            if partition.presence is Presence.READING and partition.read is not None:
                partition.read.wait()
                partition.read = None
                self._leave(partition)
                return True
        for partition in reversed(self._offered) if self._is_alone else ():
            if self._size_class_of.get(partition) is size_class and self._borrower.is_idle(partition):
                self._leave(partition)
                self._borrower.away(partition)
                return True
        return False

    # ---- ahead of use ---------------------------------------------------------------------------------------

    def move_on(self) -> None:
        """After the :meth:`use` of a module's parameters: reads what comes next, offers what has come."""
        if self._dropped:
            self._dropped = [read for read in self._dropped if not read.done()]
        if self._is_alone:
            self._offer_what_came()
        else:
            self._offer_by_position()
        self.look_ahead()

    def look_ahead(self) -> None:
        """Starts reads in the recorded order, until a pool is full or an update that is not published is met."""
        for size_class in self._size_classes:
            ahead = size_class.ahead
            while (partition := ahead.peek()) is not None:
                if partition.presence is Presence.AWAY:
                    if not partition.source.is_ready():
                        break
                    memory = size_class.memory.try_allocate(partition.num_bytes)
                    if memory is None:
                        break
                    self._start(partition, memory, priority=0)
                    size_class.reading.append(partition)
                    self.num_ahead_reads += 1
                ahead.pop()

    def _offer_what_came(self) -> None:
        """One rank: reads that have ended, and values in memory whose updates were published, in their order."""
        for size_class in self._size_classes:
            while size_class.reading:
                partition = size_class.reading[0]
                if partition.presence is Presence.READING and partition.read is not None:
                    if not partition.read.done():
                        break
                    self._arrive(partition)
                    self._offered[partition] = None
                size_class.reading.popleft()
        for _ in range(_OFFERS_AT_ONCE):
            upcoming = self._offers.peek()
            if upcoming is None or not self._publish(upcoming):
                break
            self._offers.pop()

    def _publish(self, partition: Partition) -> bool:
        """Shows values that are in memory; False if they are not published yet."""
        if partition.presence is Presence.AWAY:
            if not partition.source.is_ready():
                return False
            memory = partition.source.memory()
            if memory is not None:
                self._show(partition, memory)
        return True

    def _offer_by_position(self) -> None:
        """Several ranks: see [Note: what may differ between ranks]."""
        trace = self.trace
        if self._turn != trace.turn:
            self._turn = trace.turn
            for partition in list(self._offered):  # for an order that did not come
                if partition.num_bytes and self._borrower.is_idle(partition):
                    self._leave(partition)
                    self._borrower.away(partition)
            self._offered.clear()
            if self._sums_of is not trace.order:
                self._sums_of = trace.order
                self._sums = list(itertools.accumulate((p.size_bytes for p in trace.order), initial=0))
        while (upcoming := self._offers.peek()) is not None:
            if self._sums[self._offers.place()] - self._sums[trace.cursor] >= OFFER_BYTES:
                break
            if upcoming.presence in (Presence.AWAY, Presence.READING) and self._borrower.is_idle(upcoming):
                self.fetch(upcoming)
                self._offered[upcoming] = None
            self._offers.pop()
        for size_class in self._size_classes:
            while size_class.reading and size_class.reading[0].presence is not Presence.READING:
                size_class.reading.popleft()

    # ---- the step, and the end --------------------------------------------------------------------------------

    def step_applied(self) -> None:
        """A step changed what steps change: its next use waits for its update. What is published is read ahead."""
        self.trace.end_step()
        for partition in self.partitions:
            if partition.presence is not Presence.AWAY and partition.source.changes:
                if partition.read is not None:
                    self._dropped.append(partition.read)
                partition.presence, partition.read, partition.values = Presence.AWAY, None, None
                self._borrower.away(partition)
        self._offered = {p: None for p in self._offered if p.presence is Presence.HERE}
        self.look_ahead()

    def close(self) -> None:
        """Waits for what is in flight and lets the memory go. The device has ended its copies."""
        reads = [*self._dropped, *(p.read for p in self.partitions if p.read is not None)]
        for partition in self.partitions:
            if partition.store is self:
                if partition.presence is not Presence.AWAY:
                    self._borrower.away(partition)
                partition.move(partition.source)
                partition.store = None
        for read in reads:
            for transfer in read.transfers:
                transfer.wait_ended()
        for size_class in self._size_classes:
            size_class.memory.close()
        # A destroyed engine may be referenced for long, and with it this object: no values go with it.
        self.trace = AccessTrace()
        self._offers = Ahead(self.trace, self._may_offer)
        self._sums_of = None
        for held in (self.partitions, self._dropped, self._offered, self._size_class_of, self._size_classes):
            held.clear()
