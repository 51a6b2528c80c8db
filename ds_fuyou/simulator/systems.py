# SPDX-License-Identifier: Apache-2.0
"""The systems that can be simulated by name. No torch."""

from __future__ import annotations

import difflib
from dataclasses import replace

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.policies import Fates, Policy, Tiers, Updates
from ds_fuyou.planner.presets import constants
from ds_fuyou.state_layout import SPLIT, layout_of

__all__ = ["POLICIES", "find_policy"]


def _streamed(name: str, updates: Updates, tiers: Tiers, fates: Fates) -> Policy:
    return Policy(
        name, updates, tiers, fates, slices_loss=True, share_of_block_rate=constants().streamed_share_of_block
    )


def _stock(name: str, tiers: Tiers) -> Policy:
    return Policy(
        name,
        Updates.STEP,
        tiers,
        Fates.CHECKPOINT,
        in_a_row=True,
        fused=False,
        logit_bytes=10,  # what was published would not fit with more
        gradient_bytes=4,
        keeps_gradients=True,
        gradients_on_storage=tiers is Tiers.STORAGE,
        extra_pass_bytes=18,
        share_of_block_rate=constants().stock_share_of_block,
    )


POLICIES = {
    policy.name: policy
    for policy in (
        # It casts gradients to fp32 on the device, before they are copied.
        replace(_streamed("fuyou", Updates.BACKWARD, Tiers.STORAGE, Fates.FIRST_CLASS), gradient_bytes=4),
        replace(
            _streamed("fuyou_optimizer_as_separate_stage", Updates.STEP, Tiers.STORAGE, Fates.FIRST_CLASS),
            keeps_gradients=True,
        ),
        replace(_stock("zero_3", Tiers.DRAM), on_device=True, gradient_bytes=2, extra_pass_bytes=0),
        _stock("zero_infinity", Tiers.STORAGE),
        _stock("zero_offload", Tiers.DRAM),
        replace(
            _streamed("ds_fuyou", Updates.DEADLINE, Tiers.PLANNED, Fates.OPERATORS),
            keeps_gradients=True,
            slices_loss=False,
            layout=layout_of(SPLIT, 2),
        ),
    )
}


def find_policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        FuyouConfigError: none has it; names the nearest.
    """
    policy = POLICIES.get(name.strip().lower())
    if policy is None:
        near = difflib.get_close_matches(name.lower(), POLICIES, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(POLICIES)} and max_model"
        raise FuyouConfigError(f"system {name!r} is not known; {hint}")
    return policy
