# SPDX-License-Identifier: Apache-2.0
"""The two copy lanes between the device and host memory.

On the host there is no device to copy from: what leaves is copied into page-aligned memory that storage can take it
from, and what comes back is used where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ds_fuyou.host.device import Device
from ds_fuyou.host.memory import aligned_tensor

__all__ = ["CopyLane", "DeviceCopies", "HostCopies", "InFlightCopy", "copy_lane"]


@dataclass(frozen=True, eq=False)
class InFlightCopy:
    """Copies that a device stream does: owns sources and targets until their one event has passed."""

    event: Any
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]]

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        """Blocks the calling thread."""
        self.event.synchronize()


class CopyLane(Protocol):
    """Both directions. Sources and targets are flat byte tensors of equal length."""

    device_is_host: bool

    def current_stream(self) -> Any:
        """That computes now; None on the host."""

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, ``stream`` is the one that computes."""

    def mark(self) -> Any:
        """This point on the stream that computes: a copy out comes after the mark it is given, and after no more."""

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> InFlightCopy | None:
        """Starts device → host; None when it is complete already."""

    def new_target(self, num_bytes: int) -> torch.Tensor:
        """Memory where the device can use what comes back to it."""

    def copy_in(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> InFlightCopy | None:
        """Starts host → device for all (source, target) in order; None when they are complete already."""

    def make_visible(self, target: torch.Tensor, event: Any) -> torch.Tensor:
        """The target, on the stream that computes ordered after ``event``, which follows the last copy to it. Does not
        block the calling thread.
        """


class HostCopies:
    """The device is the host."""

    device_is_host = True

    def current_stream(self) -> None:
        return None

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> None:
        return None

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> InFlightCopy | None:
        target.copy_(source)
        return None

    def new_target(self, num_bytes: int) -> torch.Tensor:
        return aligned_tensor(num_bytes)

    def copy_in(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> InFlightCopy | None:
        for source, target in parts:
            target.copy_(source)
        return None

    def make_visible(self, target: torch.Tensor, event: Any) -> torch.Tensor:
        return target


class DeviceCopies:
    """One stream a direction, so that both run beside compute and beside each other. Host memory must be pinned.

    Nothing here synchronises the device: an event after each copy orders who comes next. The source of a copy is held
    by its owner until the event has passed; so the allocator needs no word of it. What comes back is allocated for
    the copying stream, and ``record_stream`` tells the allocator that another one works on it.
    """

    device_is_host = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._out = device.new_stream()
        self._in = device.new_stream()

    def current_stream(self) -> Any:
        return self._device.current_stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self._device.stream(stream)

    def mark(self) -> Any:
        return self._device.record_event()

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> InFlightCopy | None:
        self._out.wait_event(after)
        with self._device.stream(self._out):
            target.copy_(source, non_blocking=True)
            event = self._device.record_event(blocking=True)
        return InFlightCopy(event, ((source, target),))

    def new_target(self, num_bytes: int) -> torch.Tensor:
        with self._device.stream(self._in):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)

    def copy_in(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> InFlightCopy | None:
        with self._device.stream(self._in):
            for source, target in parts:
                target.copy_(source, non_blocking=True)
            event = self._device.record_event()
        return InFlightCopy(event, parts)

    def make_visible(self, target: torch.Tensor, event: Any) -> torch.Tensor:
        stream = self._device.current_stream()
        stream.wait_event(event)
        target.record_stream(stream)
        return target


def copy_lane(device: Device) -> CopyLane:
    """The lane that fits the device."""
    return HostCopies() if device.is_host else DeviceCopies(device)
