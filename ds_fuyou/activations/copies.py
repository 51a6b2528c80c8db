# SPDX-License-Identifier: Apache-2.0
"""The two copy lanes between the device and host memory.

On the host there is no device to copy from: what leaves is copied into page-aligned memory that storage can take it
from, and what comes back is used where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ds_fuyou.host.device import Device

__all__ = ["CopyLane", "DeviceCopies", "HostCopies", "InFlightCopy", "copy_lane"]


@dataclass(frozen=True)
class InFlightCopy:
    """A copy that a device stream does: owns source and target until its event has passed."""

    event: Any
    source: torch.Tensor
    target: torch.Tensor

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        """Blocks the calling thread."""
        self.event.synchronize()


class CopyLane(Protocol):
    """Both directions. Sources and targets are flat byte tensors of equal length."""

    device_is_host: bool

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> InFlightCopy | None:
        """Starts device → host; None when it is complete already."""

    def copy_in(self, source: torch.Tensor) -> InFlightCopy | None:
        """Starts host → device into new memory; None when ``source`` can be used itself."""

    def make_visible(self, copy: InFlightCopy) -> torch.Tensor:
        """The target, ordered after the copy on the stream that computes. Does not block the calling thread."""


class HostCopies:
    """The device is the host."""

    device_is_host = True

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> InFlightCopy | None:
        target.copy_(source)
        return None

    def copy_in(self, source: torch.Tensor) -> InFlightCopy | None:
        return None

    def make_visible(self, copy: InFlightCopy) -> torch.Tensor:
        return copy.target


class DeviceCopies:
    """One stream a direction, so that both run beside compute and beside each other. Host memory must be pinned.

    Nothing here synchronises the device: an event after each copy orders who comes next, and ``record_stream`` keeps
    the allocator from handing memory on while another stream works on it.
    """

    device_is_host = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._out = device.new_stream()
        self._in = device.new_stream()

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> InFlightCopy | None:
        self._out.wait_stream(self._device.current_stream())
        with self._device.stream(self._out):
            target.copy_(source, non_blocking=True)
            event = self._device.record_event()
        source.record_stream(self._out)
        return InFlightCopy(event, source, target)

    def copy_in(self, source: torch.Tensor) -> InFlightCopy | None:
        with self._device.stream(self._in):
            target = torch.empty(source.numel(), dtype=torch.uint8, device=self._device.torch_device)
            target.copy_(source, non_blocking=True)
            event = self._device.record_event()
        return InFlightCopy(event, source, target)

    def make_visible(self, copy: InFlightCopy) -> torch.Tensor:
        stream = self._device.current_stream()
        stream.wait_event(copy.event)
        copy.target.record_stream(stream)
        return copy.target


def copy_lane(device: Device) -> CopyLane:
    """The lane that fits the device."""
    return HostCopies() if device.is_host else DeviceCopies(device)
