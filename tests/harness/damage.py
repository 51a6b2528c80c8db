# SPDX-License-Identifier: Apache-2.0
"""A disk that gives other bytes than were written."""

from __future__ import annotations

from pathlib import Path

__all__ = ["flip_bit"]


def flip_bit(file: str | Path, at: int) -> None:
    """The lowest one of byte ``at``."""
    with open(file, "r+b") as data:
        data.seek(at)
        byte = data.read(1)[0]
        data.seek(at)
        data.write(bytes([byte ^ 1]))
