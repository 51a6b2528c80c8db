# SPDX-License-Identifier: Apache-2.0
"""The optimizer's lanes in the trace: reads, updates and writes of chunks, as the core recorded them."""

from __future__ import annotations

from typing import Any

from ds_fuyou.optimizer.layout import FlatLayout
from ds_fuyou.telemetry.trace import Lane, LaneTrace

__all__ = ["PipelineLanes"]

_LANES = (Lane.STORAGE_READ, Lane.UPDATE, Lane.STORAGE_WRITE)


class PipelineLanes:
    """Moves what the core recorded into the trace. The core's clock is that of ``time.perf_counter``.

    Args:
        state_bytes: of a parameter's P32 and moments if they live on storage, else 0.
        param_bytes: of a parameter's P16 if it lives on storage, else 0; written with the state.
    """

    def __init__(self, trace: LaneTrace, pipeline: Any, layout: FlatLayout, state_bytes: int, param_bytes: int) -> None:
        self._trace, self._pipeline, self._layout = trace, pipeline, layout
        self._bytes = (state_bytes, 0, state_bytes + param_bytes)
        pipeline.set_tracing(True)

    def collect(self) -> None:
        """To be called once a step and at the end; what is recorded between two calls stays in the core."""
        for lane, index, generation, begin, end in self._pipeline.take_events():
            chunk = self._layout.chunks[index]
            name = (
                f"step {generation}, {self._layout.params[chunk.params[0]].name}" if chunk.params else f"chunk {index}"
            )
            moved = self._bytes[lane] * chunk.numel
            self._trace.add(_LANES[lane], name, int(begin * 1e9), int(end * 1e9), moved)
