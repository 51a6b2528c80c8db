# SPDX-License-Identifier: Apache-2.0
"""The synchronous out-of-core optimizer of one rank. Knows chunks and steps, and no DeepSpeed.

[Note: one transaction a step]
Nothing that backward prepared is final before :meth:`OutOfCoreOptimizer.apply`. A step has a *generation*,
one more than that of the last applied step. During backward a chunk whose gradients are all there may be
updated into its spare slot (speculation) or read ahead (held). ``apply`` validates once: chunks that were
prepared with exactly the rules and the multiplier of the step are published, all others are redone from the
untouched slots; ``skip`` drops everything. Readers wait for the generation of the chunk they need.

[Note: threads]
The training thread owns everything here. The C++ pipeline's worker and I/O threads own the jobs they were
given (see the note in chunk_pipeline.h). The committer thread waits for a generation to be durable, writes
the commit record and opens the next generation's writes; it never waits for the training thread, except for
its next order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ds_fuyou.errors import FuyouError, FuyouStateError
from ds_fuyou.host.memory import HostPool, PageLocks
from ds_fuyou.host.waiting import wait_reporting, wait_through
from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer.chunk_values import ChunkValues
from ds_fuyou.optimizer.clip_policy import ClipPolicy, Overlap, UpdateStart
from ds_fuyou.optimizer.commit import Committer
from ds_fuyou.optimizer.gradients import DramGradients, GradientMemory, StoredGradients
from ds_fuyou.optimizer.layout import Chunk, FlatLayout, ParamSpan, overlap
from ds_fuyou.optimizer.missed_steps import MissedSteps
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.param_access import ParamAccess
from ds_fuyou.optimizer.placement import ChunkPlacement
from ds_fuyou.optimizer.rules import GroupHyper, OptimizerKind, RuleClock, StepRules
from ds_fuyou.optimizer.state_access import StateAccess
from ds_fuyou.storage.io import IoLane, storage_error
from ds_fuyou.storage.store import Extent, SlotStore

__all__ = ["OutOfCoreOptimizer"]

logger = logging.getLogger("ds_fuyou")


class OutOfCoreOptimizer:
    """Parameters (P16), fp32 state and gradients of one rank, wherever they live."""

    def __init__(
        self,
        layout: FlatLayout,
        options: CoreOptions,
        kind: OptimizerKind,
        hypers: Sequence[GroupHyper],
        store: SlotStore | None,
    ) -> None:
        self.layout, self.options, self.kind, self.store = layout, options, kind, store
        self.clock = RuleClock(kind, hypers[0])
        self.generation = 0
        self.waited_secs = 0.0
        self.num_redone_chunks = 0
        self._closed = self._told_failure = False
        core = load_core()
        self._types = {
            torch.float32: core.ElementType.FLOAT32,
            torch.float16: core.ElementType.FLOAT16,
            torch.bfloat16: core.ElementType.BFLOAT16,
        }
        self.io = IoLane(options.io, self._path_of)
        self._locks = PageLocks(options.device)
        self.place = ChunkPlacement(layout, options, len(kind.moments), store, self._locks)
        self.staging = HostPool(self.place.staging_bytes())
        self.io.pin(self.staging)
        self.pipeline: Any = core.ChunkPipeline(self.io.engine, self.staging.pool, options.num_update_threads)
        self.pipeline.set_checksum(options.checksum)
        if options.checksum:
            self.io.watch(self.place.watched())
        self.policy = ClipPolicy(options.clip_policy, options.can_speculate)
        self.param_version = 0
        for chunk in layout.chunks:
            self.pipeline.add_chunk(
                numel=chunk.numel,
                position=chunk.position,
                num_moments=len(kind.moments),
                param_type=self._types[options.param_dtype],
                grad_type=self._types[options.grad_dtype],
                **self.place.of_chunk(chunk),
            )
        self.gradients = self._make_gradients()
        self._chunk_generation = [0] * len(layout.chunks)
        self.states = StateAccess(self)
        self.params = ParamAccess(self)
        self.missed = MissedSteps(layout, self.clock)
        self._values = ChunkValues(layout, self.place, self.io, self._slot, self._replaced_p32, options.param_dtype)
        self._wide_gradients: dict[int, torch.Tensor] = {}
        self._read_wide_gradients: dict[int, torch.Tensor] = {}
        self._begin_window()
        self._committer = Committer(self.pipeline, store, self._slots) if store is not None else None

    # ---- construction -------------------------------------------------------------------------------------

    def _path_of(self, fd: int) -> Any:
        return self.store.paths_of_fd(fd) if self.store is not None else None

    def _make_gradients(self) -> GradientMemory:
        options, place = self.options, self.place
        if all(options.residency.grads):
            return DramGradients(self.layout, options.grad_dtype, self._locks)
        stored = StoredGradients(
            self.layout, options.grad_dtype, self.io, place.grad_extents, self._detach_gradient, self._locks
        )
        stored.keep(index for index, resident in enumerate(options.residency.grads) if resident)
        return stored

    def initialize(self, source: Callable[[ParamSpan], torch.Tensor], progress: Callable[[int], None]) -> None:
        """Writes P32 (and P16) of every chunk from the model's parameters; moments stay a flag.

        ``source(span)`` returns the present values of a parameter partition, 1-D, in the model dtype.
        ``progress`` is called with the number of elements done.
        """
        self._values.initialize(source, progress)
        if self._committer is not None:
            self._committer.commit_now(0, 0)

    # ---- gradients ----------------------------------------------------------------------------------------

    def _begin_window(self) -> None:
        """A step's accumulation window opens: nothing has arrived."""
        self._arrived: set[int] = set()
        self._missing = [set(chunk.params) for chunk in self.layout.chunks]
        self._prepared: dict[int, StepRules] = {}
        self._prepared_multiplier = 0.0
        self._held: set[int] = set()
        self._start = UpdateStart.DEFER
        self._window_rules: StepRules | None = None
        self._overrides: dict[int, torch.Tensor] = {}
        self._opened: set[int] = set()

    def add_gradient(self, span: ParamSpan, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Adds one parameter's gradient partition to what arrived in this window; returns the pieces of the sum.

        The pieces lie where ``gradient`` lies. From a device the copies to host memory run on its current stream and
        have not ended on return. A gradient that arrives for a chunk that was already prepared drops the prepared
        update.
        """
        for chunk in self.layout.chunks_of_param[span.index]:
            self._open_chunk(chunk)
            self._await_again(chunk, span.index)
        add = span.index in self._arrived
        sums, at = [], 0
        for view in self.gradients.pieces(span):
            sums.append(_accumulate(view, gradient.view(-1)[at : at + view.numel()], add=add))
            at += view.numel()
        self._arrived.add(span.index)
        self._overrides.pop(span.index, None)
        return sums

    def _open_chunk(self, chunk: int) -> None:
        """Before a chunk's gradient memory is written: nothing may still read it. (A held update reads it later.)"""
        if chunk in self._prepared:
            self.pipeline.invalidate(chunk)
            del self._prepared[chunk]
        if chunk not in self._opened:
            self._wait_unread(chunk, self.generation)
            self._opened.add(chunk)

    def _await_again(self, chunk: int, param: int) -> None:
        """A further backward began: a chunk that was complete is complete again when all its gradients came again."""
        missing = self._missing[chunk]
        if not missing:
            missing.update(self.layout.chunks[chunk].params)
        missing.add(param)

    def _detach_gradient(self, chunk: int, buffer: int) -> None:
        self.pipeline.read_gradient_from_storage(chunk, buffer)

    def _wait_unread(self, chunk: int, generation: int) -> None:
        """Until no update up to ``generation`` reads the chunk's gradient any more."""
        self._wait(
            lambda t: self.pipeline.wait_gradient_read(chunk, generation, t),
            lambda: f"the update of chunk {chunk} for step {generation} (gradient)",
        )

    def sum_of_squares(self, values: torch.Tensor) -> float:
        """Sum of squares of a contiguous host tensor in fp64, in no promised order; not finite if an element is not."""
        element = self._types[values.dtype]
        return float(
            load_core().sum_of_squares(element, values.data_ptr(), values.numel(), self.options.num_update_threads)
        )

    def gradient(self, span: ParamSpan, *, stored: bool = False) -> torch.Tensor:
        """The accumulated gradient of a parameter in this window, to be read before the next call: no copy if it lies
        in one piece.

        ``stored``: what backward left, even if the user replaced it since.
        """
        if span.index in self._overrides and not stored:
            return self._overrides[span.index]
        views = self.gradients.values(span)
        return views[0] if len(views) == 1 else torch.cat(views)

    def override_gradient(self, span: ParamSpan, value: torch.Tensor) -> None:
        """Replaces a gradient for this step by fp32 values (safe_set_full_grad); kept beside G16 until the step."""
        for chunk in self.layout.chunks_of_param[span.index]:
            self._open_chunk(chunk)
        self._arrived.add(span.index)
        self._overrides[span.index] = value.detach().to("cpu", torch.float32, copy=True).view(-1)

    def has_arrived(self, span: ParamSpan) -> bool:
        return span.index in self._arrived

    def is_overridden(self, span: ParamSpan) -> bool:
        return span.index in self._overrides

    def open_window(self, hypers: Sequence[GroupHyper], multiplier: float, *, managed: bool) -> None:
        """The last micro-batch of the step begins: decide whether to speculate, and read ahead otherwise."""
        if self._window_rules is not None:
            return
        self._window_rules = self.clock.prepare(hypers)
        self._prepared_multiplier = multiplier
        self._start = self.policy.choose() if managed else UpdateStart.DEFER
        if self._start is UpdateStart.DEFER and managed and self.options.overlap is not Overlap.NONE:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Reads, in deadline order and as far as staging memory reaches, the state that step() will update.

        What chunks with a resident state will need of it, G16 from storage, stays free for them.
        """
        left = self.staging.capacity_bytes
        for chunk in sorted(self.layout.chunks, key=lambda c: c.position):
            left -= self.place.job_bytes(chunk)
            if left < 0:
                break
            if self.place.residency.states[chunk.index]:
                continue
            self._held.add(chunk.index)
            self._enqueue(chunk.index, [], 1.0, gradient=0, held=True)

    def complete_gradient(self, span: ParamSpan) -> None:
        """The parameter's gradient of this micro-batch is in place. Once all of a chunk are, it may leave DRAM, and in
        the last micro-batch its update is prepared: the gradient is final as far as backward knows.
        """
        for chunk in self.layout.chunks_of_param[span.index]:
            missing = self._missing[chunk]
            if span.index in missing:
                missing.remove(span.index)
                if not missing:
                    self._prepare(chunk)

    def _prepare(self, chunk: int) -> None:
        """Updates a complete chunk into its spare slot if this window speculates.

        A resident state has one version, which an update overwrites: nothing touches it before ``step()``.
        """
        spec, rules = self.layout.chunks[chunk], self._window_rules
        speculates = self._start is UpdateStart.SPECULATE and not self.place.residency.states[chunk]
        if speculates and rules is not None and self._is_plain(spec):
            segments = [(0, spec.numel, rules.rules[spec.sub_group])]
            self._enqueue(chunk, segments, self._prepared_multiplier, gradient=self.gradients.pointer(chunk))
            self._prepared[chunk] = rules
        self.gradients.seal(chunk)

    def _is_plain(self, chunk: Chunk) -> bool:
        """Whether all of the chunk is updated by one rule from G16: nothing overridden, no parameter behind."""
        held = set(chunk.params)
        return not (held & self._overrides.keys()) and not self.missed.any_of(held)

    def end_micro_batch(self) -> None:
        """Backward of a micro-batch ended: gradients that stay incomplete may leave DRAM too."""
        self.gradients.seal_all()

    def _enqueue(
        self,
        chunk: int,
        segments: list[Any],
        multiplier: float,
        *,
        gradient: int,
        held: bool = False,
        gradient_type: torch.dtype | None = None,
    ) -> None:
        self._ask(
            self.pipeline.enqueue,
            chunk=chunk,
            generation=self.generation + 1,
            segments=segments,
            multiplier=multiplier,
            gradient=gradient,
            gradient_type=self._types[gradient_type or self.options.grad_dtype],
            param_version=self._next_version(),
            held=held,
        )

    def _ask(self, call: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """A call of the pipeline that a failed one refuses: the script then sees what failed, not the refusal."""
        try:
            call(*arguments, **named)
        except RuntimeError:
            self.check()
            raise

    def _next_version(self) -> int:
        return 1 - self.param_version if self.place.num_param_versions == 2 else 0

    # ---- the step -----------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Drops the step: nothing that backward prepared is kept."""
        self.policy.record(bool(self._prepared) or self._start is UpdateStart.DEFER)
        self._drop_prepared()
        self._end_window()

    def forget_gradients(self) -> None:
        """zero_grad(): the window starts anew, as if no backward had run since the last step."""
        if self._arrived or self._prepared or self._held:
            self._drop_prepared()
            self._end_window()

    def _drop_prepared(self) -> None:
        for chunk in [*self._prepared, *self._held]:
            self.pipeline.invalidate(chunk)
        self._prepared.clear()
        self._held.clear()

    def apply(self, hypers: Sequence[GroupHyper], multiplier: float, *, expected_multiplier: float) -> None:
        """Publishes what was prepared rightly and starts everything else; returns as soon as that is queued.

        ``multiplier`` is the fp32 factor of every gradient (unscale and clip in one); ``expected_multiplier``
        the factor without clipping, which speculation assumed.
        """
        self.check()
        rules = self.clock.prepare(hypers)
        self.policy.record(multiplier != expected_multiplier)
        due = self.params.due(self._arrived)
        work = {
            c.index: self.missed.segments(c, rules, self._arrived)
            for c in self.layout.chunks
            if due.intersection(c.params)
        }
        edits = self.params.before_step(self._arrived, work)
        kept = self._keep_prepared(rules, multiplier, work)
        self._release_held(work)
        version = self._next_version()
        self._ask(self.pipeline.publish, self.generation + 1)
        for chunk in sorted(work, key=lambda c: self.layout.chunks[c].position):
            if chunk not in kept:
                self._start_final(chunk, work[chunk], multiplier)
        self._copy_untouched(work, version)
        self.generation += 1
        self.param_version = version
        for chunk in work:
            self._chunk_generation[chunk] = self.generation
            self.states.updated(chunk)
        self.params.after_step(edits)
        self.clock.commit(rules)
        self.missed.count(self._arrived)
        self._keep_wide_gradients()
        self._end_window()
        if self._committer is not None:
            self._committer.order(self.generation, self.clock.step)
        if self.options.overlap is not Overlap.BACKWARD_AND_FORWARD:
            self.wait_all()

    def _keep_prepared(self, rules: StepRules, multiplier: float, work: dict[int, Any]) -> set[int]:
        """Speculated chunks that did exactly what this step does; the others are dropped."""
        kept = set()
        for chunk, prepared in list(self._prepared.items()):
            same = (
                prepared.hypers == rules.hypers
                and prepared.step == rules.step
                and multiplier == self._prepared_multiplier
                and self._arrived.issuperset(self.layout.chunks[chunk].params)
                and self._is_plain(self.layout.chunks[chunk])
                and chunk in work
            )
            if same:
                kept.add(chunk)
            else:
                self.pipeline.invalidate(chunk)
                self.num_redone_chunks += 1
        return kept

    def _release_held(self, work: dict[int, Any]) -> None:
        for chunk in list(self._held):
            if chunk not in work:
                self.pipeline.invalidate(chunk)
                self._held.discard(chunk)

    def _start_final(self, chunk: int, segments: list[Any], multiplier: float) -> None:
        pointer, dtype = self._final_gradient(chunk)
        if chunk in self._held:
            self._ask(
                self.pipeline.release,
                chunk=chunk,
                segments=segments,
                multiplier=multiplier,
                gradient=pointer,
                gradient_type=self._types[dtype],
                param_version=self._next_version(),
            )
        else:
            self._enqueue(chunk, segments, multiplier, gradient=pointer, gradient_type=dtype)

    def _final_gradient(self, chunk: int) -> tuple[int, torch.dtype]:
        """Address and dtype of the chunk's gradient; one with overrides is widened to fp32 first."""
        spec = self.layout.chunks[chunk]
        if not self._overrides.keys() & set(spec.params):
            return self.gradients.pointer(chunk), self.options.grad_dtype
        wide = torch.zeros(spec.numel, dtype=torch.float32)
        for index in spec.params:
            if index in self._arrived:
                span = self.layout.params[index]
                begin, end = overlap(span, spec)
                values = self.gradient(span)[begin - span.begin : end - span.begin]
                wide[begin - spec.begin : end - spec.begin].copy_(values)
        self._wide_gradients[chunk] = wide
        return wide.data_ptr(), torch.float32

    def _keep_wide_gradients(self) -> None:
        """Widened gradients stay alive until their updates have read them; those of the step before go."""
        for chunk in self._read_wide_gradients:
            self._wait_unread(chunk, self.generation - 1)
        self._read_wide_gradients, self._wide_gradients = self._wide_gradients, {}

    def _copy_untouched(self, work: dict[int, Any], version: int) -> None:
        """With two versions of P16 in DRAM, chunks without an update carry their values over."""
        if self.place.num_param_versions != 2 or len(work) == len(self.layout.chunks):
            return
        for chunk in self.layout.chunks:
            if chunk.index not in work and self.place.residency.params[chunk.index]:
                self.wait_chunk(chunk.index)
                self.place.chunk_params(chunk, version).copy_(self.place.chunk_params(chunk, 1 - version))

    def _end_window(self) -> None:
        self.gradients.end_step()
        self._begin_window()

    # ---- readers ------------------------------------------------------------------------------------------

    def _wait(self, wait: Callable[[float], bool], what: Callable[[], str]) -> None:
        if self._closed:
            self.check()
        try:
            self.waited_secs += wait_reporting(wait, what)
        except RuntimeError as error:
            self.check()
            raise FuyouStateError(str(error)) from error

    def check(self) -> None:
        """Raises what a worker met, as an exception of the training thread."""
        if self._closed:
            raise FuyouStateError("the optimizer is closed: its engine was destroyed")
        if self.pipeline.failed:
            self._told_failure = True
            raise self._failure()

    def _failure(self) -> FuyouError:
        failure = self.pipeline.failure
        if failure.error:
            return storage_error(failure.what, failure.error, failure.fd, failure.offset, self._path_of)
        return FuyouStateError(failure.what)

    def wait_chunk(self, chunk: int) -> None:
        """Until P16 of the chunk's last applied step is in place."""
        generation = self._chunk_generation[chunk]
        self._wait(
            lambda t: self.pipeline.wait_published(chunk, generation, t),
            lambda: f"the update of chunk {chunk} for step {generation}",
        )

    def wait_param(self, span: ParamSpan) -> None:
        for chunk in self.layout.chunks_of_param[span.index]:
            self.wait_chunk(chunk)

    def is_ready(self, span: ParamSpan) -> bool:
        return not self._closed and all(
            self.pipeline.is_published(c, self._chunk_generation[c]) for c in self.layout.chunks_of_param[span.index]
        )

    def wait_all(self) -> None:
        """Until every update of the applied steps has reached its place, storage included."""
        self._wait(
            lambda t: self.pipeline.wait_durable(self.generation, t), lambda: f"step {self.generation} to be durable"
        )

    def param_view(self, span: ParamSpan) -> torch.Tensor:
        """P16 of a parameter that is in DRAM as a whole, the published version. Wait for it first."""
        return self.place.span_params(span, self.param_version)

    def flat_params(self, sub_group: int) -> torch.Tensor | None:
        """P16 of a sub-group that is in DRAM as a whole, the published version."""
        return self.place.flat_params(sub_group, self.param_version)

    def _slot(self, chunk: int) -> int:
        """The slot that holds a chunk's published values. (The pipeline itself must go with close().)"""
        return int(self.pipeline.slot(chunk))

    def _replaced_p32(self, chunk: int, address: int) -> None:
        self.pipeline.replace_state(chunk, address, has_moments=False)

    def _slots(self) -> dict[str, int]:
        return self.place.slotted(self._slot)

    def state_extents(self, index: int) -> Sequence[Extent]:
        """Where the committed or last applied state of a chunk on storage lies."""
        return self.place.state_extents(index, self._slot(index))

    def withdraw_commit(self) -> None:
        """Before states on storage are overwritten in place; see [Note: states replaced in place]. Waits."""
        committer = self._committer
        if committer is not None:
            self._wait(committer.settled, lambda: f"step {self.generation} to be committed")
            committer.withdraw()

    def drop_prepared(self, index: int) -> None:
        """Drops what backward prepared for a chunk, and waits until nothing works on it."""
        if index not in self._prepared and index not in self._held:
            return
        self.pipeline.invalidate(index)
        self._prepared.pop(index, None)
        self._held.discard(index)
        self._wait(lambda t: self.pipeline.wait_idle(index, t), lambda: f"the dropped update of chunk {index} to end")

    def replace_params(self, chunk: Chunk, params: torch.Tensor) -> None:
        """P16 of a chunk := ``params`` (1-D, model dtype), in its place."""
        for transfer in self._values.put_params(chunk, params):
            transfer.wait()
        self.params.replaced(chunk.params)

    def set_positions(self, positions: Iterable[tuple[int, int]]) -> None:
        """Deadlines as observed: (parameter, forward position); a chunk takes the smallest of its parameters."""
        found: dict[int, int] = {}
        for index, position in positions:
            for chunk in self.layout.chunks_of_param[index]:
                found[chunk] = min(position, found.get(chunk, position))
        for chunk, position in found.items():
            self.pipeline.set_position(chunk, position)

    def close(self) -> None:
        """Stops the threads; what was not published is lost, what was committed stays. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._committer is not None and self.store is not None and self.store.keep:
            self._committer.stop()  # the state stays: let the last step become durable
        wait_through(self.pipeline.stop, lambda: "transfers of chunks in flight to end")
        if self._committer is not None:
            self._committer.stop()
        if self.pipeline.failed and self.store is not None:
            self.store.keep_because("the run failed")
        if self.pipeline.failed and not self._told_failure:  # after the script's last call: nobody to raise it to
            logger.error("closed after a failure: %s", self._failure())
        self.gradients.close()
        self.io.close()
        self.place.close()
        self._locks.release()
        self._wide_gradients.clear()
        self._read_wide_gradients.clear()
        self.staging.give_back()
        # Their threads are joined; descriptors go with the objects, though the script may still hold the engine.
        self._committer = self.pipeline = None


def _accumulate(kept: torch.Tensor, piece: torch.Tensor, *, add: bool) -> torch.Tensor:
    """``kept`` (host memory) := ``piece``, or += ``piece``; the sum, on the device of ``piece``.

    On a device the sum is made there, as in stock, and its copy to the host is ordered by the current stream alone.
    """
    if piece.device == kept.device:
        return kept.add_(piece.to(kept.dtype)) if add else kept.copy_(piece)
    total = piece.to(kept.dtype)
    if add:
        total = kept.to(piece.device, non_blocking=True).add_(total)
    kept.copy_(total, non_blocking=True)
    return total
