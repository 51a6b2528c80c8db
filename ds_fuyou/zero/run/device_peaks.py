# SPDX-License-Identifier: Apache-2.0
"""What the steps of mode "auto" that are measured take of the device beside activations: while forward and the loss
run, and while backward is in the blocks. What stays meets both, what backward works on only the second.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_fuyou.activations.swapper import Swapper
from ds_fuyou.activations.tier import SOON_BYTES
from ds_fuyou.host.device import Device
from ds_fuyou.planner.activations import WORKING_BLOCKS

__all__ = ["DevicePeaks"]


@dataclass(frozen=True)
class _Peak:
    """Of one backward through the blocks: of the device, of activations that were kept, and of others held there."""

    device_bytes: int
    kept_bytes: int
    passing_bytes: int


class DevicePeaks:
    """Of the steps since :meth:`begin`. Peaks of the device are begun anew wherever one of both parts begins."""

    def __init__(self, device: Device, swapper: Swapper) -> None:
        self._device, self._swapper = device, swapper
        self._peaks: list[_Peak] = []
        self.loss_bytes: float | None = None
        """Beside activations, until backward came to a block; None: it never did. What the loss itself had saved and
        was gone by then is part of it."""

    def begin(self) -> None:
        """A step begins."""
        self._peaks, self.loss_bytes = [], None
        self._mark()

    def _mark(self) -> None:
        self._device.reset_peak()
        self._swapper.held.mark()
        self._swapper.kept.mark()

    def forward_begins(self) -> None:
        """The last backward has ended, if there was one."""
        self.end()
        self._mark()
        self._swapper.blocks_begin = self._blocks_begin

    def _blocks_begin(self) -> None:
        beside = self._device.peak_bytes() - self._swapper.held.now
        self.loss_bytes = max(self.loss_bytes or 0.0, float(beside))
        self._mark()

    def end(self) -> None:
        """The step ends, or another forward begins."""
        held, kept = self._swapper.held.peak_since_mark, self._swapper.kept.peak_since_mark
        self._peaks.append(_Peak(self._device.peak_bytes(), kept, max(0, held - kept)))
        self._swapper.blocks_begin = None

    def beside_bytes(self, block_bytes: float) -> float:
        """While backward was in the blocks. Part of a peak are what was kept, and at most the tensors of the blocks
        that backward works on, for which the rule has room itself: they count once. On the host other budgets count it.

        Whatever is kept beyond what a step kept adds as much to its peak at most, whenever that was.
        """
        working = WORKING_BLOCKS * block_bytes
        others = (p.device_bytes - p.kept_bytes - min(p.passing_bytes, working) for p in self._peaks)
        return float(max(0.0, max(others, default=0.0)))

    def passing_bytes(self, block_bytes: float) -> float:
        """Of activations that do not stay, at a peak of these steps, or of others: so much may be leaving."""
        found = max((float(peak.passing_bytes) for peak in self._peaks), default=0.0)
        return min(WORKING_BLOCKS * block_bytes, max(found, float(SOON_BYTES)))
