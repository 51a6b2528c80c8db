# SPDX-License-Identifier: Apache-2.0
"""What the command chooses: ours by :func:`ds_fuyou.planner.decide.decide`, as a run does; the other systems place as
they do, and choose what to recompute. The best that fits is simulated. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.activations import costs_of, plan_activations
from ds_fuyou.planner.cost import ClosedForm, Placement, Workload, closed_form
from ds_fuyou.planner.decide import Decision, StepTime, decide
from ds_fuyou.planner.hardware import GIB, Machine
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.model import ModelSpec
from ds_fuyou.planner.policies import Fates, Fixed, Policy, Tiers
from ds_fuyou.simulator.fit import Needs, device_room, needs_of, rank_facts, shown_bytes
from ds_fuyou.simulator.simulate import Simulated, simulate

__all__ = [
    "BATCHES",
    "Chosen",
    "best_batch",
    "choose",
    "closed_alternatives",
    "fits",
    "largest_model",
    "quick_secs",
    "try_choose",
]

BATCHES = tuple(1 << power for power in range(10))
_TIER_NAMES = {"gpu": "GPU memory", "cpu": "host memory", "nvme": "storage"}


@dataclass(frozen=True)
class Chosen:
    """A placement that fits, with its predictions."""

    work: Workload
    machine: Machine
    policy: Policy
    place: Placement
    needs: Needs
    closed: ClosedForm
    simulated: Simulated

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
        f"{shown_bytes(chosen.total(tier))} of {_TIER_NAMES[tier]}"
        f" ({shown_bytes(chosen.have[tier])} {'a GPU ' if tier == 'gpu' else ''}there)"
        for tier in chosen.missing()
    )
    raise FuyouConfigError(
        f"{work.model.name} at batch {work.batch} does not fit under {policy.name}: it needs {lacking}; "
        f"{_cheapest_change(work, machine, policy, chosen)}"
    )


def try_choose(work: Workload, machine: Machine, policy: Policy) -> Chosen | Needs:
    """As :func:`choose`; where nothing fits, the needs of the placement that lacks least."""
    best, nearest = _quick(work, machine, policy)
    if best is None:
        return nearest
    _, place, needs, closed = best
    return Chosen(work, machine, policy, place, needs, closed, simulate(work, machine, policy, place))


_Quick = tuple[float, Placement, Needs, ClosedForm]


def _quick(work: Workload, machine: Machine, policy: Policy) -> tuple[_Quick | None, Needs]:
    """The best placement that fits by the closed form, and the needs of the one that lacks least."""
    place = _place(work, machine, policy)
    needs = needs_of(work, machine, policy, place)
    if needs.missing():
        return None, needs
    closed = closed_form(work, machine, policy, place)
    return (closed.iteration_secs, place, needs, closed), needs


def _decision(work: Workload, machine: Machine, policy: Policy) -> Decision:
    """Raises FuyouConfigError if nothing fits."""
    time = StepTime(work, machine, policy, costs_of(work, policy), policy.fixed.mode)
    given = replace(rank_facts(work, machine, policy), device_room_bytes=device_room(work, machine, policy))
    return decide(given, {}, time)


def _place(work: Workload, machine: Machine, policy: Policy) -> Placement:
    """The best placement, or, where none fits, the one that needs least of host memory."""
    if policy.tiers is Tiers.PLANNED:
        try:
            return _decision(work, machine, policy).place
        except FuyouConfigError:
            fixed = {"cpu": 1.0, "nvme": 0.0, "auto": 0.0}
            params, states, grads = (fixed[t] for t in (policy.fixed.params, policy.fixed.states, policy.fixed.grads))
            base = Placement(params, states, grads, frozen=0.0)
            return _with_activations(work, machine, policy, base, 0.0)
    resident = 1.0 if policy.tiers is Tiers.DRAM else 0.0
    base = Placement(
        params=resident, states=resident, grads=0.0 if policy.gradients_on_storage else 1.0, frozen=resident
    )
    return _with_activations(work, machine, policy, base, float("inf") if policy.fates is Fates.CHECKPOINT else 0.0)


def fits(work: Workload, machine: Machine, policy: Policy) -> bool:
    """Whether some placement fits. Ours: the one with the least in host memory, or the one without storage."""
    if policy.tiers is not Tiers.PLANNED or policy.fixed != Fixed():
        return _quick(work, machine, policy)[0] is not None
    inputs = float(work.model.layers * work.tokens * work.model.input_bytes)
    stored = Placement(0.0, 0.0, 0.0, frozen=0.0, swapped_bytes=inputs)
    resident = Placement(1.0, 1.0, 1.0, swapped_bytes=inputs, dram_activation_bytes=inputs)
    return any(not needs_of(work, machine, policy, place).missing() for place in (stored, resident))


def quick_secs(work: Workload, machine: Machine, policy: Policy) -> float:
    """Iteration seconds of the best placement by the closed form; infinite where nothing fits."""
    best, _ = _quick(work, machine, policy)
    return float("inf") if best is None else best[0]


def closed_alternatives(chosen: Chosen) -> list[tuple[str, str]]:
    """What other decisions would have cost, each with activations planned anew."""
    work, machine, policy = chosen.work, chosen.machine, chosen.policy
    if policy.tiers is not Tiers.PLANNED:
        return []
    shares = {
        "as planned": chosen.place,
        "everything on storage": replace(chosen.place, params=0.0, states=0.0, grads=0.0, frozen=0.0),
        "states on storage, the rest in host memory": replace(
            chosen.place, params=1.0, states=0.0, grads=1.0, frozen=1.0, two_versions=True
        ),
        "everything in host memory": replace(
            chosen.place, params=1.0, states=1.0, grads=1.0, frozen=1.0, two_versions=False
        ),
    }
    rows = []
    for name, place in shares.items():
        tried = place if name == "as planned" else _with_rest(work, machine, policy, place)
        secs = closed_form(work, machine, policy, tried).iteration_secs
        lacking = needs_of(work, machine, policy, tried).missing()
        note = "" if not lacking else f", does not fit {' and '.join(_TIER_NAMES[t] for t in lacking)}"
        rows.append((name, f"{secs:.2f}{note}" if secs < float("inf") else "needs storage"))
    if policy.fixed.durable:
        free = replace(policy, fixed=replace(policy.fixed, states="auto", durable=False))
        rows.append(("the best where a step need not be durable", f"{quick_secs(work, machine, free):.2f}"))
    return rows


def _with_rest(work: Workload, machine: Machine, policy: Policy, place: Placement) -> Placement:
    """Activations planned into what a placement leaves of host memory."""
    bare = replace(place, swapped_bytes=0.0, dram_activation_bytes=0.0, kept_bytes=0.0, recompute_flops=0.0)
    left = machine.dram_usable_bytes - needs_of(work, machine, policy, bare).total("cpu")
    left -= 2.0 * work.model.saved_bytes * work.tokens * machine.num_gpus
    return _with_activations(work, machine, policy, bare, _activation_room(policy, left) / machine.num_gpus)


def _activation_room(policy: Policy, left: float) -> float:
    """Host memory for activations when ``left`` bytes are free, unless the user chose their tier."""
    return {"cpu": float("inf"), "nvme": 0.0}.get(policy.fixed.activations, max(0.0, left))


def _with_activations(work: Workload, machine: Machine, policy: Policy, place: Placement, in_dram: float) -> Placement:
    room = device_room(work, machine, policy) if policy.fates is Fates.OPERATORS else 0.0
    time = StepTime(work, machine, policy)
    return plan_activations(costs_of(work, policy), place, room, in_dram, time.secs, policy.fixed.mode)


def best_batch(model: ModelSpec, seq: int, machine: Machine, policy: Policy) -> Chosen | None:
    """The batch of BATCHES with the most tokens/s; the smaller one where they are equal to 0.1 %. None: none fits.

    The closed form ranks them; the three best are simulated.
    """
    works = [Workload(model, batch, seq) for batch in BATCHES]
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
    for batch in (b for b in reversed(BATCHES) if b < work.batch):
        if fits(replace(work, batch=batch), machine, policy):
            return f"batch {batch} fits"
    for seq in (work.seq // 2, work.seq // 4, work.seq // 8):
        if seq and fits(replace(work, seq=seq), machine, policy):
            return f"sequence length {seq} fits"
    missing = nearest.missing()
    grown = replace(
        machine,
        gpu_bytes=int(max(machine.gpu_bytes, nearest.total("gpu") * 1.02)),
        dram_bytes=machine.dram_bytes + missing.get("cpu", 0.0) * 1.1,
        storage_bytes=machine.storage_bytes + missing.get("nvme", 0.0) * 1.02,
        pinned_limit_bytes=max(machine.pinned_limit_bytes, nearest.total("cpu") * 1.02),
    )
    wanted = []
    if "gpu" in missing:
        wanted.append(f"a GPU with {grown.gpu_bytes / GIB:.0f} GiB")
    if "cpu" in missing:
        wanted.append(f"{grown.dram_bytes / GIB:.0f} GiB of DRAM that may be page-locked")
    if "nvme" in missing:
        wanted.append(f"{shown_bytes(grown.storage_bytes)} of storage")
    return "it fits with " + " and ".join(wanted)
