# SPDX-License-Identifier: Apache-2.0
"""Which block a parameter belongs to, by its name: everything up to the first index is one block."""

from __future__ import annotations

__all__ = ["block_of"]


def block_of(name: str) -> str:
    """``model.layers.3.mlp.up.weight`` → ``model.layers.3``; a name without an index is a block of its own. An index
    that a name begins with may stand for a whole model (``0.model.layers.3.mlp.up.weight`` of ``nn.Sequential(encoder,
    pooling)``): there the next one counts, too, if there is one.
    """
    first, _, rest = name.partition(".")
    if first.isdigit() and any(part.isdigit() for part in rest.split(".")):
        return f"{first}.{block_of(rest)}"
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return name
