# SPDX-License-Identifier: Apache-2.0
"""Short probes of a run's own lanes: storage through its I/O engine, and the link to its device."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ds_fuyou.host.device import Device
from ds_fuyou.host.memory import PageLocks, aligned_tensor
from ds_fuyou.host.threads import starting_threads
from ds_fuyou.planner.profile import StorageRates
from ds_fuyou.storage.anonymous import open_anonymous
from ds_fuyou.storage.data_file import preallocate
from ds_fuyou.storage.io import IoLane, Transfer
from ds_fuyou.storage.types import Extent

__all__ = ["path_rates", "probe_link", "probe_storage"]

_NUM_IN_FLIGHT = 4
_LINK_ROUNDS = 3
_SHORT_BYTES = 64 << 20  # a stall of the disk would count for much
_COMPARED_BYTES, _COMPARED_TRANSFER = 32 << 20, 4 << 20
_Kind = Callable[..., Transfer]  # of a lane


def probe_storage(io: IoLane, paths: Sequence[Path], num_bytes: int, transfer_bytes: int) -> StorageRates:
    """Writes, reads and does both by turns, ``num_bytes`` each, in transfers of ``transfer_bytes`` (a multiple of 4096)
    in nameless files; the better of two rounds where they are short. Several paths do the same at once, since they may
    share a device or what it is reached by, and are added up.

    Raises:
        FuyouStorageError: a path is not writable, or a transfer fails.
    """
    before = resource.getrusage(resource.RUSAGE_SELF)
    write, read, mixed = _rates(io, paths, num_bytes, transfer_bytes)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_secs = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    moved = (2.0 + 3.0 * _rounds(num_bytes)) * num_bytes * len(paths)
    return StorageRates(read, write, mixed, cpu_secs / moved, float(num_bytes))


def path_rates(io: IoLane, path: Path) -> tuple[float, float]:
    """(write, read) bytes a second of one path, to be compared with others: 0.2 s on a disk of 1 GB/s.

    Raises:
        FuyouStorageError: the path is not writable, or a transfer fails.
    """
    write, read = _rates(io, [path], _COMPARED_BYTES, _COMPARED_TRANSFER, is_mixed_wanted=False)
    return write, read


def _rates(
    io: IoLane, paths: Sequence[Path], num_bytes: int, transfer_bytes: int, *, is_mixed_wanted: bool = True
) -> tuple[float, ...]:
    """(write, read, mixed) bytes a second of all paths together, or the first two."""
    with ExitStack() as ends, starting_threads(), ThreadPoolExecutor(len(paths), "fuyou-probe") as threads:
        files = [ends.enter_context(_file(io, path, num_bytes, transfer_bytes)) for path in paths]

        def moved(*kinds: _Kind) -> float:
            return sum(threads.map(lambda file: _moved(kinds, *file), files))

        def rate(*kinds: _Kind) -> float:
            return max(moved(*kinds) for _ in range(_rounds(num_bytes)))

        moved(IoLane.write)  # allocates
        write = rate(IoLane.write)
        moved(IoLane.read)  # waits for what a disk has said to be written and is still writing
        read = rate(IoLane.read)
        return (write, read, rate(IoLane.read, IoLane.write)) if is_mixed_wanted else (write, read)


@contextmanager
def _file(
    io: IoLane, path: Path, num_bytes: int, transfer_bytes: int
) -> Iterator[tuple[IoLane, list[torch.Tensor], list[Extent]]]:
    """A lane to a nameless file, memory for its transfers, and their places there."""
    fd = open_anonymous(path, "measure storage")
    try:
        num_places = max(_NUM_IN_FLIGHT, num_bytes // transfer_bytes)
        preallocate(fd, num_places * transfer_bytes)
        extents = [Extent(fd, place * transfer_bytes, transfer_bytes) for place in range(num_places)]
        yield io.sharing(lambda _: path), [aligned_tensor(transfer_bytes) for _ in range(_NUM_IN_FLIGHT)], extents
    finally:
        os.close(fd)


def _rounds(num_bytes: int) -> int:
    return 2 if num_bytes <= _SHORT_BYTES else 1


def _moved(kinds: Sequence[_Kind], lane: IoLane, blocks: Sequence[torch.Tensor], extents: Sequence[Extent]) -> float:
    flights: list[Transfer | None] = [None] * _NUM_IN_FLIGHT
    begin = time.perf_counter()
    try:
        for index, extent in enumerate(extents):
            place = index % _NUM_IN_FLIGHT
            _finish(flights[place])
            flights[place] = kinds[index % len(kinds)](lane, [extent], blocks[place], "measuring storage")
        for flight in flights:
            _finish(flight)
    finally:  # whatever failed: nobody may still use the memory and the descriptor
        for flight in flights:
            if flight is not None:
                flight.wait_ended()
    return sum(extent.num_bytes for extent in extents) / (time.perf_counter() - begin)


def _finish(flight: Transfer | None) -> None:
    if flight is not None:
        flight.wait()


def probe_link(device: Device, num_bytes: int) -> tuple[float, float]:
    """(up, down) bytes a second of copies between host memory and ``device``, by its own events where it has any."""
    locks = PageLocks(device)
    host = locks.lock(aligned_tensor(num_bytes))
    try:
        there = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        host.fill_(1)
        up = min(_secs(device, lambda: there.copy_(host, non_blocking=True)) for _ in range(_LINK_ROUNDS))
        down = min(_secs(device, lambda: host.copy_(there, non_blocking=True)) for _ in range(_LINK_ROUNDS))
    finally:
        device.synchronize()
        locks.release()
    return num_bytes / up, num_bytes / down


def _secs(device: Device, work: Callable[[], object]) -> float:
    if device.is_host:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    first = device.record_event(timed=True)
    work()
    last = device.record_event(timed=True)
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000
