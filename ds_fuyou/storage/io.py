# SPDX-License-Identifier: Apache-2.0
"""The I/O engine as the Python layers use it: transfers between file extents and tensors."""

from __future__ import annotations

import copy
import errno
import logging
import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_fuyou.errors import FuyouChecksumError, FuyouStorageError
from ds_fuyou.host.memory import HostPool
from ds_fuyou.host.threads import starting_threads
from ds_fuyou.host.waiting import wait_reporting, wait_through
from ds_fuyou.log import log_once
from ds_fuyou.ops.core import load_core
from ds_fuyou.storage.layout import queue_depth
from ds_fuyou.storage.store import Extent

__all__ = ["IoLane", "IoSettings", "Transfer"]

logger = logging.getLogger("ds_fuyou")
_THREADS_A_PATH = 4
_CORES_A_RING = 4
_MOST_RINGS = 4


@dataclass(frozen=True)
class IoSettings:
    """``engine`` is auto, io_uring or threads; ``block_bytes`` is the size of one request to the kernel."""

    engine: str = "auto"
    queue_depth: int = 32
    block_bytes: int = 1024 * 1024
    num_threads: int = _THREADS_A_PATH
    num_rings: int = 1
    """Of io_uring, a thread each: one makes page checksums of some 8 to 14 GB/s, less than fast drives together."""

    @classmethod
    def for_paths(cls, engine: str, num_paths: int, num_cores: int = 1) -> IoSettings:
        """Of an engine that keeps so many paths busy at once, on so many cores."""
        num_rings = min(_MOST_RINGS, max(1, num_cores // _CORES_A_RING))
        return cls(engine, queue_depth(num_paths), num_threads=_THREADS_A_PATH * num_paths, num_rings=num_rings)


@dataclass(frozen=True)
class Transfer:
    """Work in flight. Its ticket owns the memory; dropped before the transfer has ended, it waits for that end."""

    ticket: Any
    memory: torch.Tensor
    what: str
    path_of: Callable[[int], Path | None]
    on_failure: Callable[[FuyouStorageError], None] | None = None

    def done(self) -> bool:
        return bool(self.ticket.done())

    def wait(self) -> float:
        """Blocks (without the GIL) until the transfer is complete to the byte; returns the seconds waited.

        Raises :class:`FuyouStorageError` with path, offset and errno if it failed.
        """
        seconds = self.wait_ended()
        outcome = self.ticket.outcome()
        if outcome.error:
            error = storage_error(self.what, outcome.error, outcome.fd, outcome.offset, self.path_of)
            if self.on_failure is not None:
                self.on_failure(error)
            raise error
        return seconds

    def wait_ended(self) -> float:
        """As :meth:`wait`, but says nothing of how it ended."""
        return wait_reporting(self.ticket.wait, lambda: self.what)

    def end(self) -> None:
        """As :meth:`wait_ended`, before its memory goes: what a signal handler raises is raised after that."""
        wait_through(self.ticket.wait, lambda: self.what)


def storage_error(
    what: str, error: int, fd: int, offset: int, path_of: Callable[[int], Path | None]
) -> FuyouStorageError:
    """The error for a failed transfer: what was moved, where and why."""
    path = path_of(fd) if fd >= 0 else None
    message = what if " failed" in what else f"{what} failed"  # the end of a commit says so by itself
    if error == errno.ENODATA:
        message = f"{what} failed: the file is shorter than the layout says"
    if error == errno.EBADMSG:
        message = f"{what} failed: the bytes read are not those that were written; the disk or its path is faulty"
        return FuyouChecksumError(error, message, None if path is None else str(path), offset)
    return FuyouStorageError(error, message, None if path is None else str(path), offset)


class IoLane:
    """Storage read and write lanes of one rank. Thread-safe; :meth:`close` waits for what is in flight."""

    def __init__(self, settings: IoSettings, path_of: Callable[[int], Path | None]) -> None:
        core = load_core()
        backends = {"auto": core.IoBackend.AUTO, "io_uring": core.IoBackend.IO_URING, "threads": core.IoBackend.THREADS}
        with starting_threads():
            self.engine: Any = core.IoEngine(
                backend=backends[settings.engine],
                queue_depth=settings.queue_depth,
                block_bytes=settings.block_bytes,
                num_threads=settings.num_threads,
                num_rings=settings.num_rings,
            )
        if settings.engine == "auto" and self.engine.backend == core.IoBackend.THREADS:
            reason = self.engine.backend_reason
            log_once(logging.INFO, f"a pool of threads reads and writes, for io_uring is not to be had: {reason}")
        self._core = core
        self._path_of = path_of
        self._is_shared = False  # another lane's engine
        self.on_failure: Callable[[FuyouStorageError], None] | None = None
        """Called with the error of a transfer before it is raised, in the thread that waits for the transfer."""
        self._told = {"unregistered": False}  # shared by all lanes of the engine
        self.identity = object()
        """Of the engine: one for all lanes that share it."""
        self._registered: list[HostPool] = []

    def watch(self, extents: Iterable[Extent]) -> None:
        """Whole pages read from there are from now on compared with what was written there last.

        A page that differs makes its transfer fail with :class:`FuyouChecksumError`. Costs 8 bytes of memory a page of
        4 KiB. To be called before anything is written there; what was watched before and shares a page is forgotten.
        """
        for extent in extents:
            self.engine.watch_pages(*extent)

    def forget(self, extents: Iterable[Extent]) -> None:
        """What was watched there is not any more: the bytes are given back. Nothing may be in flight."""
        for extent in extents:
            self.engine.forget_pages(*extent)

    def digest(self, extents: Iterable[Extent]) -> int:
        """Of extents that were watched, and written or read as a whole: a number that stands for what they hold."""
        return int(self.engine.page_digest(list(extents)))

    def expect(self, extents: Sequence[Extent], digest: int) -> None:
        """As :meth:`watch`, of extents that hold what another engine told this digest of: compared when the last of
        them has been read.
        """
        self.watch(extents)
        self.engine.expect_pages(extents, digest)

    def sharing(self, path_of: Callable[[int], Path | None]) -> IoLane:
        """The same engine for files of another owner. Only the lane that was built first closes it."""
        lane = copy.copy(self)
        lane._path_of, lane._is_shared = path_of, True
        lane.on_failure = None
        return lane

    def register_memory(self, pool: HostPool) -> None:
        """Registers the pool with the kernel; it stays mapped until the engine is closed."""
        self.pin(pool)
        self._registered.append(pool)

    def forget_memory(self, pool: HostPool) -> None:
        """Takes :meth:`register_memory` back. Nothing may be in flight there."""
        self.engine.unregister_buffer(pool.pool.base, pool.capacity_bytes)
        self._registered[:] = [one for one in self._registered if one is not pool]  # all lanes of the engine have it

    def pin(self, pool: HostPool) -> None:
        """Registers memory that outlives the engine with the kernel, so that requests need not look it up each time.

        Where that is refused, mostly by the limit of locked memory, it is said once; everything works without.
        """
        backend = self.engine.backend
        if self.engine.register_buffer(pool.pool.base, pool.capacity_bytes) or backend != self._core.IoBackend.IO_URING:
            return
        if not self._told["unregistered"]:
            self._told["unregistered"] = True
            logger.info(
                "%d bytes of I/O memory cannot be registered with io_uring (`ulimit -l` says %s): reads and writes "
                "cost somewhat more processor time",
                pool.capacity_bytes,
                _memlock_limit(),
            )

    def read(self, extents: Sequence[Extent], memory: torch.Tensor, what: str, priority: int = 0) -> Transfer:
        """Starts reading the extents, in order, into ``memory`` (bytes of a contiguous CPU tensor)."""
        return self._submit(self._core.IoKind.READ, extents, memory, what, priority)

    def write(self, extents: Sequence[Extent], memory: torch.Tensor, what: str, priority: int = 0) -> Transfer:
        """Starts writing ``memory`` to the extents, in order."""
        return self._submit(self._core.IoKind.WRITE, extents, memory, what, priority)

    def _submit(self, kind: Any, extents: Sequence[Extent], memory: torch.Tensor, what: str, priority: int) -> Transfer:
        num_bytes = sum(extent.num_bytes for extent in extents)
        if num_bytes > memory.numel() * memory.element_size():
            raise ValueError(f"{what}: extents hold {num_bytes} bytes, the memory {memory.nbytes}")
        ticket = self.engine.submit(
            kind=kind, ranges=extents, buffer=memory.data_ptr(), priority=priority, memory=memory, what=what
        )
        return Transfer(ticket, memory, what, self._path_of, self.on_failure)

    def stats(self) -> dict[str, Any]:
        """Per lane: number of operations, bytes and busy seconds since the start."""
        return {
            "read": self.engine.stats(self._core.IoKind.READ),
            "write": self.engine.stats(self._core.IoKind.WRITE),
        }

    def let_go(self) -> None:
        """A lane that shares another one's engine needs it no more: it goes when that is closed and nobody holds it."""
        if self._is_shared:
            self.engine = None

    def close(self) -> None:
        """Idempotent. The engine goes with its last transfer, and with the lanes that share it."""
        if self.engine is not None:
            wait_through(self.engine.close, lambda: f"{self.engine.num_in_flight} transfers in flight to end")
            self.engine = None
            self._registered.clear()


def _memlock_limit() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
