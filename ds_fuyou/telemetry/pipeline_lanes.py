# SPDX-License-Identifier: Apache-2.0
"""The optimizer's lanes in the trace: reads, updates and writes of chunks, as the core recorded them."""

from __future__ import annotations

from typing import Any

from ds_fuyou.optimizer.layout import FlatLayout
from ds_fuyou.optimizer.placement import ChunkPlacement
from ds_fuyou.telemetry.trace import Lane, LaneTrace

__all__ = ["PipelineLanes"]

_LANES = (Lane.STORAGE_READ, Lane.UPDATE, Lane.STORAGE_WRITE)


class PipelineLanes:
    """Moves what the core recorded into the trace. The core's clock is that of ``time.perf_counter``.

    Args:
        param_bytes: of one element's P16; written with the state where it lives on storage.
    """

    def __init__(
        self,
        trace: LaneTrace,
        pipeline: Any,
        layout: FlatLayout,
        place: ChunkPlacement,
        param_bytes: int,
    ) -> None:
        self._trace, self._pipeline, self._layout, self._place = trace, pipeline, layout, place
        self._param_bytes = param_bytes
        pipeline.set_tracing(True)

    def collect(self) -> None:
        """To be called once a step and at the end; what is recorded between two calls stays in the core."""
        for lane, index, generation, begin, end in () if self._pipeline is None else self._pipeline.take_events():
            chunk = self._layout.chunks[index]
            name = (
                f"step {generation}, {self._layout.params[chunk.params[0]].name}" if chunk.params else f"chunk {index}"
            )
            moved = int(self._moved_bytes_each(_LANES[lane], index) * chunk.numel)
            self._trace.add(_LANES[lane], name, int(begin * 1e9), int(end * 1e9), moved)

    def close(self) -> None:
        """Collects what is left and lets the pipeline go. Idempotent."""
        self.collect()
        self._pipeline = None

    def _moved_bytes_each(self, lane: Lane, chunk: int) -> float:
        if lane is Lane.UPDATE:
            return 0
        in_memory, stored = self._place.residency.params[chunk], self._place.stored
        if lane is Lane.STORAGE_WRITE:
            moved = stored.written_bytes(params_in_memory=in_memory)
        else:
            moved = stored.read_bytes(params_in_memory=in_memory)
        if self._place.residency.states[chunk]:
            moved = 0
        return moved + (self._param_bytes if lane is Lane.STORAGE_WRITE and not in_memory else 0)
