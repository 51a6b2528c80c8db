# SPDX-License-Identifier: Apache-2.0
"""Gradients of further micro-batches, added on the host behind their copies from the device.

[Note: sums on the host]
The sum of two 16-bit or fp32 values rounds alike on the host and on a device, so each micro-batch crosses the link
once: it is copied to staging memory, and one thread adds it to G16 when the copy, and the read of the sum so far if
that lay on storage, have ended. The thread waits for nothing else but helpers, which wait for nothing: device events
and reads end by themselves. Staging and the target belong to it from :meth:`HostSums.submit` until the sum has ended;
the training thread alone asks for that.

As many helpers as update states take a part each: of the squares, whose order is free (norms.py), and of the sum where
torch adds by one thread (launchers of several ranks tell it so).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ds_fuyou.host.device import Device
from ds_fuyou.host.memory import PageLocks, aligned_tensor, round_up_to_page
from ds_fuyou.host.threads import starting_threads, stay_unbound
from ds_fuyou.host.waiting import wait_reporting
from ds_fuyou.optimizer.norms import any_squares
from ds_fuyou.storage.io import Transfer

__all__ = ["PIECE_ELEMENTS", "STAGING_BYTES", "Helpers", "HostSum", "HostSums"]

PIECE_ELEMENTS = 4 * 1024 * 1024
"""The most that is copied and added at once."""

STAGING_BYTES = 128 * 1024 * 1024
"""How far copies may run ahead of their sums. Beyond, the oldest is waited for."""

_PART_ELEMENTS = 256 * 1024  # less is not worth a helper


class Helpers:
    """Threads that work on parts of one thing. Used by one thread."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "fuyou-sums", stay_unbound) if num_threads > 1 else None

    def add(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """``target += values``, rounded as torch does it at once."""
        if torch.get_num_threads() > 1:
            target.add_(values)
            return
        size = max(_PART_ELEMENTS, -(-target.numel() // self._num_threads))
        both = zip(target.split(size), values.split(size), strict=True)
        self._each(lambda pair: pair[0].add_(pair[1]), [*both])

    def squares(self, pieces: Sequence[torch.Tensor]) -> float:
        """The sum of squares of all values, in some order."""
        size = max(_PART_ELEMENTS, -(-sum(piece.numel() for piece in pieces) // self._num_threads))
        return sum(self._each(any_squares, [[part] for piece in pieces for part in piece.view(-1).split(size)]))

    def _each(self, call: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
        return [*(map(call, parts) if self._pool is None or len(parts) < 2 else self._pool.map(call, parts))]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class HostSum:
    """``target`` := or += what a copy from the device brings into ``staging``."""

    def __init__(
        self,
        target: torch.Tensor,
        staging: torch.Tensor,
        event: Any,
        reading: Transfer | None,
        *,
        adds: bool,
        gradient: Sequence[torch.Tensor],
    ) -> None:
        """``event`` follows the copy, ``reading`` brings what ``target`` holds so far. ``gradient``: the pieces of the
        whole gradient if this is its last one and its norm is wanted; else empty."""
        self._target, self._staging, self._event, self._reading = target, staging, event, reading
        self._adds, self._gradient = adds, gradient
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.squares: float | None = None
        """Sum of squares of ``gradient``, after the end."""
        self.added_secs = 0.0
        """What adding took, after the end; nothing where it was a copy."""
        self.numel = target.numel()

    def run(self, device: Device, helpers: Helpers) -> None:
        """``device``: whose event it is."""
        try:
            device.make_current()
            self._event.synchronize()
            if self._reading is not None:
                self._reading.wait()
            if self._adds:
                began = time.perf_counter()
                helpers.add(self._target, self._staging)
                self.added_secs = time.perf_counter() - began
            else:
                self._target.copy_(self._staging)
            if self._gradient:
                self.squares = helpers.squares(self._gradient)
        except BaseException as error:
            self._error = error
        finally:  # memory that was lent for the gradient may go back
            del self._target, self._staging, self._event, self._reading, self._gradient
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> float:
        """Until it has ended; returns the seconds waited. Raises what failed, in the training thread."""
        seconds = wait_reporting(self._ended.wait, lambda: "a gradient to be copied from the device and added")
        if self._error is not None:
            raise self._error
        return seconds


class HostSums:
    """The thread that adds, and its staging memory."""

    def __init__(self, dtype: torch.dtype, device: Device, locks: PageLocks, num_helpers: int) -> None:
        self._num_helpers = num_helpers
        self._dtype, self._device, self._locks = dtype, device, locks
        self._bytes = round_up_to_page(PIECE_ELEMENTS * dtype.itemsize)
        self._orders: queue.SimpleQueue[HostSum | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_buffers = 0
        self._free: list[torch.Tensor] = []
        self._lent: deque[tuple[HostSum, torch.Tensor]] = deque()

    def staging(self, numel: int) -> torch.Tensor:
        """Memory for a copy of ``numel`` elements, to be submitted next. Waits for the oldest sum if there is none."""
        while self._lent and (self._lent[0][0].done() or self._is_full()):
            self._lent[0][0].wait()
            self._free.append(self._lent.popleft()[1])
        if not self._free:
            self._free.append(self._locks.lock(aligned_tensor(self._bytes)))
            self._num_buffers += 1
        return self._free[-1].view(self._dtype)[:numel]

    def _is_full(self) -> bool:
        return not self._free and (self._num_buffers + 1) * self._bytes > STAGING_BYTES

    def submit(self, one: HostSum) -> HostSum:
        """Hands over a sum whose staging is the memory given last."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="fuyou-sums", daemon=True)
            with starting_threads():
                thread.start()
            self._thread = thread
        self._lent.append((one, self._free.pop()))
        self._orders.put(one)
        return one

    def _run(self) -> None:
        stay_unbound()
        helpers = Helpers(self._num_helpers)
        while (one := self._orders.get()) is not None:
            one.run(self._device, helpers)
        helpers.close()

    def close(self) -> None:
        """Ends what was submitted, then the thread. Idempotent."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
            self._thread = None
        self._lent.clear()
        self._free.clear()
