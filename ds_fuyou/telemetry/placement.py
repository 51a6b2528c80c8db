# SPDX-License-Identifier: Apache-2.0
"""Bytes of this rank by tensor class and tier, as built (not as planned)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Placed", "placement_of", "placement_table", "shown_bytes"]

_TIERS = {"cpu": "host memory", "nvme": "storage"}


@dataclass(frozen=True)
class Placed:
    """``num_bytes`` of one tensor class in one tier ("cpu" or "nvme"), all copies counted."""

    name: str
    tier: str
    num_bytes: int
    note: str = ""


def placement_of(rank_state: Any) -> list[Placed]:
    """Every model-sized class and every pool of a ``RankState``, without activations that are not swapped: autograd
    keeps those where it always does.
    """
    core = rank_state.core
    options, numel = core.options, core.layout.numel
    on_storage = f"{options.num_slots} slot{'s' if options.num_slots > 1 else ''}"
    versions = len(core._param_memory)
    p16, g16 = options.param_dtype.itemsize * numel, options.grad_dtype.itemsize * numel
    rows = [
        Placed("P16 (parameters)", "cpu", versions * p16, f"{versions} version{'s' if versions > 1 else ''}")
        if options.params_tier == "cpu"
        else Placed("P16 (parameters)", "nvme", options.num_slots * p16, on_storage),
        Placed("G16 (gradients)", options.gradients_tier, g16),
    ]
    for tier, num_bytes in rank_state.frozen_bytes().items():
        if num_bytes:
            rows.append(Placed("frozen parameters", tier, num_bytes, "no gradient, no state"))
    state_copies = options.num_slots if options.optimizer_tier == "nvme" else 1
    note = on_storage if options.optimizer_tier == "nvme" else ""
    for name in ("P32 (master parameters)", *core.kind.moments):
        rows.append(Placed(name, options.optimizer_tier, state_copies * 4 * numel, note))
    rows.append(Placed("staging pool", "cpu", core.staging.capacity_bytes, "chunks in flight"))
    if rank_state.stored is not None:
        rows.append(Placed("look-ahead pool", "cpu", rank_state.stored.pool_bytes, "parameters in use or read ahead"))
    if rank_state.frozen is not None:
        rows.append(Placed("look-ahead pool (frozen)", "cpu", rank_state.frozen.pool_bytes, "in use or read ahead"))
    session = getattr(rank_state, "activations", None)
    tier = session.swapper.tier if session is not None and session.swapper is not None else None
    if tier is not None:
        rows.append(Placed("activation staging", "cpu", tier.arena_bytes, "on their way, and the last ones saved"))
        if tier.storage is not None:
            rows.append(
                Placed("A16 (activations)", "nvme", tier.storage.space.num_bytes, "what forwards needed so far")
            )
    return rows


def placement_table(rows: Sequence[Placed], numel: int) -> str:
    """The rows as aligned text with a total for each tier."""
    lines = [f"where every byte lives, {numel / 1e6:.1f} M trainable parameters on this rank:"]
    for row in rows:
        lines.append(f"  {row.name:<26}{shown_bytes(row.num_bytes):>10}  {_TIERS[row.tier]:<13}{row.note}".rstrip())
    for tier, name in _TIERS.items():
        total = sum(row.num_bytes for row in rows if row.tier == tier)
        lines.append(f"  {'total in ' + name:<26}{shown_bytes(total):>10}")
    return "\n".join(lines)


def shown_bytes(num_bytes: float) -> str:
    """Decimal units, as storage is sold: 1 GB is 10^9 bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"
