# SPDX-License-Identifier: Apache-2.0
"""One parameter's 16-bit values on this rank: where they are, and in which state."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

import torch

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.storage.io import IoLane
from ds_fuyou.storage.location import Location, ValuesRead

__all__ = ["Lost", "Partition", "Presence", "Source"]


class Presence(Enum):
    """Which memory holds a partition's values, beside its source."""

    AWAY = 1
    """None. (Where the source is host memory: nobody may use the values before their update is published.)"""
    READING = 2
    """Memory that a read in flight fills; the read owns it."""
    KEPT = 3
    """A block of a pool that holds them for a later use, and is given up for an earlier one. Nobody is shown it."""
    HERE = 4
    """Memory that whoever gathers them takes them from: a block of a pool, memory of its own, or the source's."""
    GATHERED = 5
    """The gathered parameter's alone. Memory that a device copies from is kept until the copy has ended."""


class Source(Protocol):
    """Where the values of one partition are when nobody uses them. Training thread only."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that a read of them takes (whole pages); 0 if they are in memory for good."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""

    @property
    def changes(self) -> bool:
        """Whether steps change them: then nothing is read ahead, kept or offered beyond the end of a step."""

    @property
    def io(self) -> IoLane: ...

    def is_ready(self) -> bool:
        """Whether the values of the last applied step can be read, or are in memory."""

    def wait(self) -> None:
        """Until they can. Raises what the work on them met."""

    def memory(self) -> torch.Tensor | None:
        """The published values, if host memory holds them for good."""

    def start_reading(self, memory: torch.Tensor, priority: int = 0) -> ValuesRead:
        """Brings them into ``memory`` (:attr:`num_bytes`)."""

    def location(self) -> Location:
        """Where they are; waits until nothing of them is on its way there."""

    def write(self, values: torch.Tensor) -> None:
        """The script replaced the values (1-D). Waits."""


class Lost:
    """Values that nobody has any more."""

    num_bytes = size_bytes = 1
    changes = True

    def __init__(self, what: str, why: str) -> None:
        self._message = (
            f"{what} has no values any more: {why}. Read or save parameters before that; build the model anew for "
            "another engine"
        )

    @property
    def io(self) -> IoLane:
        raise FuyouStateError(self._message)

    def is_ready(self) -> bool:
        return False

    def wait(self) -> None:
        raise FuyouStateError(self._message)

    def memory(self) -> torch.Tensor | None:
        raise FuyouStateError(self._message)

    def start_reading(self, memory: torch.Tensor, priority: int = 0) -> ValuesRead:
        raise FuyouStateError(self._message)

    def location(self) -> Location:
        raise FuyouStateError(self._message)

    def write(self, values: torch.Tensor) -> None:
        raise FuyouStateError(self._message)


class Partition:
    """The values of one parameter. The :class:`~ds_fuyou.parameters.store.ParameterStore` moves it between states; one
    without a store (no engine took it) is AWAY or HERE, and every read of it takes memory of its own.
    """

    __slots__ = (
        "copy_event",
        "handle",
        "is_lent",
        "is_pooled",
        "num_bytes",
        "presence",
        "read",
        "size_bytes",
        "source",
        "started_ns",
        "store",
        "values",
    )

    def __init__(self, handle: Any, source: Source) -> None:
        """``handle`` is whatever the borrower knows the parameter by."""
        self.handle = handle
        self.source = source
        self.num_bytes, self.size_bytes = source.num_bytes, source.size_bytes
        self.presence = Presence.AWAY
        self.read: ValuesRead | None = None
        self.values: torch.Tensor | None = None
        self.is_pooled = False  # the memory of the values, or of the read
        self.is_lent = False  # a script has the memory of the values, and may write there: nobody else uses it
        self.copy_event: Any = None  # of the last copy of the values to the device
        self.started_ns = 0  # when the read began
        self.store: Any = None

    def move(self, source: Source) -> None:
        """From here on ``source`` holds the values; what was read of them before is forgotten."""
        self.source, self.num_bytes, self.size_bytes = source, source.num_bytes, source.size_bytes
        self.presence, self.read, self.values, self.copy_event = Presence.AWAY, None, None, None
        self.is_lent = False

    def show(self, values: torch.Tensor) -> None:
        """``values`` are in memory: HERE."""
        self.presence, self.read, self.values = Presence.HERE, None, values

    def copy(self) -> torch.Tensor:
        """The published values, for reading only; no state changes."""
        self.source.wait()
        memory = self.source.memory()
        if memory is not None:
            return memory
        read = self.source.start_reading(aligned_tensor(self.num_bytes), priority=-1)
        read.wait()
        return read.values
