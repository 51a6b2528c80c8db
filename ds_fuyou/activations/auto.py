# SPDX-License-Identifier: Apache-2.0
"""``activations.mode: auto``: fates of operators' outputs by what one measured step tells. No torch is run here.

[Note: the rule of mode auto]
What cannot be computed again comes first: inputs of blocks, and what lies around blocks. Then the outputs of operators
by the FLOPs that each byte saves, most first, each in every block: they are swapped until the storage lane would have
more to do than the step lasts. What does not fit that is kept as far as the device has room, and computed again
otherwise. One operator may have several fates: it is swapped in the first blocks, which have the longest time to get
it back, kept in the last ones, which need it first, and recomputed in between.

Whole blocks are kept, the last ones, where the device has room for them; backward works on two more. Where storage can
take all that the other blocks save, they are swapped whole, and nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_fuyou.activations.calls import OperatorCall
from ds_fuyou.activations.policy import BlockFate, Fate

__all__ = ["WORKING_BLOCKS", "Choice", "Counts", "OutputCost", "SwappedStep", "choose", "swap_allowance"]

WORKING_BLOCKS = 2
"""Backward works on one, and the next comes back meanwhile."""


@dataclass(frozen=True)
class OutputCost:
    """One operator's output in one forward of one block."""

    name: str
    call: OperatorCall
    flops: float
    num_bytes: float


@dataclass(frozen=True)
class SwappedStep:
    """One step in which what the device had room for was kept, and the rest swapped. Blocks are taken to be alike.

    Attributes:
        num_blocks: all of them.
        block_bytes: what one block saves in one forward.
        input_bytes: of the tensors that go into a block.
        outside_bytes: what is saved around blocks in one forward.
        outputs: of one block, in the order of its forward; only those worth saving.
        swap_bytes: of one forward, what storage can take (:func:`swap_allowance`, and its room), or, without storage,
            host memory can hold; None: nothing bounds swapping.
        device_bytes: room for activations on the device.
    """

    num_blocks: int
    block_bytes: float
    input_bytes: float
    outside_bytes: float
    outputs: tuple[OutputCost, ...]
    swap_bytes: float | None
    device_bytes: float


def swap_allowance(step_secs: float, storage_bytes_per_sec: float, other_bytes: float, num_forwards: int) -> float:
    """Bytes of one forward that can cross the storage lane out and in again before it becomes the bound of a step.

    Args:
        step_secs: wall time of the step without waits for activations.
        storage_bytes_per_sec: reads and writes together.
        other_bytes: moved in the step for parameters, gradients and states.
    """
    return max(0.0, step_secs * storage_bytes_per_sec - other_bytes) / (2 * max(1, num_forwards))


@dataclass(frozen=True)
class Counts:
    """In how many blocks, in the order of forward, an output is swapped, recomputed, kept."""

    swapped: int
    recomputed: int
    kept: int

    def fate(self, index: int) -> Fate:
        """In the block of that number."""
        if index < self.swapped:
            return Fate.SWAP
        return Fate.RECOMPUTE if index < self.swapped + self.recomputed else Fate.KEEP


@dataclass(frozen=True)
class Choice:
    """What becomes of everything: ``inputs`` of blocks (recomputed: the whole block is, and its inputs are swapped),
    ``outputs`` by (name, call), and whether what lies around blocks is swapped. A block of which nothing is recomputed
    is swapped or kept whole.
    """

    num_blocks: int
    inputs: Counts
    outputs: Mapping[tuple[str, OperatorCall], Counts]
    swaps_outside: bool

    def fates(self, names: Sequence[str]) -> dict[str, BlockFate]:
        """For :meth:`ActivationSession.decide`; ``names`` are the blocks in the order of forward."""
        fates = {name: self._block(index) for index, name in enumerate(names)}
        return {**fates, "": BlockFate(Fate.SWAP if self.swaps_outside else Fate.KEEP)}

    def _block(self, index: int) -> BlockFate:
        whole = self.inputs.fate(index)
        if whole is Fate.RECOMPUTE:
            return BlockFate(Fate.SWAP, {})
        outputs = {call: counts.fate(index) for (_, call), counts in self.outputs.items()}
        found = {*outputs.values(), whole}
        if Fate.RECOMPUTE not in found:
            return BlockFate(Fate.SWAP if Fate.SWAP in found else Fate.KEEP)
        saved = {call: fate for call, fate in outputs.items() if fate is not Fate.RECOMPUTE}
        return BlockFate(whole, saved)

    def line(self) -> str:
        """What most blocks do, for the log."""
        outputs = self.outputs.values()
        swapped, recomputed, kept = (sum(getattr(c, f) for c in outputs) for f in ("swapped", "recomputed", "kept"))
        inputs = self.inputs
        line = f"of {self.num_blocks} blocks {inputs.kept} are kept whole, the inputs of {inputs.swapped} are swapped"
        if inputs.recomputed:
            line += f" and {inputs.recomputed} recomputed whole"
        if outputs:
            line += f"; of operators' outputs there {swapped} are swapped, {recomputed} recomputed, {kept} kept"
        return line

    def table(self) -> str:
        """One line an output, for the log."""
        rows = {"block inputs": self.inputs, **{name: counts for (name, _), counts in self.outputs.items()}}
        lines = [f"  {'output of':<44}{'swapped':>9}{'recomputed':>12}{'kept':>6}"]
        for name, counts in rows.items():
            lines.append(f"  {name:<44}{counts.swapped:>9}{counts.recomputed:>12}{counts.kept:>6}")
        return "\n".join(lines)


def choose(measured: SwappedStep) -> Choice:
    """Applies the rule, [Note: the rule of mode auto]."""
    total, block = measured.num_blocks, measured.block_bytes
    if measured.device_bytes >= total * block + measured.outside_bytes:
        return _whole(measured, num_swapped=0)
    room = max(0.0, measured.device_bytes - WORKING_BLOCKS * block)
    kept = min(total, int(room / block)) if block > 0 else total
    rest = total - kept
    allowance = measured.swap_bytes
    if allowance is None or allowance >= rest * block + measured.outside_bytes:
        return _whole(measured, rest)
    if not measured.outputs:  # nothing is known of operators: whole blocks it is
        swapped = min(rest, int(max(0.0, allowance - measured.outside_bytes) / block))
        return Choice(total, Counts(swapped, rest - swapped, kept), {}, swaps_outside=True)
    allowance = max(0.0, allowance - measured.outside_bytes - rest * measured.input_bytes)
    outputs = _ladder(measured, kept, allowance, room - kept * block)
    return Choice(total, Counts(rest, 0, kept), outputs, swaps_outside=True)


def _whole(measured: SwappedStep, num_swapped: int) -> Choice:
    counts = Counts(num_swapped, 0, measured.num_blocks - num_swapped)
    return Choice(measured.num_blocks, counts, {}, swaps_outside=num_swapped > 0)


def _ladder(measured: SwappedStep, kept: int, allowance: float, room: float) -> dict[tuple[str, OperatorCall], Counts]:
    """Counts of every output where the last ``kept`` blocks are kept, in the order of worth."""
    rest = measured.num_blocks - kept
    found = {}
    for output in sorted(measured.outputs, key=lambda output: -output.flops / output.num_bytes):
        swapped = min(rest, int(allowance / output.num_bytes))
        allowance = allowance - swapped * output.num_bytes if swapped == rest else 0.0
        more = min(rest - swapped, int(room / output.num_bytes))
        room -= more * output.num_bytes
        found[output.name, output.call] = Counts(swapped, rest - swapped - more, kept + more)
    return found
