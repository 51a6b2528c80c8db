# SPDX-License-Identifier: Apache-2.0
"""What the drives behind a path may be written before their warranty ends: by their model's rating, or a guess.

Linux tells model and size of a drive, not what its vendor warrants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ds_fuyou.storage.disks import VIRTUAL, drives_of, read_fact

__all__ = ["GUESSED_WRITES", "Rating", "rating_of"]

GUESSED_WRITES = 600.0
"""Of a drive that no preset knows: its capacity so many times, which consumer drives of TLC flash are rated for."""

_SECTOR_BYTES = 512
_NO_FLASH = (*VIRTUAL, "loop", "ram", "zram", "nbd", "rbd")


@dataclass(frozen=True)
class Rating:
    """Of all drives that a path lies on. ``is_known``: every model has a preset."""

    models: tuple[str, ...]
    written_bytes: float
    is_known: bool


def rating_of(device: str, known: Callable[[str, float], float], root: Path = Path("/")) -> Rating | None:
    """Of "major:minor"; None where nothing there wears, or it cannot be told.

    Args:
        known: (model, capacity in bytes) → bytes it is rated for, 0 if not known.
        root: stands before /sys.
    """
    models: list[str] = []
    rated, all_known = 0.0, True
    try:
        for drive in drives_of(device, root):
            if drive.name.startswith(_NO_FLASH) or read_fact(drive / "queue/rotational") == "1":
                continue
            model, capacity = read_fact(drive / "device/model"), float(read_fact(drive / "size")) * _SECTOR_BYTES
            found = known(model, capacity)
            models.append(model)
            rated += found or GUESSED_WRITES * capacity
            all_known = all_known and found > 0
    except (OSError, ValueError):
        return None
    return Rating(tuple(models), rated, all_known) if models else None
