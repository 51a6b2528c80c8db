# SPDX-License-Identifier: Apache-2.0
"""What one step was like, as numbers for monitors: (tag, value) pairs under ``Train/Fuyou``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_fuyou.telemetry.report import BOUND_LANES, LaneTimes

__all__ = ["StepMetrics"]


@dataclass(frozen=True)
class StepMetrics:
    """``lanes`` of the step, its wall time, what lies in each tier after it, and how many ranks do the same."""

    secs: float
    lanes: LaneTimes
    tiers: Mapping[str, float]
    num_ranks: int

    def events(self) -> list[tuple[str, float]]:
        """Times and bytes of this rank, tokens of all. The bound lane is given by its place in ``BOUND_LANES``."""
        lanes = self.lanes
        values = {
            "step_secs": self.secs,
            "bound_lane": float(BOUND_LANES.index(lanes.bound_lane(self.secs))),
            "hidden_secs": lanes.hidden_secs,
            "exposed_secs": lanes.exposed_secs,
            "storage_read_secs": lanes.read_secs,
            "storage_write_secs": lanes.write_secs,
            "cpu_optimizer_secs": lanes.update_secs,
            "storage_read_bytes": lanes.read_bytes,
            "storage_write_bytes": lanes.write_bytes,
            "device_to_host_bytes": lanes.swapped_bytes,
            "host_to_device_bytes": lanes.returned_bytes,
        }
        if lanes.tokens and self.secs > 0:
            values["tokens_per_sec"] = lanes.tokens * self.num_ranks / self.secs
        for tier, num_bytes in self.tiers.items():
            values[f"bytes_in_{tier.replace(' ', '_')}"] = float(num_bytes)
        return [(f"Train/Fuyou/{name}", value) for name, value in values.items()]
