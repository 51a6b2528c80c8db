# SPDX-License-Identifier: Apache-2.0
"""Sizes as texts for people have them. No torch."""

from __future__ import annotations

__all__ = ["shown_bytes"]

_UNITS = (("PB", 1e15, 2), ("TB", 1e12, 2), ("GB", 1e9, 1), ("MB", 1e6, 1), ("kB", 1e3, 1))


def shown_bytes(num_bytes: float) -> str:
    """Decimal units, as storage is sold: 1 GB is 10^9 bytes."""
    for unit, size, digits in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:,.{digits}f} {unit}"
    return f"{num_bytes:.0f} B"
