# SPDX-License-Identifier: Apache-2.0
"""``activations.mode: auto``: a simple rule over whole blocks, until a planner that knows operators decides.

The last blocks are kept, as many as the device has room for: backward needs them first. Of the others the first ones
are swapped, as many as storage can move while the step computes: they have the longest time to come back. What is left
in the middle is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_fuyou.activations.blocks import Block

__all__ = ["BlockFates", "BlockMeasurement", "choose_fates"]

_WORKING_BLOCKS = 2
"""What backward works on, and what is on its way to it, takes as much room as this many blocks."""


@dataclass(frozen=True)
class BlockMeasurement:
    """One step in which everything was swapped.

    Attributes:
        num_blocks: all of them, assumed alike.
        block_bytes: what one block saves in one forward.
        num_forwards: forwards in the step.
        step_secs: wall time of the step.
        storage_bytes_per_sec: measured, reads and writes together; None without storage: then nothing bounds swapping.
        other_storage_bytes: moved in the step for parameters, gradients and states.
        device_bytes: room for activations on the device.
    """

    num_blocks: int
    block_bytes: float
    num_forwards: int
    step_secs: float
    storage_bytes_per_sec: float | None
    other_storage_bytes: float
    device_bytes: float


@dataclass(frozen=True)
class BlockFates:
    """How many blocks, in the order of forward, are swapped, recomputed, kept."""

    num_swapped: int
    num_recomputed: int
    num_kept: int

    def split(self, blocks: Sequence[Block]) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
        """(swapped, recomputed) of the blocks in their order."""
        middle = self.num_swapped + self.num_recomputed
        return tuple(blocks[: self.num_swapped]), tuple(blocks[self.num_swapped : middle])


def choose_fates(measured: BlockMeasurement) -> BlockFates:
    """Applies the rule. Bytes of a swapped block cross the storage lane twice in every forward and backward."""
    if measured.block_bytes <= 0:
        return BlockFates(0, 0, measured.num_blocks)
    room = int(measured.device_bytes / measured.block_bytes)
    num_kept = measured.num_blocks if room >= measured.num_blocks else max(0, room - _WORKING_BLOCKS)
    rest = measured.num_blocks - num_kept
    if measured.storage_bytes_per_sec is None:
        return BlockFates(rest, 0, num_kept)
    free_bytes = measured.step_secs * measured.storage_bytes_per_sec - measured.other_storage_bytes
    affordable = int(max(0.0, free_bytes) / (2 * measured.block_bytes * max(1, measured.num_forwards)))
    num_swapped = min(rest, affordable)
    return BlockFates(num_swapped, rest - num_swapped, num_kept)
