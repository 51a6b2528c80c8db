# SPDX-License-Identifier: Apache-2.0
"""The floor of a step: the most loaded lane's required work over its rate, measured alone."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.rates import Rates

__all__ = ["BYTES_A_PARAMETER", "Floor", "floor_of"]

_SCALES = 2 * 4 / 256  # of two moments
BYTES_A_PARAMETER: dict[str, tuple[float, float]] = {
    "fuyou_dram": (0, 0),
    "fuyou_optimizer_nvme": (10, 12),
    "fuyou_optimizer_nvme_whole": (12, 12),
    "fuyou_states_in_both": (10 / 4, 12 / 4),
    "fuyou_optimizer_nvme_bf16": (6, 8),
    "fuyou_optimizer_nvme_int8": (4 + _SCALES, 6 + _SCALES),
    "fuyou_dram_int8": (0, 0),
    "fuyou_all_nvme": (16, 14),
    "fuyou_all_nvme_whole": (16, 16),
    "fuyou_all_nvme_int8": (10 + _SCALES, 8 + _SCALES),
}
"""(read, written) bytes of storage a parameter and step that the placement requires (docs/states.md). All on NVMe: P16
twice, P32, M and V are read; P16, P32, M, V and the spilled G16 are written (G16 is read back only for a redo)."""


@dataclass(frozen=True)
class Floor:
    """Seconds a step. ``cores``: compute, updates and the host's part of I/O share all cores."""

    storage: float
    cores: float

    @property
    def secs(self) -> float:
        return max(self.storage, self.cores)


def floor_of(variant: str, numel: int, compute_secs: float, rates: Rates) -> Floor:
    """``compute_secs`` is forward and backward with the optimizer off, measured in the same rounds."""
    read, written = (each * numel for each in BYTES_A_PARAMETER[variant])
    storage = max(read / rates.read, written / rates.write, (read + written) / rates.mixed)
    io_secs = (read + written) * rates.io_cpu_secs_per_byte / rates.num_cores
    return Floor(storage, compute_secs + numel / rates.update + io_secs)
