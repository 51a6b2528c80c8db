# SPDX-License-Identifier: Apache-2.0
"""P16 on storage, as a whole or in part: reads of parameter partitions ahead of their use."""

from __future__ import annotations

import torch

from ds_fuyou.host.memory import PAGE_BYTES, HostPool, aligned_tensor, round_up_to_page
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import ParamSpan
from ds_fuyou.optimizer.param_access import ParamRead
from ds_fuyou.parameters.trace import AccessTrace

__all__ = ["StoredParameters"]

SMALL_BYTES = 256 * 1024
"""Smaller partitions are read into memory of their own: they often stay gathered and would fragment the pool."""


class StoredParameters:
    """Demand reads and look-ahead over the recorded order. Used by the training thread alone.

    At most ``prefetch_bytes`` of pool memory hold parameters that were read ahead or are still referenced; a demand
    read that finds the pool full takes memory of its own, so a changed order never fails.
    """

    def __init__(self, core: OutOfCoreOptimizer, prefetch_bytes: int) -> None:
        self._core = core
        spans = [span for span in core.layout.params if not core.place.is_in_memory(span)]
        sizes = [round_up_to_page(s.numel * core.options.param_dtype.itemsize) + PAGE_BYTES for s in spans]
        self._pool = HostPool(min(max(prefetch_bytes, 2 * max(sizes)), 2 * sum(sizes)), core.options.device)
        core.io.pin(self._pool)
        self._in_flight: dict[int, ParamRead] = {}
        self.trace = AccessTrace()
        self.num_demand_reads = 0
        self.num_ahead_reads = 0
        self.waited_secs = 0.0

    @property
    def pool(self) -> HostPool:
        """The look-ahead memory."""
        return self._pool

    @property
    def pool_bytes(self) -> int:
        """Memory of the look-ahead pool."""
        return self._pool.capacity_bytes

    def _start(self, span: ParamSpan, *, must: bool) -> ParamRead | None:
        low, high = self._core.params.page_range(span)
        memory = None if high - low < SMALL_BYTES else self._pool.try_allocate(high - low)
        if memory is None:
            if not must and high - low >= SMALL_BYTES:
                return None
            memory = aligned_tensor(high - low)
        what = f"reading parameter {span.name}"
        return self._core.params.start_reading(span, memory, what, priority=-1 if must else 0)

    def fetch(self, span: ParamSpan) -> torch.Tensor:
        """The parameter's published values; waits for its update and its read."""
        flight = self._in_flight.pop(span.index, None)
        if flight is None:
            self._core.wait_param(span)
            flight = self._start(span, must=True)
            self.num_demand_reads += 1
        if flight is None:
            raise RuntimeError(f"a demand read of {span.name} was refused")  # _start(must=True) always starts
        self.waited_secs += flight.wait()
        return flight.values

    def take_ready(self) -> list[ParamRead]:
        """Look-ahead reads that have ended; the caller owns their memory from here on."""
        ready = [f for f in self._in_flight.values() if f.done()]
        for flight in ready:
            flight.wait()
            del self._in_flight[flight.span.index]
        return ready

    def look_ahead(self, resident: set[int]) -> None:
        """Starts reads in the recorded order until pool memory ends or an unpublished parameter is met.

        Parameters in DRAM as a whole need none.
        """
        seen: set[int] = set()
        for index in self.trace.upcoming():
            if index in resident or index in self._in_flight or index in seen:
                continue
            seen.add(index)
            span = self._core.layout.params[index]
            if self._core.place.is_in_memory(span):
                continue
            if not self._core.is_ready(span):
                return
            flight = self._start(span, must=False)
            if flight is None:
                return
            self._in_flight[index] = flight
            self.num_ahead_reads += 1

    def forget(self, span: ParamSpan) -> None:
        """The parameter was rewritten in its place: what was read ahead is old."""
        flight = self._in_flight.pop(span.index, None)
        if flight is not None:
            flight.wait()

    def drop_all(self) -> None:
        """Forgets what was read ahead (the parameters are about to change)."""
        for flight in self._in_flight.values():
            flight.wait()
        self._in_flight.clear()

    def close(self) -> None:
        """Lets the look-ahead memory go. The I/O lane is closed already: nothing is in flight."""
        self._in_flight.clear()
        self._pool.give_back()
