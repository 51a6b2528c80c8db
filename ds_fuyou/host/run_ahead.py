# SPDX-License-Identifier: Apache-2.0
"""How far the threads that launch a model's work run ahead of the device, in bytes of its memory.

What work on a device reads is let go by the host once the work is launched, and is free for others only when the device
has come there. Where nothing else makes the host wait (parameters in host memory, copies faster than computing) a whole
pass would be launched at once, and what was brought to the device for it would be there together. PyTorch counts that
as active memory, not as allocated: no peak shows it, no plan knows it, and where a device has no more the allocator
waits for all work, gives its blocks back to the driver and asks for them again.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from ds_fuyou.host.device import Device

__all__ = ["RunAhead", "run_ahead"]

_MOST_BYTES = 1 << 30
_OF_DEVICE = 16  # of a small one, one part of so many
_MARKS = 8


class RunAhead:
    """Of a device that computes by itself, whatever engines use it.

    An event is recorded on the stream that computes for each eighth of :attr:`most_bytes`. Whoever launches waits for
    the oldest of them, holding nothing; never for the newest, so a device has work while others wait.
    """

    def __init__(self, device: Device) -> None:
        self.most_bytes = min(_MOST_BYTES, device.total_bytes() // _OF_DEVICE)
        """The device may fall behind by so many, or by what the newest event stands for."""
        self._device = device
        self._lock = threading.Lock()  # autograd may have several threads
        self._marks: deque[tuple[Any, int]] = deque()
        self._marked_bytes = self._open_bytes = 0

    def let_go(self, num_bytes: int) -> None:
        """So many bytes are there for work that was launched on the current stream, or is about to be, and no longer.
        Waits until the device has passed what came before the last :attr:`most_bytes`.
        """
        passed = []
        with self._lock:
            self._open_bytes += num_bytes
            if self._open_bytes * _MARKS < self.most_bytes:
                return
            self._marks.append((self._device.record_event(blocking=True), self._open_bytes))
            self._marked_bytes += self._open_bytes
            self._open_bytes = 0
            while self._marked_bytes > self.most_bytes and len(self._marks) > 1:
                event, marked = self._marks.popleft()
                self._marked_bytes -= marked
                passed.append(event)
        for event in passed:
            event.synchronize()


_known: dict[torch.device, RunAhead] = {}


def run_ahead(device: Device) -> RunAhead | None:
    """The one of a device; None where that is the host."""
    return None if device.is_host else _known.setdefault(device.torch_device, RunAhead(device))
