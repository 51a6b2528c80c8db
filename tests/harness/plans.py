# SPDX-License-Identifier: Apache-2.0
"""Plan documents for small models."""

from __future__ import annotations

__all__ = ["plan_document"]


def plan_document(params: int, layers: int, activations: dict[str, tuple[int, int, int]], **settings: int) -> dict:
    """``activations``: by operator, in how many blocks its output is (kept, swapped, recomputed)."""
    return {
        "schema": "ds_fuyou.plan/1",
        "model": {"name": "tiny", "params": params, "layers": layers, "fingerprint": "none"},
        "world_size": 1,
        "residency": {"parameters": 1, "optimizer": 0, "gradients": 1},
        "activations": {
            name: dict(zip(("keep", "swap", "recompute"), counts, strict=True)) for name, counts in activations.items()
        },
        "settings": settings,
    }
