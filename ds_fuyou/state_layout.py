# SPDX-License-Identifier: Apache-2.0
"""The layouts of a state block: the one description of what lies where in it. Standard library only.

A block holds the fp32 master (P32) and the moments of one chunk. Every field begins at a page. Everybody outside of a
slot sees *whole* blocks: states in host memory, states kept for a checkpoint, whoever reads or replaces a state between
steps. What lies in a slot on storage has the layout of the run, which its contents name; the C++ pipeline gets offsets
from here, slots, checkpoints and recovery sizes, the planner bytes a parameter. See [Note: split masters] in
``csrc/pipeline/state_block.h`` for how P32 is put together from halves.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ds_fuyou.errors import FuyouConfigError

__all__ = ["PAGE_BYTES", "SPLIT", "WHOLE", "StateLayout", "layout_of", "masters_of"]

PAGE_BYTES = 4096
WHOLE, SPLIT = "whole", "split"


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class StateLayout:
    """``masters``: ``whole`` is fp32; ``split`` is 16 lower halves, which P16 of the same step completes, and upper
    halves where P16 does not, or does not last.

    A block is ``[master, moment, ...]``, or split ``[high, joints, low, moment, ...]``: what is left out is at its
    ends, high halves where P16 makes them needless, moments before the first update.
    """

    masters: str
    num_moments: int

    @property
    def version(self) -> int:
        """As state files name it; those that name none are of version 1."""
        return 1 if self.masters == WHOLE else 2

    @property
    def is_split(self) -> bool:
        return self.masters == SPLIT

    @functools.cached_property
    def fields(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes of one element), in order; ``joints`` is one page."""
        moments = tuple((f"moment{i}", 4) for i in range(self.num_moments))
        if not self.is_split:
            return (("master", 4), *moments)
        return (("high", 2), ("joints", 0), ("low", 2), *moments)

    def offsets(self, numel: int) -> dict[str, int]:
        """The first byte of every field; ``end`` is the size of the block."""
        found, at = {}, 0
        for name, itemsize in self.fields:
            found[name] = at
            at += _pages(numel * itemsize) if itemsize else PAGE_BYTES
        return {**found, "end": at}

    def num_bytes(self, numel: int) -> int:
        return self.offsets(numel)["end"]

    def num_master_bytes(self, numel: int) -> int:
        """Of the first fields: what stands there without moments."""
        return self.offsets(numel)["moment0" if self.num_moments else "end"]

    def num_moment_bytes(self, numel: int) -> int:
        return self.num_bytes(numel) - self.num_master_bytes(numel)

    def as_json(self) -> dict[str, int | str]:
        """How state files name it."""
        return {"version": self.version, "masters": self.masters, "moments": self.num_moments}

    def native(self, numel: int) -> dict[str, object]:
        """As ``BlockLayout`` of the C++ core takes it."""
        at = self.offsets(numel)
        return {
            "numel": numel,
            "num_moments": self.num_moments,
            "is_split": self.is_split,
            "high": at.get("high", 0),
            "joints": at.get("joints", 0),
            "master": at["low" if self.is_split else "master"],
            "moments": [at[f"moment{i}"] for i in range(self.num_moments)],
            "num_bytes": at["end"],
        }

    # ---- bytes a parameter ---------------------------------------------------------------------------------

    @property
    def bytes_each(self) -> int:
        """In memory, or in a slot."""
        return 4 + 4 * self.num_moments

    def read_bytes(self, *, params_in_memory: bool) -> int:
        """Of an update whose state is on storage: P16 that completes lower halves included, if it is read for them."""
        return self.bytes_each - (2 if self.is_split and params_in_memory else 0)

    def written_bytes(self, *, params_in_memory: bool) -> int:
        """Beside P16 on storage, which is written all the same. With P16 in memory a slot has upper halves: it is
        durable by itself."""
        return self.bytes_each - (2 if self.is_split and not params_in_memory else 0)

    def moved_bytes(self, params: float, states: float) -> tuple[float, float]:
        """Read and written in a step, with these shares of P16 and of states in memory, which are filled in one
        order."""
        beside, alone = max(0.0, params - states), 1 - max(params, states)
        return (
            beside * self.read_bytes(params_in_memory=True) + alone * self.read_bytes(params_in_memory=False),
            beside * self.written_bytes(params_in_memory=True) + alone * self.written_bytes(params_in_memory=False),
        )


def layout_of(masters: str, num_moments: int) -> StateLayout:
    """Raises ValueError for what no version has."""
    if masters not in (WHOLE, SPLIT) or not 1 <= num_moments <= 2:
        raise ValueError(f"no state layout has {masters} masters and {num_moments} moments")
    return StateLayout(masters, num_moments)


def masters_of(wanted: str, *, is_bfloat16: bool, checksum: bool) -> str:
    """How a run keeps P32 on storage; ``is_bfloat16`` is said of P16.

    Raises:
        FuyouConfigError: it cannot be as wanted.
    """
    if wanted == SPLIT and not (is_bfloat16 and checksum):
        why = "fuyou.checksum is false" if is_bfloat16 else "parameters are of another type"
        raise FuyouConfigError(
            f'fuyou.optimizer.masters: "split" needs bfloat16 parameters and checksums, but {why}; leave it "whole"'
        )
    return wanted
