# SPDX-License-Identifier: Apache-2.0
"""Builds the out-of-core optimizer of one rank from its design, and holds its parts.

:class:`RankState` is the one object that knows both sides: DeepSpeed's parameters and the spans, the plan and
the store. What serves its parameters is the :class:`~ds_fuyou.parameters.store.ParameterStore`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.nn import Parameter
from tqdm import tqdm

from ds_fuyou.activations.session import ActivationSession
from ds_fuyou.activations.tier import SwapTier
from ds_fuyou.errors import FuyouError, FuyouMemoryError, FuyouStateError, FuyouStorageError
from ds_fuyou.host.compute_clock import compute_clock
from ds_fuyou.host.device import failure_of
from ds_fuyou.host.memory import HeapGuard, PageLocks
from ds_fuyou.log import Stderr
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.host_sums import STAGING_BYTES
from ds_fuyou.optimizer.layout import FlatLayout, ParamSpan
from ds_fuyou.optimizer.moving_params import ParamMove
from ds_fuyou.optimizer.param_access import PublishedSpan
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.optimizer.rules import GroupHyper
from ds_fuyou.parameters.partition import Lost, Partition
from ds_fuyou.parameters.store import ParameterStore
from ds_fuyou.planner.plan import Plan, PlanInput
from ds_fuyou.planner.profile import RunProfile
from ds_fuyou.storage.ending import goes_on
from ds_fuyou.storage.layout import ACTIVATION_SHARE, spare_bytes
from ds_fuyou.storage.lifetime import register_closer
from ds_fuyou.storage.parked import ParkedValues
from ds_fuyou.telemetry.pipeline_lanes import PipelineLanes
from ds_fuyou.telemetry.report import StepReport, waited_secs
from ds_fuyou.telemetry.trace import LaneTrace
from ds_fuyou.zero.agreement import all_or_none, barrier, least
from ds_fuyou.zero.compute_spans import computed
from ds_fuyou.zero.parameters.frozen_places import FrozenPlaces
from ds_fuyou.zero.parameters.inference import InferenceReads, reads_of_inference
from ds_fuyou.zero.parameters.param_swapper import PARTITION_TENSORS, held_bytes
from ds_fuyou.zero.run.budgets import planned_host_bytes
from ds_fuyou.zero.run.neighbours import local_ranks
from ds_fuyou.zero.run.resuming import tell_start
from ds_fuyou.zero.run.run_design import TrainedModel, design_of
from ds_fuyou.zero.run.run_store import count_engine, forget_engine, open_store, tell_durability
from ds_fuyou.zero.run.skipped_steps import SkippedSteps
from ds_fuyou.zero.run.striping import parked_space, shares_of_machine

__all__ = ["RankState"]

logger = logging.getLogger("ds_fuyou")
_LEAST_MOVED_A_STEP = 256 << 20  # bytes
_MOST_STEPS_OF_A_MOVE = 64  # that all states take from one tier to the other


class RankState:
    """Parameters, states and gradients of one rank under the plan. Used by the training thread alone."""

    def __init__(self, model: TrainedModel, hypers: Sequence[GroupHyper], profile: RunProfile | None = None) -> None:
        """``profile``: of an earlier run, the same on all ranks."""
        self.model, self.activation, self.device = model, model.activation, model.device
        self.num_params = model.num_params
        self._sums_bytes = STAGING_BYTES if model.accumulation > 1 and not self.device.is_host else 0
        design = design_of(model, profile)
        trace = self.activation.config.trace
        with ExitStack() as undo:  # what fails leaves no file and no thread
            self.store, num_slots, self.design, self.resumed = open_store(design)
            if self.store is not None:
                undo.callback(self.store.close)
            self.planned(self.design.plan)
            options = self.design.core_options(num_slots)
            with all_or_none("build its optimizer"):
                self.trace = None if trace is None else LaneTrace.at(trace)
                if self.trace is not None:
                    undo.callback(self.trace.close)
                    self.trace.num_ranks = local_ranks()
                self.core = OutOfCoreOptimizer(self.layout, options, model.kind, hypers, self.store, self.resumed)
                undo.callback(self.core.close)
                self._forget_closer = register_closer(self.core.close)
                undo.callback(self._forget_closer)
            undo.pop_all()
        self._spans = {param.ds_id: span for param, span in zip(model.trained, self.layout.params, strict=True)}
        self._partitions: dict[int, Partition] = {}  # by ds_id: what is read, or waits for updates
        self._locks = PageLocks(self.device)
        self._frozen = FrozenPlaces(model, self._locks, self.bound_heap)
        self.parameters = ParameterStore(
            PARTITION_TENSORS,
            self.device,
            self.core.io,
            read_bytes=self.plan.prefetch_bytes,
            keep_below=self.plan.small_param_bytes,
            is_alone=dist.get_world_size() == 1,
            lanes=self.trace,
        )
        self._ended: str | None = None
        self._pid = os.getpid()
        self.number: int | None = None
        """Among the engines of this process with these paths; an engine that failed leaves it to the next."""
        self.has_begun = False  # to train
        self.params_placed: Callable[[], None] = lambda: None
        """Told when P16 has got another home."""
        self._lanes: PipelineLanes | None = None
        if self.trace is not None:
            self._lanes = PipelineLanes(
                self.trace, self.core.pipeline, self.layout, self.core.place, model.param_dtype.itemsize
            )
        self.activations: ActivationSession | None = None
        self.clock = compute_clock(
            self.device, lambda: waited_secs(self), None if self.trace is None else computed(self.trace)
        )
        self.num_tokens = 0
        self.report = StepReport()
        self.planned_device_bytes = 0.0  # the most that steps are expected to hold; 0: not known, or the host's
        self._heap = HeapGuard()
        self._num_reads = 0
        self._skipped = SkippedSteps(self.core)
        self._positions_known = False

    def let_updates_wait(self, waits: bool) -> None:
        """From the next step on all updates wait for ``step()``, or those begin in backward that can; between steps,
        on all ranks.
        """
        self.core.policy.waits = waits
        self.design = replace(self.design, given=replace(self.design.given, may_speculate=not waits))

    def planned(self, plan: Plan) -> None:
        """What the run is told to do from now on, and the host memory it takes with that."""
        self.plan = plan
        self.planned_host_bytes = plan.host_bytes(self.plan_input) + self._sums_bytes
        if self in planned_host_bytes:
            planned_host_bytes[self] = self.planned_host_bytes

    @property
    def plan_input(self) -> PlanInput:
        """What the plan was made from."""
        return self.design.given

    @property
    def swap_tier(self) -> SwapTier | None:
        """Where swapped activations go; None where none are."""
        return None if self.activations is None else self.activations.tier

    @property
    def layout(self) -> FlatLayout:
        return self.design.layout

    # ---- construction -------------------------------------------------------------------------------------

    def initialize(self, values_of: Callable[[Parameter], torch.Tensor]) -> None:
        """Moves the model's parameters into their place, chunk by chunk, with a progress bar on rank 0. A run that
        resumes finds them there, and takes none from the model.

        A parameter's old partition goes as soon as its values are in their place, so that host memory holds no class
        twice.
        """
        begin = time.perf_counter()
        if self.activation.config.resume == "auto":
            in_memory = self.core.place.residency.params
            tell_start(self.resumed, self.store, sum(4 * c.numel for c in self.layout.chunks if in_memory[c.index]))
        waiting = dict(enumerate(self.model.trained))
        current: dict[int, torch.Tensor] = {}

        def source(span: ParamSpan) -> torch.Tensor:
            if span.index not in current:
                for index in current:
                    self._attach(waiting.pop(index))
                current.clear()
                self.bound_heap()
                current[span.index] = values_of(self.param(span)).view(-1)
            return current[span.index]

        hidden, what = dist.get_rank() != 0, "initialising states" if self.resumed is None else "taking over states"
        shown = {"total": self.layout.numel, "desc": what, "unit": "param", "unit_scale": True, "file": Stderr()}
        with tqdm(**shown, disable=hidden) as bar:
            if self.resumed is None:
                self.core.initialize(source, bar.update)
            else:
                self.core.resume(bar.update)
        current.clear()
        for param in waiting.values():
            self._attach(param)
        self.core.pin()
        self._frozen.place(self.plan.residency.frozen * self.plan_input.frozen_bytes)
        self._take_parameters()
        if self.store is not None:
            self.number = count_engine(self.model)
        planned_host_bytes[self] = self.planned_host_bytes
        if dist.get_rank() == 0:
            logger.debug(
                "states of %d parameters initialised in %.1f s", self.layout.numel, time.perf_counter() - begin
            )

    def _attach(self, param: Parameter) -> None:
        """From here on the chunks hold a trainable parameter; in DRAM its partition is the chunk's memory."""
        source = PublishedSpan(self.core, self.span(param))
        partition = param.nvme_swapper.hold(param, source)
        self._partitions[param.ds_id] = partition
        memory = source.memory()
        if memory is not None:
            partition.show(memory)
            PARTITION_TENSORS.here(partition, memory)

    def _take_parameters(self, read_bytes: int | None = None) -> None:
        """What waits for updates or is on storage is served from here on, read to so many bytes; None: as before."""
        self._partitions.update(self._frozen.attach(self.core.io))
        in_use_order = sorted(
            self._partitions.values(), key=lambda partition: self.model.places[partition.handle.ds_id]
        )
        self.parameters.take(in_use_order, read_bytes)
        self.parameters.trace.expect(in_use_order)
        self.bound_heap()

    @property
    def reads_parameters(self) -> bool:
        """Whether any parameters, trainable or frozen, come from storage when they are used."""
        return self.parameters.reads

    def frozen_bytes(self) -> dict[str, int]:
        """Bytes of this rank's partitions of frozen parameters by tier."""
        return held_bytes(self.model.frozen)

    def beside(self) -> list[InferenceReads]:
        """Engines of this process that only infer."""
        return reads_of_inference()

    def bound_heap(self, *freed_bytes: int) -> None:
        """Called where temporaries of a parameter's size were freed, or of as many bytes as are given: their holes must
        not add up over the model."""
        self._heap.check(*freed_bytes)

    # ---- parameters ---------------------------------------------------------------------------------------

    def span(self, param: Parameter) -> ParamSpan:
        return self._spans[param.ds_id]

    def param(self, span: ParamSpan) -> Parameter:
        return self.model.trained[span.index]

    def before_module(self, params: Iterable[Parameter]) -> None:
        """A module is about to run: makes what it needs available, then reads ahead. Comes before DeepSpeed's fetch."""
        parameters = self.parameters
        partitions = [p for param in params if (p := self._partitions.get(param.ds_id)) is not None]
        if not partitions:
            return
        parameters.use(*partitions)
        parameters.move_on()
        num_reads = parameters.num_demand_reads + parameters.num_ahead_reads
        if num_reads != self._num_reads:
            self._num_reads = num_reads
            self.bound_heap(sum(partition.num_bytes for partition in partitions))

    def step_applied(self) -> None:
        """Every parameter may have changed: its next use waits for its update."""
        if self._lanes is not None:
            self._lanes.collect()
        for param in self.model.trained:  # whichever engine put values of them aside
            param.nvme_swapper.forget_gathered(param)
        self.parameters.step_applied()
        self._skipped.step_applied()
        goes_on()
        first_uses = [] if self._positions_known else self.parameters.trace.first_uses()
        if first_uses:
            self._positions_known = True
            order = [self._spans.get(partition.handle.ds_id) for partition in first_uses]
            trainable = [span.index for span in order if span is not None]
            self.core.set_positions(zip(trainable, range(len(trainable)), strict=True))

    def unused_storage_bytes(self) -> int:
        """Of ``nvme_budget_bytes``, which the user names, what state files do not take: they grow where states move."""
        taken = 0 if self.store is None else self.store.total_bytes
        return max(0, int(self.activation.config.nvme_budget_bytes) - taken)

    @property
    def _storage_budget_bytes(self) -> int | None:
        """The most for state files where something moves to storage: what is free beside a share for others, and one
        for activations where they are swapped; of what the user names, what these do not take.
        """
        if self.store is None:
            return None
        home = None if self.swap_tier is None else self.swap_tier.storage
        paths = [Path(path) for path in self.activation.state_paths]
        left = spare_bytes(paths, swaps_activations=home is not None)
        if self.activation.config.nvme_budget_bytes != "auto":
            unused = self.unused_storage_bytes()
            if home is not None:
                unused = int((1 - ACTIVATION_SHARE) * (unused - home.space.num_bytes))
            left = min(left, unused)
        return self.store.total_bytes + left

    def move_to(
        self, states_share: float, step_bytes: int | None = None, room: Callable[[], int] | None = None
    ) -> bool:
        """From the next step on P32 and moments of as many chunks as the share holds, those that are needed first, come
        to host memory, or stay there; the others leave it. About ``step_bytes`` move in a step, by way of its updates;
        None: 256 MiB, or a 64th of all, which is little beside what the updates of a large model move.

        A collective, in the training thread, after a step and before the next backward. False if a rank has no room on
        storage, which is told: then nothing more moves on any. How far it is: ``core.mover``, which takes ``room``.

        Raises:
            FuyouStateError: ``durable`` forbids states in memory, a backward has begun, or a rank can commit no more.
        """
        mover, config = self.core.mover, self.activation.config
        if states_share > 0 and config.durable:
            raise FuyouStateError('fuyou.durable is true: states stay on storage, "optimizer.tier" is "nvme"')
        states = ChunkResidency.of_shares(self.layout, 0.0, states_share, 0.0).states
        if step_bytes is None:
            num_bytes = sum(self.core.place.state_spec(chunk).num_bytes for chunk in self.layout.chunks)
            step_bytes = max(_LEAST_MOVED_A_STEP, num_bytes // _MOST_STEPS_OF_A_MOVE)
        refusal: FuyouError | None = None
        try:
            mover.move_to(states, step_bytes, self._storage_budget_bytes, room)
        except (FuyouMemoryError, FuyouStorageError) as error:
            refusal = error
        if self._all_go(refusal):
            if dist.get_rank() == 0:
                tell_durability(states, self.core.options.num_slots, is_wanted=config.relies_on_slots)
            return True
        mover.stop()
        _tell_stays("chunks stay where they are", refusal)
        return False

    @property
    def may_place_params(self) -> bool:
        """Whether it is between two steps, the commit of the last one is ordered, nothing else of the state moves or is
        copied to a checkpoint, and the script has no parameter gathered."""
        core = self.core
        is_idle = (
            core.window.is_empty and core.mover.is_idle and not core.has_snapshot and not core.commits.has_unordered
        )
        return is_idle and all(param.ds_status is ZeroParamStatus.NOT_AVAILABLE for param in self.model.trained)

    def place_params(self, share: float, prefetch_bytes: int | None = None, num_versions: int | None = None) -> bool:
        """Now, P16 of as many chunks as the share holds comes to host memory, or stays there; that of the others leaves
        it. ``prefetch_bytes``: what parameters on storage are read to from now on; ``num_versions``: of P16 in memory.
        None: as many as before.

        A collective, in the training thread, where all ranks may (:attr:`may_place_params`). False if nothing moved on
        any rank, because one, which tells it, has no room.

        Raises:
            FuyouStorageError: something could not be read or written.
            FuyouStateError: a rank can commit no more steps.
        """
        params = ChunkResidency.of_shares(self.layout, share, 0.0, 0.0).params
        self.core.commits.wait()
        barrier()  # on all ranks: while it moves no record stands, and one of them may be killed before it begins
        move, refusal = None, None
        try:
            move = ParamMove(self.core, params, self._storage_budget_bytes, num_versions)
        except FuyouError as error:
            refusal = error
        is_agreed = False
        try:
            is_agreed = self._all_go(refusal)
        finally:
            if move is not None and not is_agreed:
                move.give_up()
        if move is None or not is_agreed:
            self.core.check()
            _tell_stays("P16 stays where it is", refusal)
            return False
        try:
            self.device.synchronize()  # nothing is copied from memory that goes
            self._move_params(move, self.parameters.read_bytes if prefetch_bytes is None else prefetch_bytes)
        except BaseException as error:
            self.core.fail("P16 that changes its home was cut short", error)
            raise
        return True

    def _move_params(self, move: ParamMove, read_bytes: int) -> None:
        trained = self.model.trained
        self.parameters.let_go()
        why = "they were on their way to another home, which was cut short"
        for param in trained:
            param.nvme_swapper.hold(param, Lost(f"parameter {self.span(param).name}", why))
        if self._lanes is not None:
            self._lanes.collect()
        move.make()
        for param in trained:
            param.nvme_swapper.hold(param, PublishedSpan(self.core, self.span(param)))
        self.parameters.take(self.parameters.partitions, read_bytes)
        self.parameters.look_ahead()
        self.params_placed()
        self.bound_heap()

    @property
    def may_place_frozen(self) -> bool:
        """Whether no checkpoint copies states, the script has no frozen parameter gathered, and this is the one engine
        of the process that has planned anything."""
        return not self.core.has_snapshot and len(planned_host_bytes) == 1 and self._frozen.may_move

    def place_frozen(self, share: float, prefetch_bytes: int | None = None) -> bool:
        """Now, so much of the frozen parameters comes to host memory, or stays there; the others leave it.
        ``prefetch_bytes``: what parameters on storage are read to from now on; None: as before.

        A collective, in the training thread, between two steps, where all ranks may (:attr:`may_place_frozen`). False
        if nothing moved on any rank, because one, which tells it, has no room.

        Raises:
            FuyouMemoryError: none to read to; the engine has failed.
        """
        copied, is_agreed = self._frozen.copied(share * self.plan_input.frozen_bytes), False
        try:
            is_agreed = bool(least(float(copied is not None))[0])
        finally:
            if copied is not None and not is_agreed:
                self._frozen.drop(copied)
        if copied is None or not is_agreed:
            return False
        try:
            self._move_frozen(copied, prefetch_bytes)
        except BaseException as error:
            self.core.fail("frozen parameters that change their home were cut short", error)
            raise
        return True

    def _move_frozen(self, copied: Mapping[Parameter, ParkedValues | torch.Tensor], prefetch_bytes: int | None) -> None:
        self.device.synchronize()  # nothing is copied from memory that goes
        self.parameters.let_go(forgets=True)
        self._frozen.move(copied)
        for ds_id in [param.ds_id for param, values in copied.items() if isinstance(values, torch.Tensor)]:
            del self._partitions[ds_id]
        self._take_parameters(prefetch_bytes)
        self.parameters.look_ahead()
        self.params_placed()

    @property
    def frozen_share(self) -> float:
        """Of the frozen parameters whose place is the plan's to say what is in host memory, the same on all ranks."""
        return self._frozen.held_bytes / max(1.0, self.plan_input.frozen_bytes)

    def place_grads(self, share: float) -> bool:
        """From the next step's first gradient on G16 of as many chunks as the share holds is in host memory, that of
        the others on storage: nothing is copied, no gradient outlives its step. A collective, between two steps. False
        if a rank has no room, which is told: then it stays on all.

        Raises:
            FuyouStateError: a rank can commit no more steps.
        """
        core = self.core
        refusal, before = None, core.grad_mover.target
        try:
            grads = ChunkResidency.of_shares(self.layout, 0.0, 0.0, share).grads
            core.grad_mover.move_to(grads, self._storage_budget_bytes)
        except FuyouError as error:
            refusal = error
        if self._all_go(refusal):
            return True
        core.grad_mover.undo(before)
        _tell_stays("G16 stays where it is", refusal)
        return False

    def _all_go(self, refusal: FuyouError | None) -> bool:
        """Whether no rank had a reason not to begin a move. A collective.

        Raises:
            FuyouStateError: a rank cannot commit any more steps. On all of them: nobody waits for one that has ended.
        """
        may_commit = self.store is None or self.store.may_commit
        all_go, all_commit = least(float(refusal is None), float(may_commit))
        if not all_commit:
            if self.store is not None:
                self.store.require_commits()
            raise FuyouStateError("another rank can commit no more steps, and says why")
        return bool(all_go)

    def step_skipped(self) -> None:
        """A step was not applied. Raises FuyouChecksumError if that will be so for ever, for what is on storage."""
        self._skipped.step_skipped(self._partitions.values())

    # ---- sleep ----------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Waits for the device. No host memory of this engine is registered with it until :meth:`wake`; whatever runs
        meanwhile copies by way of the driver's own memory.
        """
        self.device.synchronize()
        self.core.states.forget()
        for owner in self._pinned():
            owner.unpin()
        self._locks.pause()

    def wake(self) -> None:
        """Memory is registered again, and what the next forward needs is read."""
        self._locks.resume()
        for owner in self._pinned():
            owner.pin()
        self.parameters.move_on()

    def _pinned(self) -> list[Any]:
        tier = self.swap_tier
        return [self.core, self.parameters, *([] if tier is None else [tier]), *self.beside()]

    # ---- the end ------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def require_parameters(self) -> None:
        """Raises FuyouStateError if the engine was destroyed, or its parameters belong to another one by now."""
        if self._ended is not None:
            raise FuyouStateError(self._ended)

    def _leave_values(self) -> None:
        """The model, which is not gathered, holds its parameters: those in host memory there, the others on storage.

        What cannot be read any more is lost; whoever asks for it is told why, and the log says it now.
        """
        lost: list[BaseException] = []
        for param in self.model.trained:
            partition = self._partitions.get(param.ds_id)
            if partition is None:
                continue
            source = partition.source
            try:
                source.wait()
                memory = source.memory()
                if memory is not None:
                    param.nvme_swapper.give_back(param, memory)
                else:
                    space = parked_space(self.activation)
                    values = source.location().read(source.io)
                    param.nvme_swapper.hold(param, space.park(f"parameter {self.span(param).name}", values))
            except (FuyouError, OSError) as error:
                lost.append(error)
                why = f"their engine failed ({error})"
                param.nvme_swapper.hold(param, Lost(f"parameter {self.span(param).name}", why))
            self.bound_heap()
        if lost:
            logger.warning("values of %d parameters are lost to the model: %s", len(lost), lost[0])

    def _rest(self) -> None:
        """Frozen parameters are read by their own space again."""
        for partition in self._partitions.values():
            if isinstance(partition.source, ParkedValues):
                partition.source.read_by(None)
                partition.source.space.rest()

    def shares_of_machine(self) -> dict[str, float]:
        """Path → what the ranks of this machine write there, in multiples of what one rank writes everywhere."""
        return shares_of_machine(self.activation.state_paths, self.store)

    def _keep_what_was_begun(self) -> None:
        """An engine that began to train and made no step has failed, as one does that runs out of device memory: what
        it went on from stays, and the engine that is built in its place goes on from there."""
        if self.has_begun and self.store is not None and not self.core.num_applied:
            self.store.keep_because("the engine made no step")

    def _leave_number(self, why: str) -> None:
        """To the engine that is built in place of this one."""
        if self.number is not None and (not why or (self.store is not None and self.store.has_failed)):
            forget_engine(self.model, self.number)

    def close(self, why: str = "") -> None:
        """Stops everything of this rank and lets its files go; the model keeps its values. Idempotent.

        ``why``: nothing for an engine that is not built after all. The next one takes its number.
        """
        if self._ended is not None:
            return
        self._ended = f"this engine makes no steps any more: {why or 'it was not built'}"
        planned_host_bytes.pop(self, None)
        if os.getpid() != self._pid:
            return  # a forked child: none of the threads is here, and the files are its parent's
        self._keep_what_was_begun()
        with ExitStack() as ending:  # from the last line to the first; what fails keeps nothing else from ending
            ending.callback(self._partitions.clear)
            ending.callback(self._rest)
            ending.callback(self._leave_number, why)
            if self.store is not None:
                ending.callback(self.store.close)
            ending.callback(self._locks.release)
            ending.callback(self._forget_closer)
            for owner in (self.parameters, self.core, self.trace):
                if owner is not None:
                    ending.callback(owner.close)
            if self._lanes is not None:
                ending.callback(self._lanes.close)
            ending.callback(self._leave_values)
            if self.activations is not None:
                ending.callback(self.activations.close)
            ending.callback(failure_of, self.device)  # no copy may be in flight when memory is unpinned
            ending.callback(self.report.close, self)


def _tell_stays(what: str, refusal: FuyouError | None) -> None:
    """On the ranks that had a reason."""
    if refusal is not None:
        logger.warning("%s, training goes on: %s", what, refusal)
