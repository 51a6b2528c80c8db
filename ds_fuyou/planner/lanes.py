# SPDX-License-Identifier: Apache-2.0
"""What works at a time. No torch."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Lane"]


class Lane(IntEnum):
    """What works at a time. The names are those of the lane trace."""

    GPU = 0
    DOWN = 1
    UP = 2
    READ = 3
    WRITE = 4
    CPU = 5
    THREAD = 6

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = (
    *("compute", "device to host", "host to device", "storage read", "storage write", "cpu optimizer"),
    "training thread",
)
