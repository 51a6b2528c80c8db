# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of pieces in flight, by path: enough to keep every path busy, no more."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ds_fuyou.activations.records import InFlightIo, Record
from ds_fuyou.storage.io import IoLane
from ds_fuyou.storage.swap_space import Lease, SwapSpace
from ds_fuyou.telemetry.trace import Lane, LaneTrace

__all__ = ["StorageHome", "StorageTraffic"]

_DEMAND, _AHEAD, _WRITE = -1, 0, 1  # priorities in the engine; optimizer jobs have larger numbers


@dataclass(frozen=True)
class StorageHome:
    """Where records go beyond host memory, and how hard they may press on the shared engine.

    ``kept_bytes``: of the arena, before anything is written. ``write_pieces`` and ``read_pieces``: in flight on each
    path. ``checksum``: what is read is compared with what was written, by the page.
    """

    io: IoLane
    space: SwapSpace
    kept_bytes: int = 0
    write_pieces: int = 4
    read_pieces: int = 8
    checksum: bool = True

    def close(self) -> None:
        """Only after all I/O has ended. What is opened with the same descriptors later is not compared with this."""
        if self.checksum:
            self.io.forget(self.space.files)
        self.space.close()
        self.io.let_go()


class StorageTraffic:
    """What is in flight. Each path ends its transfers about in order, so the oldest of each are asked alone whether
    they have ended. Not thread-safe: the tier's lock is held.
    """

    def __init__(self, home: StorageHome, piece_bytes: int, arena_bytes: int, trace: LaneTrace | None) -> None:
        self.home = home
        self._trace = trace
        self._limits: dict[bool, int] = {}
        self.bound(piece_bytes, arena_bytes)
        self._bytes = {True: 0, False: 0}
        self._lanes: dict[bool, list[OrderedDict[int, InFlightIo]]] = {
            is_write: [OrderedDict() for _ in range(home.space.num_paths)] for is_write in (True, False)
        }
        self._next_number = 0

    def bound(self, piece_bytes: int, arena_bytes: int) -> None:
        """In flight each way are the home's pieces a path, and no more than half of the arena."""
        home, most = self.home, max(piece_bytes, arena_bytes // 2)
        per_path = {True: home.write_pieces, False: home.read_pieces}
        self._limits = {key: min(most, count * piece_bytes * home.space.num_paths) for key, count in per_path.items()}

    def has_room(self, *, is_write: bool) -> bool:
        return self._bytes[is_write] < self._limits[is_write]

    def start_write(self, record: Record, index: int, memory: torch.Tensor, lease: Lease) -> InFlightIo:
        if self.home.checksum:
            self.home.io.watch([lease.extent])
        transfer = self.home.io.write([lease.extent], memory, f"writing {record.what}", _WRITE)
        return self._started(InFlightIo(record.reference, index, transfer, lease, record.what, True, *self._now()))

    def start_read(
        self, record: Record, index: int, memory: torch.Tensor, lease: Lease, *, is_demand: bool
    ) -> InFlightIo:
        priority = _DEMAND if is_demand else _AHEAD
        transfer = self.home.io.read([lease.extent], memory, f"reading {record.what}", priority)
        return self._started(InFlightIo(record.reference, index, transfer, lease, record.what, False, *self._now()))

    def _now(self) -> tuple[int, int]:
        self._next_number += 1
        return self._next_number, 0 if self._trace is None else time.perf_counter_ns()

    def _started(self, flight: InFlightIo) -> InFlightIo:
        self._lanes[flight.is_write][flight.lease.path][flight.number] = flight
        self._bytes[flight.is_write] += flight.num_bytes
        return flight

    def ended(self) -> list[InFlightIo]:
        """Those that have ended, as far as one sees without asking every one."""
        found = []
        for lanes in self._lanes.values():
            for lane in lanes:
                for flight in lane.values():
                    if not flight.transfer.done():
                        break
                    found.append(flight)
        return found

    def oldest(self, *, is_write: bool) -> InFlightIo | None:
        heads = [next(iter(lane.values())) for lane in self._lanes[is_write] if lane]
        return min(heads, key=lambda flight: flight.number, default=None)

    def remove(self, flight: InFlightIo) -> None:
        """It has ended and is accounted for."""
        del self._lanes[flight.is_write][flight.lease.path][flight.number]
        self._bytes[flight.is_write] -= flight.num_bytes
        if self._trace is not None:
            lane = Lane.STORAGE_WRITE if flight.is_write else Lane.STORAGE_READ
            self._trace.add(lane, flight.what, flight.began_ns, time.perf_counter_ns(), flight.num_bytes)

    def __iter__(self) -> Iterator[InFlightIo]:
        """All of them."""
        for lanes in self._lanes.values():
            for lane in lanes:
                yield from list(lane.values())
