# SPDX-License-Identifier: Apache-2.0
"""What a run writes to its drives in a day, against what they are rated for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.probe import probe_path
from ds_fuyou.storage.wear import Rating, rating_of
from ds_fuyou.telemetry.placement import shown_bytes

__all__ = ["DAY_SECS", "rating_at", "short_lives"]

DAY_SECS = 86400.0
_SHORT_DAYS = 365.0


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
