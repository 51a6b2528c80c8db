# SPDX-License-Identifier: Apache-2.0
"""The closed form: bytes and FLOPs of a step, lane times, iteration time. DESIGN equations, with the terms
the paper leaves out: the CPU update, the drain, residency in host memory, head and embedding, accumulation.

Everything is in bytes, FLOPs and seconds. ``P`` counts all parameters of the model; batch and activations are
those of one GPU, and storage, host memory and the CPU serve all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.hardware import Machine
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.model import ModelSpec
from ds_fuyou.planner.policies import Policy, Updates

__all__ = [
    "ACCUMULATOR_BYTES",
    "P16_BYTES",
    "STATE_BYTES",
    "ClosedForm",
    "Placement",
    "Workload",
    "bound_lane",
    "closed_form",
    "eager_bytes",
    "shared_secs",
    "storage_secs",
]

P16_BYTES, STATE_BYTES, ACCUMULATOR_BYTES = 2, 12, 4
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
        for what, value in (("batch", self.batch), ("seq", self.seq), ("accumulation", self.accumulation)):
            if value < 1:
                raise FuyouConfigError(f"--{what} must be at least 1, found {value}")

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
        params, states, grads, accumulators: share of the class in host memory; the rest is on storage.
        two_versions: resident P16 exists twice, so that updates may start in backward.
        swapped_bytes: activations that leave one GPU, a micro-batch, all blocks; of these ``dram_activation_bytes``
            stay in host memory.
        kept_bytes: activations that stay on the GPU, beyond those of the block that is computed.
        recompute_flops: that backward repeats, a micro-batch, on one GPU.
        fates: for each operator in how many blocks its output is (kept, swapped, recomputed); for the plan document.
    """

    params: float = 0.0
    states: float = 0.0
    grads: float = 1.0
    accumulators: float = 1.0
    two_versions: bool = False
    swapped_bytes: float = 0.0
    dram_activation_bytes: float = 0.0
    kept_bytes: float = 0.0
    recompute_flops: float = 0.0
    fates: tuple[tuple[str, int, int, int], ...] = ()

    @property
    def storage_activation_bytes(self) -> float:
        return max(0.0, self.swapped_bytes - self.dram_activation_bytes)


@dataclass(frozen=True)
class ClosedForm:
    """Seconds: of the phases, of the whole step, and of each lane's own work over the step."""

    forward_secs: float
    backward_secs: float
    tail_secs: float
    iteration_secs: float
    lane_secs: dict[Lane, float]


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


def _storage_secs(read: float, write: float, machine: Machine) -> float:
    """One resource for both directions, as far as they share it."""
    return shared_secs(
        storage_secs(read, machine.storage_read), storage_secs(write, machine.storage_write), machine.storage_duplex
    )


def shared_secs(read_secs: float, write_secs: float, duplex: float) -> float:
    """Of reads and writes together, from what each takes alone."""
    return max((read_secs + write_secs) / duplex, read_secs, write_secs)


def bound_lane(lane_secs: dict[Lane, float], duplex: float) -> Lane:
    """The lane with the most work; the two of storage count together, and the busier one is named."""
    read, write = lane_secs[Lane.READ], lane_secs[Lane.WRITE]
    others = max((lane for lane in Lane if lane not in (Lane.READ, Lane.WRITE)), key=lambda lane: lane_secs[lane])
    if shared_secs(read, write, duplex) > lane_secs[others]:
        return Lane.READ if read >= write else Lane.WRITE
    return others


@dataclass(frozen=True)
class _Terms:
    """The terms of the equations, for one micro-batch unless told; seconds on lanes, bytes on storage."""

    forward: float
    recompute: float
    up: float
    activations_down: float
    activations_up: float
    gradients_down: float
    update: float  # a step
    p_bytes: float
    activation_bytes: float
    accumulator_bytes: float
    state_bytes: float  # a step
    spilled_bytes: float  # a step


def _terms(work: Workload, machine: Machine, policy: Policy, place: Placement) -> _Terms:
    model, num_params = work.model, float(work.model.params)
    blocks, head = _compute_secs(work, machine, policy)
    recompute = place.recompute_flops / (machine.flops * policy.share_of_block_rate)
    if not policy.fused:
        recompute += model.layers * eager_bytes(work) / machine.gpu_memory_rate
    grad = policy.gradient_bytes * num_params
    return _Terms(
        forward=blocks + head,
        recompute=recompute,
        up=P16_BYTES * num_params / machine.link_up,
        activations_down=place.swapped_bytes / machine.link_down,
        activations_up=place.swapped_bytes / machine.link_up,
        gradients_down=grad / machine.link_down,
        update=num_params / machine.update_rate + num_params * policy.extra_pass_bytes / machine.pass_rate,
        p_bytes=P16_BYTES * num_params * (1 - place.params),
        activation_bytes=place.storage_activation_bytes * machine.num_gpus,
        accumulator_bytes=ACCUMULATOR_BYTES * num_params * (1 - place.accumulators) if work.accumulation > 1 else 0.0,
        state_bytes=STATE_BYTES * num_params * (1 - place.states),
        spilled_bytes=grad * (1 - place.grads) if policy.keeps_gradients else 0.0,
    )


def closed_form(work: Workload, machine: Machine, policy: Policy, place: Placement) -> ClosedForm:
    """Lane times and iteration time of one step under a placement."""
    t, k = _terms(work, machine, policy, place), work.accumulation
    compute = 2 * t.forward + t.recompute
    up, down = t.up + t.activations_up, t.gradients_down

    def backward(read: float, write: float, *more: float) -> float:
        storage = _storage_secs(t.p_bytes + t.activation_bytes + read, write, machine)
        return _phase(policy, [compute, up, down, *more], storage)

    forward = _phase(
        policy, [t.forward, t.up, t.activations_down], _storage_secs(t.p_bytes, t.activation_bytes, machine)
    )
    plain = backward(t.accumulator_bytes, t.accumulator_bytes)
    before = k * forward + (k - 1) * plain
    read = t.state_bytes + t.spilled_bytes + t.accumulator_bytes
    write = t.state_bytes + t.p_bytes
    lanes = {
        Lane.GPU: k * (3 * t.forward + t.recompute),
        Lane.DOWN: k * (t.activations_down + down),
        Lane.UP: k * (t.up + up),
        Lane.READ: storage_secs(
            k * (2 * t.p_bytes + t.activation_bytes) + (k - 1) * t.accumulator_bytes + read, machine.storage_read
        ),
        Lane.WRITE: storage_secs(
            k * t.activation_bytes + t.spilled_bytes + (k - 1) * t.accumulator_bytes + write, machine.storage_write
        ),
        Lane.CPU: t.update,
    }
    if policy.updates is Updates.BACKWARD:
        last, tail = backward(read, write, t.update), _drain_secs(work, machine, policy, place)
    elif policy.updates is Updates.STEP:
        last, tail = backward(0.0, t.spilled_bytes), _phase(policy, [t.update], _storage_secs(read, write, machine))
    else:
        last, tail = backward(0.0, t.spilled_bytes), _turn_secs(work, machine, policy, place)
        # Updates run beside the last backward and the next step's first forward, wherever there is room; activations
        # leave in forward and return in backward.
        storage = _storage_secs(
            2 * t.p_bytes + t.activation_bytes + read, t.activation_bytes + t.spilled_bytes + write, machine
        )
        turn = max(forward + last, storage, t.forward + compute, t.activations_down + down, t.up + up, t.update)
        return ClosedForm(before, last, tail, (k - 1) * (forward + plain) + turn + tail, lanes)
    return ClosedForm(before, last, tail, before + last + tail, lanes)


def _phase(policy: Policy, lanes: list[float], storage: float) -> float:
    return sum(lanes) + storage if policy.in_a_row else max(*lanes, storage)


def _chunk_secs(num_params: float, machine: Machine, policy: Policy, place: Placement) -> dict[str, float]:
    """Gradient out, state in, update, state and P16 out of ``num_params`` parameters."""
    states = STATE_BYTES * num_params * (1 - place.states)
    written = states + P16_BYTES * num_params * (1 - place.params)
    return {
        "down": policy.gradient_bytes * num_params / machine.link_down,
        "read": storage_secs(states, machine.storage_read),
        "update": num_params / machine.update_rate,
        "write": storage_secs(written, machine.storage_write),
        "up": P16_BYTES * num_params / machine.link_up,
    }


def _drain_secs(work: Workload, machine: Machine, policy: Policy, place: Placement) -> float:
    """The last chunk's own chain after the last gradient, less what the bound lane has counted already: reads and
    writes where storage bounds (as it nearly always does here), so the copy and the update remain.
    """
    parts = _chunk_secs(float(work.model.embedding_params), machine, policy, place)
    return parts["down"] + parts["update"]


def _turn_secs(work: Workload, machine: Machine, policy: Policy, place: Placement) -> float:
    """From the last gradient to the first forward of the next step: the embedding's chain, nothing hides it."""
    parts = _chunk_secs(float(work.model.embedding_params), machine, policy, place)
    chain = parts["down"] + parts["read"] + parts["update"] + parts["up"]
    return chain + (parts["write"] if place.params < 1 else 0.0)
