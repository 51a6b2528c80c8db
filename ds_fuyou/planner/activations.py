# SPDX-License-Identifier: Apache-2.0
"""Keep, swap or recompute: the scan over activations in the order of recompute FLOPs saved a byte. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ds_fuyou.planner.cost import Placement, Workload
from ds_fuyou.planner.policies import Fates, Policy

__all__ = ["plan_activations"]


@dataclass(frozen=True)
class _Candidate:
    """Saving the outputs of one operator in some blocks: bytes moved and FLOPs not repeated, a micro-batch."""

    name: str
    blocks: int
    num_bytes: float
    flops: float


def _ranked(work: Workload, policy: Policy) -> list[_Candidate]:
    """Candidates, most FLOPs per byte first.

    The output of the last matmul is worth most by that measure: backward does not need it, but repeats that matmul in
    every block of which anything is repeated, unless its output is saved. The published gain of planning over block
    inputs alone is 0 to 14 %, at most what this one class can give (9 %) and far from what all of them would (33 %): so
    it is the only class taken there.
    """
    model = work.model
    if policy.fates is Fates.CHECKPOINT:
        return []
    ops = sorted(model.operators, key=lambda op: -op.flops_per_byte(work.seq))
    chosen = ops[:1] if policy.fates is Fates.FIRST_CLASS else ops
    scale = float(model.layers * work.tokens)
    return [_Candidate(op.name, model.layers, scale * op.output_bytes, scale * op.flops(work.seq)) for op in chosen]


class _Ladder:
    """What is saved, in the order of worth: rung 0 saves block inputs alone, the last one everything.

    A rung is one operator in one block (the published system: in all blocks).
    """

    def __init__(self, work: Workload, policy: Policy) -> None:
        model = work.model
        scale = float(model.layers * work.tokens)
        self._work = work
        self._ranked = _ranked(work, policy)
        self._all_flops = scale * sum(op.flops(work.seq) for op in model.operators)
        by_operators = policy.fates is Fates.OPERATORS
        # A block of which nothing is repeated has no use for these.
        self._spared_bytes = scale * sum(op.output_bytes for op in model.operators if by_operators and not op.needed)
        self._input_bytes = scale * model.input_bytes
        self.rungs_each = 1 if policy.fates is Fates.FIRST_CLASS else model.layers
        self.num_rungs = self.rungs_each * len(self._ranked)

    def at(self, rung: int) -> tuple[float, float]:
        """(bytes saved, FLOPs repeated)."""
        whole, part = divmod(rung, self.rungs_each)
        num_bytes, flops = self._input_bytes, self._all_flops
        for index, candidate in enumerate(self._ranked[: whole + 1]):
            share = 1.0 if index < whole else part / self.rungs_each
            num_bytes += share * candidate.num_bytes
            flops -= share * candidate.flops
        if self._ranked:
            whole_blocks = rung / self.rungs_each - (len(self._ranked) - 1)
            num_bytes -= max(0.0, whole_blocks) * self._spared_bytes
        return num_bytes, max(0.0, flops)

    def saved(self, rung: int) -> dict[str, int]:
        """In how many blocks each operator's output is saved."""
        whole, part = divmod(rung, self.rungs_each)
        layers = self._work.model.layers
        counts = {"block_input": layers}
        for index, candidate in enumerate(self._ranked[: whole + 1]):
            count = layers if index < whole else round(layers * part / self.rungs_each)
            counts[candidate.name] = count
        return counts


def plan_activations(
    work: Workload,
    policy: Policy,
    place: Placement,
    gpu_free_bytes: float,
    dram_free_bytes: float,
    secs_of: Callable[[Placement], float],
) -> Placement:
    """The placement with activations filled in. ``secs_of`` predicts the iteration time of a placement.

    Convex in the bytes saved: whole operators are taken until the first one that is slower, then single blocks
    on both sides of the best. What fits ``gpu_free_bytes`` stays on the GPU (ours only), the next
    ``dram_free_bytes`` in host memory, the rest goes to storage. A mode that the user chose is taken as it is:
    block inputs alone (recompute), everything swapped, everything kept (none).
    """
    ladder = _Ladder(work, policy)

    mode = policy.fixed.mode
    room = 0.0 if policy.fates is not Fates.OPERATORS or mode == "swap" else max(0.0, gpu_free_bytes)
    if mode == "none":
        room = float("inf")

    def tried(rung: int) -> Placement:
        num_bytes, flops = ladder.at(rung)
        kept = min(num_bytes, room)
        swapped = num_bytes - kept
        return replace(
            place,
            swapped_bytes=swapped,
            kept_bytes=kept,
            dram_activation_bytes=min(swapped, max(0.0, dram_free_bytes)),
            recompute_flops=flops,
        )

    def secs(rung: int) -> float:
        return secs_of(tried(rung))

    if mode in ("none", "swap", "recompute"):
        best = 0 if mode == "recompute" else ladder.num_rungs
        return _with_fates(work, ladder, best, tried(best))
    best, best_secs = 0, secs(0)
    for rung in range(ladder.rungs_each, ladder.num_rungs + 1, ladder.rungs_each):
        now = secs(rung)
        if now < best_secs * (1 - 1e-9):
            best, best_secs = rung, now
        elif now > best_secs * (1 + 1e-6):
            break
    best = _least(secs, max(0, best - ladder.rungs_each), min(ladder.num_rungs, best + ladder.rungs_each), best)
    return _with_fates(work, ladder, best, tried(best))


def _with_fates(work: Workload, ladder: _Ladder, rung: int, place: Placement) -> Placement:
    kept_share = place.kept_bytes / max(1.0, place.kept_bytes + place.swapped_bytes)
    return replace(place, fates=_fates(work, ladder.saved(rung), kept_share))


def _least(secs: Callable[[int], float], low: int, high: int, best: int) -> int:
    """The rung of a convex function's minimum on both sides of ``best``, by halving; the lowest of equal ones."""
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


def _fates(work: Workload, saved: dict[str, int], kept_share: float) -> tuple[tuple[str, int, int, int], ...]:
    """Blocks in which each operator's output is kept, swapped, recomputed. What stays on the GPU is that of the last
    blocks, whose backward comes first.
    """
    layers = work.model.layers
    kept_blocks = int(layers * kept_share)
    rows = []
    for name in ("block_input", *(op.name for op in work.model.operators)):
        count = saved.get(name, 0)
        kept = min(count, kept_blocks)
        rows.append((name, kept, count - kept, layers - count))
    return tuple(rows)
