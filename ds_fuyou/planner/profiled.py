# SPDX-License-Identifier: Apache-2.0
"""The cost model fed with what a run measured: predicted lane times of its placement and of others. No torch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.activations import WORKING_BLOCKS, ActivationCosts, SavedOutput
from ds_fuyou.planner.blocks import OPERATORS, Block, Operator
from ds_fuyou.planner.cost import MOST_ACCUMULATION, Placement, Workload, cores_secs
from ds_fuyou.planner.decide import Decision, StepTime, decide
from ds_fuyou.planner.document import CLASSES
from ds_fuyou.planner.explain import bound_by
from ds_fuyou.planner.hardware import GIB, Machine
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.model import ModelSpec
from ds_fuyou.planner.plan import TWICE, Plan, PlanInput, kept_param_bytes
from ds_fuyou.planner.policies import Fates, Policy, Tiers, Updates
from ds_fuyou.planner.profile import RunProfile

__all__ = [
    "MOST_REDONE",
    "Prediction",
    "activation_costs",
    "expert_values",
    "placed",
    "placed_again",
    "placed_under",
    "predict",
    "profile_line",
    "run_time",
]

_UNKNOWN = Machine(
    name="not measured",
    num_gpus=1,
    gpu_bytes=0,
    flops=1.0,
    gpu_memory_rate=float("inf"),
    link_up=float("inf"),
    link_down=float("inf"),
    dram_bytes=0.0,
    pinned_limit_bytes=float("inf"),
    storage_read=1e9,
    storage_write=1e9,
    storage_duplex=1.0,
    storage_bytes=0.0,
    endurance_bytes=0.0,
    update_rate=float("inf"),
    pass_rate=float("inf"),
)
_WORTH_MOVING = 0.05  # of a step
MOST_REDONE = 0.25
"""Of updates begun in backward: where more of them are done again they wait for ``step()``."""


@dataclass(frozen=True)
class Prediction:
    """Of one step under ``place``. ``lane_secs``: each lane's own work, by the lane's name; ``thread_secs``: what the
    training thread runs, or shares cores with; ``bound``: what bounds the step.
    """

    place: Placement
    updates: Updates
    iteration_secs: float
    lane_secs: Mapping[str, float]
    thread_secs: float
    read_bytes: float
    write_bytes: float
    bound: str
    device_is_host: bool = False

    @property
    def storage_bytes(self) -> float:
        return self.read_bytes + self.write_bytes

    def line(self) -> str:
        """Seconds, what bounds them, and every lane that works. Where the device is the host there is no link."""
        links = (Lane.DOWN.label, Lane.UP.label) if self.device_is_host else ()
        lanes = [f"{n} {secs:.3f} s" for n, secs in self.lane_secs.items() if secs > 0 and n not in links]
        return f"predicted {self.iteration_secs:.3f} s a step, bound by {self.bound} ({', '.join(lanes)})"


@dataclass(frozen=True)
class _ProfiledModel(ModelSpec):
    """A model by what was measured of it, for one micro-batch as one token; only the number of its blocks is true."""

    measured_block_flops: float = 0.0
    measured_head_flops: float = 0.0
    num_params: int = 0
    frozen: float = 0.0

    @classmethod
    def of(cls, profile: RunProfile | None, given: PlanInput) -> _ProfiledModel:
        """Where no FLOPs could be counted, all of it is one FLOP: the measured seconds then say the rest."""
        blocks = profile.blocks if profile is not None else ()
        inside = [block for block in blocks if block.name]
        layers = max(1, len(inside))
        head = sum(block.flops for block in blocks if not block.name)
        if profile is not None and profile.forward_flops <= 0:
            head = 1.0
        return cls(
            "the model of this run",
            hidden=1,
            vocab=1,
            blocks=(Block(tuple(Operator(name, 0) for name in OPERATORS)),) * layers,
            embedding_params=given.first_numel,
            measured_block_flops=sum(block.flops for block in inside) / layers,
            measured_head_flops=head,
            num_params=given.numel,
            frozen=given.frozen_bytes,
        )

    @cached_property
    def params(self) -> int:
        return self.num_params

    @cached_property
    def frozen_bytes(self) -> float:
        return self.frozen

    @cached_property
    def head_flops(self) -> float:
        return self.measured_head_flops

    def block_flops(self, seq: int) -> float:
        return self.measured_block_flops


def activation_costs(profile: RunProfile | None) -> ActivationCosts | None:
    """What a micro-batch saves by a profile; None where operators were not recorded. The first block stands for all."""
    blocks = [block for block in profile.blocks if block.name] if profile is not None else []
    if not blocks or profile is None:
        return None
    block = blocks[0]
    outputs = [one for one in block.operators if one.num_bytes > 0 and (one.flops > 0 or one.saved)]
    outside = [one for other in profile.blocks if not other.name for one in other.operators if one.saved]
    return ActivationCosts(
        num_blocks=len(blocks),
        input_bytes=block.input_bytes,
        whole_bytes=block.input_bytes + sum(one.num_bytes for one in block.operators if one.saved),
        outside_bytes=sum(one.num_bytes for one in outside),
        outputs=tuple(SavedOutput(one.name, one.flops, one.num_bytes) for one in outputs),
        block_flops=block.flops,
        working_blocks=WORKING_BLOCKS,
    )


def _machine(profile: RunProfile, model: ModelSpec) -> Machine:
    forward_flops = model.layers * model.block_flops(1) + model.head_flops
    storage = profile.storage
    duplex = 1.0
    if storage is not None:
        duplex = min(2.0, max(0.5, storage.mixed * (1 / storage.read + 1 / storage.write) / 2))
    return Machine(
        name="measured in this run",
        num_gpus=1,
        gpu_bytes=int(profile.device_bytes),
        flops=forward_flops / profile.forward_secs,
        gpu_memory_rate=profile.link_up,
        link_up=profile.link_up,
        link_down=profile.link_down,
        dram_bytes=profile.host_bytes,
        pinned_limit_bytes=float("inf"),
        storage_read=storage.read if storage is not None else 0.0,
        storage_write=storage.write if storage is not None else 0.0,
        storage_duplex=duplex,
        storage_bytes=0.0,
        endurance_bytes=0.0,
        update_rate=profile.update_rate,
        pass_rate=float("inf"),
        backward_over_forward=profile.backward_secs / profile.forward_secs,
        shares_cores=profile.device_is_host,
        io_cpu_secs_per_byte=storage.cpu_secs_per_byte / profile.num_cores if storage is not None else 0.0,
        thread=profile.thread,
        sum_rate=profile.sum_rate or float("inf"),
    )


def run_time(
    profile: RunProfile | None,
    given: PlanInput,
    *,
    updates: Updates | None = None,
    accumulation: int = 1,
    activations: ActivationCosts | None = None,
    mode: str = "auto",
) -> StepTime:
    """What predicts a run's steps under any placement. ``updates``: when those of states on storage run; None: in
    backward if they may. ``accumulation``: micro-batches a step, where no profile says it.

    Without a profile computing takes no time, and neither do updates and the link: storage is the bound.
    """
    redone = 0.0 if profile is None else profile.redo_share
    if updates is None:
        updates = Updates.DEADLINE if given.may_speculate and redone <= MOST_REDONE else Updates.FORWARD
    policy = Policy(
        "ds_fuyou",
        updates,
        Tiers.PLANNED,
        Fates.OPERATORS,
        gradient_bytes=given.grad_bytes_each,
        param_bytes=given.param_bytes_each,
        layout=given.layout,
        keeps_gradients=True,
        redo_share=redone,
        reused_bytes=float(given.param_bytes_each * given.reused_numel),
        staying_bytes=float(given.param_bytes_each * given.staying_numel),
    )
    model = _ProfiledModel.of(profile, given)
    machine = _UNKNOWN if profile is None else _machine(profile, model)
    accumulation = min(accumulation if profile is None else profile.accumulation, MOST_ACCUMULATION)
    return StepTime(Workload(model, 1, 1, accumulation), machine, policy, activations, mode, profile is not None)


def _known(profile: RunProfile, given: PlanInput, mode: str) -> tuple[PlanInput, StepTime]:
    """With what leaves the device where that is known: in mode "auto" when it has decided once."""
    knows = mode == "swap" or (mode == "auto" and profile.room is not None)
    costs = activation_costs(profile) if knows and given.swaps_activations else None
    if mode == "auto":
        given = replace(given, device_room_bytes=profile.room or 0.0)
    return given, run_time(profile, given, activations=costs, mode=mode)


def placed(
    given: PlanInput,
    overrides: Mapping[str, int | None],
    profile: RunProfile | None = None,
    accumulation: int = 1,
    mode: str = "auto",
) -> Decision:
    """The placement of a run by what was measured of it, if anything was, and it fits storage with two slots; else the
    one that moves the fewest bytes. ``mode`` of activations.

    Raises:
        FuyouConfigError: as :func:`decide`.
    """
    if profile is not None and profile.storage is not None:  # else measured while nothing was on storage
        given, time = _known(profile, given, mode)
        with contextlib.suppress(FuyouConfigError):
            return decide(replace(given, durable=overrides.get("slots") != 1), overrides, time)
    unbounded = replace(given, storage_budget_bytes=float("inf"))  # with one slot it may fit; who makes files says so
    return decide(unbounded, overrides, run_time(None, given, accumulation=accumulation))


def expert_values(config: Any) -> dict[str, int | None]:
    """Values of the plan that a ``FuyouConfig`` replaces."""
    return config.plan.model_dump(exclude={"residency", "shares"}) if config.plan is not None else {}


def placed_under(config: Any, given: PlanInput, profile: RunProfile | None, accumulation: int = 1) -> Decision:
    """As :func:`placed`, under a ``FuyouConfig``: what a run does that begins anew, and what the command says that it
    does. One that goes on from state files takes their placement (zero/run/taken_design.py).

    Raises:
        FuyouConfigError: as :func:`decide`; where a plan document says the shares, with its name.
    """
    try:
        return placed(given, expert_values(config), profile, accumulation, config.activations.mode)
    except FuyouConfigError as error:
        document = config.plan.document if config.plan is not None else None
        if document is None:
            raise
        limit = given.dram_budget_bytes * document.world_size / GIB
        raise FuyouConfigError(
            f"fuyou.plan places more in host memory than this run may take of it: {error}. Or make a plan for so much, "
            f"fuyou plan --pinned-gb {math.floor(100 * limit) / 100:g}, or leave fuyou.plan out"
        ) from error


def placed_again(
    given: PlanInput,
    overrides: Mapping[str, int | None],
    profile: RunProfile,
    plan: Plan,
    mode: str = "auto",
    *,
    others: Collection[str] = (),
    states_move: bool = True,
    may_speculate: bool | None = None,
) -> Decision | None:
    """Where states, and ``others`` that may move (parameters, gradients, frozen), should be of a run under ``plan``, by
    what was measured of it: everything else, and staging memory, stays. None unless a step becomes clearly shorter; the
    others stay, too, unless it becomes clearly shorter still: they move in a pause. ``given`` says whether updates
    begin in backward as it is, ``may_speculate`` whether they may where P16 gets as many versions as that needs.
    """
    staying = ("parameters", "gradients", "frozen") if states_move else (*CLASSES, "frozen")
    stays = {name: getattr(plan.residency, name) for name in staying}
    best = float("inf")
    found = _placed_again(replace(given, weighs_start=False), overrides, profile, plan, mode, stays)
    if found is not None:
        best = found.time.secs(_as_it_is(found.place, given, plan))
        if _fits(found, given, plan) and found.secs < (1 - _WORTH_MOVING) * best:
            best = found.secs
        else:
            found = None
    for moving in (("gradients",), ("parameters",), ("parameters", "gradients"), ("frozen",)):  # least first
        if not all(name in others and name not in given.fixed_shares() for name in moving):
            continue
        leaves = {name: share for name, share in stays.items() if name not in moving}
        there = replace(given, weighs_start=False)
        if "parameters" in moving and may_speculate is not None:
            there = replace(given, may_speculate=may_speculate)
        other = _placed_again(there, overrides, profile, plan, mode, leaves)
        if other is None or not _fits(other, there, plan):
            continue
        if other.begins == given.may_speculate and getattr(other.plan.residency, moving[0]) == stays[moving[0]]:
            continue
        if other.secs < (1 - _WORTH_MOVING) * best:
            found, best = other, other.secs
    return found


def _placed_again(
    given: PlanInput,
    overrides: Mapping[str, int | None],
    profile: RunProfile,
    plan: Plan,
    mode: str,
    stays: Mapping[str, float],
) -> Decision | None:
    """The best where lanes are as they are, and ``stays``, shares of classes; None if nothing fits."""
    fixed = {**stays, TWICE: plan.residency.optimizer_twice}
    lanes: dict[str, int | None] = {
        "chunk_bytes": plan.chunk_bytes,
        "staging_bytes": plan.staging_bytes,
        "activation_bytes": plan.activation_bytes,
    }
    if "parameters" in stays and "frozen" in stays:  # else what is read to is as large as they need
        lanes["prefetch_bytes"] = plan.prefetch_bytes
    there = replace(given, params_tier="auto", gradients_tier="auto", shares={**given.shares, **fixed})
    there, time = _known(profile, there, mode)
    try:
        return decide(there, {**overrides, **lanes}, time)
    except FuyouConfigError:
        return None


def _fits(found: Decision, given: PlanInput, plan: Plan) -> bool:
    """Whether host memory holds it, or as much as ``plan`` takes."""
    return found.plan.host_bytes(found.settled(given)) <= max(given.dram_budget_bytes, plan.host_bytes(given))


def _as_it_is(place: Placement, given: PlanInput, plan: Plan) -> Placement:
    """Classes under ``plan``, and what another placement says of activations."""
    now = plan.residency
    return replace(
        place,
        params=now.parameters,
        states=now.optimizer,
        grads=now.gradients,
        states_twice=now.optimizer_twice,
        kept_param_bytes=kept_param_bytes(given, now, plan.prefetch_bytes),
    )


def predict(time: StepTime, place: Placement) -> Prediction:
    """What a step of this placement takes by the closed form, with the measured rates."""
    machine, found = time.machine, time.predicted(place)
    lanes = [found.lane_secs[lane] for lane in Lane]
    return Prediction(
        place,
        time.policy.updates,
        found.iteration_secs,
        {lane.label: found.lane_secs[lane] for lane in Lane},
        max(lanes[Lane.GPU], lanes[Lane.THREAD], cores_secs(lanes, machine)),
        found.lane_secs[Lane.READ] * machine.storage_read,
        found.lane_secs[Lane.WRITE] * machine.storage_write,
        bound_by(found, machine),
        machine.shares_cores,
    )


def profile_line(profile: RunProfile) -> str:
    """The measured rates in one line."""
    parts = [f"forward {profile.forward_secs:.3f} s and backward {profile.backward_secs:.3f} s a micro-batch"]
    if profile.forward_flops:
        parts[0] += f" ({profile.flops_rate / 1e12:.3g} TFLOP/s)"
    parts.append(f"updates {profile.update_rate / 1e6:.0f} M parameters/s")
    if profile.storage is not None:
        rates = profile.storage
        parts.append(
            f"storage {rates.read / 1e9:.2f} GB/s read, {rates.write / 1e9:.2f} write, {rates.mixed / 1e9:.2f} mixed"
        )
    if not profile.device_is_host:
        parts.append(f"link {profile.link_up / 1e9:.1f} GB/s up, {profile.link_down / 1e9:.1f} down")
    return ", ".join(parts)
