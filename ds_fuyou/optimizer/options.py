# SPDX-License-Identifier: Apache-2.0
"""What the plan decided for the out-of-core optimizer of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ds_fuyou.host.device import Device, HostDevice
from ds_fuyou.optimizer.clip_policy import Overlap
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.state_layout import FP32, WHOLE, StateLayout, layout_of
from ds_fuyou.storage.io import IoSettings

__all__ = ["CoreOptions"]


@dataclass(frozen=True)
class CoreOptions:
    """Where every chunk lives in the beginning, and how updates run. ``num_slots`` is that of what is on storage; sizes
    in bytes.

    ``has_peers``: other ranks train the same model, with the same options.
    """

    residency: ChunkResidency
    num_slots: int
    overlap: Overlap
    clip_policy: str
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    staging_bytes: int
    num_update_threads: int
    io: IoSettings
    device: Device = field(default_factory=HostDevice)
    checksum: bool = True
    has_peers: bool = False
    masters: str = WHOLE  # of states on storage; split needs bfloat16 P16
    moments: str = FP32

    def state_layout(self, num_moments: int) -> StateLayout:
        """Of a state in a slot."""
        return layout_of(self.masters, num_moments, self.moments)

    def can_speculate(self, residency: ChunkResidency) -> bool:
        """Speculation needs chunks with a spare slot, or a spare block in memory, and backward to hide behind."""
        may = any(residency.spares) or (not all(residency.states) and self.num_slots >= 2)
        return may and self.overlap is not Overlap.NONE

    @property
    def num_param_versions(self) -> int:
        """Versions of P16 in DRAM in the beginning: two where an update may come before ``step()`` has published it.
        With one, chunks with P16 in memory wait for ``step()`` even when their state has left memory.
        """
        return 2 if self.can_speculate(self.residency) and self.clip_policy != "defer" else 1
