# SPDX-License-Identifier: Apache-2.0
"""The plan of one rank: what it must know, what it says, and the host memory it takes. No torch.

``decide.py`` fills host memory. Before the classes come staging and look-ahead memory, a quarter of the budget, at
most what they can use, the blocks that states pass through on their way to a checkpoint which is written behind
training, and the arena of swapped activations: what keeps every path busy both ways, and the tensors of a block
between device and storage; or, where they are to stay in host memory and it is not known how many they are, a quarter
of the budget, and whatever the other classes leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ds_fuyou.planner.document import CLASSES, Residency
from ds_fuyou.state_layout import StateLayout
from ds_fuyou.storage.layout import queue_depth

__all__ = [
    "CHUNK_BYTES",
    "GRADIENT_BUFFERS",
    "MIB",
    "SAVE_BLOCKS",
    "SAVE_BLOCKS_READ",
    "TWICE",
    "Plan",
    "PlanInput",
    "activations_stay",
    "arena_bytes",
    "built_plan",
    "bytes_each",
    "classes_of",
    "handles_activations",
    "has_two_versions",
    "in_use_bytes",
    "kept_param_bytes",
    "lane_bytes",
    "least_arena_bytes",
    "least_plan",
    "least_resident",
    "minimum_lane_bytes",
    "most_prefetch_bytes",
    "narrow_arena_bytes",
    "resident_bytes",
    "save_bytes",
    "stored_bytes",
    "under_block",
    "weighs_start",
    "whole_bytes",
]

MIB = 1024 * 1024
_STAGING_BYTES = 1024 * MIB
_PREFETCH_BYTES = 256 * MIB
GRADIENT_BUFFERS = 4
"""Chunks of G16 on storage that are in host memory by each of their ways: twice as many and one are filled at once
(more if one parameter has more), as many are being written, and as many are read ahead or kept for the next."""
SAVE_BLOCKS = 6
SAVE_BLOCKS_READ = 2  # of them
"""State blocks on their way to a checkpoint: lent to updates, being read or being written."""
CHUNK_BYTES = (16 * MIB, 8 * MIB, 4 * MIB, 2 * MIB)
"""Of these the largest with which a placement fits the budget."""
_ARENA_BYTES = 256 * MIB  # at least, where the budget has eight times as much
_ARENA_PATH_BYTES = 128 * MIB  # pieces of one path: leaving, being written, being read, on their way up
_ARENA_BLOCK_BYTES = 2048 * MIB  # for what a block saves, where that is not known; given back if nothing leaves
_SMALLEST_SWAPPED_BYTES = 64 * 1024
_PARTLY_HELD = 1 / 4  # of P16 on storage: as much is in memory, too, in parameters of which the rest is not


@dataclass(frozen=True)
class PlanInput:
    """What the rule needs to know of one rank. Tiers are "auto", "cpu" or "nvme"; sizes in bytes.

    ``shares``: resident shares that a plan fixes, by field of :class:`Residency`; used where the tier is "auto".
    ``num_paths``: of storage. ``block_activation_bytes``: what the largest block saves in a forward; 0: not known.
    ``storage_budget_bytes``: for what is on storage; ``durable``: in two slots. ``device_room_bytes``: for activations
    that stay on the device. ``frozen_bytes``: of parameters that are not trained, ``largest_frozen_bytes`` of one of
    them. ``first_numel``: of those that are, what comes before the first block: its gradients arrive last, and it is
    needed first. ``reused_numel``: of all, what stays on the device from the end of forward to the begin of backward;
    ``staying_numel``: from one micro-batch to the next.
    """

    numel: int
    param_bytes_each: int
    grad_bytes_each: int
    layout: StateLayout
    largest_param_numel: int
    dram_budget_bytes: int
    params_tier: str = "auto"
    optimizer_tier: str = "auto"
    gradients_tier: str = "auto"
    may_speculate: bool = True
    weighs_start: bool = False  # whether updates begin in backward is the plan's to say
    num_cpus: int = 1
    device_is_host: bool = False
    is_unified: bool = False  # device and host share one memory, though the device computes by itself
    swaps_activations: bool = False
    activations_stay_in_dram: bool = False  # there is no storage behind the host memory that they are swapped to
    activations_leave_dram: bool = False  # what is swapped is written to storage at once
    shares: Mapping[str, float] = field(default_factory=dict)
    num_paths: int = 1
    block_activation_bytes: int = 0
    storage_budget_bytes: float = float("inf")
    durable: bool = False
    device_room_bytes: float = 0.0
    frozen_bytes: float = 0.0
    largest_frozen_bytes: float = 0.0
    first_numel: int = 0
    reused_numel: int = 0
    staying_numel: int = 0
    saves_behind: bool = False  # checkpoints are written while training goes on
    keeps_read: bool = False  # of the budget, what nothing else takes holds parameters that were read
    lent_bytes: int = 0  # of the budget that the user named, to engines without an optimizer, and not in this one

    def open(self) -> PlanInput:
        """Before it was decided when updates begin."""
        return replace(self, may_speculate=self.may_speculate or self.weighs_start)

    def fixed_shares(self) -> dict[str, float]:
        """Resident shares that are not the rule's to choose: 1 and 0 for tiers "cpu" and "nvme", else the plan's."""
        tiers = {"parameters": self.params_tier, "optimizer": self.optimizer_tier, "gradients": self.gradients_tier}
        tiers["frozen"] = self.params_tier
        whole = {"cpu": 1.0, "nvme": 0.0}
        shares = {name: share for name, share in self.shares.items() if name != TWICE or self.may_speculate}
        return {**shares, **{name: whole[tier] for name, tier in tiers.items() if tier != "auto"}}


def handles_activations(config: Any, device_is_host: bool) -> bool:
    """Whether anything is to be done under a ``FuyouConfig``. Mode "auto" needs a device with memory of its own, a
    budget, or a plan document that says it.
    """
    if config.activations.mode != "auto":
        return bool(config.activations.mode != "none")
    document = config.plan.document if config.plan is not None else None
    is_planned = document is not None and bool(document.fates)
    return bool(config.gpu_budget_bytes != "auto" or not device_is_host or is_planned)


def weighs_start(config: Any) -> bool:
    """Whether a ``FuyouConfig`` leaves it to the plan when updates begin; which knows what hides behind both passes."""
    return bool(config.optimizer.clip_policy == "auto" and config.optimizer.overlap == "backward_and_forward")


def under_block(given: PlanInput, config: Any, has_storage: bool) -> PlanInput:
    """Sizes and means of a rank with what a ``FuyouConfig`` decides; means that it leaves open stay as they are."""
    budget, stored = config.dram_budget_bytes, config.nvme_budget_bytes
    return replace(
        given,
        dram_budget_bytes=given.dram_budget_bytes if budget == "auto" else int(budget),
        storage_budget_bytes=min(given.storage_budget_bytes, float("inf") if stored == "auto" else float(stored)),
        params_tier=config.parameters.tier if has_storage else "cpu",
        optimizer_tier=config.optimizer.tier if has_storage else "cpu",
        gradients_tier=config.gradients.tier if has_storage else "cpu",
        may_speculate=config.optimizer.clip_policy != "defer" and config.optimizer.overlap != "none",
        weighs_start=weighs_start(config),
        swaps_activations=config.activations.mode != "recompute" and handles_activations(config, given.device_is_host),
        activations_stay_in_dram=not has_storage or config.activations.tier == "cpu",
        activations_leave_dram=config.activations.tier == "nvme" or (given.is_unified and has_storage),
        durable=config.durable,
        shares=config.plan.resident_shares() if config.plan is not None else {},
        saves_behind=config.checkpoint.save == "background",
        keeps_read=budget != "auto",
    )


@dataclass(frozen=True)
class Plan:
    """How much of every class of one rank is in host memory, and how much memory the lanes get."""

    residency: Residency
    chunk_bytes: int
    staging_bytes: int
    prefetch_bytes: int
    num_threads: int
    queue_depth: int
    block_bytes: int
    slots: int
    activation_bytes: int = 0  # host memory of swapped activations
    kept_activation_bytes: int = 0  # of that, for those that stay there; 0: not planned
    smallest_swapped_bytes: int = _SMALLEST_SWAPPED_BYTES
    gradient_buffer_bytes: int = 0  # host memory of gradients on their way to storage, at most
    small_param_bytes: int = 0  # P16 partitions on storage of fewer bytes stay once they are read, until the step
    save_bytes: int = 0  # host memory of states on their way to a checkpoint, while training goes on

    def resident_bytes(self, given: PlanInput) -> int:
        """Host bytes that grow with the model under this plan."""
        return resident_bytes(given, self.residency)

    def host_bytes(self, given: PlanInput) -> int:
        """All host bytes of this plan: what grows with the model, and what the lanes get."""
        lanes = self.staging_bytes + self.prefetch_bytes + self.gradient_buffer_bytes + self.activation_bytes
        return self.resident_bytes(given) + lanes + self.save_bytes


TWICE = "optimizer_twice"
"""Second versions of P32 and moments in memory, by field of :class:`Residency`."""


def _is_stored(residency: Residency) -> bool:
    """Whether any part of any class is on storage."""
    return any(getattr(residency, name) < 1 for name in (*CLASSES, "frozen"))


def has_two_versions(given: PlanInput, residency: Residency) -> bool:
    """P16 in memory has two versions where states may be updated before ``step()`` publishes them: on storage, or with
    two versions of their own.
    """
    may_start = residency.optimizer < 1 or residency.optimizer_twice > 0
    return residency.parameters > 0 and may_start and given.may_speculate


def classes_of(given: PlanInput) -> tuple[str, ...]:
    """What may be in host memory or on storage."""
    return (*CLASSES, "frozen") if given.frozen_bytes > 0 else CLASSES


def bytes_each(given: PlanInput, name: str, two_versions: bool) -> float:
    """Host bytes of a resident class for each trainable element."""
    sizes: dict[str, float] = {
        "frozen": given.frozen_bytes / given.numel,
        "parameters": given.param_bytes_each * (2 if two_versions else 1),
        "optimizer": given.layout.resident_bytes_each,
        TWICE: given.layout.resident_bytes_each,
        "gradients": given.grad_bytes_each,
    }
    return sizes[name]


def resident_bytes(given: PlanInput, residency: Residency) -> int:
    two = has_two_versions(given, residency)
    each = sum(getattr(residency, name) * bytes_each(given, name, two) for name in (*classes_of(given), TWICE))
    return int(each * given.numel)


def stored_bytes(given: PlanInput, residency: Residency) -> float:
    """Of storage, with one slot a chunk, or two where every step is to be durable."""
    slots = 2 if given.durable else 1
    each = slots * given.param_bytes_each * (1 - residency.parameters)
    each += slots * given.layout.bytes_each * (1 - residency.optimizer)
    each += given.grad_bytes_each * (1 - residency.gradients)
    return each * given.numel + given.frozen_bytes * (1 - residency.frozen)


def lane_bytes(given: PlanInput, chunk_bytes: int) -> int:
    """Host memory left to the lanes where anything is on storage, whatever is: staging and look-ahead."""
    nothing = Residency(0.0, 0.0, 0.0, 0.0)
    least, in_use = minimum_lane_bytes(given, nothing, chunk_bytes), in_use_bytes(given, nothing)
    three = min(least + in_use // 2, given.dram_budget_bytes * 3 // 4)
    wanted = min(_STAGING_BYTES + max(_PREFETCH_BYTES, _three_bytes(in_use)), given.dram_budget_bytes // 4)
    return max(least, three, wanted)


def built_plan(
    given: PlanInput,
    residency: Residency,
    chunk_bytes: int,
    arena: int,
    overrides: Mapping[str, int],
    kept: int = 0,
) -> Plan:
    """The plan of a residency that fits, with ``arena`` bytes for activations that pass through, and ``kept`` for those
    that stay; the lanes get what is left.
    """
    is_set_aside = arena + kept > 0
    least = 0 if "activation_bytes" in overrides else least_arena_bytes(given)
    arena = arena + kept if is_set_aside else least
    buffers = _gradient_buffer_bytes(given, residency, chunk_bytes)
    in_use = in_use_bytes(given, residency)
    least_staging = max(0, minimum_lane_bytes(given, residency, chunk_bytes) - buffers - in_use)
    saves = save_bytes(given, chunk_bytes)
    left = given.dram_budget_bytes - resident_bytes(given, residency) - arena - buffers - saves
    prefetch_bytes = max(in_use, min(max(most_prefetch_bytes(left), _three_bytes(in_use)), left - least_staging))
    prefetch_bytes = overrides.get("prefetch_bytes", prefetch_bytes)
    most_staging = min(_STAGING_BYTES, left // 2, left - max(prefetch_bytes, in_use))
    staging_bytes = overrides.get("staging_bytes", max(least_staging, most_staging))
    passing = arena
    if activations_stay(given):  # all that is left as well; that may be less than nothing
        passing += max(0, left - staging_bytes - prefetch_bytes)
    elif not is_set_aside and _pass_through(given):
        passing = max(passing, (left - staging_bytes - prefetch_bytes) // 8)
    activation_bytes = overrides.get("activation_bytes", passing)
    # States may move to memory, once a step is measured.
    may_come = "optimizer" not in given.fixed_shares() and residency.optimizer < 1
    if given.keeps_read and not may_come and "prefetch_bytes" not in overrides:
        spare = left - staging_bytes - (activation_bytes - arena)
        prefetch_bytes = max(prefetch_bytes, min(spare, _read_whole_bytes(given, residency)))
    return Plan(
        residency=residency,
        chunk_bytes=chunk_bytes,
        staging_bytes=staging_bytes,
        prefetch_bytes=prefetch_bytes,
        num_threads=overrides.get("num_threads", _num_threads(given)),
        queue_depth=overrides.get("queue_depth", queue_depth(given.num_paths)),
        block_bytes=overrides.get("block_bytes", MIB),
        slots=overrides.get("slots", 3 if given.saves_behind else 2),
        activation_bytes=activation_bytes,
        kept_activation_bytes=kept,
        smallest_swapped_bytes=overrides.get("smallest_swapped_bytes", _SMALLEST_SWAPPED_BYTES),
        gradient_buffer_bytes=buffers,
        small_param_bytes=overrides.get("small_param_bytes", 0),
        save_bytes=saves,
    )


def least_resident(given: PlanInput) -> Residency:
    """Nothing in host memory but what the user wants there."""
    fixed = given.fixed_shares()
    least = Residency(**{name: fixed.get(name, 0.0) for name in classes_of(given)})
    return replace(least, optimizer_twice=min(fixed.get(TWICE, 0.0), least.optimizer))


def least_plan(given: PlanInput) -> Plan:
    """As much on storage as may be, with the least lanes: it need not fit, and where nothing does it tells why."""
    residency, chunk_bytes = least_resident(given), CHUNK_BYTES[-1]
    lanes = minimum_lane_bytes(given, residency, chunk_bytes)
    lanes -= _gradient_buffer_bytes(given, residency, chunk_bytes) if lanes else 0
    sizes = {"staging_bytes": lanes, "prefetch_bytes": 0, "activation_bytes": least_arena_bytes(given)}
    return built_plan(given, residency, chunk_bytes, 0, sizes)


def most_prefetch_bytes(left_bytes: int) -> int:
    """Host memory of parameters read ahead or kept, of what is left for the lanes."""
    return min(_PREFETCH_BYTES, left_bytes // 4)


def _three_bytes(in_use: int) -> int:
    """Host memory that parameters are read to: of the largest three, or a read could begin only when a copy to the
    device has ended (benchmarks/results/2026-11-30-read-memory.md).
    """
    return in_use * 3 // 2


def kept_param_bytes(given: PlanInput, residency: Residency, pool_bytes: int) -> int:
    """Of host memory that parameters are read to, what the next pass finds there: all but half of the largest, for one
    is in use where a pass turns, or what is free lies in pieces (benchmarks/results/2026-11-30-look-ahead-memory.md).
    """
    return max(0, pool_bytes - in_use_bytes(given, residency) // 4)


def whole_bytes(stored_bytes: float) -> int:
    """Host memory in which so many bytes of parameters find room in whatever pieces, rounded to pages."""
    return int(1.25 * stored_bytes)


def _read_whole_bytes(given: PlanInput, residency: Residency) -> int:
    params = given.param_bytes_each * given.numel * (1 - residency.parameters)
    if residency.parameters > 0:
        params *= 1 + _PARTLY_HELD
    return whole_bytes(params + given.frozen_bytes * (1 - residency.frozen))


def _gradient_buffer_bytes(given: PlanInput, residency: Residency, chunk_bytes: int) -> int:
    """Host bytes of gradients on their way to storage, at most: a parameter's chunks are open together."""
    chunk = chunk_bytes // 4
    filled = max((2 * GRADIENT_BUFFERS + 1) * chunk, given.largest_param_numel)
    most = filled + 2 * GRADIENT_BUFFERS * chunk
    return min(most, int(given.numel * (1 - residency.gradients))) * given.grad_bytes_each


def save_bytes(given: PlanInput, chunk_bytes: int) -> int:
    """Host bytes of states on their way to a checkpoint, wherever they are otherwise."""
    chunk = min(chunk_bytes, 4 * given.numel)
    if not given.saves_behind:
        return 0
    each = SAVE_BLOCKS * given.layout.whole.bytes_each
    if not given.layout.is_whole:  # read as it is in a slot, with P16
        each += SAVE_BLOCKS_READ * (given.layout.bytes_each + 2)
    return int(each * chunk) // 4


def minimum_lane_bytes(given: PlanInput, residency: Residency, chunk_bytes: int) -> int:
    """Two chunks in flight, gradient buffers, and two of the largest parameter where some are on storage."""
    if not _is_stored(residency):
        return 0
    numel = min(chunk_bytes // 4, given.numel)
    chunk = int(numel * given.layout.bytes_each) + 4 * numel
    return 2 * chunk + in_use_bytes(given, residency) + _gradient_buffer_bytes(given, residency, chunk_bytes)


def in_use_bytes(given: PlanInput, residency: Residency) -> int:
    """Two of the largest parameter that may be on storage: one that is used, and one that is read."""
    trained = given.largest_param_numel * given.param_bytes_each if residency.parameters < 1 else 0
    return 2 * int(max(trained, given.largest_frozen_bytes if residency.frozen < 1 else 0))


def activations_stay(given: PlanInput) -> bool:
    """Host memory is their home: there is no storage behind it, and it is not where they come from."""
    return given.swaps_activations and given.activations_stay_in_dram and not given.device_is_host


def arena_bytes(given: PlanInput) -> int:
    """Host memory of swapped activations that no other class gets, unless a run finds that nothing leaves its device.
    Where the device is the host, what does not move is there anyway.
    """
    budget = given.dram_budget_bytes
    if activations_stay(given):
        return 0 if given.block_activation_bytes else budget // 4  # known, they are a class that memory is filled with
    if not _pass_through(given):
        return 0
    wanted = narrow_arena_bytes(given)
    if given.block_activation_bytes:
        wanted = max(wanted, _ARENA_PATH_BYTES * given.num_paths + 2 * given.block_activation_bytes)
    elif not given.device_is_host:
        wanted = max(wanted, _ARENA_BLOCK_BYTES)
    return min(wanted, budget // 8)


def narrow_arena_bytes(given: PlanInput) -> int:
    """Host memory for activations that leave a device though no plan says so, those of a longer batch: every path's
    pieces.
    """
    return max(_ARENA_BYTES, _ARENA_PATH_BYTES * given.num_paths)


def _pass_through(given: PlanInput) -> bool:
    """Whether activations may pass through host memory, on their way to storage."""
    return given.swaps_activations and not given.activations_stay_in_dram


def least_arena_bytes(given: PlanInput) -> int:
    """Where none is set aside: what a run that finds something to swap begins with."""
    return MIB if _pass_through(given) else 0


def _num_threads(given: PlanInput) -> int:
    """All cores where the device is the host: a short burst stalls compute less than a long share of one core
    (benchmarks/results/2026-11-21-2-core-amd-epyc.md). Elsewhere one core stays free for the training thread.
    """
    return max(1, given.num_cpus if given.device_is_host else given.num_cpus - 1)
