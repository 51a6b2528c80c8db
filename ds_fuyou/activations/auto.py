# SPDX-License-Identifier: Apache-2.0
"""``activations.mode: auto``: what one measured step tells of activations, and the fates of operators' outputs as
blocks know them. Which fates they are is the planner's to say (``planner/activations.py``). No torch is run here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ds_fuyou.activations.calls import OperatorCall
from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.planner.activations import WORKING_BLOCKS, ActivationCosts, SavedOutput, plan_activations
from ds_fuyou.planner.cost import Placement
from ds_fuyou.planner.profile import OperatorCost

__all__ = ["Choice", "Counts", "SavedStep"]


@dataclass(frozen=True)
class SavedStep:
    """What a step saved for backward, and the room there is for it. Blocks are taken to be alike.

    Attributes:
        num_blocks: all of them.
        block_bytes: what one block saves in one forward.
        block_flops: of its forward; 0: not known.
        input_bytes: of the tensors that go into a block.
        outside_bytes: what is saved around blocks in one forward.
        outputs: of one block by their calls, in the order of its forward; only those worth saving.
        device_bytes: room for activations on the device in backward of the blocks; ``beside_bytes``: what else this
            rank's training takes of it then.
        staying_bytes: of the device, for activations until that begins: the loss, say, may need more of it than blocks.
        passing_bytes: of that, for activations that are leaving it.
        host_bytes: of host memory, for what is swapped and stays there; ``stored_bytes``: of storage.
    """

    num_blocks: int
    block_bytes: float
    block_flops: float
    input_bytes: float
    outside_bytes: float
    outputs: Mapping[OperatorCall, OperatorCost]
    device_bytes: float
    host_bytes: float
    stored_bytes: float
    beside_bytes: float = 0.0
    staying_bytes: float = math.inf
    passing_bytes: float = 0.0

    def costs(self) -> ActivationCosts:
        """For the planner. Where no FLOPs were counted all of a forward is one, as in its profile."""
        known = self.block_flops > 0
        return ActivationCosts(
            num_blocks=self.num_blocks,
            input_bytes=self.input_bytes,
            whole_bytes=self.block_bytes,
            outside_bytes=self.outside_bytes,
            outputs=tuple(SavedOutput(o.name, o.flops, o.num_bytes) for o in self.outputs.values()) if known else (),
            block_flops=self.block_flops if known else 1.0 / self.num_blocks,
            working_blocks=WORKING_BLOCKS,
            spare_bytes=self.device_bytes - self.room,
        )

    @property
    def _saved_bytes(self) -> float:
        return self.num_blocks * self.block_bytes + self.outside_bytes

    @property
    def most_bytes(self) -> float:
        """Of the device that activations may hold when forward ends."""
        return min(self.device_bytes, self.staying_bytes)

    @property
    def room(self) -> float:
        """Bytes of the device for what stays there from forward to backward."""
        if self.most_bytes >= self._saved_bytes:
            return self.most_bytes
        return max(0.0, self.most_bytes - self.passing_bytes)

    def room_for(self, saved: float, beside: float, fixed_bytes: float, kept_bytes: float) -> float:
        """Bytes of the device that activations of another forward may hold, which saves ``saved`` times as much as the
        mean of these, of which ``kept_bytes`` stay, and needs ``beside`` times as much beside them, but for
        ``fixed_bytes``. Where less stays than was decided, the last blocks, which backward begins with, come back.
        """
        room = self.device_bytes - (beside - 1) * max(0.0, self.beside_bytes - fixed_bytes)
        beside_loss = self.device_bytes + self.beside_bytes - self.most_bytes
        most = max(0.0, self.most_bytes - (beside - 1) * max(0.0, beside_loss - fixed_bytes))
        passing = 0.0 if kept_bytes >= self._saved_bytes else self.passing_bytes
        if most >= saved * (kept_bytes + passing):
            return most
        return max(0.0, min(most, room - saved * min(WORKING_BLOCKS, self.num_blocks) * self.block_bytes))

    def planned(self, place: Placement, secs_of: Callable[[Placement], float]) -> Choice:
        """The fates that make a step of ``place`` shortest."""
        costs = self.costs()
        found = plan_activations(costs, place, self.room, self.host_bytes, secs_of, most_stored=self.stored_bytes)
        inputs, *outputs = (Counts(swapped, again, kept) for _, kept, swapped, again in found.fates)
        named = zip(self.outputs.items(), outputs, strict=True) if costs.outputs else ()
        coming = max(0, costs.num_working - inputs.kept)  # blocks that backward works on and that do not stay whole
        return Choice(
            self.num_blocks,
            inputs,
            {(output.name, call): counts for (call, output), counts in named},
            swaps_outside=found.swapped_bytes > 0,
            device_bytes=found.kept_bytes + coming * self.block_bytes,
            kept_bytes=found.kept_bytes,
        )


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
    is swapped or kept whole. ``device_bytes``: the most that activations then take of the device; 0: not known.
    ``kept_bytes``: of these, what stays there from forward to backward.
    """

    num_blocks: int
    inputs: Counts
    outputs: Mapping[tuple[str, OperatorCall], Counts]
    swaps_outside: bool
    device_bytes: float = 0.0
    kept_bytes: float = 0.0

    @property
    def stays_whole(self) -> bool:
        """Whether nothing leaves the device, and nothing is computed again."""
        return self.inputs.kept == self.num_blocks and not self.swaps_outside

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
