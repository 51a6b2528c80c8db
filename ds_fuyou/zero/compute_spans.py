# SPDX-License-Identifier: Apache-2.0
"""Compute spans of a lane trace: which block runs, seen from the modules whose parameters DeepSpeed fetches."""

from __future__ import annotations

import time

import torch

from ds_fuyou.host.compute_clock import ComputeClock, Phase, Span
from ds_fuyou.telemetry.tier_bytes import TierBytes
from ds_fuyou.telemetry.trace import Lane, LaneTrace
from ds_fuyou.zero.blocks import block_of

__all__ = ["ComputeSpans", "computed"]


def computed(trace: LaneTrace) -> Span:
    """Takes what a device's clock tells of its computing, and of its idling for us, into the trace."""

    def add(phase: Phase, block: str, begin_ns: int, end_ns: int) -> None:
        if phase in (Phase.FORWARD, Phase.BACKWARD):
            trace.add(Lane.COMPUTE, block or phase.value, begin_ns, end_ns)
        elif phase in (Phase.PARAMETERS, Phase.ACTIVATIONS, Phase.GRADIENTS):
            trace.add(Lane.WAIT, phase.value, begin_ns, end_ns)

    return add


class ComputeSpans:
    """A span lasts from the first fetch for a block to the first fetch for the next one, in either direction. At its
    end the bytes of every tier are counted. Where the device has a clock, its times count, and :func:`computed` gets
    them.
    """

    def __init__(self, trace: LaneTrace, model: torch.nn.Module, tiers: TierBytes, clock: ComputeClock) -> None:
        self._trace = trace
        self._clock = clock
        self._tiers = tiers
        self._names = {id(module): block_of(name) for name, module in model.named_modules()}
        self._name = ""
        self._began_ns = 0

    def enter(self, module: torch.nn.Module, forward: bool) -> None:
        """DeepSpeed is about to fetch the parameters of ``module``. The model itself ("") belongs to what follows."""
        block = self._names.get(id(module), "")
        if not block:
            return
        name = f"{'forward' if forward else 'backward'} {block}"
        if name != self._name:
            self.leave()
            self._name, self._began_ns = name, time.perf_counter_ns()
            self._clock.name(name)

    def leave(self) -> None:
        """The current block has ended."""
        if self._name:
            if not self._clock.times_device:
                self._trace.add(Lane.COMPUTE, self._name, self._began_ns, time.perf_counter_ns())
            self._trace.count(self._tiers.now())
        self._name = ""
