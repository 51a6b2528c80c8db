# SPDX-License-Identifier: Apache-2.0
"""What a window asks of the pipeline: updates ahead of the step, and those that the step starts itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_fuyou.optimizer.clip_policy import UpdateStart
from ds_fuyou.optimizer.gradients import GradientMemory
from ds_fuyou.optimizer.layout import FlatLayout, ParamSpan, overlap
from ds_fuyou.optimizer.missed_steps import MissedSteps, Run
from ds_fuyou.optimizer.moving import ChunkMover
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.placement import ChunkPlacement
from ds_fuyou.optimizer.rules import Segment, StepRules
from ds_fuyou.optimizer.window import Window
from ds_fuyou.optimizer.worker import Worker

__all__ = ["Published", "WindowUpdates"]


@dataclass
class Published:
    """Which step readers see, and which of the versions of P16 in DRAM it is."""

    num_param_versions: int
    generation: int = 0
    param_version: int = 0

    @property
    def next_version(self) -> int:
        return 1 - self.param_version if self.num_param_versions == 2 else 0

    def advance(self) -> None:
        self.generation, self.param_version = self.generation + 1, self.next_version


class WindowUpdates:
    """Updates of the chunks of one window. Used by the training thread alone."""

    def __init__(
        self,
        layout: FlatLayout,
        options: CoreOptions,
        place: ChunkPlacement,
        worker: Worker,
        published: Published,
        window: Window,
        missed: MissedSteps,
        types: Mapping[torch.dtype, Any],
        mover: ChunkMover,
    ) -> None:
        self._mover = mover
        self._layout, self._options, self._place = layout, options, place
        self._worker, self._published, self._window, self._missed = worker, published, window, missed
        self._types = types
        self._by_deadline = sorted(layout.chunks, key=lambda chunk: chunk.position)
        self._left_out: frozenset[int] = frozenset()  # chunks that the last step did not touch
        self._wide: dict[int, torch.Tensor] = {}
        self._read_wide: dict[int, torch.Tensor] = {}
        self.num_redone = 0

    # ---- before the step ----------------------------------------------------------------------------------

    def reopen(self, chunk: int) -> None:
        """Before a chunk's gradient memory is written: nothing may still read it. (A held update reads it later.)"""
        window = self._window
        if chunk in window.prepared:
            self._forget(chunk)
        if chunk not in window.opened:
            self._wait_unread(chunk, self._published.generation)
            window.opened.add(chunk)

    def _wait_unread(self, chunk: int, generation: int) -> None:
        """Until no update up to ``generation`` reads the chunk's gradient any more."""
        self._worker.wait(
            lambda t: self._worker.pipeline.wait_gradient_read(chunk, generation, t),
            lambda: f"the update of chunk {chunk} for step {generation} (gradient)",
        )

    def prepare(self, chunk: int, gradient: int) -> None:
        """All gradients of a chunk are in place. In a window that speculates it is updated into its spare slot.

        A resident state without a spare block has one version, which an update overwrites, and P16 in memory may have:
        nothing touches it before ``step()``, nor a chunk that is about to move.
        """
        window, spec = self._window, self._layout.chunks[chunk]
        if window.start is not UpdateStart.SPECULATE or window.rules is None:
            return
        if not self._place.may_prepare(chunk) or self._mover.is_due(chunk) or window.is_overridden(chunk):
            return
        runs = self._missed.runs(spec, window.arrived)
        segments = self._missed.segments(spec, window.rules, runs)
        try:
            self._start(chunk, segments, window.multiplier, gradient, self._options.grad_dtype)
            window.prepared[chunk] = runs
        except BaseException:  # an interrupt, say: publishing must find no job that the window does not know
            self._forget(chunk)
            raise

    def _forget(self, chunk: int) -> None:
        """Whatever was asked for the chunk in this window is not done."""
        self._worker.pipeline.invalidate(chunk)
        self._window.prepared.pop(chunk, None)
        self._window.held.discard(chunk)

    def read_ahead(self, num_bytes: int) -> None:
        """Reads, in deadline order and as far as ``num_bytes`` of staging memory reach, the state that will be updated.

        What chunks with a resident state will need of it, G16 from storage, stays free for them. Chunks that the last
        step did not touch (experts without a token, say) are left out.
        """
        for chunk in self._by_deadline:
            if chunk.index in self._left_out:
                continue
            num_bytes -= self._place.job_bytes(chunk)
            if num_bytes < 0:
                break
            index = chunk.index
            if self._place.residency.states[index] or index in self._window.held or self._mover.is_due(index):
                continue
            try:
                self._enqueue(chunk.index, [], 1.0, 0, self._options.grad_dtype, held=True)
                self._window.held.add(chunk.index)
            except BaseException:
                self._forget(chunk.index)
                raise

    def _enqueue(
        self,
        chunk: int,
        segments: list[Segment],
        multiplier: float,
        gradient: int,
        gradient_type: torch.dtype,
        *,
        held: bool = False,
    ) -> None:
        self._worker.ask(
            self._worker.pipeline.enqueue,
            chunk=chunk,
            generation=self._published.generation + 1,
            segments=segments,
            multiplier=multiplier,
            gradient=gradient,
            gradient_type=self._types[gradient_type],
            param_version=self._published.next_version,
            held=held,
        )

    def set_positions(self, positions: Mapping[int, int]) -> None:
        """Deadlines of chunks as observed; those that were not keep theirs."""
        self._by_deadline.sort(key=lambda chunk: positions.get(chunk.index, chunk.position))

    def drop(self) -> None:
        """Nothing that backward prepared is kept."""
        for chunk in [*self._window.prepared, *self._window.held]:
            self._worker.pipeline.invalidate(chunk)

    def drop_chunk(self, chunk: int) -> None:
        """Drops what backward prepared for a chunk, and waits until nothing works on it."""
        window = self._window
        if chunk not in window.prepared and chunk not in window.held:
            return
        self._forget(chunk)
        self._worker.wait(
            lambda t: self._worker.pipeline.wait_idle(chunk, t), lambda: f"the dropped update of chunk {chunk} to end"
        )

    # ---- the step -----------------------------------------------------------------------------------------

    def publish(
        self,
        work: Mapping[int, tuple[Run, ...]],
        rules: StepRules,
        multiplier: float,
        gradients: GradientMemory,
        values: Callable[[ParamSpan], torch.Tensor],
        *,
        is_as_begun: bool,
    ) -> None:
        """Publishes of ``work`` what was prepared rightly, and starts the rest in deadline order.

        ``values(span)``: the gradient of a parameter, also where the script replaced it. ``is_as_begun``: what was
        prepared had these rules and this multiplier.
        """
        kept = self._keep_prepared(work, is_as_begun)
        self._left_out = frozenset(chunk.index for chunk in self._by_deadline if chunk.index not in work)
        self._worker.ask(self._worker.pipeline.publish, self._published.generation + 1)
        for chunk in self._by_deadline:
            if chunk.index in work and chunk.index not in kept:
                if chunk.index not in self._window.prepared and chunk.index not in self._window.held:
                    self._mover.start(chunk.index)
                segments = self._missed.segments(chunk, rules, work[chunk.index])
                pointer, dtype = self._gradient_of(chunk.index, gradients, values)
                self._start(chunk.index, segments, multiplier, pointer, dtype)
        for index in self._read_wide:
            self._wait_unread(index, self._published.generation)
        self._read_wide, self._wide = self._wide, {}

    def _keep_prepared(self, work: Mapping[int, tuple[Run, ...]], is_as_begun: bool) -> set[int]:
        """Speculated chunks that did exactly what this step does; the others, and what was held in vain, go."""
        window, kept = self._window, set()
        for chunk, runs in window.prepared.items():
            if is_as_begun and work.get(chunk) == runs and not window.is_overridden(chunk):
                kept.add(chunk)
            else:
                self._worker.pipeline.invalidate(chunk)
                self.num_redone += 1
        for chunk in [chunk for chunk in window.held if chunk not in work]:
            self._forget(chunk)
        return kept

    def _start(self, chunk: int, segments: list[Segment], multiplier: float, pointer: int, dtype: torch.dtype) -> None:
        if chunk not in self._window.held:
            self._enqueue(chunk, segments, multiplier, pointer, dtype)
            return
        self._window.held.discard(chunk)
        self._worker.ask(
            self._worker.pipeline.release,
            chunk=chunk,
            segments=segments,
            multiplier=multiplier,
            gradient=pointer,
            gradient_type=self._types[dtype],
            param_version=self._published.next_version,
        )

    def _gradient_of(
        self, chunk: int, gradients: GradientMemory, values: Callable[[ParamSpan], torch.Tensor]
    ) -> tuple[int, torch.dtype]:
        """Address and dtype of the chunk's gradient. One with overrides is widened to fp32 first, and stays alive until
        its update has read it: those of the step before go in the next one."""
        if not self._window.is_overridden(chunk):
            return gradients.pointer(chunk), self._options.grad_dtype
        spec = self._layout.chunks[chunk]
        wide = torch.zeros(spec.numel, dtype=torch.float32, device="cpu")
        for index in spec.params:
            if index in self._window.arrived:
                span = self._layout.params[index]
                begin, end = overlap(span, spec)
                wide[begin - spec.begin : end - spec.begin].copy_(values(span)[begin - span.begin : end - span.begin])
        self._wide[chunk] = wide
        return wide.data_ptr(), torch.float32

    def copy_untouched(self, work: Collection[int], wait_chunk: Callable[[int], None]) -> None:
        """With two versions of P16 in DRAM, chunks without an update carry their values over."""
        published = self._published
        if published.num_param_versions != 2 or len(work) == len(self._layout.chunks):
            return
        version = published.next_version
        for chunk in self._layout.chunks:
            if chunk.index not in work and self._place.residency.params[chunk.index]:
                wait_chunk(chunk.index)
                self._place.chunk_params(chunk, version).copy_(self._place.chunk_params(chunk, 1 - version))

    def close(self) -> None:
        self._wide.clear()
        self._read_wide.clear()
