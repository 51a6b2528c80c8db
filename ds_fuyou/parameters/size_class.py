# SPDX-License-Identifier: Apache-2.0
"""Partitions on storage of one class of sizes, and the host memory they are read to. Small ones often stay gathered,
and would cut the memory of large ones to pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ds_fuyou.host.device import Device
from ds_fuyou.host.memory import HostPool
from ds_fuyou.parameters.kept import Kept
from ds_fuyou.parameters.partition import Partition
from ds_fuyou.parameters.trace import AccessTrace, Ahead

__all__ = ["SMALL_BYTES", "SizeClass"]

SMALL_BYTES = 256 * 1024
"""Partitions of fewer bytes have a pool of their own."""


class ReadMemory:
    """One pool, registered with the device, and what copies of the device still read. Training thread only.

    [Note: copies in flight] Copies from registered memory return at once, so what they read is kept until the event
    after them has passed. A read that somebody waits for, and that finds the pool full and no kept values in it, waits
    for the oldest of these events. That cannot deadlock: the copies stand in a stream behind work that was issued
    before them, none of which waits for the host.
    """

    def __init__(self, sizes: Sequence[int], wanted_bytes: int, device: Device) -> None:
        """``sizes``: bytes of every parameter that may come here. The pool takes ``wanted_bytes``, but always two of
        the largest, and never more than twice all of them.
        """
        self._pool = HostPool(min(max(wanted_bytes, 2 * max(sizes)), 2 * sum(sizes)), device, inherited=device.is_host)
        self._copies: deque[tuple[Any, torch.Tensor]] = deque()

    @property
    def pool(self) -> HostPool:
        return self._pool

    def try_allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Bytes of the pool, or None when there is no room now; they return when the last alias is gone."""
        self.sweep()
        return self._pool.try_allocate(num_bytes)

    def keep_until(self, event: Any, memory: torch.Tensor) -> None:
        """The device reads ``memory`` until ``event``."""
        self._copies.append((event, memory))

    def sweep(self) -> None:
        """Lets go of what the device is done with."""
        while self._copies and self._copies[0][0].query():
            self._copies.popleft()

    def wait_for_copy(self) -> bool:
        """Waits for the oldest copy and lets its memory go; False if none is in flight."""
        if not self._copies:
            return False
        event, _ = self._copies.popleft()
        event.synchronize()
        return True

    def unpin(self) -> None:
        """Until :meth:`pin`. No copy may be in flight."""
        self._copies.clear()
        self._pool.unpin()

    def pin(self) -> None:
        self._pool.pin()

    def close(self) -> None:
        """Unpins the pool and returns its pages; no read and no copy may be in flight."""
        self._copies.clear()
        self._pool.give_back()


class SizeClass:
    """Large partitions on storage, or small ones: their pool, what it keeps, and their reads in the order of use."""

    def __init__(self, members: Sequence[Partition], wanted_bytes: int, trace: AccessTrace, device: Device) -> None:
        sizes = [partition.num_bytes for partition in members]
        self.memory = ReadMemory(sizes, wanted_bytes, device)
        capacity = self.memory.pool.capacity_bytes
        self.ahead_bytes = min(capacity, max(capacity // 4, max(sizes)))
        """What reads ahead may take from kept values, and what is offered at once."""
        self.beside_two_bytes = capacity - 2 * max(sizes)
        self.holds_all = 8 * capacity >= 9 * sum(sizes)
        """Whether there is room for all of them, in whatever pieces."""
        self.members = set(members)
        self._trace = trace
        self.kept = Kept(trace)
        self.ahead = Ahead(trace, self._wants)
        self.in_flight: deque[Partition] = deque()
        self._unused: dict[Partition, int] = {}  # read ahead, for this place
        self._unused_bytes = 0
        self._owed_bytes = 0  # of these, for an order that did not come
        self._passed_bytes = 0
        # Of what is expected: the place of a use, and of the next one of the same, which is later than that of all that
        # come after it here.
        self._again: deque[tuple[int, int]] = deque()
        self._turn, self._looked_to = -1, 0
        self.num_ahead = self.ahead_bytes * len(sizes) // sum(sizes)
        """How many of mean size reads ahead may take from kept values."""

    def _wants(self, partition: Partition, is_next_step: bool) -> bool:
        return partition in self.members and not (is_next_step and partition.source.changes)

    def read_ahead(self, partition: Partition, place: int) -> None:
        self._unused[partition] = place
        self._unused_bytes += partition.num_bytes

    def used(self, partition: Partition) -> None:
        if partition in self._unused:
            del self._unused[partition]
            self._unused_bytes -= partition.num_bytes

    def unused_bytes(self, cursor: int) -> int:
        """Of what was read ahead and is still to be used."""
        while self._unused:
            partition, place = next(iter(self._unused.items()))
            if place >= cursor:
                break
            self.used(partition)  # it was left out
        return self._unused_bytes

    def comes_back(self, place: int) -> int:
        """Until when all that is used from now on to ``place`` is used again behind it. What is kept and used later
        than that is what a full pool would give up at ``place`` itself.
        """
        trace, again = self._trace, self._again
        cursor = trace.cursor
        if self._turn != trace.turn:
            self._turn, self._looked_to = trace.turn, cursor
            again.clear()
        while again and again[0][0] < cursor:
            again.popleft()
        for at in range(max(self._looked_to, cursor), place):
            item = trace.at(at)
            if item in self.members:
                behind = self.kept.place_after(item, at)
                while again and again[-1][1] <= behind:
                    again.pop()
                again.append((at, behind))
        self._looked_to = max(self._looked_to, place)
        return max(place, again[0][1]) if again else place

    @property
    def may_go_on(self) -> bool:
        """Whether reads ahead may take more than their quarter: not while as many are in flight, for which a read that
        is waited for may have to wait, nor behind what was read for an order that did not come."""
        return not self._owed_bytes and len(self.in_flight) <= self.num_ahead

    def passed(self, num_bytes: int) -> None:
        """So much was used."""
        self._passed_bytes += num_bytes
        if self._owed_bytes and self._passed_bytes >= self.ahead_bytes:
            self._unused_bytes -= self._owed_bytes
            self._owed_bytes = 0

    def turned(self) -> None:
        """The walk begins anew. What was read for the one before counts on until as much was used: an order that turns
        at every few uses would have everything read again and again.
        """
        self._unused.clear()
        if self._passed_bytes >= self.ahead_bytes:
            self._unused_bytes = self._passed_bytes = 0
        self._owed_bytes = self._unused_bytes
