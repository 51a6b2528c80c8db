# SPDX-License-Identifier: Apache-2.0
"""Commits generations in the background: durable first, then the record, then the next generation's writes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ds_fuyou.lanes.waiting import wait_reporting
from ds_fuyou.storage.store import SlotStore

__all__ = ["Committer"]


class Committer:
    """One thread that handles orders one by one. A failure fails the pipeline, hence the training thread."""

    def __init__(self, pipeline: Any, store: SlotStore, slots: Callable[[], Mapping[str, int]]) -> None:
        self._pipeline, self._store, self._slots = pipeline, store, slots
        self._orders: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fuyou-committer", daemon=True)
        self._thread.start()

    def order(self, generation: int) -> None:
        """Asks for the record of a published generation."""
        self._orders.put(generation)

    def commit_now(self, generation: int) -> None:
        """Writes a record in the calling thread; nothing may be in flight (initialisation, loading)."""
        self._store.commit(generation, self._slots(), {})
        self._pipeline.set_committed(generation)

    def _run(self) -> None:
        while (generation := self._orders.get()) is not None:
            target = generation
            try:
                wait_reporting(
                    lambda t, g=target: self._pipeline.wait_durable(g, t),  # type: ignore[misc]
                    lambda g=target: f"step {g} to be durable",  # type: ignore[misc]
                )
            except RuntimeError:
                return  # the pipeline failed or stopped: its own failure reaches the training thread
            try:
                self.commit_now(target)
            except Exception as error:
                number = error.errno if isinstance(error, OSError) else None
                self._pipeline.fail(f"committing step {target} ({error})", number or 0)
                return

    def stop(self) -> None:
        """Lets the orders given so far finish or fail, then ends the thread. Idempotent."""
        self._orders.put(None)
        self._thread.join()
