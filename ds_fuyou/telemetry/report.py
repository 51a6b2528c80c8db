# SPDX-License-Identifier: Apache-2.0
"""Log lines of a run: lane times of the steps, what they cost the training thread, and a summary at the end.

``busy`` is the time a lane had work, summed over read, update and write (lanes run beside each other, so
the sum may exceed the wall time). ``exposed`` is the time in which the device idled for that work: where the device is
the host, the time the training thread stood waiting for it. ``hidden`` is the rest of the busy time: it ran beside
forward, backward or another lane.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from ds_fuyou.host.compute_clock import Phase
from ds_fuyou.log import current_rank, get_logger
from ds_fuyou.storage.lifetime import register_closer
from ds_fuyou.telemetry.placement import placement_of, placement_table
from ds_fuyou.telemetry.wear import DAY_SECS, rating_at, short_lives
from ds_fuyou.units import shown_bytes

__all__ = ["BOUND_LANES", "LaneTimes", "StepReport", "waited_secs"]


_FIRST_REPORT = 10
BOUND_LANES = ("compute", "storage", "cpu optimizer")


def waited_secs(rank_state: Any) -> float:
    """Seconds for which threads have waited for lanes since the start."""
    core = rank_state.core
    swap = rank_state.activations.counters if rank_state.activations is not None else None
    waiters = [core, core.gradients, rank_state.parameters, swap]
    return float(sum(waiter.waited_secs for waiter in waiters if waiter is not None))


@dataclass(frozen=True)
class LaneTimes:
    """Seconds and bytes since the start of the rank, or between two points (:meth:`since`)."""

    read_secs: float = 0.0
    update_secs: float = 0.0
    write_secs: float = 0.0
    exposed_secs: float = 0.0
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    redone_chunks: float = 0.0
    swapped_bytes: float = 0.0  # activations that left the device
    swap_wait_secs: float = 0.0  # part of exposed_secs: the device, or backward on the host, waited for activations
    returned_bytes: float = 0.0  # activations that came back to the device
    tokens: float = 0.0
    device_secs: float = 0.0  # forward and backward on a device of its own, by its own clock

    @classmethod
    def of(cls, rank_state: Any) -> LaneTimes:
        core, clock = rank_state.core, rank_state.clock
        io = core.io.stats()
        swap = rank_state.activations.counters if rank_state.activations is not None else None
        swap_wait_secs = swap.waited_secs if swap is not None else 0.0
        if clock.times_device:
            swap_wait_secs = clock.secs(Phase.ACTIVATIONS)
        return cls(
            read_secs=io["read"].busy_secs,
            update_secs=core.pipeline.stats().update_busy_secs,
            write_secs=io["write"].busy_secs,
            exposed_secs=clock.exposed_secs,
            read_bytes=io["read"].num_bytes,
            write_bytes=io["write"].num_bytes,
            redone_chunks=core.num_redone_chunks,
            swapped_bytes=swap.out_bytes if swap is not None else 0.0,
            swap_wait_secs=swap_wait_secs,
            returned_bytes=swap.in_bytes if swap is not None else 0.0,
            tokens=rank_state.num_tokens,
            device_secs=clock.secs(Phase.FORWARD) + clock.secs(Phase.BACKWARD) if clock.times_device else 0.0,
        )

    def since(self, earlier: LaneTimes) -> LaneTimes:
        return LaneTimes(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def after(self, work: LaneTimes) -> LaneTimes:
        """Both added up."""
        return LaneTimes(*(getattr(self, f.name) + getattr(work, f.name) for f in fields(self)))

    def over(self, num_steps: int) -> LaneTimes:
        """The mean of a step."""
        return LaneTimes(*(getattr(self, f.name) / num_steps for f in fields(self)))

    @property
    def busy_secs(self) -> float:
        return self.read_secs + self.update_secs + self.write_secs

    @property
    def hidden_secs(self) -> float:
        return max(0.0, self.busy_secs - self.exposed_secs)

    def compute_of(self, secs: float) -> float:
        """Of ``secs`` of wall time, what a device computed, or, on the host, what is left of them without waiting."""
        return self.device_secs or max(0.0, secs - self.exposed_secs)

    def bound_lane(self, secs: float) -> str:
        """Of :data:`BOUND_LANES` the one that works longest in ``secs`` of wall time, the first of equal ones.
        Reads and writes share storage, and cannot last longer than the step.
        """
        busy = (self.compute_of(secs), min(secs, self.read_secs + self.write_secs), min(secs, self.update_secs))
        return BOUND_LANES[busy.index(max(busy))]

    def line(self) -> str:
        share = 100 * self.hidden_secs / self.busy_secs if self.busy_secs > 0 else 100.0
        redone = f", {self.redone_chunks:.1f} chunks redone" if self.redone_chunks else ""
        swapped = ""
        if self.swapped_bytes:
            swapped = f", activations {shown_bytes(self.swapped_bytes)} swapped, waited {self.swap_wait_secs:.2f} s"
        return (
            f"read {self.read_secs:.2f} s ({shown_bytes(self.read_bytes)}), update {self.update_secs:.2f} s, "
            f"write {self.write_secs:.2f} s ({shown_bytes(self.write_bytes)}): "
            f"hidden {self.hidden_secs:.2f} s, "
            f"exposed {self.exposed_secs:.2f} s ({share:.0f} % hidden){redone}{swapped}"
        )


class StepReport:
    """Reports of one rank, which holds it. Rank 0 logs: after steps 1, 10, 100 and every further 100, and once at the
    end, when the rank's state is closed or at the interpreter's exit.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._logged_steps = 0
        self._start = self._at_log = LaneTimes()
        self._logged_at = 0.0
        self._closed = self._has_failed = False
        self._forget: Callable[[], None] = lambda: None

    def step(self, rank_state: Any) -> None:
        """A step was applied. The first one only sets the clocks: it also built what later steps reuse.

        Whatever fails is told: the step is made, and other ranks, which report nothing, go on.
        """
        if current_rank() != 0:
            return
        try:
            self._step(rank_state)
        except Exception as error:
            if not self._has_failed:
                get_logger().warning("steps are not reported, training goes on: %s: %s", type(error).__name__, error)
            self._has_failed = True

    def _step(self, rank_state: Any) -> None:
        self._num_steps += 1
        if self._num_steps == 1:
            self._forget = register_closer(partial(self._close_at_exit, weakref.ref(rank_state)))
            self._start = self._at_log = LaneTimes.of(rank_state)
            self._logged_at = time.perf_counter()
            self._logged_steps = 1
            get_logger().info("%s", placement_table(placement_of(rank_state), rank_state.core.layout.numel))
        elif self._num_steps == _FIRST_REPORT or self._num_steps % 100 == 0:
            self._log_steps(rank_state)

    def _log_steps(self, rank_state: Any) -> None:
        now, lanes = time.perf_counter(), LaneTimes.of(rank_state)
        count = self._num_steps - self._logged_steps
        mean, secs = lanes.since(self._at_log).over(count), (now - self._logged_at) / count
        speed = f", {mean.tokens / secs:.0f} tokens/s" if mean.tokens else ""
        daily = mean.write_bytes / secs * DAY_SECS
        written = {path: share * daily for path, share in rank_state.shares_of_machine().items()}
        get_logger().info(
            "steps %d-%d, mean %.2f s%s, bound by %s: %s%s",
            self._logged_steps + 1,
            self._num_steps,
            secs,
            speed,
            mean.bound_lane(secs),
            mean.line(),
            f"; {shown_bytes(sum(written.values()))} written a day" if daily else "",
        )
        if self._num_steps == _FIRST_REPORT:
            for is_known, sentence in short_lives(written, {path: rating_at(path) for path in written}):
                level = logging.WARNING if is_known else logging.INFO
                get_logger().log(level, "%s; more host memory, or fewer steps a day, would spare it", sentence)
        self._logged_steps, self._logged_at, self._at_log = self._num_steps, now, lanes

    def leave_out(self, secs: float, work: LaneTimes) -> None:
        """``work`` done within ``secs``, measurements say, was no work of a step."""
        self._start, self._at_log = self._start.after(work), self._at_log.after(work)
        self._logged_at += secs

    def close(self, rank_state: Any) -> None:
        """The summary of all steps but the first. Once; nothing when fewer than two were applied, or when the optimizer
        was closed before, as at the interpreter's end.
        """
        if self._closed or self._num_steps < 2 or rank_state.core.pipeline is None:
            return
        self._closed = True
        self._forget()
        count = self._num_steps - 1
        mean = LaneTimes.of(rank_state).since(self._start).over(count)
        get_logger().info("mean of steps 2-%d: %s", self._num_steps, mean.line())
        if rank_state.planned_device_bytes:
            held, planned = map(shown_bytes, (rank_state.device.peak_bytes(), rank_state.planned_device_bytes))
            get_logger().info("device memory: at most %s in use, planned were %s", held, planned)

    def _close_at_exit(self, reference: weakref.ref[Any]) -> None:
        rank_state = reference()
        if rank_state is not None:
            self.close(rank_state)
