# SPDX-License-Identifier: Apache-2.0
"""The cost model fed with what a run measured: predicted lane times of its placement and of others. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.activations import ActivationCosts, SavedOutput
from ds_fuyou.planner.blocks import OPERATORS, Block, Operator
from ds_fuyou.planner.cost import ClosedForm, Placement, Workload, closed_form, cores_secs, shared_secs
from ds_fuyou.planner.decide import Decision, StepTime, decide
from ds_fuyou.planner.hardware import Machine
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.model import ModelSpec
from ds_fuyou.planner.plan import Plan, PlanInput
from ds_fuyou.planner.policies import Fates, Policy, Tiers, Updates
from ds_fuyou.planner.profile import RunProfile

__all__ = [
    "Prediction",
    "RunPlacement",
    "activation_costs",
    "alternatives",
    "durability_line",
    "placed",
    "placed_again",
    "predict",
    "prediction_line",
    "prediction_table",
    "profile_line",
    "run_time",
    "sizes_of",
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
CORES = "cores"
"""The bound where compute, updates and I/O share the host's cores and ask most of them."""


@dataclass(frozen=True)
class RunPlacement:
    """What a run placed where, on one rank.

    Attributes:
        params, states, grads: share of P16, of P32 and the moments, of G16 in host memory.
        updates: when chunks are updated whose state is on storage; resident ones wait for ``step()``.
        num_params: trainable parameters of this rank; ``first_params`` of them are used before the first block.
        param_bytes, grad_bytes, state_bytes: each, of a parameter.
        staging_bytes: host memory that states pass through.
        speculates: updates may start in backward, so P16 in host memory has two versions beside states on storage.
        swapped_bytes: activations that a micro-batch moves to storage.
        recompute_flops: that backward repeats of a micro-batch, and did not when the profile was made.
        accumulation: micro-batches a step, where no profile says it.
    """

    params: float
    states: float
    grads: float
    updates: Updates
    num_params: int
    first_params: int
    param_bytes: int
    grad_bytes: int
    state_bytes: int
    speculates: bool
    staging_bytes: float = 0.0
    swapped_bytes: float = 0.0
    recompute_flops: float = 0.0
    accumulation: int = 1

    @property
    def host_bytes(self) -> float:
        """Of the classes in host memory, buffers not counted."""
        versions = 2 if self.speculates and self.states < 1 else 1
        each = versions * self.param_bytes * self.params + self.state_bytes * self.states + self.grad_bytes * self.grads
        return each * self.num_params

    @property
    def shown(self) -> tuple[str, str, str]:
        """Where P16, states and gradients are, for a table."""
        p, s, g = (_shown_share(share) for share in (self.params, self.states, self.grads))
        return p, s, g


@dataclass(frozen=True)
class Prediction:
    """Of one step. ``lane_secs``: each lane's own work, by the lane's name; ``thread_secs``: what the training thread
    runs, or shares cores with; ``bound``: what bounds the step.
    """

    placement: RunPlacement
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


@dataclass(frozen=True)
class _ProfiledModel(ModelSpec):
    """A model by what was measured of it, for one micro-batch as one token; only the number of its blocks is true."""

    measured_block_flops: float = 0.0
    measured_head_flops: float = 0.0
    num_params: int = 0

    @classmethod
    def of(cls, profile: RunProfile | None, placement: RunPlacement) -> _ProfiledModel:
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
            embedding_params=placement.first_params,
            measured_block_flops=sum(block.flops for block in inside) / layers,
            measured_head_flops=head,
            num_params=placement.num_params,
        )

    @cached_property
    def params(self) -> int:
        return self.num_params

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
    )


def run_time(
    profile: RunProfile | None,
    placement: RunPlacement,
    activations: ActivationCosts | None = None,
    mode: str = "auto",
) -> StepTime:
    """What predicts this run's steps under any placement; of ``placement`` its sizes and its updates count alone.

    Without a profile computing takes no time, and neither do updates and the link: storage is the bound.
    """
    policy = Policy(
        "ds_fuyou",
        placement.updates,
        Tiers.PLANNED,
        Fates.OPERATORS,
        gradient_bytes=placement.grad_bytes,
        param_bytes=placement.param_bytes,
        state_bytes=placement.state_bytes,
        keeps_gradients=True,
        reads_spilled=placement.updates is not Updates.DEADLINE,
    )
    model = _ProfiledModel.of(profile, placement)
    machine = _UNKNOWN if profile is None else _machine(profile, model)
    accumulation = placement.accumulation if profile is None else profile.accumulation
    return StepTime(Workload(model, 1, 1, accumulation), machine, policy, activations, mode)


def placed(
    given: PlanInput,
    overrides: Mapping[str, int | None],
    profile: RunProfile | None = None,
    accumulation: int = 1,
    mode: str = "auto",
) -> Decision:
    """The placement of a run by what was measured of it, if anything was, and it fits storage with two slots; else the
    one that moves the fewest bytes. ``mode`` of activations: in "auto" it is not known yet how many leave the device.

    Raises:
        FuyouConfigError: as :func:`decide`.
    """
    if profile is not None and profile.storage is not None:  # else measured while nothing was on storage
        costs = activation_costs(profile) if mode == "swap" and given.swaps_activations else None
        time = run_time(profile, sizes_of(given, accumulation), costs, mode)
        with contextlib.suppress(FuyouConfigError):
            return decide(replace(given, durable=overrides.get("slots") != 1), overrides, time)
    unbounded = replace(given, storage_budget_bytes=float("inf"))  # with one slot it may fit; who makes files says so
    return decide(unbounded, overrides, run_time(None, sizes_of(given, accumulation)))


def placed_again(
    given: PlanInput, overrides: Mapping[str, int | None], profile: RunProfile, plan: Plan, mode: str = "auto"
) -> Decision | None:
    """Where states should be that a run under ``plan`` may move, by what was measured of it: P16, gradients and the
    memory of the lanes stay. None unless a step becomes clearly shorter.
    """
    now = plan.residency
    fixed = replace(
        given,
        params_tier="auto",
        gradients_tier="auto",
        shares={**given.shares, "parameters": now.parameters, "gradients": now.gradients},
    )
    lanes: dict[str, int | None] = {
        "chunk_bytes": plan.chunk_bytes,
        "staging_bytes": plan.staging_bytes,
        "prefetch_bytes": plan.prefetch_bytes,
        "activation_bytes": plan.activation_bytes,
    }
    costs = activation_costs(profile) if mode == "swap" and given.swaps_activations else None
    time = run_time(profile, sizes_of(given, profile.accumulation), costs, mode)
    try:
        found = decide(fixed, {**overrides, **lanes}, time)
    except FuyouConfigError:
        return None
    before = time.secs(replace(found.place, states=now.optimizer))
    fits = found.plan.host_bytes(given) <= max(given.dram_budget_bytes, plan.host_bytes(given))
    return found if fits and found.secs < (1 - _WORTH_MOVING) * before else None


def sizes_of(given: PlanInput, accumulation: int = 1) -> RunPlacement:
    """What a run is, wherever things are; updates start in backward if they may."""
    return RunPlacement(
        *(0.0, 0.0, 0.0),
        updates=Updates.DEADLINE if given.may_speculate else Updates.FORWARD,
        num_params=given.numel,
        first_params=0,
        param_bytes=given.param_bytes_each,
        grad_bytes=given.grad_bytes_each,
        state_bytes=4 * (1 + given.num_moments),
        speculates=given.may_speculate,
        accumulation=accumulation,
    )


def predict(profile: RunProfile, placement: RunPlacement) -> Prediction:
    """What a step of this placement takes by the closed form, with the measured rates."""
    time = run_time(profile, placement)
    machine = time.machine
    place = Placement(
        placement.params,
        placement.states,
        placement.grads,
        staging_bytes=placement.staging_bytes,
        swapped_bytes=placement.swapped_bytes,
        recompute_flops=placement.recompute_flops,
    )
    found = closed_form(time.work, machine, time.policy, place)
    return Prediction(
        placement,
        found.iteration_secs,
        {lane.label: found.lane_secs[lane] for lane in Lane},
        max(found.lane_secs[Lane.GPU], cores_secs([found.lane_secs[lane] for lane in Lane], machine)),
        found.lane_secs[Lane.READ] * machine.storage_read,
        found.lane_secs[Lane.WRITE] * machine.storage_write,
        _bound(found, machine),
        profile.device_is_host,
    )


def _bound(found: ClosedForm, machine: Machine) -> str:
    lanes = [found.lane_secs[lane] for lane in Lane]
    storage = shared_secs(lanes[Lane.READ], lanes[Lane.WRITE], machine.storage_duplex)
    if cores_secs(lanes, machine) > max(*lanes, storage):
        return CORES
    return found.bound.label


def alternatives(profile: RunProfile, placement: RunPlacement) -> list[Prediction]:
    """The same run with whole classes elsewhere, fastest first; only what needs no storage where none was measured."""
    places = [(p, s, g) for p in (1.0, 0.0) for s in (1.0, 0.0) for g in (1.0, 0.0)]
    if profile.storage is None:
        places = [(1.0, 1.0, 1.0)]
    here = (placement.params, placement.states, placement.grads)
    found = [
        predict(profile, replace(placement, params=p, states=s, grads=g)) for p, s, g in places if (p, s, g) != here
    ]
    return sorted(found, key=lambda prediction: prediction.iteration_secs)


def prediction_table(chosen: Prediction, others: Sequence[Prediction], budget_bytes: float) -> str:
    """What was chosen, what others would cost, which lane bounds each; then the chosen one's lanes."""
    head = ("", "P16", "P32 and moments", "G16", "host memory", "storage a step", "predicted", "bound by")
    rows = [head, ("chosen", *_row(chosen, None))]
    rows += [("", *_row(other, budget_bytes)) for other in others]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([*lines, f"  lanes of the chosen one, a step: {_shown_lanes(chosen)}"])


def prediction_line(chosen: Prediction, others: Sequence[Prediction], budget_bytes: float) -> str:
    """What is predicted of the placement as it is, and of the fastest other one that fits the budget."""
    line = f"predicted {chosen.iteration_secs:.3f} s a step, bound by {chosen.bound}"
    line += f" ({_shown_lanes(chosen)})"
    fitting = [other for other in others if other.placement.host_bytes <= budget_bytes]
    if fitting:
        where = ", ".join(
            f"{n}: {t}" for n, t in zip(("P16", "states", "G16"), fitting[0].placement.shown, strict=True)
        )
        line += f"; of other placements the fastest {fitting[0].iteration_secs:.3f} s ({where})"
    return line


def durability_line(chosen: Prediction, others: Sequence[Prediction], budget_bytes: float) -> str:
    """What it costs a step that all states are on storage, against the fastest placement with states in memory that
    fits the budget."""
    freer = [o for o in others if o.placement.states > 0 and o.placement.host_bytes <= budget_bytes]
    price = chosen.iteration_secs - min((other.iteration_secs for other in freer), default=float("inf"))
    if price <= 0:
        return "every step is durable; no placement that is not would be faster"
    return f"every step is durable, which costs {price:.3f} s a step against states in host memory"


def _shown_lanes(chosen: Prediction) -> str:
    """Every lane that works. Where the device is the host there is no link."""
    links = (Lane.DOWN.label, Lane.UP.label) if chosen.device_is_host else ()
    lanes = [(lane, secs) for lane, secs in chosen.lane_secs.items() if secs > 0 and lane not in links]
    return ", ".join(f"{lane} {secs:.3f} s" for lane, secs in lanes)


def _row(prediction: Prediction, budget_bytes: float | None) -> tuple[str, ...]:
    host = prediction.placement.host_bytes
    lacks = budget_bytes is not None and host > budget_bytes
    return (
        *prediction.placement.shown,
        f"{host / 1e9:.2f} GB{', too much' if lacks else ''}",
        f"{prediction.storage_bytes / 1e9:.2f} GB",
        f"{prediction.iteration_secs:.3f} s",
        prediction.bound,
    )


def _shown_share(share: float) -> str:
    if 0 < share < 1:
        return f"{100 * share:.0f} % in host memory"
    return "host memory" if share >= 1 else "storage"


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
