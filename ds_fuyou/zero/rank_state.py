# SPDX-License-Identifier: Apache-2.0
"""Builds the out-of-core optimizer of one rank from what stage 3 knows, and holds its parts.

:class:`RankState` is the one object that knows both sides: DeepSpeed's parameters and the spans, the plan and
the store. What serves its parameters is the :class:`~ds_fuyou.parameters.store.ParameterStore`.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from torch.nn import Parameter
from tqdm import tqdm

from ds_fuyou.activations.session import ActivationSession
from ds_fuyou.checkpoint.state_files import contents_of
from ds_fuyou.ds_json import Activation
from ds_fuyou.errors import FuyouConfigError, FuyouError, FuyouMemoryError, FuyouStateError, FuyouStorageError
from ds_fuyou.host.compute_clock import compute_clock
from ds_fuyou.host.device import failure_of
from ds_fuyou.host.memory import HeapGuard, PageLocks, aligned_tensor, round_up_to_page
from ds_fuyou.log import log_once
from ds_fuyou.optimizer.clip_policy import Overlap
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.host_sums import STAGING_BYTES
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, FlatLayout, LayoutEntry, LayoutLimits, ParamSpan, build_layout
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.param_access import PublishedSpan
from ds_fuyou.optimizer.placement import regions_for
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.optimizer.rules import GroupHyper, OptimizerKind
from ds_fuyou.parameters.partition import Lost, Partition
from ds_fuyou.parameters.store import ParameterStore
from ds_fuyou.planner.applied import require_params
from ds_fuyou.planner.decide import Decision, StepTime
from ds_fuyou.planner.host_memory import available_host_bytes
from ds_fuyou.planner.plan import Plan, PlanInput, handles_activations, under_block
from ds_fuyou.planner.profile import RunProfile
from ds_fuyou.planner.profiled import placed_under
from ds_fuyou.state_layout import FP32, SPLIT, WHOLE, StateLayout, layout_of, masters_of, moments_of
from ds_fuyou.storage.io import IoSettings
from ds_fuyou.storage.lifetime import register_closer
from ds_fuyou.storage.parked import ParkedValues
from ds_fuyou.storage.probe import probe_path, shares_blocks
from ds_fuyou.storage.store import CommitRecord, JsonValue, RegionSpec, RunIdentity, SlotStore, choose_num_slots
from ds_fuyou.telemetry.pipeline_lanes import PipelineLanes
from ds_fuyou.telemetry.report import report_close, waited_secs
from ds_fuyou.telemetry.trace import LaneTrace
from ds_fuyou.zero.agreement import least, of_every_rank, of_rank_0
from ds_fuyou.zero.blocks import block_of
from ds_fuyou.zero.budgets import check_budgets, cores_of_rank, local_ranks, planned_host_bytes
from ds_fuyou.zero.compute_spans import computed
from ds_fuyou.zero.device import rank_device
from ds_fuyou.zero.inference import InferenceReads, reads_of_inference
from ds_fuyou.zero.param_swapper import PARTITION_TENSORS, FuyouParameterSwapper, held_bytes, partition_of
from ds_fuyou.zero.resuming import Fitting, Resumable, find_resumable, tell_start
from ds_fuyou.zero.skipped_steps import SkippedSteps
from ds_fuyou.zero.stale_state import settle_stale_state
from ds_fuyou.zero.striping import parked_space, path_weights, shares_of_machine

__all__ = ["MOVED_A_STEP_BYTES", "RankState"]

logger = logging.getLogger("ds_fuyou")
_RUN_NUMBERS = itertools.count()
MOVED_A_STEP_BYTES = 256 << 20
_NUM_BUILT: Counter[tuple[str, ...]] = Counter()
"""Engines of this process that had state on these paths: two of one shape are told apart by their order."""


def _is_in_host_memory(param: Parameter) -> bool:
    return bool(param.ds_tensor.device.type == "cpu")


def _partition_bytes(param: Parameter) -> int:
    return int(param.ds_tensor.ds_numel * param.ds_tensor.element_size())


class _Design(NamedTuple):
    """A run with one layout of states: how it is placed, by what, and its chunks."""

    given: PlanInput
    decision: Decision
    decided_by: StepTime
    layout: FlatLayout


class RankState:
    """Parameters, states and gradients of one rank under the plan. Used by the training thread alone."""

    def __init__(
        self,
        activation: Activation,
        sub_groups: Sequence[Sequence[Parameter]],
        names: dict[Parameter, str],
        kind: OptimizerKind,
        hypers: Sequence[GroupHyper],
        grad_dtype: torch.dtype,
        param_dtype: torch.dtype,
        profile: RunProfile | None = None,
        accumulation: int = 1,
    ) -> None:
        """``profile``: of an earlier run, the same on all ranks; ``accumulation``: micro-batches a step."""
        self.activation = activation
        self.device = rank_device(pin_memory=activation.absorbed.pin_memory)
        self._params = [param for group in sub_groups for param in group]
        self._index = {param.ds_id: i for i, param in enumerate(self._params)}
        order = self._order = {param.ds_id: place for place, param in enumerate(names)}
        entries = [
            [(names[p], block_of(names[p]), p.partition_numel(), order[p.ds_id]) for p in group] for group in sub_groups
        ]
        self._frozen_params = {p.ds_id: p for p in names if p.ds_id not in self._index}
        self._kind, self._grad_dtype, self._param_dtype = kind, grad_dtype, param_dtype
        given = self._plan_input(entries)
        expert = activation.config.plan
        self.num_params = sum(param.ds_numel for param in names)
        if expert is not None and expert.document is not None:
            require_params(expert.document, self.num_params)
        self.host_budget_bytes = given.dram_budget_bytes
        self._sums_bytes = STAGING_BYTES if accumulation > 1 and not self.device.is_host else 0
        designs = self._designs(given, entries, profile, accumulation)
        self._adopt(designs[0])
        with ExitStack() as undo:  # what fails leaves no file and no thread
            self.trace = LaneTrace.at(activation.config.trace) if activation.config.trace is not None else None
            if self.trace is not None:
                undo.callback(self.trace.close)
            self.resumed: CommitRecord | None = None
            self.store, num_slots = self._create_store(designs)
            if self.store is not None:
                undo.callback(self.store.close)
            options = self._core_options(num_slots)
            self.core = OutOfCoreOptimizer(self.layout, options, kind, hypers, self.store, self.resumed)
            undo.callback(self.core.close)
            self._forget_closer = register_closer(self.core.close)
            undo.pop_all()
        self._partitions: dict[int, Partition] = {}  # by ds_id: what is read, or waits for updates
        self._locks = PageLocks(self.device)
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
        self._is_counted = False
        self._lanes: PipelineLanes | None = None
        if self.trace is not None:
            self._lanes = PipelineLanes(
                self.trace, self.core.pipeline, self.layout, self.core.place, param_dtype.itemsize
            )
        self.activations: ActivationSession | None = None
        self.clock = compute_clock(
            self.device, lambda: waited_secs(self), None if self.trace is None else computed(self.trace)
        )
        self.num_tokens = 0
        self._heap = HeapGuard()
        self._num_reads = 0
        self._skipped = SkippedSteps(self.core)
        self._positions_known = False

    def planned(self, plan: Plan) -> None:
        """What the run is told to do from now on, and the host memory it takes with that."""
        self.plan = plan
        self.planned_host_bytes = plan.host_bytes(self.plan_input) + self._sums_bytes
        if self in planned_host_bytes:
            planned_host_bytes[self] = self.planned_host_bytes

    # ---- construction -------------------------------------------------------------------------------------

    def _designs(
        self,
        given: PlanInput,
        entries: Sequence[Sequence[LayoutEntry]],
        profile: RunProfile | None,
        accumulation: int,
    ) -> list[_Design]:
        """As this run begins, first; if it may go on from state files, with the masters that they may have, too."""
        config = self.activation.config

        def designed(given: PlanInput) -> _Design:
            decision, decided_by = placed_under(config, given, profile, accumulation)
            chunk_bytes = decision.plan.chunk_bytes
            limits = LayoutLimits(
                max_elements=max(CUT_ELEMENTS, chunk_bytes // 4),
                min_elements=min(512 * 1024, max(CUT_ELEMENTS, chunk_bytes // 8)),
            )
            return _Design(given, decision, decided_by, build_layout(entries, limits))

        found = [designed(given)]
        can_split = self._param_dtype is torch.bfloat16 and config.checksum
        other = {SPLIT: WHOLE, WHOLE: SPLIT if can_split else None}.get(given.layout.masters)
        if config.resume == "auto" and other is not None:
            with suppress(FuyouConfigError):  # what does not fit has left no files
                found.append(designed(replace(given, layout=replace(given.layout, masters=other))))
        return found

    def _adopt(self, design: _Design) -> None:
        self.plan_input, self.decision, self.decided_by, self.layout = design
        self.planned(self.decision.plan)

    def _plan_input(self, entries: Sequence[Sequence[LayoutEntry]]) -> PlanInput:
        config = self.activation.config
        check_budgets(config)
        ordered = sorted((entry for group in entries for entry in group), key=lambda entry: entry[3])
        first = itertools.takewhile(lambda entry: entry[1] == entry[0], ordered)  # in no numbered block
        sizes = PlanInput(
            numel=sum(entry[2] for entry in ordered),
            param_bytes_each=self._param_dtype.itemsize,
            grad_bytes_each=self._grad_dtype.itemsize,
            layout=self._state_layout(),
            largest_param_numel=max(entry[2] for entry in ordered),
            dram_budget_bytes=self._dram_budget(),
            num_cpus=cores_of_rank(),
            device_is_host=self.device.is_host,
            is_unified=self.device.is_unified,
            storage_budget_bytes=self._storage_budget(),
            num_paths=max(1, len(self.activation.state_paths)),
            first_numel=sum(entry[2] for entry in first),
            frozen_bytes=float(sum(map(_partition_bytes, self._planned_frozen()))),
        )
        given = under_block(sizes, config, bool(self.activation.state_paths))
        if config.dram_budget_bytes == "auto":
            return given
        ahead = sum(size for holder, size in planned_host_bytes.items() if not isinstance(holder, RankState))
        taken = int(-least(-float(ahead))[0])
        if taken:
            log_once(logging.INFO, f"of dram_budget_bytes {taken} are the look-ahead of engines without an optimizer")
        return replace(given, dram_budget_bytes=given.dram_budget_bytes - taken, lent_bytes=taken)

    def _planned_frozen(self) -> list[Parameter]:
        """Frozen parameters whose place is the plan's to say, in the order of use: not where all are in host memory
        whatever else there is, nor those that another engine serves.
        """
        if not self.activation.state_paths or self.activation.config.parameters.tier == "cpu":
            return []
        frozen = self._frozen_params.values()
        ours = [p for p in frozen if isinstance(getattr(p, "nvme_swapper", None), FuyouParameterSwapper)]
        held = ((param, partition_of(param)) for param in ours)
        return [p for p, has in held if has is None or (has.store is None and isinstance(has.source, ParkedValues))]

    def _state_layout(self) -> StateLayout:
        """Of states in slots, the same on all ranks."""
        config, kind = self.activation.config, self._kind
        of_masters, of_moments = kind.kept_as
        moments = moments_of(config.optimizer.moments, kind.name, of_moments)
        masters = masters_of(
            config.optimizer.masters,
            is_bfloat16=self._param_dtype is torch.bfloat16,
            checksum=config.checksum,
            are_cloned=moments == FP32 and self._may_share_blocks(),
            stock=of_masters,
        )
        return layout_of(masters, len(kind.moments), moments)

    def _may_share_blocks(self) -> bool:
        """Whether checkpoints may share blocks with slots, as far as all ranks' file systems can. A collective."""
        paths = map(Path, self.activation.state_paths)
        return bool(least(float(not self.activation.config.relies_on_slots and shares_blocks(paths)))[0])

    def _dram_budget(self) -> int:
        """Bytes of host memory, the same on every rank: where parameters are decides which gathers may run ahead, and
        a gather must be the same collective everywhere. What trainable partitions take now is about to be free.
        """
        budget = self.activation.config.dram_budget_bytes
        if budget != "auto":
            return int(budget)
        owned = (*self._params, *self._planned_frozen())
        in_place = sum(p.ds_tensor.nbytes for p in owned if partition_of(p) is None and _is_in_host_memory(p))
        tenths = 4 if self.device.is_unified else 8
        if self.device.is_unified:
            log_once(
                logging.INFO,
                "device and host share one memory: half of it is planned for the device, activations leave it for "
                "storage alone (dram_budget_bytes and gpu_budget_bytes say otherwise)",
            )
        return int(least(float((available_host_bytes() // local_ranks() + in_place) * tenths // 10))[0])

    def _storage_budget(self) -> float:
        """Bytes of storage for this rank, the same on every one: the block's, and what is free of its devices."""
        facts = {found.device: found.free_bytes for found in map(probe_path, map(Path, self.activation.state_paths))}
        budget = self.activation.config.nvme_budget_bytes
        free = sum(facts.values()) / local_ranks()
        return least(free if budget == "auto" else min(free, float(budget)))[0]

    def _core_options(self, num_slots: int) -> CoreOptions:
        config, plan = self.activation.config, self.plan
        shares = plan.residency
        return CoreOptions(
            residency=ChunkResidency.by_deadline(
                self.layout, shares.parameters, shares.optimizer, shares.gradients, shares.optimizer_twice
            ),
            num_slots=num_slots,
            overlap=Overlap(config.optimizer.overlap),
            clip_policy=config.optimizer.clip_policy,
            param_dtype=self._param_dtype,
            grad_dtype=self._grad_dtype,
            staging_bytes=plan.staging_bytes,
            num_update_threads=plan.num_threads,
            io=IoSettings(config.io.engine, plan.queue_depth, plan.block_bytes, 4 * self.plan_input.num_paths),
            checksum=config.checksum,
            device=self.device,
            has_peers=dist.get_world_size() > 1,
            masters=self.plan_input.layout.masters,
            moments=self.plan_input.layout.moments,
        )

    def _regions(self, num_slots: int) -> list[RegionSpec]:
        return regions_for(self.layout, self._core_options(num_slots), len(self._kind.moments), num_slots)

    def _contents(self) -> dict[str, JsonValue]:
        shapes = [tuple(param.ds_shape) for param in self._params]
        return {
            **contents_of(self.layout, shapes, self.plan_input.layout),
            "dtype": str(self._param_dtype),
            "optimizer": self._kind.name,
            "engine": _NUM_BUILT[tuple(self.activation.state_paths)],
        }

    def _find_resumable(self, designs: Sequence[_Design], identity: RunIdentity) -> Resumable | None:
        """State files to go on from, in the layout that they have: this run then is as they say. A collective."""
        fitting: list[tuple[_Design, Fitting]] = []
        for design in designs:
            self._adopt(design)
            residency = self._core_options(1).residency
            if self.plan.slots >= 2 and residency.needs_storage and not any(residency.states):
                fitting.append((design, Fitting(self._contents(), [self._regions(2), self._regions(3)])))
        self._adopt(designs[0])
        if not fitting:
            return None
        paths = [Path(path) for path in self.activation.state_paths]
        found = find_resumable(paths, identity, [each for _, each in fitting])
        if found is not None:
            design = fitting[found.which][0]
            self._adopt(design)
            if design is not designs[0] and dist.get_rank() == 0:
                logger.info("masters stay %s, as in the files that this run goes on from", design.given.layout.masters)
        return found

    def _create_store(self, designs: Sequence[_Design]) -> tuple[SlotStore | None, int]:
        """The slot store, with as many slots as the disks hold; None when nothing lives on storage."""
        run_id = self._run_id()
        if not self._core_options(1).residency.needs_storage:
            return None, 1
        config = self.activation.config
        paths = [Path(path) for path in self.activation.state_paths]
        budget = config.nvme_budget_bytes
        budget_bytes = None if budget == "auto" else int(budget)
        identity = RunIdentity(self._fingerprint(), dist.get_rank(), dist.get_world_size(), run_id)
        found = self._find_resumable(designs, identity) if config.resume == "auto" else None
        self.resumed = None if found is None else found.commit
        # Where a run may go on nothing is removed: it may be another engine's, or what another start would go on from.
        cleans = config.on_stale == "clean" and config.resume == "off"
        bytes_stale = settle_stale_state(paths, identity.model_fingerprint if cleans else "")
        if found is not None:
            return found.store, max(region.num_slots for region in found.store.regions.values())
        by_slots = {n: self._regions(n) for n in (1, 2, 3)}
        sizes = {n: sum(r.num_bytes * r.num_slots for r in regions) for n, regions in by_slots.items()}
        residency, num_slots = self._core_options(1).residency, 1
        for wanted in range(self._most_slots(residency), 1, -1):
            # A third slot is for checkpoints: the one that is there, and the next, which replaces it.
            beside = 0 if wanted == 2 else 2 * 12 * self.layout.numel
            choice = choose_num_slots(
                paths,
                sizes[1],
                sizes[wanted],
                budget_bytes,
                wanted=wanted,
                bytes_beside=beside,
                bytes_of_others=_bytes_of_others(paths, sizes[wanted] + beside),
                bytes_stale=bytes_stale,
                swaps_activations=self.activation.config.activations.tier != "cpu"
                and self.activation.config.activations.mode != "recompute"
                and handles_activations(self.activation.config, self.device.is_host),
            )
            if wanted == 2 and choice.num_slots == 1 and not config.durable:
                logger.warning("%s", choice.reason)
            num_slots = int(least(choice.num_slots)[0])  # also: no rank allocates before all have looked
            if num_slots > 1:
                break
        if config.durable and num_slots == 1:
            limit = choice.limit or "the disks of another rank, which says it, have no room for them"
            message = f"fuyou.durable needs two slots a chunk: {limit}. Free space, raise the budget or add a path"
            raise FuyouStorageError(errno.ENOSPC, message, str(paths[0]))
        store = SlotStore.create(
            paths,
            by_slots[num_slots],
            identity,
            weights=path_weights(self.activation),
            budget_bytes=budget_bytes,
            keep=config.keep_state,
            checksum=config.checksum,
            recoverable=True,  # commits that lack states say so
        )
        if dist.get_rank() == 0:
            _tell_durability(sum(residency.states), len(residency.states), num_slots)
        try:
            store.describe(self._contents())
        except BaseException:
            store.close()
            raise
        return store, num_slots

    def _most_slots(self, residency: ChunkResidency) -> int:
        """Slots to be tried for: those of the plan, but no third where states in memory may need the room when they
        leave it, nor for checkpoints that will share the states' blocks. The same on all ranks.
        """
        shares = self.plan_input.layout.is_whole and self._may_share_blocks()
        return int(least(min(self.plan.slots, 2) if shares or any(residency.states) else self.plan.slots)[0])

    def _fingerprint(self) -> str:
        text = ";".join(f"{s.name}:{s.numel}" for s in self.layout.params)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @staticmethod
    def _run_id() -> str:
        """One for all ranks, and for no other run: `fuyou recover` takes ranks of one run alone. A collective."""
        return of_rank_0(f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_RUN_NUMBERS)}-{secrets.token_hex(3)}")

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
        waiting = dict(enumerate(self._params))
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
        with tqdm(total=self.layout.numel, desc=what, unit="param", unit_scale=True, disable=hidden) as bar:
            if self.resumed is None:
                self.core.initialize(source, bar.update)
            else:
                self.core.resume(bar.update)
        current.clear()
        for param in waiting.values():
            self._attach(param)
        self._attach_frozen()
        in_use_order = sorted(self._partitions.values(), key=lambda partition: self._order[partition.handle.ds_id])
        self.parameters.take(in_use_order)
        self.parameters.trace.expect(in_use_order)
        self.bound_heap()
        if self.store is not None:
            _NUM_BUILT[tuple(self.activation.state_paths)] += 1
            self._is_counted = True
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

    def _place_frozen(self) -> None:
        """As many bytes of frozen parameters as planned are in host memory, those that forward needs first; the same on
        every rank, for their sizes are. ``zero.Init`` had put them where they fell.
        """
        left = self.plan.residency.frozen * self.plan_input.frozen_bytes
        for param in self._planned_frozen():
            size, partition = _partition_bytes(param), partition_of(param)
            stays = size <= left * (1 + 1e-9)
            left -= size if stays else 0
            if stays and partition is not None:
                param.nvme_swapper.give_back(param, partition.copy())
            elif not stays and partition is None and _is_in_host_memory(param):
                param.nvme_swapper.park(param, param.ds_tensor.data)
            self.bound_heap()

    def _attach_frozen(self) -> None:
        """Frozen parameters go where the plan says; those on storage are read ahead from now on, those in host memory
        are registered with a device that pins.
        """
        self._place_frozen()
        for param in self._frozen_params.values():
            partition = partition_of(param)
            if partition is None:
                self._pin(param)
            elif partition.store is None and isinstance(partition.source, ParkedValues):
                partition.source.space.rest()
                partition.source.read_by(self.core.io)
                self._partitions[param.ds_id] = partition

    def _pin(self, param: Parameter) -> None:
        """Moves a frozen partition from the heap to pages that the device copies from without a detour."""
        tensor = param.ds_tensor
        if self.device.pins and tensor.device.type == "cpu" and tensor.numel():
            memory = aligned_tensor(round_up_to_page(tensor.numel() * tensor.element_size()))
            memory.view(tensor.dtype)[: tensor.numel()].copy_(tensor.view(-1))
            tensor.data = self._locks.lock(memory).view(tensor.dtype)[: tensor.numel()].view(tensor.shape)

    @property
    def reads_parameters(self) -> bool:
        """Whether any parameters, trainable or frozen, come from storage when they are used."""
        return self.parameters.reads

    def frozen_bytes(self) -> dict[str, int]:
        """Bytes of this rank's partitions of frozen parameters by tier."""
        return held_bytes(self._frozen_params.values())

    def beside(self) -> list[InferenceReads]:
        """Engines of this process that only infer."""
        return reads_of_inference()

    def bound_heap(self) -> None:
        """Called where temporaries of a parameter's size were freed: their holes must not add up over the model."""
        self._heap.check()

    # ---- parameters ---------------------------------------------------------------------------------------

    def span(self, param: Parameter) -> ParamSpan:
        return self.layout.params[self._index[param.ds_id]]

    def param(self, span: ParamSpan) -> Parameter:
        return self._params[span.index]

    def owns(self, param: Parameter) -> bool:
        return param.ds_id in self._index

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
            self.bound_heap()

    def step_applied(self) -> None:
        """Every parameter may have changed: its next use waits for its update."""
        if self._lanes is not None:
            self._lanes.collect()
        self.parameters.step_applied()
        self._skipped.step_applied()
        first_uses = [] if self._positions_known else self.parameters.trace.first_uses()
        if first_uses:
            self._positions_known = True
            order = [self._index.get(partition.handle.ds_id) for partition in first_uses]
            trainable = [index for index in order if index is not None]
            self.core.set_positions(zip(trainable, range(len(trainable)), strict=True))

    def move_to(
        self, states_share: float, step_bytes: int = MOVED_A_STEP_BYTES, room: Callable[[], int] | None = None
    ) -> bool:
        """From the next step on P32 and moments of as many chunks as the share holds, those that are needed first, come
        to host memory, or stay there; the others leave it. About ``step_bytes`` move in a step, by way of its updates.

        A collective, in the training thread, after a step and before the next backward. False if a rank has no room on
        storage, which is told: then nothing more moves on any. How far it is: ``core.mover``, which takes ``room``.

        Raises:
            FuyouStateError: ``durable`` forbids states in memory, or a backward has begun.
        """
        mover, config = self.core.mover, self.activation.config
        if states_share > 0 and config.durable:
            raise FuyouStateError('fuyou.durable is true: states stay on storage, "optimizer.tier" is "nvme"')
        states = ChunkResidency.by_deadline(self.layout, 0.0, states_share, 0.0).states
        budget = config.nvme_budget_bytes
        refused = False
        try:
            mover.move_to(states, step_bytes, None if budget == "auto" else int(budget), room)
        except (FuyouMemoryError, FuyouStorageError) as error:
            refused = True
            logger.warning("chunks stay where they are, training goes on: %s", error)
        if least(float(not refused))[0]:
            if dist.get_rank() == 0:
                _tell_durability(sum(states), len(states), self.core.options.num_slots)
            return True
        mover.stop()
        return False

    def step_skipped(self) -> None:
        """A step was not applied. Raises FuyouChecksumError if that will be so for ever, for what is on storage."""
        self._skipped.step_skipped(self._partitions.values())

    # ---- sleep ----------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Waits for the device. No host memory of this engine is registered with it until :meth:`wake`; whatever runs
        meanwhile copies by way of the driver's own memory.
        """
        self.device.synchronize()
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
        session = self.activations
        tier = session.swapper.tier if session is not None and session.swapper is not None else None
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
        for param in self._params:
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
        if self._is_counted and not why:
            _NUM_BUILT[tuple(self.activation.state_paths)] -= 1
        with ExitStack() as ending:  # from the last line to the first; what fails keeps nothing else from ending
            ending.callback(self._partitions.clear)
            ending.callback(self._rest)
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
            ending.callback(report_close, self)


def _tell_durability(num_resident: int, num_chunks: int, num_slots: int) -> None:
    """What a run that is killed leaves, where that is less than its last step."""
    if num_resident:
        where = f"P32 and the moments of {num_resident} of {num_chunks} chunks are in host memory"
        to_do = 'with optimizer.tier "nvme" every step is'
    elif num_slots == 1:
        where, to_do = "chunks have one slot on storage", "with room for two every step is"
    else:
        return
    log_once(logging.INFO, f"{where}: this run is as durable as its last checkpoint; {to_do} kept on storage")


def _bytes_of_others(paths: Sequence[Path], num_bytes: int) -> int:
    """What other ranks will take of the devices that this one uses. A collective."""
    mine, host = {probe_path(path).device for path in paths}, os.uname().nodename
    every = of_every_rank((host, mine, num_bytes))
    return sum(size for where, devices, size in every if where == host and devices & mine) - num_bytes
