# SPDX-License-Identifier: Apache-2.0
"""Keep, swap or recompute: what becomes of everything that backward needs, by predicted time. No torch.

[Note: the ladder]
What cannot be computed again comes first: inputs of blocks, and what lies around blocks. Then outputs of operators by
the FLOPs that each byte saves, most first, each in one block after the other: a rung is one output in one block. In
that order the seconds of a step are convex in the bytes saved, so the best rung is found by halving. A block of which
everything is saved saves what backward really needs of it, which may be less than the outputs that spare computing.
Whole blocks, the last ones, whose backward comes first, stay on the device where there is room: those that backward
works on at a time in any case, since the device has room for one after the other of these anyway. What room is left
keeps outputs of the others. What is saved and does not stay is swapped; in host memory as far as that reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ds_fuyou.planner.cost import Placement, Workload
from ds_fuyou.planner.policies import Fates, Policy

__all__ = ["INPUTS", "WORKING_BLOCKS", "ActivationCosts", "SavedOutput", "costs_of", "plan_activations"]

INPUTS = "block_input"
"""What goes into a block, in ``Placement.fates``."""

WORKING_BLOCKS = 2
"""Backward works on one, and the next comes back meanwhile."""


@dataclass(frozen=True)
class SavedOutput:
    """An operator's output in one block, one micro-batch: what saving it costs and spares."""

    name: str
    flops: float
    num_bytes: float


@dataclass(frozen=True)
class ActivationCosts:
    """What one micro-batch saves on one device. Blocks are taken to be alike.

    Attributes:
        input_bytes: of the tensors that go into a block.
        whole_bytes: saved by a block of which nothing is computed again, its inputs included.
        outside_bytes: saved around blocks.
        outputs: of a block, in the order of forward; those that may be saved where others are computed again.
        block_flops: that a block computed again from its input repeats.
        num_classes: of outputs that may be saved, those worth most a byte, each in all blocks or in none; None: all,
            block by block.
        working_blocks: whose tensors backward has on the device at a time, whatever their fates, in the room for what
            stays and in ``spare_bytes``, which the loss needs before.
    """

    num_blocks: int
    input_bytes: float
    whole_bytes: float
    outside_bytes: float
    outputs: tuple[SavedOutput, ...]
    block_flops: float
    num_classes: int | None = None
    working_blocks: int = 0
    spare_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Saved where nothing is computed again."""
        return self.num_blocks * self.whole_bytes + self.outside_bytes

    @cached_property
    def num_working(self) -> int:
        return min(self.working_blocks, self.num_blocks)

    def left(self, room: float, num_kept: int) -> float:
        """Of ``room`` for what stays, for outputs of blocks that are not kept whole; negative: so many cannot be."""
        in_backward = room + self.spare_bytes - max(num_kept, self.num_working) * self.whole_bytes
        return min(room - num_kept * self.whole_bytes, in_backward)

    @cached_property
    def ranked(self) -> tuple[int, ...]:
        """Indices of the ``outputs`` that may be saved, most FLOPs a byte first."""
        worth = [output.flops / max(1.0, output.num_bytes) for output in self.outputs]
        return tuple(sorted(range(len(worth)), key=lambda index: -worth[index])[: self.num_classes])


def costs_of(work: Workload, policy: Policy) -> ActivationCosts:
    """Of a model by its shape.

    The output of the last matmul is worth most by FLOPs a byte: backward does not need it, but repeats that matmul in
    every block of which anything is repeated, unless its output is saved. The published gain of planning over block
    inputs alone is 0 to 14 %, at most what this one class can give (9 %) and far from what all of them would (33 %): so
    it is the only class that the published system takes.
    """
    model, tokens = work.model, float(work.tokens)
    outputs = tuple(SavedOutput(o.name, tokens * o.flops(work.seq), tokens * o.output_bytes) for o in model.operators)
    return ActivationCosts(
        num_blocks=model.layers,
        input_bytes=tokens * model.input_bytes,
        whole_bytes=tokens * model.saved_bytes,
        outside_bytes=0.0,
        outputs=outputs,
        block_flops=sum(output.flops for output in outputs),
        num_classes={Fates.CHECKPOINT: 0, Fates.FIRST_CLASS: 1, Fates.OPERATORS: None}[policy.fates],
    )


class _Ladder:
    """Rungs of the blocks before the last ``num_kept``, which are kept whole: 0 saves inputs alone, the last all."""

    def __init__(self, costs: ActivationCosts, num_kept: int, room: float) -> None:
        self.costs = costs
        self.num_kept = num_kept
        self.rest = costs.num_blocks - num_kept
        self.left = max(0.0, costs.left(room, num_kept))
        self._by_class = costs.num_classes is not None
        num_outputs = len(costs.ranked) if self._by_class else max(1, len(costs.ranked))
        self.each = 1 if self._by_class else max(1, self.rest)
        self.last = self.each * num_outputs if self.rest else 0
        self._spared_bytes = costs.input_bytes + sum(output.num_bytes for output in costs.outputs) - costs.whole_bytes
        self._unsaved_flops = costs.block_flops - sum(output.flops for output in costs.outputs)

    def saved(self, rung: int) -> list[int]:
        """Of the blocks that are not kept, in how many each output is saved, by rank."""
        if self._by_class:
            return [self.rest if rank < rung else 0 for rank in range(len(self.costs.ranked))]
        return [min(self.rest, max(0, rung - rank * self.each)) for rank in range(len(self.costs.ranked))]

    def at(self, rung: int) -> tuple[float, float]:
        """(bytes saved by the blocks that are not kept, FLOPs repeated)."""
        costs = self.costs
        num_bytes, flops = self.rest * costs.input_bytes, self.rest * costs.block_flops
        for count, index in zip(self.saved(rung), costs.ranked, strict=True):
            num_bytes += count * costs.outputs[index].num_bytes
            flops -= count * costs.outputs[index].flops
        if not self._by_class:
            num_whole = max(0, rung - (self.last - self.each))  # of which nothing is computed again
            num_bytes -= num_whole * self._spared_bytes
            flops -= num_whole * self._unsaved_flops
        return num_bytes, max(0.0, flops)

    def fates(self, rung: int, kept_bytes: float) -> tuple[tuple[str, int, int, int], ...]:
        """For ``Placement.fates``; ``kept_bytes`` of the saved outputs stay, those worth least a byte first: the
        others are moved gladly.
        """
        costs, left = self.costs, kept_bytes
        again = self.rest - rung if not costs.outputs and not self._by_class else 0
        found = [(output.name, self.num_kept, 0, self.rest) for output in costs.outputs]
        for count, index in reversed(list(zip(self.saved(rung), costs.ranked, strict=True))):
            size = costs.outputs[index].num_bytes
            stays = min(count, int(left / size)) if size > 0 else count
            left -= stays * size
            found[index] = (costs.outputs[index].name, self.num_kept + stays, count - stays, self.rest - count)
        return ((INPUTS, self.num_kept, self.rest - again, again), *found)


def plan_activations(
    costs: ActivationCosts,
    place: Placement,
    room: float,
    in_dram: float,
    secs_of: Callable[[Placement], float],
    mode: str = "auto",
    *,
    most_stored: float = float("inf"),
) -> Placement:
    """The placement with activations filled in, and the fates that do it, [Note: the ladder].

    Args:
        room: bytes of the device for what stays there.
        in_dram: bytes of host memory for what is swapped; ``most_stored``: of storage behind it.
        secs_of: predicts the seconds of a step.
        mode: as the user chose: "recompute" (block inputs alone are saved), "swap" (all leaves), "none" (all stays).
    """
    total = costs.total_bytes
    if mode == "none" or (mode == "auto" and room >= total):
        names = (INPUTS, *(output.name for output in costs.outputs))
        return replace(
            place,
            swapped_bytes=0.0,
            dram_activation_bytes=0.0,
            kept_bytes=total,
            recompute_flops=0.0,
            fates=tuple((name, costs.num_blocks, 0, 0) for name in names),
        )

    def tried(ladder: _Ladder, rung: int) -> Placement:
        num_bytes, flops = ladder.at(rung)
        stays = min(ladder.left, max(0.0, num_bytes - ladder.rest * costs.input_bytes))
        swapped = num_bytes - stays + costs.outside_bytes
        kept = ladder.num_kept * costs.whole_bytes + stays
        return place.with_activations(swapped, min(swapped, max(0.0, in_dram)), kept, flops)

    known: dict[tuple[int, int], float] = {}

    def secs(ladder: _Ladder, rung: int) -> float:
        key = ladder.num_kept, rung
        if key not in known:
            found = tried(ladder, rung)
            too_many = rung > 0 and found.storage_activation_bytes > most_stored + 1
            known[key] = float("inf") if too_many else secs_of(found)
        return known[key]

    best, found = float("inf"), place
    for ladder in _ladders(costs, room if mode == "auto" else 0.0):
        rung = {"swap": ladder.last, "recompute": 0}.get(mode)
        if rung is None:
            rung = _best_rung(ladder, secs)
        took = secs(ladder, rung)
        if found is place or took < best * (1 - 1e-9):
            best, found = took, tried(ladder, rung)
            stays = found.kept_bytes - ladder.num_kept * costs.whole_bytes
            found = replace(found, fates=ladder.fates(rung, stays))
    return found


def _ladders(costs: ActivationCosts, room: float) -> Iterator[_Ladder]:
    """With as many blocks kept whole as there is room for, half as many, and those alone that take no one else's."""
    most = costs.num_blocks if costs.whole_bytes <= 0 else min(costs.num_blocks, int(room / costs.whole_bytes))
    if costs.left(room, most) < 0:
        most = 0
    least = min(most, costs.num_working)
    for num_kept in dict.fromkeys((most, max(most // 2, least), least)):
        yield _Ladder(costs, num_kept, room)


def _best_rung(ladder: _Ladder, secs: Callable[[_Ladder, int], float]) -> int:
    """Whole outputs until one makes it slower, then single blocks on both sides of the best."""
    best, best_secs = 0, secs(ladder, 0)
    for rung in range(ladder.each, ladder.last + 1, ladder.each):
        now = secs(ladder, rung)
        if now < best_secs * (1 - 1e-9):
            best, best_secs = rung, now
        elif now > best_secs * (1 + 1e-6):
            break
    low, high = max(0, best - ladder.each), min(ladder.last, best + ladder.each)
    return _least(lambda rung: secs(ladder, rung), low, high, best)


def _least(secs: Callable[[int], float], low: int, high: int, best: int) -> int:
    """The rung of a convex function's minimum on both sides of ``best``, by thirds; the lowest of equal ones."""
    if high - low <= 2:
        return best
    while high - low > 2:
        left = low + (high - low) // 3
        right = high - (high - low) // 3
        if secs(left) <= secs(right):
            high = right
        else:
            low = left
    return min((*range(low, high + 1), best), key=lambda rung: (secs(rung), rung))
