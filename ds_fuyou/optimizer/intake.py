# SPDX-License-Identifier: Apache-2.0
"""The one door by which gradients enter the out-of-core optimizer.

[Note: copies from the device]
Where the device is the host a gradient is in its place when :meth:`GradientIntake.add` returns. From a device it is
copied on the stream that is current in ``add``, and nobody waits. What is in flight stands in a queue, in the order of
that stream: straight copies with the event that follows them, sums with the thread that makes them
([Note: sums on the host]). It is looked through whenever gradients come, and at the end of backward; ``step()`` and
readers of gradients wait until it is empty. A parameter is complete when nothing of it is in flight any more; only
then may its chunks be updated, written, or read by a script. What an earlier micro-batch left in flight when the last
one begins completes nothing: another gradient of the same parameter is on its way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_fuyou.host.device import Device
from ds_fuyou.host.memory import PageLocks
from ds_fuyou.optimizer.gradients import GradientMemory, Piece
from ds_fuyou.optimizer.host_sums import PIECE_ELEMENTS, HostSum, HostSums
from ds_fuyou.optimizer.layout import FlatLayout, ParamSpan
from ds_fuyou.optimizer.norms import GradientNorms, host_squares
from ds_fuyou.optimizer.window import Window

__all__ = ["GradientIntake"]


class _EventCopy:
    """A straight copy from the device; the memory is kept by who owns the chunk's gradient."""

    squares: float | None = None
    added_secs = 0.0
    numel = 0

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> float:
        self._event.synchronize()
        return 0.0


class GradientIntake:
    """Gradients of a window: to their place, into the norm, and on when a chunk has all of its own.

    Used by the training thread alone.
    """

    def __init__(
        self,
        layout: FlatLayout,
        memory: GradientMemory,
        window: Window,
        device: Device,
        dtype: torch.dtype,
        locks: PageLocks,
        *,
        num_helpers: int,
        reopen: Callable[[int], None],
        complete: Callable[[int], None],
    ) -> None:
        """``dtype``: in which gradients are summed and kept. ``num_helpers``: threads that share sums.
        ``reopen(chunk)`` makes sure that nothing reads the chunk's gradient memory any more; ``complete(chunk)``: all
        gradients of the chunk are in it."""
        self._layout, self._memory, self._window, self._device = layout, memory, window, device
        self._dtype = dtype
        self._reopen, self._complete = reopen, complete
        self.norms = GradientNorms(device)
        self._sums = HostSums(dtype, device, locks, num_helpers)
        self._in_flight: deque[tuple[ParamSpan, _EventCopy | HostSum, bool]] = deque()
        self._num_in_flight: Counter[int] = Counter()
        self.added = (0.0, 0)
        """Seconds since the start in which gradients from a device were added on the host, and of how many elements."""

    def use(self, memory: GradientMemory) -> None:
        """From the next gradient on, between two windows."""
        memory.waited_secs, memory.relieve = self._memory.waited_secs, self.settle_oldest
        self._memory = memory

    # ---- the door -----------------------------------------------------------------------------------------

    def add(self, gradients: Sequence[tuple[ParamSpan, torch.Tensor]], *, last: bool) -> None:
        """Adds partitions of parameters (1-D) to what arrived in this window; ``last``: in its last micro-batch.

        From a device they must have been made on the current stream, or before it. A gradient that arrives for a chunk
        that was already prepared drops the prepared update.
        """
        if self._device.is_host:
            for span, gradient in gradients:
                self._add_on_host(span, gradient, last=last)
                self._settled(span, last=last)
            return
        for span, gradient in gradients:
            if not self._add_from_device(span, gradient, last=last):
                # An event each: where memory for the next one is short, it waits for the oldest of these.
                self._in_flight.append((span, _EventCopy(self._device.record_event()), last))
                self._num_in_flight[span.index] += 1
        self.settle(wait=False)

    def _open(self, span: ParamSpan) -> tuple[list[Piece], bool]:
        """The gradient's memory, and whether to add to it."""
        for chunk in self._layout.chunks_of_param[span.index]:
            self._reopen(chunk)
            self._window.await_gradient(chunk, span.index)
        pieces = self._memory.pieces(span)
        self._window.overrides.pop(span.index, None)
        self.norms.forget(span.index)
        return pieces, span.index in self._window.summed

    def _is_there(self, span: ParamSpan) -> None:
        """Its copy or sum is launched. Not before: what raises on the way leaves the last step's values there."""
        self._window.summed.add(span.index)
        self._window.arrived.add(span.index)

    def _add_on_host(self, span: ParamSpan, gradient: torch.Tensor, *, last: bool) -> None:
        pieces, adds = self._open(span)
        parts = [gradient] if len(pieces) == 1 else gradient.split([kept.numel() for kept, _ in pieces])
        for (kept, reading), part in zip(pieces, parts, strict=True):
            if reading is not None:
                self._memory.waited_secs += reading.wait()
            if adds:
                kept.add_(part.to(kept.dtype))
            else:
                kept.copy_(part)
        self._is_there(span)
        if last:
            self.norms.take(span.index, [piece.values for piece in pieces])

    def _add_from_device(self, span: ParamSpan, gradient: torch.Tensor, *, last: bool) -> bool:
        """Whether the gradient goes by way of a sum on the host, which is in the queue then; else it was copied."""
        pieces, adds = self._open(span)
        total = gradient.to(self._dtype)
        if not adds and all(reading is None for _, reading in pieces):
            at = 0
            for kept, _ in pieces:
                kept.copy_(total[at : at + kept.numel()], non_blocking=True)
                at += kept.numel()
            self._is_there(span)
            if last:
                self.norms.take(span.index, [total])
            return False
        cut = [
            (kept[begin : begin + PIECE_ELEMENTS], reading)
            for kept, reading in pieces
            for begin in range(0, kept.numel(), PIECE_ELEMENTS)
        ]
        at = 0
        for number, (target, reading) in enumerate(cut):
            staging = self._sums.staging(target.numel())
            staging.copy_(total[at : at + target.numel()], non_blocking=True)
            at += target.numel()
            wants_norm = last and adds and number == len(cut) - 1
            whole = [piece.values for piece in pieces] if wants_norm else []
            event = self._device.record_event(blocking=True)  # the thread that waits would take a core from updates
            one = HostSum(target, staging, event, reading, adds=adds, gradient=whole)
            self._in_flight.append((span, self._sums.submit(one), last))
            self._num_in_flight[span.index] += 1
        self._is_there(span)
        if last and not adds:
            self.norms.take(span.index, [total])
        return True

    # ---- what is in flight --------------------------------------------------------------------------------

    def settle(self, *, wait: bool) -> None:
        """Hands on what has arrived in host memory; ``wait``: until everything has."""
        while self._in_flight and (wait or self._in_flight[0][1].done()):
            self.settle_oldest()

    def settle_oldest(self) -> bool:
        """Waits for the oldest copy or sum and hands it on; False if nothing is in flight."""
        if not self._in_flight:
            return False
        span, one, last = self._in_flight[0]
        self._memory.waited_secs += one.wait()
        self._in_flight.popleft()
        if one.added_secs:
            self.added = (self.added[0] + one.added_secs, self.added[1] + one.numel)
        if one.squares is not None and self._num_in_flight[span.index] == 1:  # nothing was added since
            self.norms.take_sum(span.index, one.squares, span.numel)
        self._num_in_flight[span.index] -= 1
        if not self._num_in_flight[span.index]:
            del self._num_in_flight[span.index]
            self._settled(span, last=last)
        return True

    def _settled(self, span: ParamSpan, *, last: bool) -> None:
        if not last and self._window.rules is not None:
            return
        for chunk in self._layout.chunks_of_param[span.index]:
            if self._window.is_completed_by(chunk, span.index):
                self._complete(chunk)

    def complete(self, span: ParamSpan) -> None:
        """The parameter's gradient is as it will be, though none came: the script replaced it."""
        self.settle(wait=True)
        self._settled(span, last=True)

    def drop(self) -> None:
        """Lets everything in flight end; nothing of it counts."""
        while self._in_flight:
            self._in_flight[0][1].wait()
            self._in_flight.popleft()
        self._num_in_flight.clear()

    # ---- ends ---------------------------------------------------------------------------------------------

    def end_micro_batch(self) -> None:
        """Backward of a micro-batch ended: gradients that stay incomplete may leave DRAM too. Nothing waits."""
        self.settle(wait=False)
        flying = {chunk for param in self._num_in_flight for chunk in self._layout.chunks_of_param[param]}
        self._memory.seal_all(but=flying)

    def close_window(self) -> None:
        """``step()`` begins: every gradient is in host memory."""
        self.settle(wait=True)
        self._memory.begin_last()
        self._memory.seal_all()
        self._memory.check()

    def take_missing_norms(self, gradient: Callable[[ParamSpan], Sequence[torch.Tensor]]) -> None:
        """The norms of gradients that came in an earlier micro-batch only, or were replaced: of ``gradient(span)``."""
        for index in sorted(self._window.arrived):
            if index in self.norms:
                continue
            span = self._layout.params[index]
            pieces = gradient(span)
            if not pieces:
                continue
            if self._device.is_host:
                self.norms.take(index, pieces)
            else:
                self.norms.take_sum(index, host_squares(pieces), span.numel)

    def end_window(self) -> None:
        """Applied or dropped: nothing of the window is needed any more."""
        self.norms.clear()
        self._memory.end_step()

    def close(self) -> None:
        """Ends what is in flight; the device has ended its copies. Idempotent."""
        self._sums.close()
        self._in_flight.clear()
        self._num_in_flight.clear()
