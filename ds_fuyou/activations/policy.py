# SPDX-License-Identifier: Apache-2.0
"""What becomes of a saved tensor, decided when it is saved."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from ds_fuyou.activations.calls import OperatorCall

__all__ = ["BlockFate", "Fate"]


class Fate(enum.Enum):
    """Keep: it stays on the device. Swap: it goes to host memory or storage. Recompute: it is not saved at all, so no
    saved tensor has this fate; outputs of operators may (:mod:`ds_fuyou.activations.selective`).
    """

    KEEP = enum.auto()
    SWAP = enum.auto()
    RECOMPUTE = enum.auto()


@dataclass(frozen=True)
class BlockFate:
    """What becomes of one block.

    Attributes:
        saved: fate of what autograd saves in it; of its inputs alone, if it is recomputed.
        outputs: the block is recomputed, but for the outputs of these calls. None: it is not recomputed.
    """

    saved: Fate
    outputs: Mapping[OperatorCall, Fate] | None = None
