# SPDX-License-Identifier: Apache-2.0
"""Partitions on storage of one class of sizes. Small ones often stay gathered, and would cut the memory of large ones
to pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ds_fuyou.host.device import Device
from ds_fuyou.parameters.kept import Kept
from ds_fuyou.parameters.memory import ReadMemory
from ds_fuyou.parameters.partition import Partition
from ds_fuyou.parameters.trace import AccessTrace, Ahead
from ds_fuyou.planner.plan import kept_param_bytes

__all__ = ["SMALL_BYTES", "SizeClass"]

SMALL_BYTES = 256 * 1024
"""Partitions of fewer bytes have a pool of their own."""


class SizeClass:
    """Large partitions on storage, or small ones: their pool, what it keeps, and their reads in the order of use."""

    def __init__(self, members: Sequence[Partition], wanted_bytes: int, trace: AccessTrace, device: Device) -> None:
        sizes = [partition.num_bytes for partition in members]
        self.memory = ReadMemory(sizes, wanted_bytes, device)
        capacity = self.memory.pool.capacity_bytes
        self.ahead_bytes = capacity - kept_param_bytes(capacity, max(sizes))
        """What reads ahead may take from kept values, and what is offered at once."""
        self.members = set(members)
        self.kept = Kept(trace)
        self.ahead = Ahead(trace, self._wants)
        self.in_flight: deque[Partition] = deque()
        self._unused: dict[Partition, int] = {}  # read ahead, for this place
        self._unused_bytes = 0

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

    def turned(self) -> None:
        """The walk begins anew."""
        self._unused.clear()
        self._unused_bytes = 0
