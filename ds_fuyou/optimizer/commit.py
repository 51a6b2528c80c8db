# SPDX-License-Identifier: Apache-2.0
"""Commits generations in the background: durable first, then the record, then the next generation's writes.

[Note: states replaced in place]
Loading and ``safe_set_full_*`` write states between steps, into the slots that the last record names. Killed meanwhile,
the files would hold a mixture under that record. So the record is withdrawn first, durably; there is none until the
next step, which reads what was written and commits as ever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ds_fuyou.host.waiting import wait_reporting, wait_through
from ds_fuyou.storage.store import SlotStore

__all__ = ["Committer"]


class Committer:
    """One thread that handles orders one by one. A failure fails the pipeline, hence the training thread.

    A record's ``meta`` is ``{"optimizer_step": n, "state_sums": hex}``: the steps applied to these states, in earlier
    runs too, and the checksums of every chunk's P32 and moments, 8 bytes each; "" without ``checksum``.
    """

    def __init__(self, pipeline: Any, store: SlotStore, slots: Callable[[], Mapping[str, int]]) -> None:
        self._pipeline, self._store, self._slots = pipeline, store, slots
        self._orders: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._progress = threading.Condition()
        self._num_open = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="fuyou-committer", daemon=True)
        self._thread.start()

    def order(self, generation: int, optimizer_step: int) -> None:
        """Asks for the record of a published generation."""
        with self._progress:
            self._num_open += 1
        self._orders.put((generation, optimizer_step))

    def commit_now(self, generation: int, optimizer_step: int) -> None:
        """Writes a record in the calling thread; nothing may be in flight (initialisation)."""
        sums = self._pipeline.state_sums().hex()
        self._store.commit(generation, self._slots(), {"optimizer_step": optimizer_step, "state_sums": sums})
        self._pipeline.set_committed(generation)

    def settled(self, timeout_secs: float) -> bool:
        """Waits until every order is committed; RuntimeError when the thread ended before."""
        with self._progress:
            self._progress.wait_for(lambda: self._num_open == 0 or self._ended, timeout_secs)
            if self._num_open and self._ended:
                raise RuntimeError("the committer ended before the last step was committed")
            return self._num_open == 0

    def withdraw(self) -> None:
        """Before committed slots are overwritten; everything ordered must be settled. Raises FuyouStorageError."""
        if self._store.last_commit() is not None:
            self._store.withdraw()

    def _run(self) -> None:
        try:
            self._commit_orders()
        finally:
            with self._progress:
                self._ended = True
                self._progress.notify_all()

    def _commit_orders(self) -> None:
        while (order := self._orders.get()) is not None:
            target, optimizer_step = order
            try:
                wait_reporting(
                    lambda t, g=target: self._pipeline.wait_durable(g, t),  # type: ignore[misc]
                    lambda g=target: f"step {g} to be durable",  # type: ignore[misc]
                )
            except RuntimeError:
                return  # the pipeline failed or stopped: its own failure reaches the training thread
            try:
                self.commit_now(target, optimizer_step)
            except Exception as error:
                number = error.errno if isinstance(error, OSError) else None
                said = f"{error.strerror} [{error.filename}]" if isinstance(error, OSError) else str(error)
                self._pipeline.fail(f"committing step {target} ({said})", number or 0)
                return
            with self._progress:
                self._num_open -= 1
                self._progress.notify_all()

    def stop(self) -> None:
        """Lets the orders given so far finish or fail, then ends the thread. Idempotent."""
        self._orders.put(None)
        wait_through(self._joined, lambda: "the last steps to be committed")

    def _joined(self, timeout_secs: float) -> bool:
        self._thread.join(timeout_secs)
        return not self._thread.is_alive()
