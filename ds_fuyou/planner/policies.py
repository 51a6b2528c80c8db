# SPDX-License-Identifier: Apache-2.0
"""The systems that can be simulated, told apart by a few facts each. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from ds_fuyou.state_layout import WHOLE, StateLayout, layout_of

if TYPE_CHECKING:
    from ds_fuyou.config import FuyouConfig

__all__ = ["LOGIT_BYTES", "Fates", "Policy", "Tiers", "Updates"]

LOGIT_BYTES = 14
"""Of the device, that cross entropy may take at once for a logit: its log-probability, the gradient of that and of the
logit in fp32, and the logit in 16 bits."""


class Updates(Enum):
    """When chunks are updated."""

    STEP = "inside step(), reads, updates and writes of neighbouring chunks overlap"
    BACKWARD = "in backward, all done before the next forward"
    FORWARD = "behind backward, beside the next forward"
    DEADLINE = "in backward and the next forward, each before its parameters are read"


_DEFERRED = {Updates.DEADLINE: Updates.FORWARD, Updates.BACKWARD: Updates.STEP}


class Tiers(Enum):
    """Where P16, P32, M and V live between uses; gradients as the other fields of the policy say."""

    STORAGE = "all on storage, host memory is a window"
    DRAM = "all in host memory"
    PLANNED = "shares in host memory as the planner chooses"


class Fates(Enum):
    """What happens to operator outputs that backward needs."""

    CHECKPOINT = "block inputs are kept in host memory, the rest is recomputed"
    FIRST_CLASS = "block inputs are swapped, and in all blocks or in none the outputs worth most a byte"
    OPERATORS = "kept, swapped or recomputed for every operator of every block"


_FP32 = layout_of(WHOLE, 2)


@dataclass(frozen=True)
class Policy:
    """Facts about one system.

    Attributes:
        in_a_row: transfers, compute and updates wait for each other; nothing overlaps.
        fused: attention and element-wise operators are fused (no s x s matrix in memory). ``slices_loss``: the loss is
            taken of one slice of tokens after the other, so that logits are never whole; else it takes ``logit_bytes``
            of the device at once for each of them. All three are the script's.
        gradient_bytes: a parameter, on the link and where gradients wait; ``param_bytes`` of P16.
        layout: of P32 and the moments.
        keeps_gradients: they exist as a class until ``step()``; else a window of them.
        gradients_on_storage: that class lies on storage with the states.
        on_device: nothing lives off the GPUs, which share everything among them.
        extra_pass_bytes: other passes over host memory an update costs, a parameter (unscale, norm, copies).
        block: bounds where tiers are planned; None: everything is open. ``has_storage``: it has directories for state.
        mode: of activations, "auto", "none", "swap" or "recompute": the block's, or tried without one.
        redo_share: of steps, those whose updates begun in backward are done again: clipping, overflow.
        share_of_block_rate: of the rate of one block alone, what a whole step gets.
        reused_bytes: of parameters used last in forward, those that stay on the device for backward; ``staying_bytes``:
            of those used first, from one micro-batch to the next.
    """

    name: str
    updates: Updates
    tiers: Tiers
    fates: Fates
    in_a_row: bool = False
    fused: bool = True
    slices_loss: bool = False
    logit_bytes: int = LOGIT_BYTES
    gradient_bytes: int = 2
    param_bytes: int = 2
    layout: StateLayout = _FP32
    keeps_gradients: bool = False
    gradients_on_storage: bool = False
    on_device: bool = False
    extra_pass_bytes: int = 0
    block: FuyouConfig | None = None
    has_storage: bool = True
    mode: str = "auto"
    redo_share: float = 0.0
    share_of_block_rate: float = 1.0
    reused_bytes: float = 0.0
    staying_bytes: float = 0.0

    @property
    def is_durable(self) -> bool:
        """Whether states have two slots on storage, whatever fits."""
        return self.block is not None and self.block.durable

    @property
    def begins_in_backward(self) -> bool:
        """Whether updates do."""
        return self.updates in _DEFERRED

    def deferred(self) -> Policy:
        """With updates that wait for ``step()``."""
        return replace(self, updates=_DEFERRED.get(self.updates, self.updates))

    def begun(self) -> Policy:
        """With updates that begin in backward, as those do that :meth:`deferred` makes wait."""
        begun = {waiting: updates for updates, waiting in _DEFERRED.items()}.get(self.updates, self.updates)
        return replace(self, updates=begun)
