# SPDX-License-Identifier: Apache-2.0
"""Where the time of a rank's computing goes: forward, backward, and what it stands waiting for.

[Note: device seconds]
Where the device is the host, computing is what is left of wall time without the waits of the training thread. A device
with streams computes while the host waits, and waits while the host does not; so there a timed event is recorded on the
computing stream wherever it is given something else to do, or comes to something it may have to wait for, and the time
between two events belongs to what the first one began. Between the two events of a wait nothing computes: what lies
between them is time in which the device idled, whether the copy it needs was late or the host was late to issue it.
A computing stream that was ahead of its copies shows nothing there, however long the host itself waited.

Events are read after they have passed, at the latest at the end of the next step: nobody waits for one. Forwards that
no backward follows, an evaluation's among them, may have many until then: so hundreds are not left to it.

[Note: thread seconds]
The threads that run the model (the training thread, and autograd's on a device) issue work, look for parameters and
take decisions; a device that is fast beside them stands still meanwhile. What they do themselves in a phase is
processor time, which waits take none of. Where waits for the device poll (:attr:`Device.waits_block`) it is not known,
and counts as none. On the host it is part of computing.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from ds_fuyou.host.device import Device

__all__ = ["ComputeClock", "DeviceClock", "HostClock", "Phase", "Span", "compute_clock"]

Span = Callable[["Phase", str, int, int], None]
"""Told of a phase that has passed: its name, begin and end in nanoseconds of ``time.perf_counter_ns``."""


class Phase(enum.Enum):
    """What the computing stream does, or waits for."""

    OUTSIDE = "outside"  # between steps and micro-batches: the script's own, with all it waits for
    FORWARD = "forward"
    BACKWARD = "backward"  # from the end of forward, so the script's loss counts too
    STEP = "step()"
    PARAMETERS = "waits for parameters"
    ACTIVATIONS = "waits for activations"
    GRADIENTS = "waits for memory of gradients"


_MANY_MARKS = 512
_COMPUTES = (Phase.FORWARD, Phase.BACKWARD)
_EXPOSED = (Phase.STEP, Phase.PARAMETERS, Phase.ACTIVATIONS, Phase.GRADIENTS)


class ComputeClock(Protocol):
    """Told by the training thread, and by autograd's while that waits for it; never by both at once."""

    @property
    def times_device(self) -> bool:
        """Whether seconds are the device's own; else those of the thread that computes on the host."""

    @property
    def phase(self) -> Phase: ...

    def enter(self, phase: Phase) -> None:
        """From here on. A backward that a forward or ``step()`` follows at once did not end: it is not counted."""

    def within(self, phase: Phase) -> AbstractContextManager[None]:
        """A wait inside of forward or backward; anywhere else, and inside of another wait, it is not told apart."""

    def name(self, block: str) -> None:
        """What runs from here on, for traces."""

    def settle(self, *, wait: bool = False) -> None:
        """Takes in what has passed; ``wait`` until everything has."""

    def secs(self, phase: Phase) -> float:
        """Of all that was taken in since the start."""

    def thread_secs(self, phase: Phase) -> float:
        """Of the threads that run the model, [Note: thread seconds], what has passed of an open phase included; 0 in
        waits, and where the device is the host.
        """

    @property
    def exposed_secs(self) -> float:
        """Seconds in which the device idled for what the package does; on the host, in which threads waited for it."""


class HostClock:
    """The device is the host.

    Args:
        waited: seconds that the training thread has waited for lanes since the start.
    """

    times_device = False

    def __init__(self, waited: Callable[[], float] = lambda: 0.0) -> None:
        self._waited = waited
        self._secs = dict.fromkeys(Phase, 0.0)
        self._began = (time.perf_counter(), 0.0)
        self.phase = Phase.OUTSIDE

    def enter(self, phase: Phase) -> None:
        before, then = self.phase, self._began
        self.phase, self._began = phase, (time.perf_counter(), self._waited())
        counted = _counted(before, phase)
        if counted is not None:
            wall, waited = (now - at for now, at in zip(self._began, then, strict=True))
            self._secs[counted] += wall if counted is Phase.OUTSIDE else max(0.0, wall - waited)

    def within(self, phase: Phase) -> AbstractContextManager[None]:
        return nullcontext()

    def name(self, block: str) -> None:
        """Traces on the host have the host's own times."""

    def settle(self, *, wait: bool = False) -> None:
        """Everything is known at once."""

    def secs(self, phase: Phase) -> float:
        return self._secs[phase]

    def thread_secs(self, phase: Phase) -> float:
        return 0.0

    @property
    def exposed_secs(self) -> float:
        return self._waited()


class _ThreadClock:
    """Processor seconds of every thread that has called :meth:`note`, since its first call."""

    def __init__(self) -> None:
        self._clocks: dict[int, tuple[int, float]] = {}
        self._last: dict[int, float] = {}
        self.note()

    def note(self) -> None:
        ident = threading.get_ident()
        if ident not in self._clocks:
            clock = time.pthread_getcpuclockid(ident)
            self._clocks[ident], self._last[ident] = (clock, time.clock_gettime(clock)), 0.0

    def secs(self) -> float:
        total = 0.0
        for ident, (clock, began) in self._clocks.items():
            with contextlib.suppress(OSError):  # the thread has ended
                self._last[ident] = time.clock_gettime(clock) - began
            total += self._last[ident]
        return total


class DeviceClock:
    """The device computes by itself; see [Note: device seconds].

    Args:
        span: told of every phase with its time, for traces. The host then waits once, here, to learn how the device's
            clock stands to its own.
    """

    times_device = True

    def __init__(self, device: Device, span: Span | None = None) -> None:
        self._device = device
        self._span = span
        self._secs = dict.fromkeys(Phase, 0.0)
        self._marks: deque[tuple[Any, Phase, str]] = deque()
        self._block = ""
        self._at_ns = 0
        self._threads = _ThreadClock()
        self._thread_secs, self._thread_phase, self._thread_at = dict.fromkeys(Phase, 0.0), Phase.OUTSIDE, 0.0
        self.phase = Phase.OUTSIDE
        if span is not None:
            self._mark()
            self._marks[0][0].synchronize()
            self._at_ns = time.perf_counter_ns()

    def _mark(self) -> None:
        self._marks.append((self._device.record_event(timed=True), self.phase, self._block))
        if len(self._marks) > _MANY_MARKS:
            self.settle()

    def enter(self, phase: Phase) -> None:
        if phase is self.phase:
            return
        before, then = self._thread_phase, self._thread_at
        self._thread_phase, self._thread_at = phase, self._threads.secs()
        counted = _counted(before, phase)
        if counted is not None:
            self._thread_secs[counted] += max(0.0, self._thread_at - then)
        self._switch(phase)
        if phase is Phase.FORWARD:
            self.settle()

    def _switch(self, phase: Phase) -> None:
        self.phase = phase
        self._mark()

    @contextmanager
    def _waiting(self, phase: Phase) -> Iterator[None]:
        self._threads.note()  # backward fetches parameters on autograd's thread
        before = self.phase
        self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def within(self, phase: Phase) -> AbstractContextManager[None]:
        return self._waiting(phase) if self.phase in _COMPUTES else nullcontext()

    def name(self, block: str) -> None:
        if self._span is not None and block != self._block:
            self._block = block
            self._mark()

    def settle(self, *, wait: bool = False) -> None:
        if wait and self._marks:
            self._marks[-1][0].synchronize()
        # A mark lies on the stream that was current: one may be passed before the one that was set before it.
        while len(self._marks) > 1 and self._marks[0][0].query() and self._marks[1][0].query():
            first, phase, block = self._marks.popleft()
            last, following, _ = self._marks[0]
            secs = max(0.0, float(first.elapsed_time(last)) / 1000)
            counted = _counted(phase, following)
            if counted is not None:
                self._secs[counted] += secs
            if self._span is not None:
                begin, self._at_ns = self._at_ns, self._at_ns + round(1e9 * secs)
                self._span(phase, block, begin, self._at_ns)

    def secs(self, phase: Phase) -> float:
        return self._secs[phase]

    def thread_secs(self, phase: Phase) -> float:
        if not self._device.waits_block:
            return 0.0
        passed = self._threads.secs() - self._thread_at if phase is self._thread_phase else 0.0
        return self._thread_secs[phase] + max(0.0, passed)

    @property
    def exposed_secs(self) -> float:
        return sum(self._secs[phase] for phase in _EXPOSED)


def _counted(phase: Phase, following: Phase) -> Phase | None:
    """As what the time from one to the other counts: a backward that never ended as nothing, a forward that an
    interrupt ended as the script's, which goes on when it likes.
    """
    if phase is Phase.BACKWARD and following in (Phase.FORWARD, Phase.STEP):
        return None
    return Phase.OUTSIDE if phase is Phase.FORWARD and following in (Phase.OUTSIDE, Phase.STEP) else phase


def compute_clock(device: Device, waited: Callable[[], float], span: Span | None) -> ComputeClock:
    """The clock that fits the device."""
    return HostClock(waited) if device.is_host else DeviceClock(device, span)
