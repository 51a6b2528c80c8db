# SPDX-License-Identifier: Apache-2.0
"""What a run writes to its drives in a day, against what they are rated for: by their model, or a guess.

Linux tells model and size of a drive, not what its vendor warrants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.disks import VIRTUAL, drives_of, read_fact
from ds_fuyou.storage.probe import probe_path
from ds_fuyou.units import shown_bytes

__all__ = ["DAY_SECS", "GUESSED_WRITES", "Rating", "rating_at", "rating_of", "short_lives"]

DAY_SECS = 86400.0
_SHORT_DAYS = 365.0
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


def rating_at(path: str) -> Rating | None:
    """Of the drives behind a path; None where nothing wears, or it cannot be told."""
    from ds_fuyou.planner.presets import rated_writes  # a run asks once, in its tenth step

    try:
        return rating_of(probe_path(Path(path)).device, rated_writes)
    except FuyouStorageError:
        return None


def short_lives(written: Mapping[str, float], ratings: Mapping[str, Rating | None]) -> list[tuple[bool, str]]:
    """For every path whose drives are worn out within a year if so many bytes are written there a day: whether their
    rating is known, and a sentence.
    """
    found = []
    for path, num_bytes in written.items():
        rating = ratings.get(path)
        if rating is None or rating.written_bytes >= _SHORT_DAYS * num_bytes:
            continue
        source = "rated" if rating.is_known else "taken to be rated (no preset knows the model)"
        sentence = (
            f"{path} ({', '.join(dict.fromkeys(rating.models))}) is {source} for {shown_bytes(rating.written_bytes)} "
            f"written, and gets {shown_bytes(num_bytes)} a day: it lasts {rating.written_bytes / num_bytes:.0f} days"
        )
        found.append((rating.is_known, sentence))
    return found
