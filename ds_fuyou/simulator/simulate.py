# SPDX-License-Identifier: Apache-2.0
"""One step as a graph of tasks on lanes, run by the discrete-event engine. No torch.

A unit is what is streamed as a whole: the embedding, each block, the head. Its parameters are read and copied up
ahead of need, its activations leave behind its forward and return ahead of its backward, and its optimizer work is
cut into chunks. Windows of buffers hold back whoever runs too far ahead. A deadline is a place in the order of
computations; every lane takes the earliest one that is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_fuyou.planner.cost import (
    Placement,
    Workload,
    eager_bytes,
    states_that_wait,
    storage_secs,
    stored_sums,
)
from ds_fuyou.planner.hardware import Machine
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.policies import Policy, Updates
from ds_fuyou.simulator.schedule import Schedule, Task

__all__ = ["Simulated", "chrome_trace", "simulate"]

_STEPS = 4  # simulated where steps overlap; the last one is in steady state
_WINDOW = 2  # units of parameters, gradients and activations in flight on the GPU and in host memory
_CHUNKS_IN_FLIGHT = 3  # one read, one updated, one written


@dataclass(frozen=True)
class Simulated:
    """Outcome: seconds of a step in steady state and how long each lane worked in it.

    ``tasks`` are those that run in that step, some of the one before or after; ``begin_secs`` is when it begins.
    """

    iteration_secs: float
    lane_secs: dict[Lane, float]
    tasks: tuple[Task, ...]
    begin_secs: float


def chrome_trace(simulated: Simulated, machine: Machine) -> dict[str, Any]:
    """The steady step as a Chrome trace, in the form of a run's lane trace. Tasks are cut at its begin and end; storage
    spans carry the bytes they move inside.
    """
    rates = {Lane.READ: machine.storage_read, Lane.WRITE: machine.storage_write}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": int(lane), "args": {"name": lane.label}} for lane in Lane
    ]
    origin, until = simulated.begin_secs, simulated.begin_secs + simulated.iteration_secs
    for task in simulated.tasks:
        start, end = max(task.start, origin), min(task.end, until)
        event: dict[str, Any] = {
            "ph": "X",
            "name": task.label,
            "cat": task.lane.label,
            "pid": 0,
            "tid": int(task.lane),
            "ts": round(1e6 * (start - origin), 1),
            "dur": round(1e6 * (end - start), 1),
        }
        if task.lane in rates:
            inside = (end - start) / (task.end - task.start)
            event["args"] = {"bytes": round(task.secs * rates[task.lane] * inside)}
        events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


_BESIDE_FORWARD, _IN_STEP = (Updates.DEADLINE, Updates.FORWARD), (Updates.STEP, Updates.FORWARD)


@dataclass(frozen=True)
class _Unit:
    """Seconds of one unit's pieces. ``chunks`` equal parts of its optimizer work are scheduled one by one; of the
    states the share ``resident`` is in host memory, ``late`` there and waiting for ``step()``. ``p_frozen``: of
    ``p_read``, what is not trained. Of ``p_read`` is in memory in backward ``p_kept``, in a step's first forward
    ``p_first``, and in a further one ``p_again``.
    """

    name: str
    chunks: int = 1
    resident: float = 0.0
    late: float = 0.0
    p_read: float = 0.0
    p_frozen: float = 0.0
    p_kept: float = 0.0
    p_first: float = 0.0
    p_again: float = 0.0
    p_up: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    a_down: float = 0.0
    a_write: float = 0.0
    a_read: float = 0.0
    a_up: float = 0.0
    g_down: float = 0.0
    g_write: float = 0.0
    acc_read: float = 0.0
    acc_write: float = 0.0
    s_read: float = 0.0
    update: float = 0.0
    s_write: float = 0.0


def simulate(work: Workload, machine: Machine, policy: Policy, place: Placement) -> Simulated:
    """Runs steps of a policy under a placement. The machine must have storage where the placement uses it."""
    units = _units(work, machine, policy, place)
    steps = _STEPS if policy.updates in _BESIDE_FORWARD else 1
    graph = _Graph(units, work, machine, policy, place)
    bounds = [graph.step(number) for number in range(steps)]
    end, begin = graph.schedule.run(), 0.0
    tasks = graph.schedule.tasks
    if steps > 1:  # from backward's end to backward's end
        begin, end = (tasks[number].end for number in graph.last_compute[-2:])
    first, last = bounds[-1]
    busy = dict.fromkeys(Lane, 0.0)
    for task in tasks[first:last]:
        busy[task.lane] += task.secs
    shown = tuple(task for task in tasks if task.start < end and task.end > begin)
    return Simulated(end - begin, busy, shown, begin)


def _units(work: Workload, machine: Machine, policy: Policy, place: Placement) -> list[_Unit]:
    model = work.model
    rate = machine.flops * policy.share_of_block_rate
    eager = 0.0 if policy.fused else eager_bytes(work) / machine.gpu_memory_rate
    forward = work.tokens * model.block_flops(work.seq) / rate + eager
    recompute = place.recompute_flops / model.layers / rate + eager
    head = work.tokens * model.head_flops / rate
    chunks = 4 if policy.updates in _BESIDE_FORWARD else 1
    swapped = place.swapped_bytes / model.layers
    stored = place.storage_activation_bytes * machine.num_gpus / model.layers
    pieces = _Pieces(work, machine, policy, place)
    moved = {
        "a_down": swapped / machine.link_down,
        "a_up": swapped / machine.link_up,
        "a_write": storage_secs(stored, machine.storage_write),
        "a_read": storage_secs(stored, machine.storage_read),
    }
    first = _Unit("embedding", 1, **pieces.of_next(float(model.embedding_params)))
    blocks = [
        _Unit(
            f"block {i}",
            chunks,
            forward=forward,
            backward=model.backward_over_forward * forward + recompute,
            **pieces.of_next(float(model.block_params)),
            **moved,
        )
        for i in range(model.layers)
    ]
    head_back = model.backward_over_forward * head
    last = _Unit("head", 1, **pieces.of_next(float(model.head_params)), forward=head, backward=head_back)
    units, kept = [first, *blocks, last], storage_secs(place.kept_param_bytes, machine.storage_read)
    # What a pass uses last the next one uses first. An update replaces what is trained, and hands it out.
    ends = _taken(kept, [unit.p_read for unit in reversed(units)])[::-1]
    begins = _taken(kept, [unit.p_frozen for unit in units]), _taken(kept, [unit.p_read for unit in units])
    return [
        replace(unit, p_kept=end, p_first=frozen + unit.late * (unit.p_read - unit.p_frozen), p_again=every)
        for unit, end, frozen, every in zip(units, ends, *begins, strict=True)
    ]


def _taken(total: float, most: Sequence[float]) -> list[float]:
    """Of ``total``, what the first ones take, each at most so much."""
    taken = []
    for each in most:
        taken.append(min(total, each))
        total -= taken[-1]
    return taken


class _Pieces:
    """Of one unit after the other, in the order of forward: host memory holds the first ones of each class, and of
    parameters the same share of all."""

    def __init__(self, work: Workload, machine: Machine, policy: Policy, place: Placement) -> None:
        self._machine, self._policy = machine, policy
        self._summed = stored_sums(work, policy, place)
        model = work.model
        num_params = float(model.trainable_params)
        self._trained = num_params / model.params  # of each unit; adapters lie evenly
        self._frozen = model.frozen_bytes / model.params
        self._params_stored, self._frozen_stored = 1 - place.params, 1 - place.frozen
        self._left = {"states": place.states, "grads": place.grads, "late": states_that_wait(policy, place)}
        self._left = {name: share * num_params for name, share in self._left.items()}

    def _stored(self, name: str, params: float) -> float:
        """Of ``params`` parameters those on storage."""
        resident = min(params, max(0.0, self._left[name]))
        self._left[name] -= resident
        return params - resident

    def of_next(self, params: float) -> dict[str, float]:
        """Seconds of everything that a unit of ``params`` parameters moves."""
        machine, policy = self._machine, self._policy
        frozen, params = self._frozen * params, self._trained * params
        grad = policy.gradient_bytes * params
        stored = self._stored("states", params)
        spilled = policy.gradient_bytes * self._stored("grads", params) if policy.keeps_gradients else 0.0
        p16, beside = policy.param_bytes * params * self._params_stored, stored * (1 - self._params_stored)
        moved = [
            how(params_in_memory=True) * beside + how(params_in_memory=False) * (stored - beside)
            for how in (policy.layout.read_bytes, policy.layout.written_bytes)
        ]
        acc = grad * self._summed
        return {
            "resident": 1 - stored / params if params > 0 else 0.0,
            "late": 1 - self._stored("late", params) / params if params > 0 else 0.0,
            "p_read": storage_secs(p16 + frozen * self._frozen_stored, machine.storage_read),
            "p_frozen": storage_secs(frozen * self._frozen_stored, machine.storage_read),
            "p_up": (policy.param_bytes * params + frozen) / machine.link_up,
            "g_down": grad / machine.link_down,
            "g_write": storage_secs(spilled, machine.storage_write),
            "acc_read": storage_secs(acc, machine.storage_read),
            "acc_write": storage_secs(acc, machine.storage_write),
            "s_read": storage_secs(moved[0] + spilled, machine.storage_read),
            "update": params / machine.update_rate + params * policy.extra_pass_bytes / machine.pass_rate,
            "s_write": storage_secs(moved[1] + p16, machine.storage_write),
        }


def _append(tasks: list[int | None], task: int | None) -> None:
    """A unit without that work holds back as the one before it does."""
    tasks.append(task if task is not None else tasks[-1] if tasks else None)


class _Graph:
    """Builds the tasks of consecutive steps. ``None`` stands for work that a unit does not have."""

    def __init__(self, units: list[_Unit], work: Workload, machine: Machine, policy: Policy, place: Placement) -> None:
        pools = {"staging": _CHUNKS_IN_FLIGHT * max(unit.chunks for unit in units)}
        self.schedule = Schedule(machine.storage_duplex, pools)
        self.last_compute: list[int] = []
        self._units, self._policy, self._k = units, policy, work.accumulation
        # P16 that is not in memory is read after its write, but by our own runs.
        self._taken_from_updates = place.params >= 1 or policy.updates in _BESIDE_FORWARD
        self._previous: int | None = None  # the task before, where everything is in a row
        self._computes: list[int] = []
        self._ups: list[int | None] = []
        self._drains: list[int | None] = []  # what must have left the GPU, by position
        self._published: list[list[int]] = [[] for _ in units]
        self._activations: list[int | None] = []
        self._window_reads: list[int | None] = []

    def step(self, number: int) -> tuple[int, int]:
        """Adds one step; returns the range of its tasks."""
        begin = len(self.schedule.tasks)
        places = 2 * len(self._units)
        gradients: list[tuple[int, int | None]] = []
        for micro in range(self._k):
            base = (number * self._k + micro) * places
            is_last = micro == self._k - 1
            self._activations = [self._forward(base, i, is_first=micro == 0) for i in range(len(self._units))]
            for back in range(len(self._units)):
                index = len(self._units) - 1 - back
                gradients.append((index, self._backward(base + len(self._units) + back, index, is_last)))
        self.last_compute.append(self._computes[-1])
        final = gradients[-len(self._units) :]
        after = [task for _, task in final if task is not None]
        for place, (index, arrived) in enumerate(final):
            self._optimizer(number, place, index, arrived, after)
        return begin, len(self.schedule.tasks)

    def _add(self, name: str, unit: _Unit, lane: Lane, secs: float, deadline: float, *after: int | None) -> int | None:
        """One task, or None where there is nothing to do. In a row, it also waits for the one before."""
        if secs <= 0:
            return None
        task = Task(f"{name} {unit.name}", lane, secs, deadline)
        if self._policy.in_a_row:
            self._previous = self.schedule.add(task, *after, self._previous)
            return self._previous
        return self.schedule.add(task, *after)

    def _past(self, tasks: list[int | None] | list[int], distance: int) -> int | None:
        return tasks[-distance] if len(tasks) >= distance else None

    def _compute(self, name: str, unit: _Unit, secs: float, deadline: float, *after: int | None) -> int:
        """Computations run in order, and not before the GPU has let go of what left two positions ago."""
        task = Task(f"{name} {unit.name}", Lane.GPU, max(secs, 1e-9), deadline)
        waits = [*after, self._past(self._computes, 1), self._past(self._drains, _WINDOW)]
        if self._policy.in_a_row:
            waits.append(self._previous)
        number = self.schedule.add(task, *waits)
        self._previous = number
        self._computes.append(number)
        return number

    def _parameters(self, unit: _Unit, position: float, secs: float, *after: int | None) -> int | None:
        held = self._past(self._ups, 2 * _WINDOW)
        read = self._add("read P16", unit, Lane.READ, secs, position, *after, held)
        up = self._add("P16 up", unit, Lane.UP, unit.p_up, position, read, *after, self._past(self._computes, _WINDOW))
        _append(self._ups, up)
        return up

    def _forward(self, base: int, index: int, *, is_first: bool) -> int | None:
        unit, position = self._units[index], float(base + index)
        kept = unit.p_first if is_first else unit.p_again
        up = self._parameters(unit, position, unit.p_read - kept, *self._published[index])
        done = self._compute("forward", unit, unit.forward, position, up)
        down = self._add("A16 down", unit, Lane.DOWN, unit.a_down, position + _WINDOW, done)
        _append(self._drains, down)
        return self._add("write A16", unit, Lane.WRITE, unit.a_write, position + 2 * _WINDOW, down) or down

    def _backward(self, position: int, index: int, is_last: bool) -> int | None:
        unit, at = self._units[index], float(position)
        up = self._parameters(unit, at, unit.p_read - unit.p_kept, *self._published[index])
        saved = self._activations[index]
        held = self._past(self._window_reads, 2 * _WINDOW)
        read = self._add("read A16", unit, Lane.READ, unit.a_read, at, saved, held)
        back = self._add("A16 up", unit, Lane.UP, unit.a_up, at, read, saved, self._past(self._computes, _WINDOW))
        _append(self._window_reads, back)
        done = self._compute("backward", unit, unit.backward, at, up, back)
        down = self._add("G16 down", unit, Lane.DOWN, unit.g_down, at + _WINDOW, done)
        _append(self._drains, down)
        if not is_last:
            loaded = self._add("read accumulator", unit, Lane.READ, unit.acc_read, at + 2 * _WINDOW, down)
            self._add("write accumulator", unit, Lane.WRITE, unit.acc_write, at + 3 * _WINDOW, loaded or down)
            return down
        return self._add("write G16", unit, Lane.WRITE, unit.g_write, at + 2 * _WINDOW, down) or down

    def _optimizer(self, step: int, place: int, index: int, arrived: int | None, after: list[int]) -> None:
        """Read, update, write of one unit's chunks. ``after``: all gradients, where updates wait for the last."""
        unit = self._units[index]
        self._published[index] = []
        if unit.update <= 0:
            return
        num_units, policy = len(self._units), self._policy
        base = step * self._k * 2 * num_units + (2 * self._k - 1) * num_units
        deadline = float(base + num_units + index if policy.updates in _BESIDE_FORWARD else base + place + _WINDOW)
        cut = unit.chunks
        resident = round(unit.resident * cut) if policy.updates in _BESIDE_FORWARD else 0
        late = cut if policy.updates in _IN_STEP else round(unit.late * cut)
        moving = cut - resident if resident < cut else cut  # parts that read and write
        for part in range(cut):
            due = deadline + part / (2 * cut)
            waits = tuple(after) if part < late else (arrived,)
            share = 1.0 / moving if part >= cut - moving else 0.0
            read = self._add("read state of", unit, Lane.READ, share * (unit.s_read + unit.acc_read), due, *waits)
            update = self._add("update", unit, Lane.CPU, unit.update / cut, due, read, *waits)
            write = self._add("write state of", unit, Lane.WRITE, share * unit.s_write, due, update)
            self._stage(read, update, write)
            ready = update if self._taken_from_updates or write is None else write
            if ready is not None:
                self._published[index].append(ready)

    def _stage(self, read: int | None, update: int | None, write: int | None) -> None:
        """A chunk's buffers: taken by the first task, given back by the last. In memory it needs none."""
        numbers = tuple(number for number in (read, update, write) if number is not None)
        if self._policy.in_a_row or not numbers:
            return
        chunk = [self.schedule.tasks[number] for number in numbers]
        chunk[0].chunk = numbers
        if read is not None:
            chunk[0].takes = chunk[-1].gives = "staging"
            for task in chunk:
                task.holds = True
