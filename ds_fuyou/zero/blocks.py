# SPDX-License-Identifier: Apache-2.0
"""Which block a parameter belongs to, by its name: everything up to the first index is one block."""

from __future__ import annotations

__all__ = ["block_of"]


def block_of(name: str) -> str:
    """``model.layers.3.mlp.up.weight`` → ``model.layers.3``; a name without an index is a block of its own."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return name
