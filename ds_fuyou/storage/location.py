# SPDX-License-Identifier: Apache-2.0
"""Where the values of one tensor are: pages on storage, host memory, or some of each; how they are read and written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.storage.io import IoLane, Transfer
from ds_fuyou.storage.types import Extent

__all__ = ["Location", "StoredRun", "ValuesRead"]


@dataclass(frozen=True)
class StoredRun:
    """Bytes [begin, end) of a location's pages, and where they lie on storage, in order."""

    begin: int
    end: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class ValuesRead:
    """Values on their way into memory: reads in flight, which own the memory, and the view that will hold them."""

    transfers: tuple[Transfer, ...]
    values: torch.Tensor
    what: str
    num_bytes: int
    """Of storage; what was in memory is not counted."""

    def done(self) -> bool:
        return all(transfer.done() for transfer in self.transfers)

    def wait(self) -> float:
        """Until the values are there; returns the seconds waited. Raises FuyouStorageError if a read failed."""
        return sum(transfer.wait() for transfer in self.transfers)


@dataclass(frozen=True)
class Location:
    """``numel`` elements of ``dtype``. A read brings ``num_bytes`` of whole pages; they begin ``skip`` bytes in these.

    ``runs`` are the pages on storage, ``parts`` the elements in memory (the first element of each, and where they are).
    """

    what: str
    numel: int
    dtype: torch.dtype
    num_bytes: int
    skip: int = 0
    runs: tuple[StoredRun, ...] = ()
    parts: tuple[tuple[int, torch.Tensor], ...] = ()

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The values in ``memory``, which holds the pages (bytes)."""
        return memory[self.skip : self.skip + self.numel * self.dtype.itemsize].view(self.dtype)

    def start_reading(self, io: IoLane, memory: torch.Tensor, priority: int = 0) -> ValuesRead:
        """Brings the values into ``memory`` (:attr:`num_bytes`): parts in memory are copied, the rest is read."""
        values = self.view(memory)
        for begin, part in self.parts:
            values[begin : begin + part.numel()].copy_(part)
        what = f"reading {self.what}"
        reads = [io.read(run.extents, memory[run.begin : run.end], what, priority=priority) for run in self.runs]
        return ValuesRead(tuple(reads), values, self.what, sum(run.end - run.begin for run in self.runs))

    def read(self, io: IoLane) -> torch.Tensor:
        """The values, in memory of their own."""
        read = self.start_reading(io, aligned_tensor(self.num_bytes), priority=-1)
        read.wait()
        return read.values

    def write(self, io: IoLane, values: torch.Tensor) -> None:
        """Replaces the values (1-D, :attr:`dtype`) in their place; what shares pages with them stays. Waits."""
        memory = aligned_tensor(self.num_bytes)
        shares_pages = self.skip > 0 or self.numel * self.dtype.itemsize < self.num_bytes
        there = self.view(memory)
        if shares_pages:
            self.start_reading(io, memory, priority=-1).wait()
        there.copy_(values.view(-1))
        for begin, part in self.parts:
            part.copy_(there[begin : begin + part.numel()])
        what = f"writing {self.what}"
        for transfer in [io.write(run.extents, memory[run.begin : run.end], what) for run in self.runs]:
            transfer.wait()
