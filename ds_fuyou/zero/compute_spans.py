# SPDX-License-Identifier: Apache-2.0
"""Compute spans of a lane trace: which block runs, seen from the modules whose parameters DeepSpeed fetches."""

from __future__ import annotations

import time
from typing import Any

import torch

from ds_fuyou.telemetry.tier_bytes import TierBytes
from ds_fuyou.telemetry.trace import Lane, LaneTrace
from ds_fuyou.zero.blocks import block_of

__all__ = ["ComputeSpans"]


class ComputeSpans:
    """A span lasts from the first fetch for a block to the first fetch for the next one, in either direction. At its
    end the bytes of every tier are counted.
    """

    def __init__(self, trace: LaneTrace, model: torch.nn.Module, tiers: TierBytes) -> None:
        self._trace = trace
        self._tiers = tiers
        self._names = {id(module): block_of(name) for name, module in model.named_modules()}
        self._name = ""
        self._began_ns = 0

    def enter(self, module: Any, forward: bool) -> None:
        """DeepSpeed is about to fetch the parameters of ``module``. The model itself ("") belongs to what follows."""
        block = self._names.get(id(module), "")
        if not block:
            return
        name = f"{'forward' if forward else 'backward'} {block}"
        if name != self._name:
            self.leave()
            self._name, self._began_ns = name, time.perf_counter_ns()

    def leave(self) -> None:
        """The current block has ended."""
        if self._name:
            self._trace.add(Lane.COMPUTE, self._name, self._began_ns, time.perf_counter_ns())
            self._trace.count(self._tiers.now())
        self._name = ""
