# SPDX-License-Identifier: Apache-2.0
"""Host memory that a device may still be copying from."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from ds_fuyou.host.device import Device

__all__ = ["ReleaseFence"]


class ReleaseFence:
    """Keeps a tensor that its owner lets go of until the device has done all that was issued before.

    Copies from pinned memory return at once, and the memory would go back to its pool, and be filled by the next
    read, while they run. Used by the training thread alone; nothing waits here.
    """

    def __init__(self, device: Device) -> None:
        """Where the device is the host copies end before they return, and this does nothing."""
        self._device = device
        self._held: deque[tuple[Any, torch.Tensor]] = deque()

    def hold(self, tensor: torch.Tensor) -> None:
        """The owner is done with ``tensor``; the current stream comes after all that reads it."""
        if self._device.is_host:
            return
        self._held.append((self._device.record_event(), tensor))
        self.sweep()

    def sweep(self) -> None:
        """Lets go of what the device is done with."""
        while self._held and self._held[0][0].query():
            self._held.popleft()

    def __len__(self) -> int:
        return len(self._held)
