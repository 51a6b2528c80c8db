# SPDX-License-Identifier: Apache-2.0
"""What becomes of a saved tensor, decided when it is saved."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

__all__ = ["ActivationPolicy", "Fate", "SavedTensor", "SwapBlocks", "SwapEverything"]


class Fate(enum.Enum):
    """Keep: it stays on the device. Swap: it goes to host memory or storage. (What is recomputed is not saved.)"""

    KEEP = enum.auto()
    SWAP = enum.auto()


@dataclass(frozen=True)
class SavedTensor:
    """What a policy may know: the block in which it was saved ("" outside of all), its place in the order of saving
    within that block, and its bytes.
    """

    block: str
    place: int
    num_bytes: int


class ActivationPolicy(Protocol):
    """The planner's say. Asked once for every storage that is saved and large enough to be moved."""

    def fate(self, saved: SavedTensor) -> Fate: ...


class SwapEverything:
    """``activations.mode: swap``: nothing is kept that can be moved."""

    def fate(self, saved: SavedTensor) -> Fate:
        return Fate.SWAP


class SwapBlocks:
    """Swaps what the named blocks save, keeps the rest."""

    def __init__(self, blocks: Collection[str]) -> None:
        self._blocks = frozenset(blocks)

    def fate(self, saved: SavedTensor) -> Fate:
        return Fate.SWAP if saved.block in self._blocks else Fate.KEEP
