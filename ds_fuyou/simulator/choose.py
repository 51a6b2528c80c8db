# SPDX-License-Identifier: Apache-2.0
"""What the command chooses: ours by :func:`ds_fuyou.planner.decide.decide`, as a run does; the other systems place as
they do, and choose what to recompute. The best that fits is simulated. No torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.activations import costs_of, plan_activations
from ds_fuyou.planner.cost import ClosedForm, Placement, Workload, closed_form
from ds_fuyou.planner.decide import StepTime, decide
from ds_fuyou.planner.explain import class_lines, class_rows
from ds_fuyou.planner.hardware import GIB, Machine
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.model import ModelSpec
from ds_fuyou.planner.plan import Plan, PlanInput, least_plan
from ds_fuyou.planner.policies import Fates, Policy, Tiers
from ds_fuyou.simulator.fit import MEMORY_NAMES, Needs, device_room, needs_of, rank_facts, usable_dram
from ds_fuyou.simulator.simulate import Simulated, simulate
from ds_fuyou.storage.layout import CHECKPOINT_BYTES
from ds_fuyou.units import shown_bytes

__all__ = [
    "Chosen",
    "alternatives",
    "batches",
    "best_batch",
    "choose",
    "fits",
    "largest_model",
    "quick_secs",
    "room_line",
    "try_choose",
    "with_checkpointing",
]

_MOST_BATCH, _MOST_TOKENS = 512, 1 << 20
_GPU_ADAM_BYTES = 30  # reads G16, P32, M, V; writes P32, M, V and P16


@dataclass(frozen=True)
class Chosen:
    """A placement that fits, with its predictions under ``policy``; ``asked``: before updates were deferred, because
    that is faster, or because storage lacks ``second_slot_bytes`` for two slots. ``plan``: of a rank of ours.
    """

    work: Workload
    machine: Machine
    policy: Policy
    asked: Policy
    place: Placement
    plan: Plan | None
    needs: Needs
    closed: ClosedForm
    second_slot_bytes: float

    @cached_property
    def simulated(self) -> Simulated:
        return simulate(self.work, self.machine, self.policy, self.place)

    @property
    def iteration_secs(self) -> float:
        return self.simulated.iteration_secs

    @property
    def bound(self) -> Lane:
        """The lane that bounds most of the step."""
        return self.closed.bound

    @property
    def tokens_per_s(self) -> float:
        return self.work.tokens_per_step(self.machine.num_gpus) / self.iteration_secs

    @property
    def tflops_model(self) -> float:
        """Model FLOPs of forward and backward, all GPUs together."""
        return self.work.model.step_flops(self.work.seq) * self.tokens_per_s / 1e12

    @property
    def tflops_8p(self) -> float:
        """The convention of the published figures: 8 P tokens/s, P the size's round number."""
        return 8 * self.work.model.counted_params * self.tokens_per_s / 1e12

    @property
    def written_bytes(self) -> float:
        """To storage, a step."""
        return self.simulated.lane_secs[Lane.WRITE] * self.machine.storage_write


def choose(work: Workload, machine: Machine, policy: Policy) -> Chosen:
    """The fastest placement that fits.

    Raises:
        FuyouConfigError: nothing fits; with what is needed, what there is, and the cheapest change that would do.
    """
    chosen = try_choose(work, machine, policy)
    if isinstance(chosen, Chosen):
        return chosen
    lacking = ", ".join(
        f"{shown_bytes(chosen.total(tier))} of {MEMORY_NAMES[tier]}"
        f" ({shown_bytes(chosen.have[tier])} {'a GPU ' if tier == 'gpu' else ''}there)"
        for tier in chosen.missing()
    )
    raise FuyouConfigError(
        f"{work.model.name} at batch {work.batch} does not fit under {policy.name}: it needs {lacking}; "
        f"{_cheapest_change(work, machine, policy, chosen)}"
    )


def try_choose(work: Workload, machine: Machine, policy: Policy) -> Chosen | Needs:
    """As :func:`choose`, by the closed form; where nothing fits, the needs of the placement that lacks least. Where
    storage holds one slot alone, a run of ours begins updates in ``step()``.
    """
    machine, asked = _as_used(machine, policy), policy
    policy, place, plan = _place(work, machine, policy)
    needs = needs_of(work, machine, policy, place, plan)
    if needs.missing():
        return needs
    lacking = _second_slot_bytes(needs, policy)
    if lacking and policy.begins_in_backward:
        policy, other, other_plan = _place(work, machine, policy.deferred())
        needed = needs_of(work, machine, policy, other, other_plan)
        if not needed.missing() and _second_slot_bytes(needed, policy):
            place, plan, needs = other, other_plan, needed
    closed = closed_form(work, machine, policy, place)
    return Chosen(work, machine, policy, asked, place, plan, needs, closed, lacking)


def with_checkpointing(work: Workload, machine: Machine, policy: Policy) -> Policy:
    """Of systems that leave gradient checkpointing to the script: with it or without, whichever is faster."""
    if policy.fates is not Fates.CHECKPOINT:
        return policy
    without = replace(policy, block=None, mode="none")
    one, other = (try_choose(work, machine, each) for each in (policy, without))
    if isinstance(other, Chosen) and not (isinstance(one, Chosen) and one.iteration_secs <= other.iteration_secs):
        return without
    return policy


def _as_used(machine: Machine, policy: Policy) -> Machine:
    """Where parameters stay on the GPUs: one does not use its link, several exchange them over theirs. Adam runs
    there.
    """
    if not policy.on_device:
        return machine
    link = float("inf") if machine.num_gpus == 1 else machine.link_up
    rate = machine.num_gpus * machine.gpu_memory_rate
    return replace(machine, link_up=link, link_down=link, update_rate=rate / _GPU_ADAM_BYTES, pass_rate=float("inf"))


def _second_slot_bytes(needs: Needs, policy: Policy) -> float:
    """What storage lacks for a second slot of ours; one that every step needs is in the needs."""
    if policy.is_durable or policy.tiers is not Tiers.PLANNED:
        return 0.0
    one, two = _stored_bytes(needs, policy)
    return max(0.0, two - needs.have["nvme"]) if two > one else 0.0


def _stored_bytes(needs: Needs, policy: Policy) -> tuple[float, float]:
    """What storage holds of ours with one slot a chunk, and with two."""
    slotted = sum(i.num_bytes for i in needs.items if i.tier == "nvme" and i.name in ("P16", "P32, M, V"))
    total, slots = needs.total("nvme"), 2 if policy.is_durable else 1
    return total - slotted + slotted / slots, total - slotted + 2 * slotted / slots


def room_line(chosen: Chosen) -> str:
    """What ours takes of disks, checkpoints included; nothing of other systems."""
    if chosen.policy.tiers is not Tiers.PLANNED:
        return ""
    one, two = _stored_bytes(chosen.needs, chosen.asked)
    checkpoint = f"one checkpoint {shown_bytes(CHECKPOINT_BYTES * chosen.work.model.trainable_params)} beside"
    if two <= one:
        return f"disk: {shown_bytes(one)}, {checkpoint}" if one else f"disk: nothing, {checkpoint}"
    slots = f"two slots {shown_bytes(two)} (a run's, where the disk has room; a third for saves behind training)"
    return f"disk: {'' if chosen.asked.is_durable else f'one slot {shown_bytes(one)}, '}{slots}, {checkpoint}"


def _question(work: Workload, machine: Machine, policy: Policy) -> tuple[PlanInput, StepTime]:
    costs, room = costs_of(work, policy), device_room(work, machine, policy)
    given = replace(rank_facts(work, machine, policy), device_room_bytes=room)
    if policy.mode == "auto" and costs.total_bytes > room:  # a run under this plan does it wherever its device is
        given = replace(given, swaps_activations=True)
    return given, StepTime(work, machine, policy, costs, policy.mode)


def _place(work: Workload, machine: Machine, policy: Policy) -> tuple[Policy, Placement, Plan | None]:
    """The best placement, or, where none fits, the one that needs least of host memory; the plan of ours, and the
    policy with what that decides of when updates begin.
    """
    if policy.tiers is Tiers.PLANNED:
        given, time = _question(work, machine, policy)
        for is_durable in dict.fromkeys((True, given.durable)):  # with two slots, if storage has room for them
            with contextlib.suppress(FuyouConfigError):
                decision = decide(replace(given, durable=is_durable), {}, time)
                return decision.time.policy, decision.place, decision.plan
        plan = least_plan(given)
        return policy, time.placed(given, plan.residency, 0.0), plan
    resident = 1.0 if policy.tiers is Tiers.DRAM else 0.0
    base = Placement(
        params=resident, states=resident, grads=0.0 if policy.gradients_on_storage else 1.0, frozen=resident
    )
    room = device_room(work, machine, policy) if policy.fates is Fates.OPERATORS else 0.0
    in_dram = float("inf") if policy.fates is Fates.CHECKPOINT else 0.0
    time = StepTime(work, machine, policy)
    place = plan_activations(costs_of(work, policy), base, room, in_dram, time.secs, policy.mode)
    return policy, place, None


def fits(work: Workload, machine: Machine, policy: Policy) -> bool:
    """Whether some placement fits: the one that would be chosen. Where the GPU lacks memory for none of it, or what is
    to be stored exceeds storage and host memory together, no choice is made.
    """
    bare = needs_of(work, machine, policy, Placement(grads=0.0, frozen=0.0))
    stored = bare.total("nvme") / (2 if policy.is_durable else 1)
    if bare.total("gpu") > bare.have["gpu"] or stored > bare.have["nvme"] + bare.have["cpu"]:
        return False
    return isinstance(try_choose(work, machine, policy), Chosen)


def quick_secs(work: Workload, machine: Machine, policy: Policy) -> float:
    """Iteration seconds of the best placement by the closed form; infinite where nothing fits."""
    best = try_choose(work, machine, policy)
    return best.closed.iteration_secs if isinstance(best, Chosen) else float("inf")


def alternatives(chosen: Chosen) -> list[str]:
    """Of each class of ours, what its best other home would cost by the closed form; a line each."""
    work, machine, policy = chosen.work, chosen.machine, chosen.policy
    if chosen.plan is None:
        return []
    given, time = _question(work, machine, policy)
    if chosen.second_slot_bytes:
        given = replace(given, weighs_start=False)
    rows = class_rows(given, time, chosen.place, chosen.plan)
    return list(class_lines(rows, chosen.closed.iteration_secs))


def batches(seq: int, least: int = 1) -> tuple[int, ...]:
    """Sizes of a batch that are tried: powers of two up to 512, a million tokens or ``least``, whichever is most."""
    most = max(_MOST_BATCH, _MOST_TOKENS // seq, least)
    return tuple(1 << power for power in range(most.bit_length()))


def best_batch(model: ModelSpec, seq: int, machine: Machine, policy: Policy) -> Chosen | None:
    """The batch of :func:`batches`, or half-way between two, with the most tokens/s; the smaller one where they are
    equal to 0.1 %. None: none fits.

    The closed form ranks them; the three best are simulated.
    """
    sizes = sorted({size for batch in batches(seq) for size in (batch, 3 * batch // 2)})
    works = [Workload(model, batch, seq) for batch in sizes]
    rates = {work.batch: work.tokens / quick_secs(work, machine, policy) for work in works}
    best: Chosen | None = None
    for work in sorted(works, key=lambda w: -rates[w.batch])[:3]:
        chosen = try_choose(work, machine, policy)
        if isinstance(chosen, Needs):
            continue
        if best is None or chosen.tokens_per_s > best.tokens_per_s * (
            1.001 if chosen.work.batch > best.work.batch else 0.999
        ):
            best = chosen
    return best


def largest_model(
    models: Sequence[ModelSpec], batch: int, seq: int, machine: Machine, policy: Policy
) -> ModelSpec | None:
    """The largest of ``models`` that trains."""
    for model in sorted(models, key=lambda m: -m.params):
        if fits(Workload(model, batch, seq), machine, policy):
            return model
    return None


def _cheapest_change(work: Workload, machine: Machine, policy: Policy, nearest: Needs) -> str:
    """One thing that would make it fit: what costs nothing first, then what must be bought."""
    for batch in (b for b in reversed(batches(work.seq, work.batch)) if b < work.batch):
        if fits(replace(work, batch=batch), machine, policy):
            return f"batch {batch} fits"
    for seq in (work.seq // 2, work.seq // 4, work.seq // 8):
        if seq and fits(replace(work, seq=seq), machine, policy):
            return f"sequence length {seq} fits"
    missing = nearest.missing()
    # What is in the way may be its limit alone.
    unlimited = replace(machine, pinned_limit_bytes=math.inf)
    usable = usable_dram(unlimited, policy) if machine.pinned_limit_bytes == math.inf else unlimited.dram_usable_bytes
    lacks_dram = max(0.0, nearest.total("cpu") - usable) * machine.dram_bytes / usable
    grown = replace(
        machine,
        gpu_bytes=int(machine.gpu_bytes * max(1.0, nearest.total("gpu") / nearest.have["gpu"] * 1.02)),
        dram_bytes=machine.dram_bytes + lacks_dram * 1.02,
        storage_bytes=machine.storage_bytes + missing.get("nvme", 0.0) * 1.02,
        pinned_limit_bytes=max(machine.pinned_limit_bytes, nearest.total("cpu") * 1.02),
    )
    wanted = []
    if "gpu" in missing:
        wanted.append(f"a GPU with {math.ceil(grown.gpu_bytes / GIB)} GiB")
    if "cpu" in missing:
        by_limit = replace(machine, pinned_limit_bytes=grown.pinned_limit_bytes)
        if nearest.total("cpu") <= usable_dram(by_limit, policy):
            limit = math.ceil(grown.pinned_limit_bytes / GIB)
            wanted.append(f"{limit} GiB of the DRAM that may be used (--pinned-gb, ulimit -l, dram_budget_bytes)")
        else:
            wanted.append(f"{math.ceil(grown.dram_bytes / GIB)} GiB of DRAM that may be page-locked")
    if "nvme" in missing:
        wanted.append(f"{shown_bytes(grown.storage_bytes)} of storage")
    return "it fits with " + " and ".join(wanted)
