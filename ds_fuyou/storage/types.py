# SPDX-License-Identifier: Apache-2.0
"""The small frozen objects of the slot store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ds_fuyou.errors import FuyouConfigError

__all__ = ["DIRECTORY_FLAGS", "PAGE_BYTES", "CommitRecord", "Extent", "JsonValue", "RegionSpec", "RunIdentity"]

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PAGE_BYTES = 4096  # every offset and length on storage is a multiple of it: what O_DIRECT asks for

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class RegionSpec:
    """A named run of bytes of which the store holds one to three slots.

    Raises :class:`FuyouConfigError` unless ``num_bytes`` is a positive multiple of 4096 and there are 1 to 3
    slots.
    """

    name: str
    num_bytes: int
    num_slots: int

    def __post_init__(self) -> None:
        if self.num_bytes <= 0 or self.num_bytes % PAGE_BYTES:
            raise FuyouConfigError(
                f"region {self.name}: num_bytes must be a positive multiple of {PAGE_BYTES}, found "
                f"{self.num_bytes}; round it up"
            )
        if self.num_slots not in (1, 2, 3):
            raise FuyouConfigError(f"region {self.name}: num_slots must be 1, 2 or 3, found {self.num_slots}")


class Extent(NamedTuple):
    """A contiguous run of bytes of one open data file; offset and length are multiples of 4096. The core takes lists of
    them.
    """

    fd: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class RunIdentity:
    """Whose state this is. ``run_id`` names the directory; the other three decide whether state may be
    reopened.

    Raises :class:`FuyouConfigError` for a rank outside the world or a run_id that is no plain file name.
    """

    model_fingerprint: str
    rank: int
    world_size: int
    run_id: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise FuyouConfigError(f"rank must be in [0, world_size); found rank {self.rank} of {self.world_size}")
        if not _RUN_ID.fullmatch(self.run_id):
            raise FuyouConfigError(
                f"run_id must be 1 to 100 letters, digits, '.', '_' or '-' and start with a letter or digit; "
                f"found {self.run_id!r}"
            )

    @property
    def directory_name(self) -> str:
        return f"{self.run_id}-rank{self.rank}"

    def mismatch(self, other: RunIdentity) -> str:
        """What keeps state of ``other`` from serving this run, "" when nothing does; run ids may differ."""
        pairs = [
            (what, getattr(other, what), getattr(self, what)) for what in ("model_fingerprint", "rank", "world_size")
        ]
        return ", ".join(f"{what} {found} instead of {wanted}" for what, found, wanted in pairs if found != wanted)


@dataclass(frozen=True)
class CommitRecord:
    """The last step whose state is complete on storage.

    Attributes:
        step: number the caller gave.
        slots: which slot holds that step, by name.
        meta: what the caller wanted to find again.
        intact: True when later, uncommitted writes cannot have touched these slots (two or three slots). False with
            one slot: a crash between this commit and the next may have left a mixture.
    """

    step: int
    slots: Mapping[str, int]
    meta: Mapping[str, JsonValue]
    intact: bool

    @property
    def lacks_states(self) -> bool:
        """States were in host memory when it was made: nobody can go on from it."""
        return self.meta.get("states_in_memory", 0) != 0

    @property
    def key(self) -> tuple[int, ...]:
        """What commits of several ranks have in common if they are of the same states: the step, its edition, and the
        steps that were applied. Records of format 1 name no edition; tests of the store alone name nothing.
        """
        named = (self.meta.get("edition", 0), self.meta.get("optimizer_step", 0))
        return (self.step, *(number for number in named if isinstance(number, int)))
