# SPDX-License-Identifier: Apache-2.0
"""Why a plan is as it is: of each class where it is, what its best other home would cost, and what bounds the step
then. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_fuyou.planner.activations import plan_activations
from ds_fuyou.planner.cost import ClosedForm, Placement, cores_secs, shared_secs
from ds_fuyou.planner.decide import Decision, StepTime
from ds_fuyou.planner.document import PlanDocument, Residency, Subject
from ds_fuyou.planner.hardware import Machine
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.plan import (
    Plan,
    PlanInput,
    arena_bytes,
    classes_of,
    lane_bytes,
    minimum_lane_bytes,
    resident_bytes,
)
from ds_fuyou.planner.profile import RunProfile

__all__ = ["CORES", "ClassRow", "bound_by", "class_lines", "class_rows", "run_document"]

CORES = "cores"
"""The bound where compute, updates and I/O share the host's cores and ask most of them."""
_CLASSES = {
    "parameters": ("P16", "params"),
    "optimizer": ("P32 and moments", "states"),
    "gradients": ("G16", "grads"),
    "frozen": ("frozen P16", "frozen"),
}

_BEGIN, _WAIT = "begin in backward", "wait for step()"


@dataclass(frozen=True)
class ClassRow:
    """One class: where it is, and its best other home: predicted seconds of a step there, what bounds them, and the
    host memory that lacks for it.
    """

    name: str
    chosen: str
    other: str
    secs: float
    bound: str
    lacking_bytes: float = 0.0


def bound_by(found: ClosedForm, machine: Machine) -> str:
    """What bounds a step, by name."""
    lanes = [found.lane_secs[lane] for lane in Lane]
    storage = shared_secs(lanes[Lane.READ], lanes[Lane.WRITE], machine.storage_duplex)
    if cores_secs(lanes, machine) > max(*lanes, storage):
        return CORES
    return found.bound.label


def class_rows(given: PlanInput, time: StepTime, place: Placement, plan: Plan) -> list[ClassRow]:
    """Of every class, beside the others as ``plan`` has them; those of which nothing else is possible, or was told by
    the user, are left out, but for states that are to be durable: what that costs is of interest.
    """
    fixed = {name for name in given.fixed_shares() if not (given.durable and name == "optimizer")}
    open_classes = [name for name in classes_of(given) if name not in fixed]
    rows = [_of_class(given, time, place, plan, name) for name in open_classes]
    rows += [_of_activations(given, time, place), _of_updates(given, time, place, plan)]
    return [row for row in rows if row is not None]


def _of_updates(given: PlanInput, time: StepTime, place: Placement, plan: Plan) -> ClassRow | None:
    """When those of states on storage begin, where that is the plan's to say and P16 takes room for it."""
    if not given.weighs_start or place.states >= 1 or place.params <= 0:
        return None
    begins = time.policy.begins_in_backward
    other, residency = replace(given, may_speculate=not begins), plan.residency
    predicted = (time.deferred() if begins else time.begun()).predicted(place)
    needed = resident_bytes(other, residency) + _passing_bytes(other, place, plan, residency)
    lacking = max(0.0, needed + place.dram_activation_bytes - given.dram_budget_bytes)
    bound, homes = bound_by(predicted, time.machine), (_WAIT, _BEGIN) if begins else (_BEGIN, _WAIT)
    return ClassRow("updates", homes[1], homes[0], predicted.iteration_secs, bound, lacking)


def _of_class(given: PlanInput, time: StepTime, place: Placement, plan: Plan, name: str) -> ClassRow | None:
    shown, field = _CLASSES[name]
    now: float = getattr(place, field)
    chosen = _home(now) + (" (durable)" if given.durable and name == "optimizer" and now < 1 else "")
    found: list[ClassRow] = []
    for share in {0.0, 1.0} - {now}:
        changes: dict[str, Any] = {field: share}
        tried = replace(place, **changes)
        twice = min(tried.states_twice, tried.states)
        residency = Residency(tried.params, tried.states, tried.grads, tried.frozen, twice)
        tried = replace(tried, states_twice=twice)
        predicted = time.predicted(tried)
        if not predicted.iteration_secs < float("inf"):  # there is no storage
            continue
        needed = resident_bytes(given, residency) + _passing_bytes(given, place, plan, residency)
        lacking = max(0.0, needed + place.dram_activation_bytes - given.dram_budget_bytes)
        bound = bound_by(predicted, time.machine)
        found.append(ClassRow(shown, chosen, _home(share), predicted.iteration_secs, bound, lacking))
    return min(found, key=lambda row: (row.lacking_bytes > 0, row.secs), default=None)


def _passing_bytes(given: PlanInput, place: Placement, plan: Plan, residency: Residency) -> float:
    """Host memory that no class gets, as ``plan`` has it, but for what it gave only because nothing else took it: the
    pools where anything is on storage, the arena where activations are swapped, and what saves pass through.
    """
    least, chosen = minimum_lane_bytes(given, residency, plan.chunk_bytes), lane_bytes(given, plan.chunk_bytes)
    pools = max(least, min(chosen, plan.staging_bytes + plan.prefetch_bytes + plan.gradient_buffer_bytes))
    arena = min(arena_bytes(given), plan.activation_bytes - plan.kept_activation_bytes) if place.swapped_bytes else 0
    return (pools if least else 0) + arena + plan.save_bytes


def _of_activations(given: PlanInput, time: StepTime, place: Placement) -> ClassRow | None:
    """All of what is saved swapped, or all computed again, whichever is faster and another thing."""
    costs = time.activations
    if costs is None or not place.fates:
        return None
    found: list[ClassRow] = []
    for mode, shown in (("swap", "all swapped"), ("recompute", "all computed again")):
        tried = plan_activations(costs, place, given.device_room_bytes, place.dram_activation_bytes, time.secs, mode)
        if tried.fates != place.fates:
            predicted = time.predicted(tried)
            if not predicted.iteration_secs < float("inf"):  # they do not fit, and there is no storage
                continue
            bound = bound_by(predicted, time.machine)
            found.append(ClassRow("activations", _fates(place), shown, predicted.iteration_secs, bound))
    return min(found, key=lambda row: row.secs, default=None)


def _fates(place: Placement) -> str:
    kept, swapped, again = map(sum, zip(*((kept, moved, done) for _, kept, moved, done in place.fates), strict=True))
    total = max(1, kept + swapped + again)
    shown = (("kept", kept), ("swapped", swapped), ("computed again", again))
    return ", ".join(f"{100 * count / total:.0f} % {name}" for name, count in shown if count)


def _home(share: float) -> str:
    if 0 < share < 1:
        return f"{100 * share:.0f} % in host memory"
    return "in host memory" if share >= 1 else "on storage"


def class_lines(rows: Sequence[ClassRow], secs: float) -> Iterator[str]:
    """One line a class; ``secs``: of the step as planned."""
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        lacks = f", lacks {row.lacking_bytes / 1e9:.2f} GB" if row.lacking_bytes > 0 else ""
        yield (
            f"{row.name:<{width}} {row.chosen}; {row.other} {row.secs:.3f} s ({row.secs - secs:+.3f}), "
            f"bound by {row.bound}{lacks}"
        )


def run_document(profile: RunProfile, given: PlanInput, decision: Decision) -> PlanDocument:
    """What a run under this profile does: written by the run, and by the command for the same profile and block."""
    plan, place, time = decision.plan, decision.place, decision.time
    layers = max(1, sum(1 for block in profile.blocks if block.name))
    machine, found = time.machine, time.predicted(place)
    return PlanDocument(
        model=Subject(f"measured {profile.model}", profile.num_params, layers, profile.model),
        world_size=profile.world_size,
        residency=plan.residency,
        activations={},  # by the names of this run's operators, which other documents do not know
        settings=_settings(plan),
        workload={"shape": list(profile.shape), "accumulation": time.work.accumulation},
        machine=profile.machine,
        predicted={
            "iteration_secs": round(found.iteration_secs, 6),
            "updates": time.policy.updates.value,
            "bound_lane": bound_by(found, machine),
            "lane_secs": {lane.label: round(found.lane_secs[lane], 6) for lane in Lane},
            "host_bytes": plan.host_bytes(decision.settled(given)),
            "storage_bytes_written_a_step": round(found.lane_secs[Lane.WRITE] * machine.storage_write),
            "activations": {name: list(counts) for name, *counts in place.fates},
        },
    )


def _settings(plan: Plan) -> dict[str, Any]:
    names = ("chunk_bytes", "staging_bytes", "prefetch_bytes", "slots")
    return {name: getattr(plan, name) for name in names}
