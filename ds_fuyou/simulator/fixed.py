# SPDX-License-Identifier: Apache-2.0
"""What a ``fuyou`` block decides, so that the planner does not: tiers, activations, budgets. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.hardware import Machine
from ds_fuyou.planner.policies import Policy, Updates
from ds_fuyou.state_layout import FP32, masters_of, moments_of
from ds_fuyou.units import shown_bytes

__all__ = ["limited", "under_block"]

_UPDATES = {"none": Updates.STEP, "backward": Updates.BACKWARD, "backward_and_forward": Updates.DEADLINE}


def under_block(
    policy: Policy,
    config: Any,
    has_storage: bool,
    *,
    is_bfloat16: bool = True,
    param_bytes: int = 2,
    stock: tuple[str, str] = (FP32, FP32),
) -> Policy:
    """The policy with what a ``FuyouConfig`` decides: tiers, shares, activations, and when updates may run; all in host
    memory without ``has_storage``, as in a run. ``is_bfloat16``: parameters are. What shares blocks is not known here:
    masters are not cloned. ``stock``: how the JSON around it has masters and moments kept.

    Raises:
        FuyouConfigError: masters cannot be as the block says.
    """
    of_masters, of_moments = stock
    masters = masters_of(config.optimizer.masters, is_bfloat16=is_bfloat16, checksum=config.checksum, stock=of_masters)
    layout = replace(policy.layout, masters=masters, moments=moments_of(config.optimizer.moments, "adam", of_moments))
    policy = replace(
        policy,
        block=config,
        has_storage=has_storage,
        mode=config.activations.mode,
        updates=_UPDATES[config.optimizer.overlap],
        layout=layout,
        param_bytes=param_bytes,
        gradient_bytes=max(policy.gradient_bytes, param_bytes),
    )
    return policy.deferred() if config.optimizer.clip_policy == "defer" else policy


def limited(machine: Machine, config: Any, has_storage: bool) -> Machine:
    """The machine within the budgets of a block, which are those of one rank.

    Raises:
        FuyouConfigError: a budget is larger than what the machine has.
    """
    ranks = machine.num_gpus
    is_open = config.dram_budget_bytes == "auto"
    dram = _budget("dram_budget_bytes", config, ranks, machine.dram_bytes, "of DRAM")
    gpu = _budget("gpu_budget_bytes", config, 1, machine.gpu_bytes, "on a GPU")
    storage = _budget("nvme_budget_bytes", config, ranks, machine.storage_bytes, "on the SSDs")
    return replace(
        machine,
        pinned_limit_bytes=machine.pinned_limit_bytes if is_open else min(machine.pinned_limit_bytes, dram),
        gpu_bytes=int(gpu),
        storage_bytes=storage if has_storage else 0.0,
    )


def _budget(name: str, config: Any, ranks: int, have: float, where: str) -> float:
    """Of all ranks together."""
    value = getattr(config, name)
    if value == "auto":
        return have
    if value * ranks > have:
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        raise FuyouConfigError(
            f"fuyou.{name} must not exceed what there is: {shown_bytes(value)}{each}, {shown_bytes(have)} {where}"
        )
    return float(value) * ranks
