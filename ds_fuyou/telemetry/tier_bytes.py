# SPDX-License-Identifier: Apache-2.0
"""How many bytes the package holds in each tier now, for the trace; and the most it ever held, for the plan's check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_fuyou.telemetry.placement import placement_of

__all__ = ["TierBytes"]

_POOLS = ("staging pool", "look-ahead pool", "activation arena")


class TierBytes:
    """Bytes by tier of one rank.

    Tensor classes count as they were placed, pools by the bytes in use. The device is counted as saved activations,
    or as what ``device_bytes`` says if that is more (everything that an accelerator's allocator has given out).
    """

    def __init__(self, rank_state: Any, device_bytes: Callable[[], int] = lambda: 0) -> None:
        self._state = rank_state
        self._device_bytes = device_bytes
        self._residency: Any = None  # of which the classes were counted
        self._classes: dict[str, int] = {}
        self._peaks: dict[str, float] = {}

    def _pools(self) -> list[Any]:
        beside = [reads.parameters for reads in self._state.beside() if reads.parameters is not None]
        return [self._state.core.staging, self._state.parameters, *beside]

    def _resident_now(self) -> dict[str, int]:
        """With what engines without an optimizer hold in this process."""
        residency = self._state.core.place.residency
        if residency is not self._residency:  # chunks have moved
            rows = [r for r in placement_of(self._state) if r.name not in _POOLS and "activations" not in r.name]
            self._classes = {tier: sum(row.num_bytes for row in rows if row.tier == tier) for tier in ("cpu", "nvme")}
            self._residency = residency
        held = [self._classes, *(reads.held_bytes() for reads in self._state.beside())]
        return {tier: sum(by_tier.get(tier, 0) for by_tier in held) for tier in ("cpu", "nvme")}

    def now(self) -> dict[str, float]:
        """By the names that reports show; peaks are noted in passing."""
        resident = self._resident_now()
        host = resident["cpu"] + sum(pool.used_bytes for pool in self._pools())
        storage, device = resident["nvme"], self._device_bytes()
        tier = self._state.swap_tier
        if tier is not None:
            host += tier.arena_used_bytes
            device = max(device, tier.held.now)
            storage += tier.storage.space.leased_bytes if tier.storage is not None else 0
        found = {"device": float(device), "host memory": float(host), "storage": float(storage)}
        self._peaks = {name: max(value, self._peaks.get(name, 0.0)) for name, value in found.items()}
        return found

    def planned(self, saved_bytes: float = 0.0) -> dict[str, float]:
        """The most that host memory and storage may ever hold: classes as placed, pools full, and ``saved_bytes`` of
        activations (what one forward saves) on storage where they go there.
        """
        resident = self._resident_now()
        host = resident["cpu"] + sum(pool.capacity_bytes for pool in self._pools())
        storage = float(resident["nvme"])
        if self._state.store is not None:
            storage += self._state.store.record_bytes
        tier = self._state.swap_tier
        if tier is not None:
            host += tier.arena_bytes
            storage += tier.storage.space.size_for(saved_bytes) if tier.storage is not None else 0
        return {"host memory": float(host), "storage": storage}

    def peaks(self) -> dict[str, float]:
        """The most seen by :meth:`now`; pools and saved activations by their own high-water marks."""
        found = self.now()
        pools = sum(pool.peak_bytes - pool.used_bytes for pool in self._pools())
        peaks = dict(self._peaks)
        session = self._state.activations
        if session is not None and session.swapper is not None:
            peaks["device"] = max(peaks["device"], session.swapper.held.peak)
            tier = session.swapper.tier
            pools += tier.arena_peak_bytes - tier.arena_used_bytes if tier is not None else 0
        peaks["host memory"] = max(peaks["host memory"], found["host memory"] + pools)
        return peaks
