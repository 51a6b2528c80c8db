# SPDX-License-Identifier: Apache-2.0
"""What the lanes of this machine can do alone: storage through our engine, DeepSpeed's Adam on all cores.

To be measured in a process of its own with one OpenMP thread, so that the threads made here are the only ones.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ds_fuyou.errors import FuyouStateError

__all__ = ["Storage", "update_rate"]

FILE_BYTES = 1 << 30
TRANSFER_BYTES = 16 << 20
NUM_IN_FLIGHT = 6
CHUNK_ELEMENTS = 4 << 20
SLICE_ELEMENTS = 64 << 10  # P32, M, V, gradient and scratch of a slice stay in the cache


class Storage:
    """A file of ``num_bytes``, a multiple of TRANSFER_BYTES, and the engine with the settings the plan uses."""

    def __init__(self, directory: Path, num_bytes: int = FILE_BYTES) -> None:
        from ds_fuyou.host.memory import HostPool
        from ds_fuyou.ops.core import load_core

        self._core = load_core()
        self._file = tempfile.NamedTemporaryFile(dir=directory)  # noqa: SIM115 (lives as long as this object)
        self._num_bytes = num_bytes
        os.posix_fallocate(self._file.fileno(), 0, num_bytes)
        self._fd = os.open(self._file.name, os.O_RDWR | os.O_DIRECT)
        self._pool = HostPool(NUM_IN_FLIGHT * TRANSFER_BYTES)
        self._blocks: list[Any] = [self._pool.try_allocate(TRANSFER_BYTES) for _ in range(NUM_IN_FLIGHT)]
        self._engine = self._core.IoEngine(
            backend=self._core.IoBackend.AUTO, queue_depth=32, block_bytes=1 << 20, num_threads=4
        )
        self._engine.register_buffer(self._pool.pool.base, self._pool.capacity_bytes)

    def rate(self, mode: str) -> float:
        """Bytes a second over the whole file, once; ``mixed`` alternates reads and writes of 16 MiB."""
        read, write = self._core.IoKind.READ, self._core.IoKind.WRITE
        kinds = {"read": [read], "write": [write], "mixed": [read, write]}[mode]
        tickets: list[Any] = [None] * NUM_IN_FLIGHT
        begin = time.perf_counter()
        for index in range(self._num_bytes // TRANSFER_BYTES):
            place = index % NUM_IN_FLIGHT
            self._finish(tickets[place])
            block = self._blocks[place]
            tickets[place] = self._engine.submit(
                kind=kinds[index % len(kinds)],
                ranges=[(self._fd, index * TRANSFER_BYTES, TRANSFER_BYTES)],
                buffer=block.data_ptr(),
                priority=0,
            )
        for ticket in tickets:
            self._finish(ticket)
        return self._num_bytes / (time.perf_counter() - begin)

    @staticmethod
    def _finish(ticket: Any) -> None:
        if ticket is None:
            return
        while not ticket.wait(60.0):
            raise FuyouStateError("a transfer of 16 MiB did not end within 60 s")
        if ticket.outcome().error:
            raise OSError(ticket.outcome().error, "a transfer of the rate measurement failed")

    def close(self) -> None:
        while not self._engine.close(60.0):
            pass
        os.close(self._fd)
        self._file.close()


def update_rate(num_threads: int) -> float:
    """Elements a second of unscale, Adam and narrowing to bf16, by threads on chunks of their own."""
    import torch

    from ds_fuyou.ops.core import load_core

    core = load_core()
    clock = core.make_adam_clock(3e-4, 0.9, 0.999, 1e-8, 0.1, True)
    clock.increment(1, 0.9, 0.999)
    rule, kind = clock.rule(3e-4, 1e-8, 0.1, True), core.ElementType.BFLOAT16
    chunks = [[torch.rand(CHUNK_ELEMENTS) for _ in range(3)] for _ in range(2 * num_threads)]
    narrow = [torch.rand(2, CHUNK_ELEMENTS).bfloat16() for _ in chunks]

    def work(first: int) -> None:
        scratch = torch.empty(SLICE_ELEMENTS)
        for index in range(first, len(chunks), num_threads):
            for at in range(0, CHUNK_ELEMENTS, SLICE_ELEMENTS):
                param, *moments = [part[at : at + SLICE_ELEMENTS] for part in chunks[index]]
                grad, half = (part[at : at + SLICE_ELEMENTS] for part in narrow[index])
                core.scale_gradient(kind, grad.data_ptr(), scratch.data_ptr(), SLICE_ELEMENTS, 1.0)
                rule.apply(param, scratch, moments)
                core.narrow_parameter(kind, param.data_ptr(), half.data_ptr(), SLICE_ELEMENTS)

    def round_secs() -> float:
        threads = [threading.Thread(target=work, args=(first,)) for first in range(num_threads)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    round_secs()
    return len(chunks) * CHUNK_ELEMENTS / min(round_secs() for _ in range(5))
