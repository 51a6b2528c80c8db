# SPDX-License-Identifier: Apache-2.0
"""The synchronous out-of-core optimizer of one rank. Knows chunks and steps, and no DeepSpeed.

[Note: one transaction a step]
Nothing that backward prepared is final before :meth:`OutOfCoreOptimizer.apply`. A step has a *generation*,
one more than that of the last applied step. During backward a chunk whose gradients are all there may be
updated into its spare slot (speculation), and the state of one that waits for gradients is read ahead (held).
``apply`` validates once: chunks that were prepared with exactly the rules and the multiplier of the step are
published, all others are redone from the untouched slots; ``skip`` drops everything. Readers wait for the
generation of the chunk they need.

[Note: threads]
The training thread owns everything here. The thread of HostSums owns gradients on their way from a device until they
are added ([Note: sums on the host]). The C++ pipeline's worker and I/O threads own the jobs they were
given (see the note in chunk_pipeline.h). The committer thread waits for a generation to be durable, writes
the commit record and, on one rank, opens the next generation's writes; on several the training thread does. The
committer never waits for the training thread, except for its next order. One more thread may take a :class:`Snapshot`
away, for a checkpoint; see [Note: a save behind training] in zero/saving/background_save.py.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ds_fuyou.errors import FuyouMemoryError, FuyouStateError, FuyouStorageError
from ds_fuyou.host.device import Device, failure_of
from ds_fuyou.host.memory import HostPool, PageLocks
from ds_fuyou.host.threads import starting_threads
from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer.chunk_values import ChunkValues
from ds_fuyou.optimizer.clip_policy import ClipPolicy, Overlap, UpdateStart
from ds_fuyou.optimizer.gradients import DramGradients, GradientMemory, StoredGradients
from ds_fuyou.optimizer.intake import GradientIntake
from ds_fuyou.optimizer.layout import Chunk, FlatLayout, ParamSpan
from ds_fuyou.optimizer.missed_steps import MissedSteps, Run
from ds_fuyou.optimizer.moving import ChunkMover
from ds_fuyou.optimizer.moving_grads import GradMover
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.param_access import ParamAccess
from ds_fuyou.optimizer.placement import ChunkPlacement, state_region
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.optimizer.rules import GroupHyper, OptimizerKind, RuleClock
from ds_fuyou.optimizer.snapshot import Snapshot
from ds_fuyou.optimizer.state_access import StateAccess
from ds_fuyou.optimizer.step_commits import StepCommits
from ds_fuyou.optimizer.taking_over import TakenOver
from ds_fuyou.optimizer.updates import Published, WindowUpdates
from ds_fuyou.optimizer.window import EndedWindow, Window
from ds_fuyou.optimizer.worker import Worker
from ds_fuyou.storage.io import IoLane, Transfer
from ds_fuyou.storage.store import CommitRecord, Extent, SlotStore

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
        resumed: CommitRecord | None = None,
    ) -> None:
        """``resumed``: of ``store``, that all ranks have made; then :meth:`resume` comes instead of initialising."""
        self._resumed = resumed
        self.num_applied = 0  # steps that this object made
        self.layout, self.options, self.kind, self.store = layout, options, kind, store
        self.clock = RuleClock(kind, hypers[0])
        types = load_core().ElementType
        self._types = {torch.float32: types.FLOAT32, torch.float16: types.FLOAT16, torch.bfloat16: types.BFLOAT16}
        self.io = IoLane(options.io, self.path_of)
        self._locks = PageLocks(options.device)
        self._locks.pause()  # registered memory is there as a whole: not before what its values come from is gone
        with ExitStack() as undo:  # what fails leaves no memory registered with the device
            undo.callback(self._locks.release)
            self.place = ChunkPlacement(layout, options, len(kind.moments), store, self._locks)
            self.staging = HostPool(self.place.staging_bytes(), self.copied_to)
            undo.callback(self.staging.unpin)
            self.io.pin(self.staging)
            slots = {} if resumed is None else resumed.slots
            self._first_slot = [slots.get(state_region(chunk.index), 0) for chunk in layout.chunks]
            self._two_jobs_bytes: int | None = None
            self.pipeline = self._make_pipeline()
            self.place.follow(self.pipeline.resident_state)
            self._worker, self._pid = Worker(self.pipeline, self.path_of), os.getpid()
            self.io.on_failure = self._worker.transfer_failed
            self.policy = ClipPolicy(options.clip_policy, options.can_speculate(options.residency))
            self.published = Published(self.place.num_param_versions)
            self.window = Window(layout)
            self._ended: EndedWindow | None = None
            self.mover = ChunkMover(self, self._worker)
            self.grad_mover = GradMover(self)
            self.missed = MissedSteps(layout, self.clock)
            self._updates = WindowUpdates(
                layout,
                options,
                self.place,
                self._worker,
                self.published,
                self.window,
                self.missed,
                self._types,
                self.mover,
            )
            self.gradients = self.make_gradients()
            self.intake = GradientIntake(
                layout,
                self.gradients,
                self.window,
                options.device,
                options.grad_dtype,
                self._locks,
                num_helpers=options.num_update_threads,
                reopen=self._updates.reopen,
                complete=self._complete,
            )
            self.gradients.relieve = self.intake.settle_oldest
            self._chunk_generation = [0] * len(layout.chunks)
            self.states = StateAccess(self)
            self.params = ParamAccess(self)
            self.values = ChunkValues(layout, self.place, self.io, self.slot, self._replaced_p32, options.param_dtype)
            self._taken_over = TakenOver(self)
            self._norm_of_overrides = False
            self._snapshot: Snapshot | None = None
            self.num_snapshots = 0
            """That were begun."""
            self.finish_first: Callable[[], None] | None = None
            """What works behind training and must have ended before anything here does."""
            self.commits = StepCommits(self, self._worker, resumed)
            undo.pop_all()

    @property
    def keeps_steps(self) -> bool:
        """Whether a run that is killed can be gone on with from its state files: none of the state is in memory."""
        return self.options.num_slots >= 2 and not any(self.place.residency.states)

    @property
    def generation(self) -> int:
        """Number of applied steps."""
        return self.published.generation

    @property
    def param_version(self) -> int:
        """Which version of P16 in DRAM readers see."""
        return self.published.param_version

    @property
    def num_redone_chunks(self) -> int:
        """Updates that backward prepared and ``step()`` dropped."""
        return self._updates.num_redone

    @property
    def waited_secs(self) -> float:
        """Time the training thread stood waiting for updates."""
        return self._worker.waited_secs

    # ---- construction -------------------------------------------------------------------------------------

    def path_of(self, fd: int) -> Path | None:
        """The state file behind a descriptor; for error messages."""
        return self.store.paths_of_fd(fd) if self.store is not None else None

    def _make_pipeline(self) -> Any:
        """With all chunks, and with nothing of what stands in their slots."""
        options, layout = self.options, self.layout
        with starting_threads():
            pipeline = load_core().ChunkPipeline(self.io.engine, self.staging.pool, options.num_update_threads)
        pipeline.set_checksum(options.checksum)
        if options.checksum:
            self.io.watch(self.place.watched())
        for chunk in layout.chunks:
            pipeline.add_chunk(self.spec_of(chunk, self.place.state(chunk.index)))
        return pipeline

    def spec_of(self, chunk: Chunk, state: torch.Tensor | None) -> Any:
        """A chunk and where it is, its state in this memory or on storage, as the pipeline takes it."""
        return load_core().ChunkSpec(
            position=chunk.position,
            param_type=self._types[self.options.param_dtype],
            grad_type=self._types[self.options.grad_dtype],
            **self.place.of_chunk(chunk, state, first_slot=self._first_slot[chunk.index]),
        )

    @property
    def copied_to(self) -> Device | None:
        """What copies to staging memory: sums of gradients may lie in it for a while."""
        return None if all(self.place.residency.grads) else self.options.device

    def make_gradients(self) -> GradientMemory:
        options, place = self.options, self.place
        if all(place.residency.grads):
            return DramGradients(self.layout, options.grad_dtype, self._locks)
        stored = StoredGradients(
            self.layout,
            options.grad_dtype,
            self.io,
            place.grad_extents,
            self._detach_gradient,
            self._locks,
            lend=self._lend,
        )
        stored.keep(index for index, resident in enumerate(place.residency.grads) if resident)
        return stored

    def initialize(self, source: Callable[[ParamSpan], torch.Tensor], progress: Callable[[int], None]) -> None:
        """Writes P32 (and P16) of every chunk from the model's parameters; moments stay a flag.

        ``source(span)`` returns the present values of a parameter partition, 1-D, in the model dtype.
        ``progress`` is called with the number of elements done.
        """
        self.values.initialize(source, progress)
        self.commits.now()

    def resume(self, progress: Callable[[int], None]) -> None:
        """Goes on from the commit where it lies. From then on a newer commit, which other ranks had not made, is none
        any more. See [Note: what a resume reads] in taking_over.py.

        Raises:
            FuyouChecksumError: P32 that was read is not what was written.
        """
        commit, store = self._resumed, self.store
        if commit is None or store is None:
            raise FuyouStateError("there is no commit to go on from")
        meta: Any = commit.meta
        self.published.generation = commit.step
        self.pipeline.publish(commit.step)
        self.pipeline.set_committed(commit.step)
        self.clock.replay(meta["clock"])
        self.missed.restore(meta["missed_steps"])
        self.commits.begin(meta["training"])
        self._taken_over.take(commit, self.values, progress)
        store.go_back_to(commit)

    # ---- gradients ----------------------------------------------------------------------------------------

    def open_window(self, hypers: Sequence[GroupHyper], multiplier: float, *, managed: bool) -> None:
        """The last micro-batch of the step begins: decide whether to speculate, and read states ahead."""
        window = self.window
        if window.rules is not None:
            return
        self.grad_mover.window_begins()
        self.commits.window_opens()
        start = self.policy.choose() if managed else UpdateStart.DEFER
        window.begin_last(self.clock.prepare(hypers), multiplier, start)
        self.gradients.begin_last()
        if managed:
            self._read_ahead(start, early=False)

    def _read_ahead(self, start: UpdateStart, *, early: bool) -> None:
        """``early``: before the last micro-batch of the step."""
        if self.options.overlap is not Overlap.NONE:
            self._updates.read_ahead(self._room_to_read_ahead(start, early=early))

    def _room_to_read_ahead(self, start: UpdateStart, *, early: bool) -> int:
        """Staging memory for states whose gradient has not come. Where updates begin in backward it is for the chunks
        that come last, are needed first, and have nothing to hide behind."""
        room = self.staging.capacity_bytes - self.gradients.lent_bytes
        if start is UpdateStart.DEFER:
            return room
        share = 2 if early else 4  # of staging: nothing else uses it before the last micro-batch
        return min(room - self._reserved_bytes, self.staging.capacity_bytes // share)

    @property
    def _reserved_bytes(self) -> int:
        """Staging memory of any two updates, of states that leave host memory as of those that have left it: what is
        taken of it in this step may be there when the next one's updates need theirs."""
        if self._two_jobs_bytes is None:
            staying = replace(self.place.residency, states=self.mover.staying)
            self._two_jobs_bytes = 2 * max(self.place.job_bytes(chunk, staying) for chunk in self.layout.chunks)
        return self._two_jobs_bytes

    def add_gradients(self, gradients: Sequence[tuple[ParamSpan, torch.Tensor]], *, last: bool = True) -> None:
        """The door: see :meth:`GradientIntake.add`."""
        self._ended = None
        self.grad_mover.window_begins()
        self.intake.add(gradients, last=last)

    def summed_over_all(self) -> None:
        """What was added last is a sum over all ranks, made on the current stream, after the window was opened."""
        if self.window.rules:
            self.commits.summed_over_all()

    def _complete(self, chunk: int) -> None:
        """All gradients of a chunk are in place: its update may be prepared, and they may leave DRAM."""
        self.commits.open_if_reduced()
        self._updates.prepare(chunk, self.gradients.pointer(chunk))
        self.gradients.seal(chunk)

    def _detach_gradient(self, chunk: int, buffer: int) -> None:
        self.pipeline.read_gradient_from_storage(chunk, buffer)

    def _gradient_pieces(self, span: ParamSpan, *, stored: bool) -> Sequence[torch.Tensor]:
        if not stored and span.index in self.window.overrides:
            return [self.window.overrides[span.index]]
        return self.gradients.values(span)

    def gradient(self, span: ParamSpan, *, stored: bool = False) -> torch.Tensor:
        """The accumulated gradient of a parameter in this window, to be read before the next call: no copy if it lies
        in one piece. Waits for copies from the device.

        ``stored``: what backward left, even if the user replaced it since.
        """
        self.require_own_process()
        self.intake.settle(wait=True)
        views = self._gradient_pieces(span, stored=stored)
        return views[0] if len(views) == 1 else torch.cat([*views])

    def require_own_process(self) -> None:
        """
        Raises:
            FuyouStateError: this is a forked child, which has no thread of the engine's, and zeros for what it held.
        """
        if os.getpid() != self._pid:
            raise FuyouStateError(
                "a child that was forked from the process that trains has no optimizer states or gradients of its "
                "engine; read them before the fork"
            )

    def forget_last_gradients(self) -> None:
        """Nobody asks any more what gradients the last step used."""
        self._ended = None

    def last_gradient(self, span: ParamSpan, dtype: torch.dtype) -> torch.Tensor | None:
        """A copy of what the last step made of the gradient, unscaled and clipped, or of it as it came if the step was
        skipped. None if it had none, the script dropped it since, or gradients of the next step have come."""
        self.require_own_process()
        ended = self._ended
        if ended is None or span.index not in ended.arrived:
            return None
        override = ended.overrides.get(span.index)
        views = self.gradients.values(span) if override is None else [override]
        return torch.cat([view.to(dtype) for view in views]).mul_(ended.multiplier)

    def override_gradient(self, span: ParamSpan, value: torch.Tensor) -> None:
        """Replaces a gradient for this step by fp32 values (safe_set_full_grad); kept beside G16 until the step."""
        self._ended = None
        self.intake.settle(wait=True)
        for chunk in self.layout.chunks_of_param[span.index]:
            self._updates.reopen(chunk)
        self.window.arrived.add(span.index)
        values = value.detach().to("cpu", torch.float32, copy=True).view(-1)
        values[span.numel - span.padding :].zero_()  # a part from a script may have anything there
        self.window.overrides[span.index] = values

    def complete_gradient(self, span: ParamSpan) -> None:
        """The parameter's gradient is final as far as the script says: its chunks may be prepared."""
        self.intake.complete(span)

    def has_arrived(self, span: ParamSpan) -> bool:
        return span.index in self.window.arrived

    def end_micro_batch(self, *, reads_ahead: bool = False) -> None:
        """Backward of a micro-batch ended. Nothing waits for the device.

        ``reads_ahead``: if the step's last one is still to come, states are read already: storage has little to do
        until then, and more than it can do while the last backward and the next forward last.
        """
        self.intake.end_micro_batch()
        if reads_ahead and self.window.rules is None and self.mover.is_idle:  # what is read already moves a step later
            self._read_ahead(self.policy.choose(), early=True)

    def close_window(self, *, with_overrides: bool = False) -> None:
        """``step()`` begins: every gradient of the step is in host memory, and every one is in the norm.

        A parameter whose gradient came in an earlier micro-batch only is counted here. Stock leaves it out of the norm
        and updates it with an old gradient; PyTorch sums all micro-batches, and so do we. A gradient that the script
        replaced stays in the norm as it came, unless ``with_overrides``: where stock takes norms in ``step()`` only.
        """
        self._norm_of_overrides = self._norm_of_overrides or with_overrides
        stored = not self._norm_of_overrides
        self.intake.close_window()
        self.intake.take_missing_norms(
            lambda span: (
                [] if stored and span.index in self.window.overrides else self._gradient_pieces(span, stored=stored)
            )
        )

    def norms(self, spans: Iterable[ParamSpan]) -> dict[int, torch.Tensor]:
        """Norms of a sub-group's gradients as stock takes them, by parameter; those without a gradient have none."""
        stored = not self._norm_of_overrides
        return self.intake.norms.settle(
            [span.index for span in spans], lambda index: self.gradient(self.layout.params[index], stored=stored)
        )

    # ---- memory lent to sums -------------------------------------------------------------------------------

    def _lend(self, num_bytes: int) -> torch.Tensor | None:
        """Staging memory for a gradient until its window ends, if half of it, and two of any update, stay in one run.

        Updates of older steps find that run when those before them have ended, so none waits for what is lent.
        """
        free = int(self.staging.pool.largest_free_bytes)
        if free - num_bytes < max(self.staging.capacity_bytes // 2, self._reserved_bytes):
            return None
        return self.staging.try_allocate(num_bytes)

    # ---- the step -----------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Drops the step: nothing that backward prepared is kept."""
        self._taken_over.compare_rest()  # it may be why there is no step
        self.policy.record(bool(self.window.prepared) or self.window.start is UpdateStart.DEFER)
        self._drop_window()

    def forget_gradients(self) -> None:
        """zero_grad(): the window starts anew, as if no backward had run since the last step."""
        if not self.window.is_empty:
            self._drop_window()
            self._ended = None

    def _drop_window(self) -> None:
        self.intake.drop()
        self._updates.drop()
        self._end_window(1.0)

    def apply(self, hypers: Sequence[GroupHyper], multiplier: float, *, expected_multiplier: float) -> None:
        """Publishes what was prepared rightly and starts everything else; returns as soon as that is queued.

        ``multiplier`` is the fp32 factor of every gradient (unscale and clip in one); ``expected_multiplier``
        the factor without clipping, which speculation assumed. An exception in between, also one that is no failure
        of ours (an interrupt), leaves a step half applied: it fails the pipeline for good.
        """
        self.check()
        step = self.clock.step + 1
        try:
            self._apply(hypers, multiplier, expected_multiplier)
        except BaseException as error:
            self._worker.fail(f"step {step} was cut short", error)
            raise
        if self.options.overlap is not Overlap.BACKWARD_AND_FORWARD:
            self.wait_all()
        self.mover.step_ended()

    def _apply(self, hypers: Sequence[GroupHyper], multiplier: float, expected_multiplier: float) -> None:
        window = self.window
        self._taken_over.compare_rest()
        self.commits.order(None)  # of a step that did not end for the engine: this one's updates wait for that commit
        self.intake.close_window()
        self.commits.norm_is_known()
        self.mover.advance()
        rules = self.clock.prepare(hypers)
        # Once: each chunk that compared all hyperparameters, of which every sub-group has some, would be quadratic.
        is_as_begun = window.rules is not None and window.began_as(rules, multiplier)
        refuses = multiplier != expected_multiplier if window.rules is None else not is_as_begun
        self.policy.record(refuses)  # what began in backward was in vain, or would have been
        work = self._work()
        edits = self.params.before_step(window.arrived, work)
        self._updates.publish(work, rules, multiplier, self.gradients, self.gradient, is_as_begun=is_as_begun)
        self._updates.copy_untouched(work, self.wait_chunk)
        self.published.advance()
        self.num_applied += 1
        for index in work:
            self._chunk_generation[index] = self.generation
            self.states.updated(index)
        self._taken_over.written(work)
        self.params.after_step(edits)
        self.clock.commit(rules)
        self.missed.count(window.arrived)
        self._end_window(multiplier)
        self.commits.applied()

    def _work(self) -> dict[int, tuple[Run, ...]]:
        """What the step does to the chunks that it touches: to those that only move, nothing."""
        arrived, moves = self.window.arrived, self.mover.is_due
        due = self.params.due(arrived)
        all_due = len(due) == len(self.layout.params)
        touched = (c for c in self.layout.chunks if all_due or not due.isdisjoint(c.params) or moves(c.index))
        return {c.index: self.missed.runs(c, arrived) for c in touched}

    def _end_window(self, multiplier: float) -> None:
        self.intake.end_window()
        self._ended = EndedWindow(*self.window.reset(), multiplier)
        self._norm_of_overrides = False
        self.commits.window_ended()

    # ---- readers ------------------------------------------------------------------------------------------

    def fail(self, what: str, error: BaseException) -> None:
        """No step is made any more: something was left half done."""
        self._worker.fail(what, error)

    def check(self) -> None:
        """Raises what a worker met, as an exception of the training thread."""
        self._worker.check()

    def wait_chunk(self, chunk: int, *, written: bool = True) -> None:
        """Until P16 of the chunk's last applied step is in place, or :meth:`copy_updated` has it (not ``written``)."""
        generation = self._chunk_generation[chunk]

        def wait(timeout_secs: float) -> bool:
            wait = self.pipeline.wait_published if written else self.pipeline.wait_updated
            return bool(wait(chunk, generation, timeout_secs))

        self._worker.wait(wait, lambda: f"the update of chunk {chunk} for step {generation}")

    def wait_param(self, span: ParamSpan) -> None:
        for chunk in self.layout.chunks_of_param[span.index]:
            self.wait_chunk(chunk)

    def wait_updated(self, span: ParamSpan) -> None:
        """Until P16 of the parameter's last applied step can be read, by :meth:`PublishedSpan.start_reading`."""
        for chunk in self.layout.chunks_of_param[span.index]:
            self.wait_chunk(chunk, written=False)

    def is_updated(self, span: ParamSpan) -> bool:
        return not self._worker.is_closed and all(
            self.pipeline.is_updated(c, self._chunk_generation[c]) for c in self.layout.chunks_of_param[span.index]
        )

    def copy_updated(self, chunk: int, begin: int, memory: torch.Tensor) -> bool:
        """Fills ``memory`` (bytes) with the chunk's P16 from byte ``begin`` on, out of an update that has yet to write
        it to storage; False if it is there.

        Raises:
            FuyouStateError: as :meth:`require_own_process`.
        """
        self.require_own_process()
        copied: bool = self._worker.ask(self.pipeline.copy_updated, chunk, begin, memory.numel(), memory.data_ptr())
        return copied

    def wait_all(self) -> None:
        """Until every update of the applied steps has reached its place, storage included."""
        self.require_own_process()
        self._worker.wait(
            lambda t: self.pipeline.wait_durable(self.generation, t), lambda: f"step {self.generation} to be durable"
        )
        self.mover.settle()

    def param_view(self, span: ParamSpan) -> torch.Tensor:
        """P16 of a parameter that is in DRAM as a whole, the published version. Wait for it first."""
        return self.place.span_params(span, self.param_version)

    def flat_params(self, sub_group: int) -> torch.Tensor | None:
        """P16 of a sub-group that is in DRAM as a whole, the published version."""
        return self.place.flat_params(sub_group, self.param_version)

    def slot(self, chunk: int) -> int:
        """The slot that holds a chunk's published values. (The pipeline itself must go with close().)"""
        return self.slot_on_storage(chunk, int(self.pipeline.slot(chunk)))

    def slot_on_storage(self, chunk: int, slot: int) -> int:
        """What the pipeline calls ``slot`` of a chunk."""
        return (slot + self._first_slot[chunk]) % self.options.num_slots

    def _replaced_p32(self, chunk: int, address: int) -> None:
        self.pipeline.replace_state(chunk, address, has_moments=False)
        self.pipeline.set_has_high(chunk)

    def slots_on_storage(self) -> dict[str, int]:
        """The slot of every region that the last applied step is in, or will be."""
        return self.place.slotted(self.slot)

    def state_extents(self, index: int) -> Sequence[Extent]:
        """Where the committed or last applied state of a chunk on storage lies."""
        return self.place.state_extents(index, self.slot(index))

    def before_params_change(self, chunks: Sequence[int]) -> None:
        """P16 on storage is about to be edited in place."""
        self._taken_over.compare_before_edit(chunks)
        self.states.keep_masters(chunks)
        self.commits.forget_params()

    # ---- chunks that move ---------------------------------------------------------------------------------

    def placed_anew(self) -> None:
        """Chunks are elsewhere than before."""
        self.published.num_param_versions = self.place.num_param_versions
        self.policy.possible = self.options.can_speculate(self.place.residency)
        self._two_jobs_bytes = None

    def return_lent(self) -> None:
        """Staging memory that sums of gradients were lent, between steps. Waits for all updates."""
        self.wait_all_idle()
        self.gradients.return_lent()

    def wait_all_idle(self) -> None:
        """Until nothing works on any chunk: for all updates, and for what is read or written of those that were
        dropped."""
        self.wait_all()
        for chunk in self.layout.chunks:
            self.wait_idle(chunk.index)

    def staging_bytes(self, residency: ChunkResidency, wanted_bytes: int | None = None) -> int:
        """Staging memory for chunks in these places, in those of now, and in those that they are on their way to. See
        :meth:`ChunkPlacement.staging_bytes`."""
        places = [self.place.residency, residency]
        if self.grad_mover.target is not None:
            places += [replace(place, grads=self.grad_mover.target) for place in places]
        if self.mover.target is not None:
            places += [replace(place, states=self.mover.target) for place in places]
        return max(self.place.staging_bytes(place, wanted_bytes) for place in places)

    def fit_staging(self, residency: ChunkResidency, room_bytes: int | None = None) -> None:
        """Makes staging memory as large as chunks in these places, and in those of now, need it: then it waits for all
        updates. Between steps. ``room_bytes``: of host memory; it becomes no larger, but as large as it must be.

        Raises:
            FuyouMemoryError: the system refuses; it is as it was.
            FuyouStorageError: a read that was dropped still uses it; it is as it was.
        """
        num_bytes = self.staging_bytes(residency)
        if room_bytes is not None:
            num_bytes = self.staging_bytes(residency, min(num_bytes, max(room_bytes, self.staging.capacity_bytes)))
        if num_bytes == self.staging.capacity_bytes:
            return
        self.return_lent()
        if self.staging.used_bytes:  # by a read that nobody wants any more, say
            raise FuyouStorageError(errno.EBUSY, "staging memory is in use by a read that nobody waits for; ask again")
        self.renew_staging(num_bytes)

    def renew_staging(self, num_bytes: int) -> None:
        """Nothing uses that of before. Raises FuyouMemoryError if the system, or the device, refuses."""
        try:
            old, new = self.staging, HostPool(num_bytes, self.copied_to)
        except FuyouStateError as error:  # of registering it, which all ranks have to hear of as of memory
            raise FuyouMemoryError(num_bytes) from error
        self.io.engine.unregister_buffer(old.pool.base, old.capacity_bytes)
        self.pipeline.set_staging(new.pool)
        self.staging = new
        self.io.pin(new)
        old.give_back()

    def set_places(self, chunk: Chunk) -> None:
        """Tells the pipeline where P16 and G16 of a chunk are now, on which nothing works."""
        self.pipeline.set_places(chunk.index, self.spec_of(chunk, self.place.state(chunk.index)))

    @property
    def has_snapshot(self) -> bool:
        """States are being copied from where they lie: none may move."""
        return self._snapshot is not None and not self._snapshot.wait(0.0)

    def snapshot(self) -> Snapshot:
        """All states as the last applied step leaves them. Waits for nothing but states that move; between two
        steps. Within one, what was prepared in a spare block is made again: published, it would take the kept one's
        place before that is copied."""
        self.check()
        self.mover.settle(wait=True)
        for index in [index for index in self.window.prepared if self.place.has_spare(index)]:
            self.drop_prepared(index)
        self._snapshot = Snapshot(self)
        self.num_snapshots += 1
        return self._snapshot

    def wait_copied(self) -> None:
        """Until a snapshot needs nothing of what lies in its place: states are about to be replaced there."""
        if self._snapshot is not None:
            self._snapshot.hurry()
            self._worker.wait(self._snapshot.wait, lambda: "states to be copied to a checkpoint")
            self._snapshot = None

    def wait_idle(self, index: int) -> None:
        """Until nothing works on a chunk. Dropped or published updates alone may."""
        self._worker.wait(
            lambda t: self.pipeline.wait_idle(index, t), lambda: f"the update of chunk {index} to have been written"
        )

    def drop_prepared(self, index: int) -> None:
        """Drops what backward prepared for a chunk, and waits until nothing works on it."""
        self._updates.drop_chunk(index)

    def replace_params(self, chunk: Chunk, params: torch.Tensor) -> list[Transfer]:
        """P16 of a chunk := ``params`` (1-D, model dtype), in its place; to be waited for before it is read."""
        self.params.replaced(chunk.params)
        return self.values.put_params(chunk, params)

    def set_positions(self, positions: Iterable[tuple[int, int]]) -> None:
        """Deadlines as observed: (parameter, forward position); a chunk takes the smallest of its parameters."""
        found: dict[int, int] = {}
        for index, position in positions:
            for chunk in self.layout.chunks_of_param[index]:
                found[chunk] = min(position, found.get(chunk, position))
        for chunk, position in found.items():
            self.pipeline.set_position(chunk, position)
        self._updates.set_positions(found)

    def unpin(self) -> None:
        """No memory is registered with the device until :meth:`pin`. No copy may be in flight."""
        self._locks.pause()
        self.staging.unpin()

    def pin(self) -> None:
        """Registers with the device what it copies from and to: to be called once all values are here.

        Raises:
            FuyouStateError: the device refuses.
        """
        self._locks.resume()
        self.staging.pin()

    def close(self) -> None:
        """Stops the threads; what was not published is lost, what was committed stays. Idempotent."""
        if self._worker.is_closed:
            return
        if self.finish_first is not None:
            self.finish_first()
        self._worker.is_closed = True
        self.states.forget()
        failure = failure_of(self.options.device)  # nothing is copied any more: memory is unpinned below
        if failure:
            logger.error("closed after the device failed: %s", failure)
            if self.store is not None:
                self.store.keep_because("the device failed")
        self._ended = None
        ending = ExitStack()  # from the last line to the first, each after what it waits for, also after Ctrl-C
        # Their threads are joined; descriptors go with the objects, though the script may still hold the engine.
        ending.callback(self._let_go)
        ending.callback(self.staging.give_back)
        ending.callback(self._updates.close)
        ending.callback(self._locks.release)
        ending.callback(self.place.close)
        ending.callback(self.io.close)
        ending.callback(lambda: self.gradients.close(told=self._worker.told))
        ending.callback(self.intake.close)
        ending.callback(self._keep_if_failed)
        ending.callback(self.commits.stop)
        ending.callback(self._worker.stop)
        if self.store is not None and self.store.keep:
            ending.callback(self.commits.stop)  # the state stays: let the last step become durable
        with ending:
            pass

    def _keep_if_failed(self) -> None:
        if self.pipeline.failed and self.store is not None:
            self.store.keep_because("the run failed")

    def _let_go(self) -> None:
        self.commits.end()
        self.pipeline = self._worker.pipeline = None
