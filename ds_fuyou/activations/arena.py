# SPDX-License-Identifier: Apache-2.0
"""Host memory that swapped activations pass through, or stay in: planned as a whole, taken as it is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ds_fuyou.errors import FuyouMemoryError, FuyouStateError
from ds_fuyou.host.device import Device
from ds_fuyou.host.memory import HostPool, round_up_to_page
from ds_fuyou.log import log_once

__all__ = ["PIECE_BYTES", "Arena"]

PIECE_BYTES = 8 * 1024 * 1024
"""Large enough for a disk's and a link's full rate, small enough that many are on their way at a time."""

_SEGMENT_BYTES = 256 * 1024 * 1024
_MOST_SEGMENT_BYTES = 2 * 1024 * 1024 * 1024
"""Of a device: it is registered within a forward, at 0.4 s a GiB by one thread on an H100's host."""
_SEGMENT_BYTES_ON_HOST = 1024 * 1024 * 1024  # where whole tensors lie in one run


class Arena:
    """At most :attr:`capacity_bytes`, in segments that are mapped, and pinned for ``device``, when the ones before are
    full: a share of host memory that is planned for activations costs nothing before activations fill it. It stays as
    small as it is where the system, or the device, refuses more.

    Args:
        register: told of every segment.
        forget: of those that are given back before the end.
    """

    def __init__(
        self,
        capacity_bytes: int,
        device: Device | None,
        register: Callable[[HostPool], None],
        forget: Callable[[HostPool], None],
    ) -> None:
        self.capacity_bytes = round_up_to_page(capacity_bytes)
        self.peak_bytes = 0
        on_host = device is None or device.is_host
        least = _SEGMENT_BYTES_ON_HOST if on_host else _SEGMENT_BYTES
        wanted = capacity_bytes // 8 if on_host else min(capacity_bytes // 8, _MOST_SEGMENT_BYTES)
        self._first_bytes = min(self.capacity_bytes, least)  # it stays, also when the arena is narrowed
        self._segment_bytes = min(self.capacity_bytes, max(least, round_up_to_page(wanted)))
        self._device, self._register, self._forget = device, register, forget
        self._segments: list[HostPool] = []
        self._grow()

    def _grow(self) -> HostPool | None:
        left = self.capacity_bytes - sum(segment.capacity_bytes for segment in self._segments)
        if left <= 0 and self._segments:
            return None
        try:
            size = self._segment_bytes if self._segments else self._first_bytes
            segment = HostPool(min(size, left), self._device)
        except (FuyouMemoryError, FuyouStateError) as error:
            if not self._segments:
                raise
            log_once(
                logging.WARNING,
                f"host memory for swapped activations stays at {self.capacity_bytes - left} bytes, of "
                f"{self.capacity_bytes} that were planned; training goes on: {error}",
                on_any_rank=True,
            )
            self.capacity_bytes -= left
            return None
        self._register(segment)
        self._segments.append(segment)
        return segment

    @property
    def piece_bytes(self) -> int:
        """What records are cut into: several of them fit, however small the arena is."""
        return min(PIECE_BYTES, max(4096, self.capacity_bytes // 16 // 4096 * 4096))

    @property
    def largest_block_bytes(self) -> int:
        """More in one run is not asked for."""
        return self._first_bytes // 2

    @property
    def used_bytes(self) -> int:
        return sum(segment.used_bytes for segment in self._segments)

    def try_allocate(self, num_bytes: int) -> torch.Tensor | None:
        """A byte tensor of whole pages, or None when no free run is large enough now."""
        num_bytes = round_up_to_page(num_bytes)
        for segment in self._segments:
            memory = segment.try_allocate(num_bytes)
            if memory is not None:
                break
        else:
            grown = self._grow()
            memory = grown.try_allocate(num_bytes) if grown is not None else None
        if memory is not None:
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return memory

    def narrow(self, capacity_bytes: int) -> None:
        """To so much, or to its first segment; the others are given back. Nothing may be in it."""
        for segment in self._segments[1:]:
            self._forget(segment)
            segment.give_back()
        del self._segments[1:]
        self.capacity_bytes = max(round_up_to_page(capacity_bytes), self._segments[0].capacity_bytes)

    def unpin(self) -> None:
        """Until :meth:`pin`. No copy may be in flight."""
        for segment in self._segments:
            segment.unpin()

    def pin(self) -> None:
        for segment in self._segments:
            segment.pin()

    def give_back(self) -> None:
        """At the end: no copy may be in flight."""
        for segment in self._segments:
            segment.give_back()
