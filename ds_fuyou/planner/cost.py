# SPDX-License-Identifier: Apache-2.0
"""The closed form: bytes and FLOPs of a step, lane times, iteration time. DESIGN equations, with the terms
the paper leaves out: the CPU update, the drain, residency in host memory, head and embedding, accumulation.

Everything is in bytes, FLOPs and seconds. ``P`` counts all parameters of the model; batch and activations are
those of one GPU, and storage, host memory and the CPU serve all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.hardware import Machine
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.model import ModelSpec
from ds_fuyou.planner.policies import Policy, Tiers, Updates

__all__ = [
    "P16_BYTES",
    "ClosedForm",
    "Placement",
    "StepCost",
    "Workload",
    "bound_lane",
    "closed_form",
    "cores_secs",
    "eager_bytes",
    "shared_secs",
    "storage_secs",
    "stored_sums",
]

P16_BYTES = 2
_SHARES = 8  # parts of what staging memory holds, each tried
MOST_ACCUMULATION = 4096  # every micro-batch is simulated
_MOST = {"batch": 10**9, "seq": 10**9, "accumulation": MOST_ACCUMULATION}
_NOT_STORAGE = (Lane.GPU, Lane.DOWN, Lane.UP, Lane.CPU, Lane.THREAD)
# Bytes that unfused operators move in GPU memory, forward: for every score of the s x s matrix (write, scale, mask,
# softmax, dropout, read), and a token and width for everything element-wise.
_EAGER_SCORE_BYTES, _EAGER_TOKEN_BYTES = 24, 60


@dataclass(frozen=True)
class Workload:
    """What is trained: ``batch`` sequences of ``seq`` tokens on each GPU, ``accumulation`` times a step."""

    model: ModelSpec
    batch: int
    seq: int = 1024
    accumulation: int = 1

    def __post_init__(self) -> None:
        for what, most in _MOST.items():
            value = getattr(self, what)
            if value < 1:
                raise FuyouConfigError(f"--{what} must be at least 1, found {value}")
            if value > most:
                raise FuyouConfigError(f"--{what} must be at most {most}, found {value:g}")

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one GPU."""
        return self.batch * self.seq

    def tokens_per_step(self, num_gpus: int) -> int:
        return self.tokens * self.accumulation * num_gpus


@dataclass(frozen=True)
class Placement:
    """The answer to "where": shares resident in host memory, and what becomes of activations.

    Attributes:
        params, states, grads, frozen: share of the class in host memory; the rest is on storage.
        states_twice: share of P32 and moments, of those in host memory, that exists twice, so that updates may start in
            backward.
        swapped_bytes: activations that leave one GPU, a micro-batch, all blocks; of these ``dram_activation_bytes``
            stay in host memory.
        kept_bytes: activations that stay on the GPU, beyond those of the block that is computed.
        staging_bytes: host memory that states pass through on their way from storage and back.
        kept_param_bytes: host memory that parameters are read to, where those of a pass's end wait for the next one.
        recompute_flops: that backward repeats, a micro-batch, on one GPU.
        fates: for each operator in how many blocks its output is (kept, swapped, recomputed); for the plan document.
    """

    params: float = 0.0
    states: float = 0.0
    grads: float = 1.0
    states_twice: float = 0.0
    frozen: float = 1.0
    swapped_bytes: float = 0.0
    dram_activation_bytes: float = 0.0
    kept_bytes: float = 0.0
    staging_bytes: float = 0.0
    kept_param_bytes: float = 0.0
    recompute_flops: float = 0.0
    fates: tuple[tuple[str, int, int, int], ...] = ()

    @property
    def storage_activation_bytes(self) -> float:
        return max(0.0, self.swapped_bytes - self.dram_activation_bytes)

    def with_activations(self, swapped: float, in_dram: float, kept: float, recompute_flops: float) -> Placement:
        """As ``dataclasses.replace``, in a fifth of its time. It would take cached properties along: there are none."""
        found = object.__new__(Placement)
        found.__dict__.update(
            self.__dict__,
            swapped_bytes=swapped,
            dram_activation_bytes=in_dram,
            kept_bytes=kept,
            recompute_flops=recompute_flops,
        )
        return found


@dataclass(frozen=True)
class ClosedForm:
    """Seconds of the step, and of each lane's own work.

    ``bound`` is the lane that bounds most of the time: of each phase the lane with the most work in it.
    """

    iteration_secs: float
    lane_secs: dict[Lane, float]
    bound: Lane


def eager_bytes(work: Workload) -> float:
    """GPU memory traffic of one block's forward that fused kernels would not have."""
    model = work.model
    scores = float(work.batch) * model.heads * work.seq * work.seq
    return _EAGER_SCORE_BYTES * scores + _EAGER_TOKEN_BYTES * float(work.tokens) * model.hidden


def _compute_secs(work: Workload, machine: Machine, policy: Policy) -> tuple[float, float]:
    """Forward seconds of all blocks and of the head, one micro-batch."""
    rate = machine.flops * policy.share_of_block_rate
    blocks = work.model.layers * work.tokens * work.model.block_flops(work.seq) / rate
    if not policy.fused:
        blocks += work.model.layers * eager_bytes(work) / machine.gpu_memory_rate
    return blocks, work.tokens * work.model.head_flops / rate


def storage_secs(num_bytes: float, rate: float) -> float:
    """Nothing takes no time; anything on a machine without storage takes for ever."""
    if num_bytes <= 0:
        return 0.0
    return num_bytes / rate if rate > 0 else float("inf")


def shared_secs(read_secs: float, write_secs: float, duplex: float) -> float:
    """Of reads and writes together, from what each takes alone."""
    return max((read_secs + write_secs) / duplex, read_secs, write_secs)


def bound_lane(lane_secs: Sequence[float], duplex: float) -> Lane:
    """The lane with the most work; the two of storage count together, and the busier one is named."""
    read, write = lane_secs[Lane.READ], lane_secs[Lane.WRITE]
    others = max(_NOT_STORAGE, key=lane_secs.__getitem__)
    if shared_secs(read, write, duplex) > lane_secs[others]:
        return Lane.READ if read >= write else Lane.WRITE
    return others


def cores_secs(lane_secs: Sequence[float], machine: Machine) -> float:
    """What all lanes ask of the cores where compute has no device of its own; else 0."""
    if not machine.shares_cores:
        return 0.0
    moved = lane_secs[Lane.READ] * machine.storage_read + lane_secs[Lane.WRITE] * machine.storage_write
    return lane_secs[Lane.GPU] + lane_secs[Lane.CPU] + moved * machine.io_cpu_secs_per_byte


def stored_sums(work: Workload, policy: Policy, place: Placement) -> float:
    """Share of gradients whose sum over micro-batches waits on storage: those with their home there, as far as staging
    memory does not hold them.
    """
    if policy.tiers is not Tiers.PLANNED or work.accumulation == 1:
        return 0.0
    gradients = policy.gradient_bytes * float(work.model.trainable_params)
    return max(0.0, 1 - place.grads - place.staging_bytes / gradients)


_Lanes = tuple[float, ...]  # seconds, in the order of Lane


def _lanes(
    gpu: float = 0.0,
    down: float = 0.0,
    up: float = 0.0,
    read: float = 0.0,
    write: float = 0.0,
    cpu: float = 0.0,
    thread: float = 0.0,
) -> _Lanes:
    return (gpu, down, up, read, write, cpu, thread)


class _Phases(NamedTuple):
    """Work of the lanes, in seconds: of one micro-batch's forward and backward, of moving sums of gradients, of
    spilling gradients, and of the optimizer; ``resident`` is the part of it that waits for ``step()`` with its state in
    host memory. ``states_read``: bytes of states that updates read; ``params_read``: of parameters that a backward
    reads from storage; ``sums_secs``: of adding a micro-batch's gradients on the host; ``tail_secs``: from the last
    gradient to the next step's forward.
    """

    forward: _Lanes
    backward: _Lanes
    accumulate: _Lanes
    spill: _Lanes
    optimizer: _Lanes
    resident: _Lanes
    states_read: float
    params_read: float
    sums_secs: float
    tail_secs: float


_CLASSES = operator.attrgetter(
    "params", "states", "grads", "frozen", "states_twice", "staging_bytes", "kept_param_bytes"
)
"""Of a placement, what all but activations depends on."""


class StepCost:
    """The closed form of one workload on one machine under one policy. Activations are tried by the dozen for each
    placement of the classes: what they do not change is kept from one placement to the next.
    """

    def __init__(self, work: Workload, machine: Machine, policy: Policy) -> None:
        self._work, self._machine, self._policy = work, machine, policy
        self._compute = _compute_secs(work, machine, policy)
        self._flops = machine.flops * policy.share_of_block_rate
        self._unfused = 0.0 if policy.fused else work.model.layers * eager_bytes(work) / machine.gpu_memory_rate
        self._known: tuple[object, _Phases] | None = None

    def form(self, place: Placement) -> ClosedForm:
        """Lane times and iteration time of one step under a placement."""
        p, machine, more = self._phases(place), self._machine, self._work.accumulation - 1
        step, spent = self._step(p, place)
        by_lane = [0.0] * len(Lane)
        for lanes, secs in spent:
            by_lane[bound_lane(lanes, machine.storage_duplex)] += secs
        between = _lanes(thread=machine.thread.between, cpu=more * p.sums_secs)
        micro_batches = [p.forward, p.backward] * (more + 1)
        total = _together(*micro_batches, *[p.accumulate] * more, p.spill, p.optimizer, between)
        return ClosedForm(step, dict(zip(Lane, total, strict=True)), bound_lane(by_lane, 1.0))

    def secs(self, place: Placement) -> float:
        """The iteration time alone."""
        return self._step(self._phases(place), place)[0]

    def _phases(self, place: Placement) -> _Phases:
        machine, classes, known = self._machine, _CLASSES(place), self._known
        if known is None or known[0] != classes:
            self._known = known = classes, self._without_activations(place)  # at once: threads may share it
        inside, swapped = known[1], place.swapped_bytes
        stored = place.storage_activation_bytes * machine.num_gpus
        gpu, down, up, read, _, cpu, thread = inside.forward
        write = storage_secs(stored, machine.storage_write)
        forward = (gpu, swapped / machine.link_down, up, read, write, cpu, thread)
        gpu, down, up, _, write, cpu, thread = inside.backward
        gpu += place.recompute_flops / self._flops + self._unfused
        read = storage_secs(inside.params_read + stored, machine.storage_read)
        return inside._replace(
            forward=forward, backward=(gpu, down, up + swapped / machine.link_up, read, write, cpu, thread)
        )

    def _without_activations(self, place: Placement) -> _Phases:
        """As if none left the device and nothing were computed again; backward's reads are bytes as yet."""
        work, machine, policy = self._work, self._machine, self._policy
        model, num_params = work.model, float(work.model.trainable_params)
        blocks, head = self._compute
        grad = policy.gradient_bytes * num_params
        p_bytes = policy.param_bytes * num_params * (1 - place.params)
        states_read, states_written = _states_moved(policy, num_params, place)
        late = states_that_wait(policy, place)
        spilled = grad * (1 - place.grads) if policy.keeps_gradients else 0.0
        # States and gradients are filled in one order: of those on storage, these are of updates that wait.
        waiting = grad * max(0.0, late - place.grads) if policy.keeps_gradients else 0.0
        sums = grad * stored_sums(work, policy, place)
        params_bytes = policy.param_bytes * num_params + model.frozen_bytes
        staying = min(policy.staying_bytes, params_bytes) * (work.accumulation - 1) / work.accumulation
        read_forward, read_backward = _params_read(work, policy, place, p_bytes)
        return _Phases(
            forward=_lanes(
                gpu=blocks + head,
                up=(params_bytes - staying) / machine.link_up,
                read=storage_secs(read_forward, machine.storage_read),
                thread=machine.thread.forward,
            ),
            backward=_lanes(
                gpu=machine.backward_over_forward * model.backward_over_forward / 2 * (blocks + head),
                up=max(0.0, params_bytes - policy.reused_bytes) / machine.link_up,
                down=grad / machine.link_down,
                thread=machine.thread.backward,
            ),
            accumulate=_lanes(
                read=storage_secs(sums, machine.storage_read), write=storage_secs(sums, machine.storage_write)
            ),
            spill=_lanes(write=storage_secs(spilled, machine.storage_write)),
            optimizer=_lanes(
                read=storage_secs(states_read + spilled + sums, machine.storage_read),
                write=storage_secs(states_written + p_bytes, machine.storage_write),
                cpu=num_params / machine.update_rate + num_params * policy.extra_pass_bytes / machine.pass_rate,
            ),
            resident=_lanes(
                read=storage_secs(waiting, machine.storage_read),
                write=storage_secs(p_bytes * late, machine.storage_write),
                cpu=num_params * late / machine.update_rate,
            ),
            states_read=states_read,
            params_read=read_backward,
            sums_secs=num_params / machine.sum_rate,
            tail_secs=self._tail_secs(place),
        )

    def _together_secs(self, lanes: _Lanes) -> float:
        return sum(lanes) if self._policy.in_a_row else _phase_secs(lanes, self._machine)

    def _step(self, p: _Phases, place: Placement) -> tuple[float, list[tuple[_Lanes, float]]]:
        """Seconds of the step; and its parts, with what lanes do in them."""
        machine, policy, more = self._machine, self._policy, self._work.accumulation - 1
        spent: list[tuple[_Lanes, float]] = []

        def secs(count: int, *parts: _Lanes) -> float:
            if count == 0:  # also where a phase would take for ever
                return 0.0
            lanes = _together(*parts)
            took = count * self._together_secs(lanes)
            spent.append((lanes, took))
            return took

        # All micro-batches but the last. What is added on the host goes on beside both.
        others = secs(more, p.forward) + secs(more, p.backward, p.accumulate)
        late = max(0.0, more * p.sums_secs - others)
        spent.append((_lanes(cpu=late), late))
        others += late
        if policy.updates is Updates.DEADLINE:
            usual, parts = self._beside_both(p, place)
            spent += parts
            again = 0.0
            if policy.redo_share > 0:  # all that backward did beside its own work, and then once more beside forward
                again = _phase_secs(_together(p.backward, p.spill), machine)
                again += _phase_secs(_together(p.forward, p.optimizer), machine) + p.tail_secs
            return others + (1 - policy.redo_share) * usual + policy.redo_share * max(usual, again), spent
        if policy.updates is Updates.FORWARD:
            beside_forward, beside_backward = _deferred(machine, place, p)
            turn = secs(1, p.backward, p.spill, beside_backward) + secs(1, p.forward, beside_forward)
            return others + turn + p.tail_secs, spent
        forward = secs(1, p.forward)
        if policy.updates is Updates.BACKWARD:
            rest = secs(1, p.backward, p.optimizer) + p.tail_secs
        else:
            rest = secs(1, p.backward, p.spill) + secs(1, p.optimizer)
        return others + forward + rest + machine.thread.between, spent

    def _beside_both(self, p: _Phases, place: Placement) -> tuple[float, list[tuple[_Lanes, float]]]:
        """From a last backward's begin to the end of the next step's first forward. Updates run beside both, wherever
        there is room, those of resident states beside forward alone; activations leave in forward and return in
        backward.
        """
        machine = self._machine
        phases = [_together(p.forward, p.resident), _together(p.backward, p.spill)]
        once = _together(p.forward, p.backward, p.spill, p.optimizer)
        took = [self._together_secs(lanes) for lanes in phases]
        apart, turn = sum(took), self._together_secs(once)
        secs = max(
            max(apart, _phase_secs(once, machine, storage=False)) + p.tail_secs,
            turn,  # storage goes on meanwhile
            _between_gradients_secs(self._work, machine, place, p),
        )
        return secs, list(zip(phases, took, strict=True)) if apart > turn else [(once, turn)]

    def _tail_secs(self, place: Placement) -> float:
        """From the last gradient to the first forward of the next step: the embedding's chain. Forward takes P16 out of
        the update, so its write is not waited for; lanes that bound the step go on meanwhile, if it is storage. Where
        all updates are done before, its reads and writes are counted already, as storage nearly always bounds there: so
        the copy and the update remain.
        """
        down, read, update, up = _first_secs(self._work, self._machine, self._policy, place)
        if self._policy.updates is Updates.BACKWARD:
            return down + update
        return down + read + update + up + self._machine.thread.between


def states_that_wait(policy: Policy, place: Placement) -> float:
    """Share of states in host memory whose updates wait for ``step()`` and run beside the next forward."""
    if policy.updates is Updates.DEADLINE:
        return place.states - place.states_twice
    return place.states if policy.updates is Updates.FORWARD else 0.0


def closed_form(work: Workload, machine: Machine, policy: Policy, place: Placement) -> ClosedForm:
    """:meth:`StepCost.form` of one placement alone."""
    return StepCost(work, machine, policy).form(place)


def _params_read(work: Workload, policy: Policy, place: Placement, p_bytes: float) -> tuple[float, float]:
    """Bytes of parameters on storage that a forward and a backward read; ``p_bytes`` of them are trained. What is used
    last in a pass is used first in the next one, and is still there as far as memory reaches: of trained ones but for
    a step's first forward, which needs new values. That has those of updates that run beside it from the updates, ahead
    of their write. Of any stretch as much is taken to be on storage as of all (embeddings are not, where memory
    reaches).
    """
    frozen, handed = work.model.frozen_bytes * (1 - place.frozen), p_bytes * states_that_wait(policy, place)
    stored = p_bytes + frozen
    trained = policy.param_bytes * float(work.model.trainable_params)
    of_end = stored / max(1.0, trained + work.model.frozen_bytes)  # is on storage
    kept, kept_frozen = min(place.kept_param_bytes, stored), min(place.kept_param_bytes, frozen)
    others = (work.accumulation - 1) / work.accumulation
    found = max(kept, min(of_end * policy.staying_bytes, stored))  # the same ones are in host memory and on the device
    forward = stored - kept_frozen - others * (found - kept_frozen) - handed / work.accumulation
    return forward, max(0.0, stored - max(kept, of_end * policy.reused_bytes))


def _states_moved(policy: Policy, num_params: float, place: Placement) -> tuple[float, float]:
    """Bytes of P32 and moments that updates of so many parameters read from storage and write."""
    read, written = policy.layout.moved_bytes(place.params, place.states)
    return read * num_params, written * num_params


def _together(*parts: _Lanes) -> _Lanes:
    total = parts[0]
    for part in parts[1:]:
        total = tuple(map(operator.add, total, part))
    return total


def _phase_secs(lanes: _Lanes, machine: Machine, *, storage: bool = True) -> float:
    """Of work that overlaps: what the busiest lane takes, or storage, or the cores; or all but storage."""
    gpu, down, up, read, write, cpu, thread = lanes
    others = max(gpu, down, up, cpu, thread, cores_secs(lanes, machine))
    return max(others, shared_secs(read, write, machine.storage_duplex)) if storage else others


def _deferred(machine: Machine, place: Placement, p: _Phases) -> tuple[_Lanes, _Lanes]:
    """The optimizer's work where updates wait for ``step()``: beside the next forward, and beside backward. At most
    what staging memory holds of the states is read ahead in backward, and is still to be written when forward ends. P16
    on storage is written with its state on storage, before forward reads it.
    """
    most = min(place.staging_bytes, p.states_read)

    def split(num_bytes: float) -> tuple[_Lanes, _Lanes]:
        moved = _lanes(
            read=storage_secs(num_bytes, machine.storage_read),
            write=storage_secs(num_bytes * place.params, machine.storage_write),
        )
        return tuple(secs - less for secs, less in zip(p.optimizer, moved, strict=True)), moved

    def took(parts: tuple[_Lanes, _Lanes]) -> float:
        beside_forward = _phase_secs(_together(p.forward, parts[0]), machine)
        return beside_forward + _phase_secs(_together(p.backward, p.spill, parts[1]), machine)

    most_shares = _SHARES if most else 0
    return min((split(most * share / _SHARES) for share in range(most_shares + 1)), key=took)


def _between_gradients_secs(work: Workload, machine: Machine, place: Placement, p: _Phases) -> float:
    """From a step's first gradients to the next step's: states have passed storage when forward comes to the last
    block, and those of its gradients are not there before its backward; meanwhile staging memory is filled at most,
    and what is left of writes passes. Where updates read less than they write, that is the difference, or nothing where
    reads waited for gradients: half of it is counted. With few blocks all this is a large part of a step.
    """
    read, write = p.optimizer[Lane.READ], p.optimizer[Lane.WRITE]
    ahead = storage_secs(min(place.staging_bytes, p.states_read), machine.storage_read)
    last_block = (p.forward[Lane.GPU] + p.backward[Lane.GPU]) / work.model.layers
    idle = max(0.0, last_block - ahead - max(0.0, write - read) / 2)
    return shared_secs(read, write, machine.storage_duplex) + idle


def _first_secs(
    work: Workload, machine: Machine, policy: Policy, place: Placement
) -> tuple[float, float, float, float]:
    """Gradient out, state in, update and P16 up of the parameters before the first block: gradients of these arrive
    last, and they are needed first, so their states are the first in host memory.
    """
    num_params = float(work.model.first_trained_params)
    first = max(1.0, num_params) / max(1.0, float(work.model.trainable_params))
    near = replace(place, states=min(1.0, place.states / first))
    states, _ = _states_moved(policy, num_params, near)
    return (
        policy.gradient_bytes * num_params / machine.link_down,
        storage_secs(states, machine.storage_read),
        num_params / machine.update_rate,
        policy.param_bytes * num_params / machine.link_up,
    )
