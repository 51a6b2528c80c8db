# SPDX-License-Identifier: Apache-2.0
"""Uses that the order of the past cannot know: of parameters that are gathered together, or saved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ds_fuyou.parameters.partition import Partition

__all__ = ["Announced"]


class Announced:
    """Uses that were announced: those that are not being read, in order, and bytes that are and are not used."""

    def __init__(self, partitions: Iterable[Partition], limit_bytes: int, *, own: bool) -> None:
        self.order = deque(partition for partition in partitions if partition.num_bytes)
        self.limit_bytes, self.own = limit_bytes, own
        self.reading: dict[Partition, int] = {}
        self.num_bytes = 0

    def started(self, partition: Partition) -> None:
        self.reading[partition] = partition.num_bytes
        self.num_bytes += partition.num_bytes

    def used(self, partition: Partition) -> None:
        self.num_bytes -= self.reading.pop(partition, 0)
