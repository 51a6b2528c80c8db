# SPDX-License-Identifier: Apache-2.0
"""A device of which only the clock is real: what the computing stream is given takes the time that a test says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_fuyou.host.device import HostDevice


@dataclass
class TimedEvent:
    device: TimedDevice
    secs: float
    timed: bool

    def query(self) -> bool:
        return self.secs <= self.device.host_secs

    def synchronize(self) -> None:
        """The host waits, which is counted."""
        self.device.num_host_waits += 1
        self.device.host_secs = max(self.device.host_secs, self.secs)

    def elapsed_time(self, later: TimedEvent) -> float:
        """As PyTorch's: milliseconds, and an error where an event has not passed or was recorded without its time."""
        if not (self.timed and later.timed and self.query() and later.query()):
            raise RuntimeError("both events must be timed and have passed")
        return 1000 * (later.secs - self.secs)


class TimedDevice(HostDevice):
    """One computing stream beside the host. Both clocks begin at 0."""

    is_host = False

    def __init__(self) -> None:
        self.host_secs = 0.0
        self.stream_secs = 0.0
        self.num_host_waits = 0

    def compute(self, secs: float) -> None:
        """Queued; it begins when the host has issued it and the stream is free."""
        self.stream_secs = max(self.stream_secs, self.host_secs) + secs

    def wait_for_copy(self, until: float) -> None:
        """The stream, not the host, goes on when the clock says ``until``."""
        self.stream_secs = max(self.stream_secs, self.host_secs, until)

    def host_works(self, secs: float) -> None:
        """Or waits for something that is no device."""
        self.host_secs += secs

    def host_waits_for_norm(self) -> None:
        """As ``step()`` does, whoever measures."""
        self.host_secs = max(self.host_secs, self.stream_secs)

    def record_event(self, *, timed: bool = False, blocking: bool = False) -> Any:
        self.stream_secs = max(self.stream_secs, self.host_secs)
        return TimedEvent(self, self.stream_secs, timed)
