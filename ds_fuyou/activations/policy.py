# SPDX-License-Identifier: Apache-2.0
"""What becomes of a saved tensor, decided when it is saved."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ds_fuyou.activations.calls import OperatorCall

__all__ = ["ActivationPolicy", "BlockFate", "Fate", "FateByBlock", "KeepEverything", "SavedTensor", "SwapEverything"]


class Fate(enum.Enum):
    """Keep: it stays on the device. Swap: it goes to host memory or storage. Recompute: it is not saved at all, so no
    saved tensor has this fate; outputs of operators may (:mod:`ds_fuyou.activations.selective`).
    """

    KEEP = enum.auto()
    SWAP = enum.auto()
    RECOMPUTE = enum.auto()


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


class KeepEverything:
    """As far as the swapper has room (``keep_bytes``)."""

    def fate(self, saved: SavedTensor) -> Fate:
        return Fate.KEEP


@dataclass(frozen=True)
class BlockFate:
    """What becomes of one block.

    Attributes:
        saved: fate of what autograd saves in it; of its inputs alone, if it is recomputed.
        outputs: the block is recomputed, but for the outputs of these calls. None: it is not recomputed.
    """

    saved: Fate
    outputs: Mapping[OperatorCall, Fate] | None = None


class FateByBlock:
    """One fate for all that a block saves; "" stands for what lies around blocks. What is not named is kept."""

    def __init__(self, fates: Mapping[str, Fate]) -> None:
        self._fates = dict(fates)

    def fate(self, saved: SavedTensor) -> Fate:
        return self._fates.get(saved.block, Fate.KEEP)
