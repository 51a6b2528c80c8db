# SPDX-License-Identifier: Apache-2.0
"""The plan of one rank and the rule that makes it. No torch.

The rule for every "auto": of the placements of whole classes that fit the DRAM budget the one that moves the fewest
bytes to and from storage in a step, by the counts of the cost model (``cost.py``). What is left of the budget becomes
staging and look-ahead memory. Nothing of the machine is measured for it: which lane is the slowest does not matter as
long as fewer bytes are never slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_fuyou.errors import FuyouConfigError

__all__ = ["MIB", "Plan", "PlanInput", "make_plan"]

MIB = 1024 * 1024
_STAGING_BYTES = 1024 * MIB
_PREFETCH_BYTES = 256 * MIB
_CHUNK_BYTES = 16 * MIB
_ACTIVATION_BYTES = 256 * MIB
_SMALLEST_SWAPPED_BYTES = 64 * 1024


@dataclass(frozen=True)
class PlanInput:
    """What the rule needs to know of one rank. Tiers are "auto", "cpu" or "nvme"; sizes in bytes."""

    numel: int
    param_bytes_each: int
    grad_bytes_each: int
    num_moments: int
    largest_param_numel: int
    dram_budget_bytes: int
    params_tier: str = "auto"
    optimizer_tier: str = "auto"
    gradients_tier: str = "auto"
    may_speculate: bool = True
    num_cpus: int = 1
    device_is_host: bool = False
    swaps_activations: bool = False


@dataclass(frozen=True)
class Plan:
    """Where every class of one rank lives and how much memory the lanes get."""

    params_tier: str
    optimizer_tier: str
    gradients_tier: str
    chunk_bytes: int
    staging_bytes: int
    prefetch_bytes: int
    num_threads: int
    queue_depth: int
    block_bytes: int
    slots: int
    double_params: bool
    activation_bytes: int = 0  # host memory of swapped activations
    smallest_swapped_bytes: int = _SMALLEST_SWAPPED_BYTES

    def resident_bytes(self, given: PlanInput) -> int:
        """Host bytes that grow with the model under this plan."""
        return _resident(given, self.params_tier, self.optimizer_tier, self.gradients_tier, self.double_params)

    @property
    def needs_storage(self) -> bool:
        return "nvme" in (self.params_tier, self.optimizer_tier, self.gradients_tier)


def _resident(given: PlanInput, params: str, optimizer: str, gradients: str, double_params: bool) -> int:
    each = 0
    if params == "cpu":
        each += given.param_bytes_each * (2 if double_params else 1)
    if optimizer == "cpu":
        each += 4 * (1 + given.num_moments)
    if gradients == "cpu":
        each += given.grad_bytes_each
    return each * given.numel


def _candidates(given: PlanInput) -> list[tuple[str, str, str]]:
    """(params, optimizer, gradients) from the fewest bytes moved to the most, as far as the user left it open."""
    known = [
        ("cpu", "cpu", "cpu"),
        ("nvme", "cpu", "cpu"),
        ("cpu", "nvme", "cpu"),
        ("cpu", "nvme", "nvme"),
        ("nvme", "nvme", "cpu"),
        ("nvme", "nvme", "nvme"),
    ]
    wanted = (given.params_tier, given.optimizer_tier, given.gradients_tier)
    chosen: list[tuple[str, str, str]] = []
    for tiers in known:
        merged = tuple(w if w != "auto" else t for w, t in zip(wanted, tiers, strict=True))
        if merged not in chosen:
            chosen.append((merged[0], merged[1], merged[2]))
    return sorted(chosen, key=lambda tiers: _moved_bytes_each(given, *tiers))


def _moved_bytes_each(given: PlanInput, params: str, optimizer: str, gradients: str) -> int:
    """Bytes a parameter and step to and from storage: P16 read in both passes and written once, states read and
    written, gradients written and (by updates that wait for ``step()``) read.
    """
    moved = 3 * given.param_bytes_each if params == "nvme" else 0
    moved += 2 * 4 * (1 + given.num_moments) if optimizer == "nvme" else 0
    return moved + (2 * given.grad_bytes_each if gradients == "nvme" else 0)


def make_plan(given: PlanInput, overrides: Mapping[str, int | None]) -> Plan:
    """The placement that fits the DRAM budget and moves least; ``overrides`` replaces single values of the plan.

    Raises :class:`FuyouConfigError` with the bytes needed and found when none fits.
    """
    over = {key: value for key, value in overrides.items() if value is not None}
    needs: list[int] = []
    swaps = given.swaps_activations
    for params, optimizer, gradients in _candidates(given):
        double = params == "cpu" and optimizer == "nvme" and given.may_speculate
        resident = _resident(given, params, optimizer, gradients, double)
        left = given.dram_budget_bytes - resident
        minimum = _minimum_lane_bytes(given, params, optimizer, gradients)
        needs.append(resident + minimum)
        if left < minimum:
            continue
        return Plan(
            params_tier=params,
            optimizer_tier=optimizer,
            gradients_tier=gradients,
            chunk_bytes=over.get("chunk_bytes", _CHUNK_BYTES),
            staging_bytes=over.get("staging_bytes", max(minimum // 2, min(_STAGING_BYTES, left // 2))),
            prefetch_bytes=over.get("prefetch_bytes", min(_PREFETCH_BYTES, left // 4)),
            num_threads=over.get("num_threads", _num_threads(given)),
            queue_depth=over.get("queue_depth", 32),
            block_bytes=over.get("block_bytes", MIB),
            slots=over.get("slots", 2),
            double_params=double,
            activation_bytes=over.get("activation_bytes", min(_ACTIVATION_BYTES, left // 8) if swaps else 0),
            smallest_swapped_bytes=over.get("smallest_swapped_bytes", _SMALLEST_SWAPPED_BYTES),
        )
    raise FuyouConfigError(
        f"the smallest placement that the tiers allow needs {min(needs) / MIB:.0f} MiB of host memory, "
        f"dram_budget_bytes is {given.dram_budget_bytes / MIB:.0f} MiB; raise it, or set more tiers to nvme"
    )


def _minimum_lane_bytes(given: PlanInput, params: str, optimizer: str, gradients: str) -> int:
    """Two chunks in flight, gradient buffers, and two of the largest parameter where they live on storage."""
    if "nvme" not in (params, optimizer, gradients):
        return 0
    chunk = _CHUNK_BYTES * (1 + given.num_moments) + _CHUNK_BYTES
    return 2 * chunk + (2 * given.largest_param_numel * given.param_bytes_each if params == "nvme" else 0)


def _num_threads(given: PlanInput) -> int:
    """All cores where the device is the host: a short burst stalls compute less than a long share of one core
    (docs/roadmap.md has the measurement). Elsewhere one core stays free for the training thread.
    """
    return max(1, given.num_cpus if given.device_is_host else given.num_cpus - 1)
