# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters on storage: one copy that never changes, read ahead of its use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ds_fuyou.host.device import Device
from ds_fuyou.host.memory import HostPool, aligned_tensor
from ds_fuyou.parameters.trace import AccessTrace
from ds_fuyou.storage.io import Transfer
from ds_fuyou.storage.staging_file import StagingFile

__all__ = ["FrozenParameters", "StagedParam"]

SMALL_BYTES = 256 * 1024
"""Smaller ones are read when they are asked for: they often stay gathered and would fragment the pool."""


@dataclass(frozen=True)
class StagedParam:
    """Where one partition lies: ``num_bytes`` (whole pages) at ``offset``, the first ``numel`` elements are it."""

    file: StagingFile
    offset: int
    numel: int
    num_bytes: int
    dtype: torch.dtype

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The partition in ``memory``, which holds its pages."""
        return memory.view(self.dtype)[: self.numel]


class FrozenParameters:
    """Look-ahead by recorded order, keyed by parameter id. Used by the training thread alone.

    At most ``pool_bytes`` (or two of the largest parameter) hold what was read ahead or is still in use; what finds
    no room there is read on demand into memory of its own.
    """

    def __init__(self, params: Mapping[int, StagedParam], pool_bytes: int, device: Device | None = None) -> None:
        self._params = dict(params)
        largest = max(param.num_bytes for param in self._params.values())
        self._pool = HostPool(min(max(pool_bytes, 2 * largest), 2 * self.num_bytes), device)
        for file in {id(param.file): param.file for param in self._params.values()}.values():
            file.register(self._pool)
        self._in_flight: dict[int, Transfer] = {}
        self.trace = AccessTrace()
        self.num_ahead_reads = 0
        self.waited_secs = 0.0

    def __contains__(self, key: int) -> bool:
        return key in self._params

    @property
    def num_bytes(self) -> int:
        """Bytes on storage."""
        return sum(param.num_bytes for param in self._params.values())

    @property
    def pool(self) -> HostPool:
        """The look-ahead memory."""
        return self._pool

    @property
    def pool_bytes(self) -> int:
        return self._pool.capacity_bytes

    def fetch(self, key: int) -> torch.Tensor:
        """The partition's values; waits for its read."""
        param = self._params[key]
        transfer = self._in_flight.pop(key, None)
        if transfer is None:
            transfer = param.file.begin_read(param.offset, aligned_tensor(param.num_bytes), priority=-1)
        self.waited_secs += transfer.wait()
        return param.view(transfer.memory)

    def look_ahead(self, is_resident: Callable[[int], bool]) -> None:
        """Starts reads in the recorded order until the pool is full."""
        seen: set[int] = set()
        for key in self.trace.upcoming():
            if key in seen or key in self._in_flight or is_resident(key):
                continue
            seen.add(key)
            param = self._params[key]
            if param.num_bytes < SMALL_BYTES:
                continue
            memory = self._pool.try_allocate(param.num_bytes)
            if memory is None:
                return
            self._in_flight[key] = param.file.begin_read(param.offset, memory)
            self.num_ahead_reads += 1

    def forget(self, key: int) -> None:
        """The partition is about to be rewritten in its place: what was read ahead is old."""
        transfer = self._in_flight.pop(key, None)
        if transfer is not None:
            transfer.wait()

    def close(self) -> None:
        """Waits for what is in flight."""
        for key in list(self._in_flight):
            self.forget(key)
