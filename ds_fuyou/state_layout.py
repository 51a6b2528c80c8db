# SPDX-License-Identifier: Apache-2.0
"""The layouts of a state block: the one description of what lies where in it. No torch.

A block holds the master (P32) and the moments of one chunk. Every field begins at a page. States kept for a checkpoint,
and whoever reads or replaces a state between steps, see *whole* blocks, fp32 throughout. What lies in a slot on storage
has the layout of the run, which its contents name; in host memory it is the same, but split masters are whole. The C++
pipeline gets offsets from here, slots, checkpoints and recovery sizes, the planner bytes a parameter. See
[Note: split masters] in ``csrc/pipeline/state_block.h`` for how P32 is put together from halves, and [Note: codes] in
``csrc/kernels/moments.h`` for 8-bit moments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.storage.types import PAGE_BYTES

__all__ = [
    "AUTO",
    "BF16",
    "CODE_BLOCK",
    "FP32",
    "INT8",
    "SPLIT",
    "WHOLE",
    "StateLayout",
    "layout_of",
    "masters_of",
    "moments_of",
]

AUTO, WHOLE, SPLIT = "auto", "whole", "split"
FP32, BF16, INT8 = "fp32", "bf16", "int8"
CODE_BLOCK = 256
"""Elements that share a scale where moments are 8-bit codes, counted from the begin of a chunk. Those of two parameters
share none."""
_MOMENT_BYTES = {FP32: 4, BF16: 2, INT8: 1}


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class StateLayout:
    """``masters``: ``whole`` is fp32; ``split`` is 16 lower halves, which P16 of the same step completes, and upper
    halves where P16 does not, or does not last; ``bf16`` is that without lower halves, which are zeros. ``moments``:
    ``fp32``, ``bf16``, or ``int8``: codes, and a scale for each :data:`CODE_BLOCK` of them, and for what is left of one
    where a parameter begins: at the elements ``cuts`` of a chunk, see :meth:`of`.

    A block is ``[master, moment, ...]``, or split ``[high, joints, low, moment, ...]``, codes before their scales:
    what is left out is at its ends, high halves where P16 makes them needless, moments before the first update.
    """

    masters: str
    num_moments: int
    moments: str = FP32
    cuts: tuple[int, ...] = ()

    def of(self, begins: Iterable[int]) -> StateLayout:
        """That of a chunk in which parameters begin at these elements, counted from its begin."""
        if self.moments != INT8:
            return self
        return replace(self, cuts=tuple(sorted({begin for begin in begins if begin > 0 and begin % CODE_BLOCK})))

    @property
    def version(self) -> int:
        """As state files name it; those that name none are of version 1. Of version 3 were codes, too, when two
        parameters shared a scale."""
        if self.moments == INT8:
            return 5
        if self.masters == BF16:
            return 4
        return 3 if self.moments != FP32 else 1 if self.masters == WHOLE else 2

    @property
    def is_split(self) -> bool:
        """Whether P16 completes masters, or is all of them."""
        return self.masters != WHOLE

    @property
    def rounds(self) -> bool:
        """Whether values from outside may not stay what they are."""
        return self.masters == BF16 or self.moments != FP32

    @property
    def is_whole(self) -> bool:
        """Whether it is what readers see."""
        return self.masters == WHOLE and self.moments == FP32

    @property
    def whole(self) -> StateLayout:
        """As readers see it."""
        return StateLayout(WHOLE, self.num_moments)

    @property
    def resident(self) -> StateLayout:
        """As it is in host memory."""
        return replace(self, masters=WHOLE) if self.masters == SPLIT else self

    @property
    def master_alone(self) -> StateLayout:
        """Its first fields."""
        return replace(self, num_moments=0)

    @functools.cached_property
    def fields(self) -> tuple[tuple[str, int, int], ...]:
        """(name, bytes, of so many elements), in order; ``joints`` is one page."""
        found = [("high", 2, 1), ("joints", PAGE_BYTES, 0)] if self.is_split else [("master", 4, 1)]
        if self.masters == SPLIT:
            found.append(("low", 2, 1))
        for number in range(self.num_moments):
            found.append((f"moment{number}", _MOMENT_BYTES[self.moments], 1))
            if self.moments == INT8:
                found.append((f"scales{number}", 4, CODE_BLOCK))
        return tuple(found)

    def offsets(self, numel: int) -> dict[str, int]:
        """The first byte of every field; ``end`` is the size of the block."""
        found, at = {}, 0
        for name, num_bytes, each in self.fields:
            found[name] = at
            num_cuts = len(self.cuts) if each == CODE_BLOCK else 0
            at += _pages(num_bytes * (-(-numel // each) + num_cuts if each else 1))
        return {**found, "end": at}

    def num_bytes(self, numel: int) -> int:
        return self.offsets(numel)["end"]

    def num_master_bytes(self, numel: int) -> int:
        """Of the first fields: what stands there without moments."""
        return self.offsets(numel)["moment0" if self.num_moments else "end"]

    def as_json(self) -> dict[str, int | str]:
        """How state files name it; moments of fp32 are not named, as ever."""
        named: dict[str, int | str] = {"version": self.version, "masters": self.masters, "moments": self.num_moments}
        return named if self.moments == FP32 else {**named, "moment_type": self.moments}

    @property
    def said(self) -> dict[str, int | str] | None:
        """What state files say of it: nothing of version 1, which older ones have."""
        return None if self.version == 1 else self.as_json()

    def native(self, numel: int) -> dict[str, object]:
        """As ``BlockLayout`` of the C++ core takes it."""
        at = self.offsets(numel)
        return {
            "numel": numel,
            "num_moments": self.num_moments,
            "is_split": self.is_split,
            "high": at.get("high", 0),
            "joints": at.get("joints", 0),
            "master": at.get("low", at.get("master", 0)),
            "has_low": self.masters != BF16,
            "moment_type": self.moments,
            "moments": [at[f"moment{i}"] for i in range(self.num_moments)],
            "scales": [at.get(f"scales{i}", 0) for i in range(self.num_moments)],
            "num_bytes": at["end"],
            "cuts": self.cuts,
        }

    @property
    def saved_as(self) -> tuple[str, ...]:
        """Types of masters and moments in a checkpoint, which are stock's: moments that stock has in fp32 stay so."""
        moments = self.moments if self.masters == self.moments == BF16 else FP32
        return (BF16 if self.masters == BF16 else FP32, *[moments] * self.num_moments)

    def saved_bytes_each(self, num_moments: int) -> int:
        """In a checkpoint, with so many moments."""
        masters, moments, *_ = self.saved_as
        return _MOMENT_BYTES[masters] + num_moments * _MOMENT_BYTES[moments]

    # ---- bytes a parameter ---------------------------------------------------------------------------------

    @functools.cached_property
    def bytes_each(self) -> float:
        """In a slot."""
        return sum(num_bytes / each for _, num_bytes, each in self.fields if each)

    @functools.cached_property
    def resident_bytes_each(self) -> float:
        """In host memory."""
        return self.resident.bytes_each

    @property
    def moment_bytes_each(self) -> float:
        """Of one moment, with its scales."""
        return (self.bytes_each - self.master_alone.bytes_each) / max(1, self.num_moments)

    def read_bytes(self, *, params_in_memory: bool) -> float:
        """Of an update whose state is on storage: P16 that completes lower halves included, if it is read for them."""
        return self.bytes_each - (2 if self.is_split and params_in_memory else 0)

    def written_bytes(self, *, params_in_memory: bool) -> float:
        """Beside P16 on storage, which is written all the same. With P16 in memory a slot has upper halves: it is
        durable by itself."""
        return self.bytes_each - (2 if self.is_split and not params_in_memory else 0)

    def moved_bytes(self, params: float, states: float) -> tuple[float, float]:
        """Read and written in a step, with these shares of P16 and of states in memory: of P16 the same share of any
        stretch."""
        beside, alone = params * (1 - states), (1 - params) * (1 - states)
        return (
            beside * self.read_bytes(params_in_memory=True) + alone * self.read_bytes(params_in_memory=False),
            beside * self.written_bytes(params_in_memory=True) + alone * self.written_bytes(params_in_memory=False),
        )


def layout_of(masters: str, num_moments: int, moments: str = FP32, cuts: Iterable[int] = ()) -> StateLayout:
    """From the fields of one. Raises ValueError for what no version has."""
    if masters not in (WHOLE, SPLIT, BF16) or not 1 <= num_moments <= 2 or moments not in _MOMENT_BYTES:
        raise ValueError(f"no state layout has {masters} masters and {num_moments} {moments} moments")
    return StateLayout(masters, num_moments, moments).of(cuts)


def masters_of(wanted: str, *, is_bfloat16: bool, checksum: bool, are_cloned: bool = False, stock: str = FP32) -> str:
    """How a run keeps P32 on storage; ``is_bfloat16`` is said of P16. ``are_cloned``: states, into checkpoints, if
    masters are whole. ``stock``: how DeepSpeed is told to keep it.

    Raises:
        FuyouConfigError: it cannot be as wanted.
    """
    if stock == BF16:  # there is nothing to split
        return BF16
    if wanted == AUTO:
        return SPLIT if is_bfloat16 and checksum and not are_cloned else WHOLE
    if wanted == SPLIT and not (is_bfloat16 and checksum):
        why = "fuyou.checksum is false" if is_bfloat16 else "parameters are of another type"
        raise FuyouConfigError(
            f'fuyou.optimizer.masters: "split" needs bfloat16 parameters and checksums, but {why}; leave it "whole"'
        )
    return wanted


def moments_of(wanted: str, kind: str, stock: str = FP32) -> str:
    """How a run keeps the moments of a ``kind`` of optimizer, which DeepSpeed is told to keep as ``stock``.

    Raises:
        FuyouConfigError: it cannot be as wanted.
    """
    if stock == BF16:
        if wanted == INT8:
            raise FuyouConfigError(
                'fuyou.optimizer.moments: "int8" and bf16.bf16_optimizer_states (or fp32_optimizer_states: false) each '
                "say how moments are kept; leave one of them out"
            )
        return BF16
    if wanted != FP32 and kind == "adagrad":
        raise FuyouConfigError(
            f'fuyou.optimizer.moments: "{wanted}" is for Adam and Lion: the sums of Adagrad only grow, and what is '
            f'added to a rounded one is lost; leave it "fp32"'
        )
    return wanted
