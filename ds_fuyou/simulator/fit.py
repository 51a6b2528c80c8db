# SPDX-License-Identifier: Apache-2.0
"""What a plan needs of each tier, item by item, and whether the machine has it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_fuyou.host.available_memory import AUTO_TENTHS
from ds_fuyou.planner.cost import P16_BYTES, Placement, Workload
from ds_fuyou.planner.document import Residency
from ds_fuyou.planner.hardware import OF_DEVICE, Machine
from ds_fuyou.planner.plan import (
    Plan,
    PlanInput,
    bytes_each,
    has_two_versions,
    under_block,
)
from ds_fuyou.planner.policies import Policy, Tiers, Updates
from ds_fuyou.planner.presets import constants

__all__ = ["MEMORY_NAMES", "Item", "Needs", "device_room", "needs_of", "rank_facts", "run_budget", "usable_dram"]

MEMORY_NAMES = {"gpu": "GPU memory", "cpu": "host memory", "nvme": "storage"}
_HEAD_SLICE_BYTES = 1 << 30  # logits of a slice of tokens
_ROUNDED = 1e-9  # of a tier: shares of it are not whole bytes
_STOCK_SWAP_BYTES = 16 << 30  # optimizer swap buffers of four sub-groups of 10^9 parameters


@dataclass(frozen=True)
class Item:
    """``num_bytes`` of one class in one tier ("gpu", "cpu" or "nvme")."""

    name: str
    tier: str
    num_bytes: float


@dataclass(frozen=True)
class Needs:
    """All items, and what the machine has of each tier; host memory is all page-locked."""

    items: tuple[Item, ...]
    have: dict[str, float]

    def total(self, tier: str) -> float:
        return sum(item.num_bytes for item in self.items if item.tier == tier)

    def missing(self) -> dict[str, float]:
        """Bytes that lack, of the tiers that are too small. Empty: it fits."""
        lacking = {tier: self.total(tier) - size for tier, size in self.have.items()}
        return {tier: value for tier, value in lacking.items() if value > _ROUNDED * self.have[tier]}


def _power_of_two(num_bytes: float) -> float:
    """What torch's caching allocator of page-locked memory takes for one tensor."""
    return float(1 << (max(1, int(num_bytes)) - 1).bit_length())


def usable_dram(machine: Machine, policy: Policy) -> float:
    """Host bytes that a plan may fill, of all ranks. Of ours, where no limit is told, what a run takes by itself."""
    is_open = policy.tiers is Tiers.PLANNED and machine.pinned_limit_bytes == float("inf")
    return run_budget(machine) if is_open else machine.dram_usable_bytes


def _usable_gpu(machine: Machine, policy: Policy) -> float:
    """Bytes of a GPU that a plan may fill. Of ours, where no budget is told, what a run takes by itself."""
    is_open = policy.tiers is Tiers.PLANNED and (policy.block is None or policy.block.gpu_budget_bytes == "auto")
    return OF_DEVICE * machine.gpu_bytes if is_open else float(machine.gpu_bytes)


def run_budget(machine: Machine) -> float:
    """What ``dram_budget_bytes: auto`` takes where nothing but the system runs beside."""
    return AUTO_TENTHS / 10 * replace(machine, pinned_limit_bytes=float("inf")).dram_usable_bytes


def needs_of(work: Workload, machine: Machine, policy: Policy, place: Placement, plan: Plan | None = None) -> Needs:
    """Bytes by tier. GPU: of each one; host memory and storage: of all of them together. Where tiers are planned host
    memory is what ``plan`` takes of it on each rank.
    """
    have = {"gpu": _usable_gpu(machine, policy), "cpu": usable_dram(machine, policy), "nvme": machine.storage_bytes}
    if policy.on_device:
        model = work.model
        bytes_each = policy.param_bytes + policy.gradient_bytes + policy.layout.bytes_each
        each = (bytes_each * float(model.trainable_params) + model.frozen_bytes) / machine.num_gpus
        inputs = Item("activations", "gpu", place.swapped_bytes)
        shares = (Item("P16, gradients, P32, M, V", "gpu", each), inputs)
        return Needs((*_gpu_items(work, machine, policy, place), *shares), have)
    items = (
        *_gpu_items(work, machine, policy, place),
        *(
            _host_items(work, machine, policy, place)
            if plan is None
            else _planned_items(plan, work, machine, policy, place)
        ),
        *_storage_items(work, machine, policy, place),
    )
    return Needs(tuple(item for item in items if item.num_bytes > 0), have)


def rank_facts(work: Workload, machine: Machine, policy: Policy) -> PlanInput:
    """What the decider needs to know of each rank, but the room on its device."""
    model, ranks = work.model, machine.num_gpus
    sizes = PlanInput(
        numel=max(1, -(-model.trainable_params // ranks)),
        param_bytes_each=policy.param_bytes,
        grad_bytes_each=policy.gradient_bytes,
        layout=policy.layout,
        largest_param_numel=-(-model.largest_param // ranks),
        dram_budget_bytes=int(usable_dram(machine, policy) / ranks),
        may_speculate=policy.begins_in_backward,
        weighs_start=True,
        device_is_host=machine.shares_cores,
        is_unified=machine.is_unified,
        swaps_activations=not machine.shares_cores,
        activations_stay_in_dram=machine.storage_bytes <= 0,
        activations_leave_dram=machine.is_unified and machine.storage_bytes > 0,
        storage_budget_bytes=machine.storage_bytes / ranks,
        frozen_bytes=model.frozen_bytes / ranks,
        largest_frozen_bytes=model.largest_frozen_bytes / ranks,
        block_activation_bytes=max(1, int(model.largest_saved_bytes * work.tokens)),
    )
    if policy.block is None:
        return sizes
    given = under_block(sizes, policy.block, policy.has_storage)
    return replace(  # the machine is within the block's budgets
        given,
        dram_budget_bytes=sizes.dram_budget_bytes,
        storage_budget_bytes=sizes.storage_budget_bytes,
        may_speculate=sizes.may_speculate,
        activations_stay_in_dram=given.activations_stay_in_dram or sizes.activations_stay_in_dram,
    )


def device_room(work: Workload, machine: Machine, policy: Policy) -> float:
    """Bytes of one GPU for activations that stay there."""
    taken = sum(item.num_bytes for item in _gpu_items(work, machine, policy, Placement()))
    return max(0.0, _usable_gpu(machine, policy) - taken)


def _gpu_items(work: Workload, machine: Machine, policy: Policy, place: Placement) -> Sequence[Item]:
    """The peak is in the backward of a block, or in the head with its loss, whichever is larger."""
    model = work.model
    unit, trained = model.largest_unit_bytes, P16_BYTES * model.largest_unit_trained
    block = model.largest_saved_bytes * work.tokens
    logits = float(policy.logit_bytes * work.tokens * model.vocab)
    if policy.slices_loss:
        logits = min(logits, _HEAD_SLICE_BYTES)
    if not policy.fused:  # two 16-bit copies of the scores and a mask
        block += 5.0 * work.batch * model.heads * work.seq * work.seq
    head = logits + 2.0 * model.hidden * work.tokens
    gradient = policy.gradient_bytes if policy.in_a_row else P16_BYTES
    leaving = (1 if policy.in_a_row else 2) * trained * gradient / P16_BYTES
    if policy.tiers is Tiers.PLANNED:  # of a large block a run keeps no more on their way
        leaving = min(leaving, max(_usable_gpu(machine, policy) / 16, 2 * P16_BYTES * model.largest_param))
    cast = 0  # while a block's activations are there
    if not policy.in_a_row and policy.gradient_bytes > P16_BYTES:
        cast = policy.gradient_bytes * max(block.largest_matrix_params for block in set(model.blocks))
    return (
        Item("context and allocator slack", "gpu", constants().device_context_bytes),
        Item("P16 in use and fetched ahead", "gpu", 2 * unit),
        Item("gradients in flight", "gpu", leaving),
        Item("a gradient cast to fp32", "gpu", float(cast)),
        Item("activations of the block in work" if block >= head else "logits and loss", "gpu", max(block, head)),
        Item("activations kept", "gpu", place.kept_bytes),
    )


def _host_items(work: Workload, machine: Machine, policy: Policy, place: Placement) -> Sequence[Item]:
    model = work.model
    num_params, unit = float(model.trainable_params), float(model.largest_unit_params)
    leaving = 2 * place.swapped_bytes / model.layers * machine.num_gpus if place.storage_activation_bytes else 0.0
    activations = place.dram_activation_bytes * machine.num_gpus
    if policy.tiers is Tiers.DRAM:
        items = [
            Item("P16", "cpu", policy.param_bytes * num_params + model.frozen_bytes),
            Item("P32, M, V", "cpu", policy.layout.resident_bytes_each * num_params),
            Item("flat gradient buffer", "cpu", policy.gradient_bytes * num_params),
        ]
    elif policy.in_a_row:
        flat = _power_of_two(policy.gradient_bytes * num_params / machine.num_gpus) * machine.num_gpus
        items = [
            Item("flat gradient buffer", "cpu", flat),
            Item("swap buffers", "cpu", _STOCK_SWAP_BYTES + 5 * policy.param_bytes * unit),
        ]
    else:  # whole units: P32, M, V read, updated and written, an fp32 gradient; two that arrive, three of P16
        window = (3 * 3 + 1) * _power_of_two(4 * unit) + 3 * _power_of_two(2 * unit)
        window += 2 * _power_of_two(policy.gradient_bytes * unit)
        items = [Item("windows of states, gradients and P16", "cpu", window)]
        if policy.updates is Updates.STEP:
            items.append(Item("G16", "cpu", policy.gradient_bytes * num_params))
    return (*items, Item("activations", "cpu", activations), Item("activations on their way", "cpu", leaving))


def _planned_items(plan: Plan, work: Workload, machine: Machine, policy: Policy, place: Placement) -> Sequence[Item]:
    """Ours, as a run plans it."""
    given, residency, ranks = rank_facts(work, machine, policy), plan.residency, machine.num_gpus
    two = has_two_versions(given, residency)
    shares: tuple[tuple[str, str], ...] = (
        ("P16", "parameters"),
        ("P32, M, V", "optimizer"),
        ("G16", "gradients"),
        ("frozen P16", "frozen"),
    )
    shares += (("P32, M, V once more", "optimizer_twice"),) if residency.optimizer_twice else ()
    items = [
        Item(name, "cpu", getattr(residency, kind) * bytes_each(given, kind, two) * given.numel * ranks)
        for name, kind in shares
    ]
    if residency != Residency(1.0, 1.0, 1.0, 1.0):
        items.append(Item("staging of chunks", "cpu", float(plan.staging_bytes * ranks)))
        items.append(Item("look-ahead", "cpu", float(max(0, plan.prefetch_bytes) * ranks)))
        items.append(Item("gradients on their way", "cpu", float(plan.gradient_buffer_bytes * ranks)))
    items.append(Item("states on their way to a checkpoint", "cpu", float(plan.save_bytes * ranks)))
    activations = plan.activation_bytes * ranks if place.swapped_bytes else 0  # what may go there is not what goes
    return (*items, Item("activations", "cpu", float(activations)))


def _storage_items(work: Workload, machine: Machine, policy: Policy, place: Placement) -> Sequence[Item]:
    """Ours with one slot, the least that trains, unless every step is to be durable; two slots are used where there is
    room."""
    num_params, slots = float(work.model.trainable_params), 2 if policy.is_durable else 1
    grads = (1 - place.grads) * policy.gradient_bytes * num_params if policy.keeps_gradients else 0.0
    return [
        Item("P16", "nvme", slots * policy.param_bytes * num_params * (1 - place.params)),
        Item("P32, M, V", "nvme", slots * policy.layout.bytes_each * num_params * (1 - place.states)),
        Item("G16", "nvme", grads),
        Item("frozen P16", "nvme", work.model.frozen_bytes * (1 - place.frozen)),
        Item("activations", "nvme", place.storage_activation_bytes * machine.num_gpus),
    ]
