# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a device's copy streams, over real memory: a copy is made only when its event is asked often enough or
waited for. So memory that is handed on too early shows as wrong bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ds_fuyou.activations.copies import InFlightCopy

__all__ = ["LateCopies", "LateEvent", "LateStream"]


class LateStream:
    """Does its copies in order; time passes when somebody asks. ``fails_at`` is the number of a copy that fails."""

    def __init__(self) -> None:
        self.now = 0
        self.num_copies = self.num_queries = self.num_waits = 0
        self.fails_at = -1
        self.queue: deque[LateEvent] = deque()


class LateEvent:
    def __init__(self, stream: LateStream, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], late: int) -> None:
        self.stream, self.parts, self.due = stream, parts, stream.now + late
        self.fails = stream.num_copies == stream.fails_at
        stream.num_copies += 1
        stream.queue.append(self)

    def query(self) -> bool:
        self.stream.now += 1
        self.stream.num_queries += 1
        if self.stream.now >= self.due or self not in self.stream.queue:
            self.run_all()
        return self not in self.stream.queue

    def synchronize(self) -> None:
        self.stream.num_waits += 1
        self.run_all()

    def run_all(self) -> None:
        """All copies of the stream up to this one."""
        while self in self.stream.queue:
            self.stream.queue.popleft().run()
        if self.fails:
            raise RuntimeError("the device says that a copy failed")

    def run(self) -> None:
        for source, target in () if self.fails else self.parts:
            with torch.autograd._unsafe_preserve_version_counter(target):  # a device counts when it is told
                target.copy_(source)
        self.parts = ()


class LateCopies:
    device_is_host = False

    def __init__(self, late: int) -> None:
        self.late = late
        self.out, self.back = LateStream(), LateStream()
        self.new_bytes = 0

    def mark(self) -> None:
        return None

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: object) -> InFlightCopy:
        parts = ((source, target),)
        return InFlightCopy(LateEvent(self.out, parts, self.late), parts)

    def new_target(self, num_bytes: int) -> torch.Tensor:
        self.new_bytes += num_bytes
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def copy_in(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> InFlightCopy:
        return InFlightCopy(LateEvent(self.back, parts, self.late), parts)

    def make_visible(self, target: torch.Tensor, event: LateEvent) -> torch.Tensor:
        event.run_all()  # the computing stream would wait here, not the host
        return target
