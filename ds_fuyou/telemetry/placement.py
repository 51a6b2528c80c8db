# SPDX-License-Identifier: Apache-2.0
"""Bytes of this rank by tensor class and tier, as built (not as planned)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_fuyou.optimizer.layout import FlatLayout
from ds_fuyou.units import shown_bytes

__all__ = ["Placed", "placement_of", "placement_table"]

_TIERS = {"cpu": "host memory", "nvme": "storage"}


@dataclass(frozen=True)
class Placed:
    """``num_bytes`` of one tensor class in one tier ("cpu" or "nvme"), all copies counted."""

    name: str
    tier: str
    num_bytes: int
    note: str = ""


@dataclass(frozen=True)
class _Split:
    """One copy of a class: bytes of the chunks in host memory and on storage."""

    name: str
    memory_bytes: int
    storage_bytes: int

    def rows(self, versions: int, slots: int, in_memory: str = "", on_storage: str = "") -> list[Placed]:
        """A row for each tier that holds a part; the share in host memory is noted where both do."""
        total = self.memory_bytes + self.storage_bytes
        share = f"{100 * self.memory_bytes / total:.0f} % of the elements" if 0 < self.memory_bytes < total else ""
        rows = [
            Placed(self.name, "cpu", versions * self.memory_bytes, ", ".join(n for n in (share, in_memory) if n)),
            Placed(self.name, "nvme", slots * self.storage_bytes, on_storage),
        ]
        return [row for row in rows if row.num_bytes]


def _split(name: str, layout: FlatLayout, resident: Sequence[bool], itemsize: float) -> _Split:
    numel = sum(chunk.numel for chunk in layout.chunks if resident[chunk.index])
    return _Split(name, int(itemsize * numel), int(itemsize * (layout.numel - numel)))


def placement_of(rank_state: Any) -> list[Placed]:
    """Every model-sized class and every pool of a ``RankState``, without activations that are not swapped: autograd
    keeps those where it always does.
    """
    core = rank_state.core
    options, residency = core.options, core.place.residency
    slots, versions = options.num_slots, core.place.num_versions
    on_storage = f"{slots} slot{'s' if slots > 1 else ''}"
    in_memory = f"{versions} version{'s' if versions > 1 else ''}"
    rows = _split("P16 (parameters)", core.layout, residency.params, options.param_dtype.itemsize).rows(
        versions, slots, in_memory, on_storage
    )
    rows += _split("G16 (gradients)", core.layout, residency.grads, options.grad_dtype.itemsize).rows(1, 1)
    for tier, num_bytes in rank_state.frozen_bytes().items():
        if num_bytes:
            rows.append(Placed("frozen parameters", tier, num_bytes, "no gradient, no state"))
    states, kind = core.place.stored, core.kind
    for name in ("P32 (master parameters)", *kind.moments):
        itemsize = states.moment_bytes_each if name in kind.moments else states.master_alone.bytes_each
        rows += _split(name, core.layout, residency.states, itemsize).rows(1, slots, "", on_storage)
    if core.place.spare_bytes:
        rows.append(Placed("P32 and moments, once more", "cpu", core.place.spare_bytes, "updated in backward"))
    rows.append(Placed("staging pool", "cpu", core.staging.capacity_bytes, "chunks in flight"))
    if rank_state.parameters.reads:
        pool_bytes = rank_state.parameters.capacity_bytes
        rows.append(Placed("look-ahead pool", "cpu", pool_bytes, "parameters in use or read ahead"))
    tier = getattr(rank_state, "swap_tier", None)
    if tier is not None:
        rows.append(Placed("activation arena", "cpu", tier.arena_bytes, "on their way, and the last ones saved"))
        if tier.storage is not None:
            rows.append(
                Placed("A16 (activations)", "nvme", tier.storage.space.num_bytes, "what forwards needed so far")
            )
    return rows


def placement_table(rows: Sequence[Placed], numel: int, what: str = "trainable parameters") -> str:
    """A line for each tier that holds anything: its total, then the classes, the largest first.

    ``numel``: elements of ``what``.
    """
    lines = [f"where every byte lives, {numel / 1e6:.1f} M {what} on this rank:"]
    for tier, name in _TIERS.items():
        held = sorted((row for row in rows if row.tier == tier), key=lambda row: -row.num_bytes)
        if held:
            classes = ", ".join(
                f"{row.name} {shown_bytes(row.num_bytes)}{f' ({row.note})' if row.note else ''}" for row in held
            )
            lines.append(f"  {name} {shown_bytes(sum(row.num_bytes for row in held))}: {classes}")
    return "\n".join(lines)
