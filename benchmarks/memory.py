# SPDX-License-Identifier: Apache-2.0
"""Host memory that grows with the model: peak resident bytes a parameter added, 12 to 36 layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import StockTuning, memory_spec
from benchmarks.processes import started

__all__ = ["measure_memory"]

LAYERS = (12, 36)
NUM_STEPS = 4
ROWS = (("fuyou_all_nvme", 0.0), ("fuyou_all_nvme", 1.0), ("zero_infinity_params", 0.0))


def measure_memory(directory: Path, scratch: Path, tuning: StockTuning) -> list[dict[str, Any]]:
    """One fresh process a row and size, from start to NUM_STEPS steps; the kernel's VmHWM of that process."""
    rows = []
    for variant, clip in ROWS:
        sizes = [_peak(variant, layers, clip, directory, scratch, tuning) for layers in LAYERS]
        added = sizes[1]["numel"] - sizes[0]["numel"]
        growth = (sizes[1]["peak_rss_bytes"] - sizes[0]["peak_rss_bytes"]) / added
        rows.append({"variant": variant, "clip": clip, "sizes": sizes, "bytes_per_parameter": growth})
        print(f"memory {variant} clip {clip}: {growth:.2f} bytes an added parameter", flush=True)
    return rows


def _peak(
    variant: str, layers: int, clip: float, directory: Path, scratch: Path, tuning: StockTuning
) -> dict[str, Any]:
    spec = memory_spec(variant, layers, clip, directory, tuning)
    with started({f"{variant}-{layers}-{clip}": spec}, scratch) as workers:
        workers[0].ask(do="steps", lead=NUM_STEPS - 1, timed=1)
        return {"layers": layers, "spec": spec, **workers[0].ask(do="memory")}
