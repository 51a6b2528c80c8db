# SPDX-License-Identifier: Apache-2.0
"""How the run of one rank is placed, before anything of it is built: sizes, plan, chunks."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from deepspeed import comm as dist
from torch.nn import Parameter

from ds_fuyou.checkpoint.state_files import contents_of
from ds_fuyou.ds_json import Activation
from ds_fuyou.host.available_memory import auto_tenths, copied_later_bytes
from ds_fuyou.host.device import Device
from ds_fuyou.log import current_rank, get_logger, log_once
from ds_fuyou.optimizer.clip_policy import Overlap
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, FlatLayout, LayoutEntry, LayoutLimits, build_layout, own_numel
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.placement import regions_for
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.optimizer.rules import OptimizerKind
from ds_fuyou.parameters.partition import Partition
from ds_fuyou.planner.applied import require_params
from ds_fuyou.planner.decide import Decision
from ds_fuyou.planner.plan import MIB, Plan, PlanInput, under_block
from ds_fuyou.planner.profile import RunProfile, fingerprint_of
from ds_fuyou.planner.profiled import placed_under
from ds_fuyou.state_layout import FP32, StateLayout, layout_of, masters_of, moments_of
from ds_fuyou.storage.io import IoSettings
from ds_fuyou.storage.parked import ParkedValues
from ds_fuyou.storage.probe import probe_path, shares_blocks
from ds_fuyou.storage.store import JsonValue, RegionSpec
from ds_fuyou.zero.agreement import all_or_none, least, of_every_rank
from ds_fuyou.zero.blocks import block_of
from ds_fuyou.zero.parameters.inference import reads_of_inference
from ds_fuyou.zero.parameters.param_swapper import is_in_host_memory, partition_bytes, partition_of, swaps_here
from ds_fuyou.zero.run.budgets import check_budgets, planned_host_bytes
from ds_fuyou.zero.run.neighbours import cores_of_rank, free_memory_of_rank, free_of_rank, machine

__all__ = ["RunDesign", "TrainedModel", "design_of", "laid_out"]


@dataclass(frozen=True)
class TrainedModel:
    """What one rank trains, and how: parameters as stage 3 has them, with their names in the order of use.

    ``accumulation``: micro-batches a step. ``reused_numel``: elements that stay gathered from forward to backward;
    ``staying_numel``: from one micro-batch to the next.
    """

    activation: Activation
    sub_groups: Sequence[Sequence[Parameter]]
    names: dict[Parameter, str]
    kind: OptimizerKind
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    accumulation: int
    device: Device
    reused_numel: int = 0
    staying_numel: int = 0

    @functools.cached_property
    def trained(self) -> list[Parameter]:
        """In the order of sub-groups, which is that of spans."""
        return [param for group in self.sub_groups for param in group]

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """ds_id → place in the order of use."""
        return {param.ds_id: place for place, param in enumerate(self.names)}

    @functools.cached_property
    def entries(self) -> list[list[LayoutEntry]]:
        return [
            [(self.names[p], block_of(self.names[p]), p.partition_numel(), self.places[p.ds_id]) for p in group]
            for group in self.sub_groups
        ]

    @functools.cached_property
    def padding(self) -> dict[str, int]:
        """Elements at the end of this rank's partition that a trained parameter does not have, by its name."""
        found = {}
        for param in self.trained:
            part, rank = param.partition_numel(), dist.get_rank(param.ds_process_group)
            found[self.names[param]] = part - own_numel(part, param.ds_numel, rank)
        return found

    @functools.cached_property
    def frozen(self) -> list[Parameter]:
        trained = {param.ds_id for param in self.trained}
        return [param for param in self.names if param.ds_id not in trained]

    def planned_frozen(self) -> list[Parameter]:
        """Frozen parameters whose place is the plan's to say, in the order of use: not where all are in host memory
        whatever else there is, nor those that another engine serves.
        """
        if not self.paths or self.activation.config.parameters.tier == "cpu":
            return []

        def is_open(held: Partition | None) -> bool:
            return held is None or (held.store is None and isinstance(held.source, ParkedValues))

        return [param for param in self.frozen if swaps_here(param) and is_open(partition_of(param))]

    @property
    def num_params(self) -> int:
        return sum(param.ds_numel for param in self.names)

    @property
    def shapes(self) -> str:
        """Short: of all parameters by name, whichever are trained, and in which groups."""
        return fingerprint_of(*sorted((name, tuple(param.ds_shape)) for param, name in self.names.items()))

    @property
    def paths(self) -> list[Path]:
        """Where state is; none where nothing may be on storage."""
        return [Path(path) for path in self.activation.state_paths]

    @functools.cached_property
    def may_share_blocks(self) -> bool:
        """Whether checkpoints may share blocks with slots, as file systems of all ranks can. A collective, once."""
        return bool(least(float(not self.activation.config.relies_on_slots and shares_blocks(self.paths)))[0])

    def state_layout(self) -> StateLayout:
        """Of states in slots, the same on all ranks."""
        config, kind = self.activation.config, self.kind
        of_masters, of_moments = kind.kept_as
        moments = moments_of(config.optimizer.moments, kind.name, of_moments)
        masters = masters_of(
            config.optimizer.masters,
            is_bfloat16=self.param_dtype is torch.bfloat16,
            checksum=config.checksum,
            are_cloned=moments == FP32 and self.may_share_blocks,
            stock=of_masters,
        )
        return layout_of(masters, len(kind.moments), moments)

    def host_budget(self) -> int:
        """Bytes of host memory, the same on every rank: where parameters are decides which gathers may run ahead, and
        a gather must be the same collective everywhere. What trainable partitions take now is about to be free.
        """
        budget = self.activation.config.dram_budget_bytes
        if budget != "auto":
            return int(budget)
        owned = (*self.trained, *self.planned_frozen())
        in_place = sum(p.ds_tensor.nbytes for p in owned if partition_of(p) is None and is_in_host_memory(p))
        if self.device.is_unified:
            log_once(
                logging.INFO,
                "device and host share one memory: half of it is planned for the device, activations leave it for "
                "storage alone (dram_budget_bytes and gpu_budget_bytes say otherwise)",
            )
        free, later = free_memory_of_rank(), copied_later_bytes()
        mine = (max(0, free - later) + in_place) * auto_tenths(is_unified=self.device.is_unified) // 10
        found, most = map(int, least(float(mine), -float(mine)))
        if mine == found and later > free // 10:
            get_logger().info(
                f"{later / MIB:.0f} of {free / MIB:.0f} MiB are left to what this process shares with the one that it "
                "was forked from, and copies as it uses it; a process that is started anew needs none of that"
            )
        if mine == found < -most // 2:
            get_logger().warning(
                f"dram_budget_bytes auto: rank {current_rank()} has {mine / MIB:.0f} MiB of host memory to plan with, "
                f"another rank {-most / MIB:.0f}; all plan with the least"
            )
        return found

    def storage_budget(self) -> float:
        """Bytes of storage for this rank, the same on every one: the block's, and what is free of its devices."""
        facts = {found.device: float(found.free_bytes) for found in map(probe_path, self.paths)}
        budget = self.activation.config.nvme_budget_bytes
        free = free_of_rank(facts, of_every_rank((machine(), set(facts))))
        return least(free if budget == "auto" else min(free, float(budget)))[0]

    def plan_input(self) -> PlanInput:
        """What a plan is made from. A collective."""
        config = self.activation.config
        with all_or_none("keep its budgets"):
            check_budgets(config)
        ordered = sorted((entry for group in self.entries for entry in group), key=lambda entry: entry[3])
        first = itertools.takewhile(lambda entry: entry[1] == entry[0], ordered)  # in no numbered block
        frozen = [partition_bytes(param) for param in self.planned_frozen()]
        sizes = PlanInput(
            numel=sum(entry[2] for entry in ordered),
            param_bytes_each=self.param_dtype.itemsize,
            grad_bytes_each=self.grad_dtype.itemsize,
            layout=self.state_layout(),
            largest_param_numel=max(entry[2] for entry in ordered),
            dram_budget_bytes=self.host_budget(),
            num_cpus=cores_of_rank(),
            device_is_host=self.device.is_host,
            is_unified=self.device.is_unified,
            storage_budget_bytes=self.storage_budget(),
            num_paths=max(1, len(self.paths)),
            first_numel=sum(entry[2] for entry in first),
            reused_numel=0 if self.device.is_host else self.reused_numel // dist.get_world_size(),
            staying_numel=0 if self.device.is_host else self.staying_numel // dist.get_world_size(),
            frozen_bytes=float(sum(frozen)),
            largest_frozen_bytes=float(max(frozen, default=0)),
        )
        given = under_block(sizes, config, bool(self.paths))
        if config.dram_budget_bytes == "auto":
            return given
        ahead = sum(planned_host_bytes.get(reads, 0) for reads in reads_of_inference())
        taken = int(-least(-float(ahead))[0])
        if taken:
            log_once(logging.INFO, f"of dram_budget_bytes {taken} are the look-ahead of engines without an optimizer")
        return replace(given, dram_budget_bytes=given.dram_budget_bytes - taken, lent_bytes=taken)


@dataclass(frozen=True)
class RunDesign:
    """How a run is placed, and its chunks. ``given``: with what was decided of when updates begin. ``profile``: of an
    earlier run; ``taken``: where chunks are in the files that it goes on from.
    """

    model: TrainedModel
    given: PlanInput
    decision: Decision
    layout: FlatLayout
    profile: RunProfile | None
    taken: ChunkResidency | None = None

    @property
    def plan(self) -> Plan:
        return self.decision.plan

    @functools.cached_property
    def residency(self) -> ChunkResidency:
        shares = self.plan.residency
        return self.taken or ChunkResidency.of_shares(
            self.layout, shares.parameters, shares.optimizer, shares.gradients, shares.optimizer_twice
        )

    def core_options(self, num_slots: int) -> CoreOptions:
        model, plan = self.model, self.plan
        config = model.activation.config
        io = IoSettings.for_paths(config.io.engine, self.given.num_paths, self.given.num_cpus)
        return CoreOptions(
            residency=self.residency,
            num_slots=num_slots,
            overlap=Overlap(config.optimizer.overlap),
            clip_policy=config.optimizer.clip_policy if self.given.may_speculate else "defer",
            param_dtype=model.param_dtype,
            grad_dtype=model.grad_dtype,
            staging_bytes=plan.staging_bytes,
            num_update_threads=plan.num_threads,
            io=replace(io, queue_depth=plan.queue_depth, block_bytes=plan.block_bytes),
            checksum=config.checksum,
            device=model.device,
            has_peers=dist.get_world_size() > 1,
            masters=self.given.layout.masters,
            moments=self.given.layout.moments,
        )

    def regions(self, num_slots: int) -> list[RegionSpec]:
        """What lives on storage, with so many slots."""
        return regions_for(self.layout, self.core_options(num_slots), len(self.model.kind.moments), num_slots)

    def contents(self, engine: int) -> dict[str, JsonValue]:
        """What state files say of themselves; ``engine``: how many of this process came before on the same paths."""
        shapes = [tuple(param.ds_shape) for param in self.model.trained]
        return {
            **contents_of(self.layout, shapes, self.given.layout),
            "dtype": str(self.model.param_dtype),
            "optimizer": self.model.kind.name,
            "engine": engine,
            "shapes": self.model.shapes,
        }


def design_of(model: TrainedModel, profile: RunProfile | None) -> RunDesign:
    """As a run is that goes on from nothing. ``profile``: of an earlier one, the same on all ranks. A collective.

    Raises:
        FuyouConfigError: the model does not fit the block's budgets, or its plan document is another model's.
    """
    config = model.activation.config
    given = model.plan_input()
    if config.plan is not None and config.plan.document is not None:
        require_params(config.plan.document, model.num_params)
    decision = placed_under(config, given, profile, model.accumulation)
    return RunDesign(model, decision.settled(given), decision, laid_out(model, decision.plan.chunk_bytes), profile)


def laid_out(model: TrainedModel, chunk_bytes: int) -> FlatLayout:
    """With chunks of at most so many bytes of fp32."""
    limits = LayoutLimits(
        max_elements=max(CUT_ELEMENTS, chunk_bytes // 4),
        min_elements=min(512 * 1024, max(CUT_ELEMENTS, chunk_bytes // 8)),
    )
    return build_layout(model.entries, limits, model.padding)
