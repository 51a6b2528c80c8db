# SPDX-License-Identifier: Apache-2.0
"""A plan document put to use: what it says where the block says "auto". No torch, no pydantic."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ds_fuyou.errors import FuyouConfigError, shown
from ds_fuyou.planner.document import CLASSES, PlanDocument

__all__ = ["completed_block", "planned_shares", "require_params"]

_CLOSE = 0.05  # biases, positions and padding of the vocabulary that a model's config does not tell


def completed_block(block: Mapping[str, Any], plan: PlanDocument) -> dict[str, Any]:
    """The block with the plan's tiers, and its mode of activations, where the block leaves them open.

    A class that the plan keeps wholly in one place gets that tier; of one in between see :func:`planned_shares`. Where
    all activations are to leave the device, or to be computed again, that is the mode; a mixture is what mode "auto"
    does, and that all stay it finds by itself.

    Raises:
        FuyouConfigError: the plan is for another number of ranks than the launcher started.
    """
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks.isdigit() and int(ranks) != plan.world_size:
        raise FuyouConfigError(
            f"the plan is for {shown(plan.world_size)} ranks, {int(ranks)} run; make one with "
            f"fuyou plan --num-gpus {int(ranks)}"
        )
    whole = {0.0: "nvme", 1.0: "cpu"}
    shares = {name: float(getattr(plan.residency, name)) for name in CLASSES}
    wanted = {name: {"tier": whole[share]} for name, share in shares.items() if share in whole}
    mode = _mode(plan)
    if mode is not None:
        wanted["activations"] = {"mode": mode}
    completed = dict(block)
    for section, values in wanted.items():
        given = completed.get(section, {})
        if isinstance(given, Mapping):  # anything else is the validator's to refuse
            kept = {key: value for key, value in given.items() if value != "auto"}
            completed[section] = {**values, **kept}
    return completed


def planned_shares(block: Mapping[str, Any], plan: PlanDocument) -> dict[str, float]:
    """Resident shares between 0 and 1, by class, of classes whose tier the block leaves open."""
    shares = {}
    for name in CLASSES:
        share = getattr(plan.residency, name)
        if _is_open(block, name) and 0 < share < 1:
            shares[name] = float(share)
    if plan.residency.frozen < 1 and _is_open(block, "parameters"):
        shares["frozen"] = float(plan.residency.frozen)
    if plan.residency.optimizer_twice > 0 and _is_open(block, "optimizer"):
        shares["optimizer_twice"] = float(plan.residency.optimizer_twice)
    return shares


def _is_open(block: Mapping[str, Any], name: str) -> bool:
    section = block.get(name, {})
    return isinstance(section, Mapping) and section.get("tier", "auto") == "auto"


def _mode(plan: PlanDocument) -> str | None:
    """ "swap" or "recompute" where the plan says so for every output but block inputs."""
    rows = [counts for name, counts in plan.activations.items() if name != "block_input"]
    for mode in ("swap", "recompute"):
        if rows and all(counts[mode] == plan.model.layers for counts in rows):
            return mode
    return None


def require_params(plan: PlanDocument, num_params: int) -> None:
    """Refuses a plan whose model has another number of parameters than the one that runs.

    Raises:
        FuyouConfigError: with both numbers.
    """
    if abs(num_params - plan.model.params) > _CLOSE * plan.model.params:
        raise FuyouConfigError(
            f"fuyou.plan is for {plan.model.name} with {plan.model.params} parameters, this model has {num_params}; "
            f"make a plan for it with fuyou plan"
        )
