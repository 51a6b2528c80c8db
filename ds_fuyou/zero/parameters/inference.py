# SPDX-License-Identifier: Apache-2.0
"""Engines without an optimizer (reference and reward models, serving): their parameters are read ahead as those of an
engine that trains.

What of the model lies on storage and no engine has gets a parameter store of its own. What another engine has stays
with that one's store, which is told of every use, until that engine ends. What is in host memory for good is registered
with a device that pins, as ``zero.Init`` of stock has it.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from deepspeed import comm as dist
from torch.nn import Parameter

from ds_fuyou.ds_json import Activation
from ds_fuyou.errors import FuyouMemoryError, FuyouStateError
from ds_fuyou.host.device import Device, failure_of
from ds_fuyou.host.memory import HeapGuard, PageLocks
from ds_fuyou.host.run_ahead import run_ahead
from ds_fuyou.log import log_once
from ds_fuyou.parameters.partition import Partition
from ds_fuyou.parameters.store import ParameterStore
from ds_fuyou.planner.plan import most_prefetch_bytes, whole_bytes
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.lifetime import register_closer
from ds_fuyou.storage.parked import ParkedValues
from ds_fuyou.telemetry.trace import Lane, LaneTrace
from ds_fuyou.zero.agreement import least
from ds_fuyou.zero.blocks import block_of
from ds_fuyou.zero.device import rank_device
from ds_fuyou.zero.parameters.gathering import (
    for_training,
    in_use_order,
    release_gathered,
    unwatch_gathers,
    watch_gathers,
)
from ds_fuyou.zero.parameters.param_swapper import (
    PARTITION_TENSORS,
    held_bytes,
    partition_bytes,
    partition_of,
    pin_partition,
    stores_of,
)
from ds_fuyou.zero.run.budgets import planned_host_bytes
from ds_fuyou.zero.run.neighbours import cores_of_rank, count_neighbours, free_memory_of_rank
from ds_fuyou.zero.stock import (
    bound_gathered,
    forget_modules,
    iter_module_params,
    watch_releases,
    without_prefetch_to_host,
)

__all__ = ["InferenceReads", "end_reads", "reads_of_inference", "watch"]

_live: weakref.WeakSet[InferenceReads] = weakref.WeakSet()


class InferenceReads:
    """The parameters of one engine without an optimizer. Used by the training thread alone."""

    def __init__(self, module: torch.nn.Module, activation: Activation) -> None:
        self._module = weakref.ref(module)
        self._names = {id(child): block_of(name) for name, child in module.named_modules()}
        self._lanes = LaneTrace.at(activation.config.trace) if activation.config.trace is not None else None
        self._heap = HeapGuard()
        self._num_reads = 0
        self._span = ("", 0)
        self._activation = activation
        self._read_bytes = 0
        self._engine = activation.config.io.engine
        self._io: IoLane | None = None
        self.parameters: ParameterStore | None = None
        self._forget_closer: Callable[[], None] = _nothing
        self._held: dict[str, int] = {}
        self._is_asleep = self.is_destroyed = False
        self.bound: Callable[[ParameterStore], None] = _no_bound
        """What a store that serves the engine calls for."""
        self._device = rank_device(pin_memory=activation.pin_memory)
        self._locks = PageLocks(self._device)
        weakref.finalize(self, _unlock, self._device, self._locks).atexit = False
        self.pinned: set[int] = set()
        """By DeepSpeed's number, parameters in host memory that are registered here."""
        self._take(in_use_order(module))

    def _take(self, params: Sequence[Parameter]) -> None:
        """Those on storage that no engine has, and those that stay in host memory."""
        self._held = held_bytes(params)
        _live.add(self)
        self._pin_resident(params)
        partitions = [partition for param in params if (partition := partition_of(param)) is not None]
        free = [partition for partition in partitions if _is_free(partition)]
        sources = [partition.source for partition in free if isinstance(partition.source, ParkedValues)]
        if not sources:
            return
        self._forget_closer = register_closer(_closing(self))
        self._read_bytes = _read_bytes(self._activation, sum(partition.num_bytes for partition in free))
        space = sources[0].space.space
        settings = IoSettings.for_paths(self._engine, space.num_paths, cores_of_rank())
        io = self._io = IoLane(settings, space.path_of)
        self.parameters = ParameterStore(
            PARTITION_TENSORS,
            self._device,
            io,
            read_bytes=self._read_bytes,
            is_alone=dist.get_world_size() == 1,
            lanes=self._lanes,
        )
        for source in sources:
            source.space.rest()
            source.read_by(io)
        self.parameters.take(free)
        planned_host_bytes[self] = self.parameters.capacity_bytes
        self.bound(self.parameters)
        self.parameters.trace.expect(free)
        self.parameters.look_ahead()

    def _pin_resident(self, params: Sequence[Parameter]) -> None:
        """What the device refuses is copied from all the same."""
        try:
            for param in params:
                if partition_of(param) is None and pin_partition(param, self._locks):
                    self.pinned.add(param.ds_id)
                    self._heap.check(partition_bytes(param))
        except (FuyouMemoryError, FuyouStateError) as error:
            told = f"parameters are copied from by way of the driver's own memory: {error}"
            log_once(logging.WARNING, told, on_any_rank=True)

    @property
    def read_bytes(self) -> int:
        """Host memory of parameters in use or read ahead, at most."""
        return self._read_bytes if self.parameters is None else max(self._read_bytes, self.parameters.capacity_bytes)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of this rank's partitions by tier, without those that a training engine had when this one was built."""
        return self._held

    def before_module(self, module: torch.nn.Module, params: Iterable[Parameter]) -> None:
        """DeepSpeed is about to fetch the parameters of a module."""
        if self._lanes is not None:
            self._enter(self._names.get(id(module), ""))
        partitions = [partition for param in params if (partition := partition_of(param)) is not None]
        if not partitions:
            return
        model = self._module()
        if self.parameters is None and model is not None and any(_is_free(partition) for partition in partitions):
            self._take(in_use_order(model))  # whoever had them has ended
        stores: dict[ParameterStore, list[Partition]] = {}
        for partition in partitions:
            if partition.store is not None:
                stores.setdefault(partition.store, []).append(partition)
        for store, used in stores.items():
            store.use(*used)
            store.move_on()
        reads = self.parameters
        if reads is not None and reads.num_demand_reads + reads.num_ahead_reads != self._num_reads:
            self._num_reads = reads.num_demand_reads + reads.num_ahead_reads
            self._heap.check()

    def _enter(self, block: str) -> None:
        name, _ = self._span
        if block and block != name:
            self._leave()
            self._span = (block, time.perf_counter_ns())

    def _leave(self) -> None:
        name, began_ns = self._span
        if name and self._lanes is not None:
            self._lanes.add(Lane.COMPUTE, f"inference {name}", began_ns, time.perf_counter_ns())
        self._span = ("", 0)

    def forward_ended(self) -> None:
        self._leave()

    def sleep(self) -> None:
        """No host memory is registered with the device until :meth:`wake`, whoever else wakes."""
        self._is_asleep = True
        self.unpin()

    def wake(self) -> None:
        self._is_asleep = False
        self.pin()
        if self.parameters is not None:
            self.parameters.move_on()

    def unpin(self) -> None:
        self._device.synchronize()
        self._locks.pause()
        if self.parameters is not None:
            self.parameters.unpin()

    def pin(self) -> None:
        if self._is_asleep:
            return
        self._locks.resume()
        if self.parameters is not None:
            self.parameters.pin()

    def end(self) -> None:
        """Others take the parameters, or the engine has ended. Idempotent."""
        self._forget_closer()
        _live.discard(self)
        planned_host_bytes.pop(self, None)
        self._leave()
        module = self._module()
        if module is not None and self.parameters is not None:
            release_gathered(module)
        _unlock(self._device, self._locks)
        self.pinned.clear()
        lanes, self._lanes = self._lanes, None
        if lanes is not None:
            lanes.close()
        parameters, self.parameters = self.parameters, None
        if parameters is not None:
            served = list(parameters.partitions)
            parameters.close()
            for partition in served:
                if isinstance(partition.source, ParkedValues):
                    partition.source.read_by(None)
        self._close_io()

    def _close_io(self) -> None:
        io, self._io = self._io, None
        if io is not None:
            io.close()


def _unlock(device: Device, locks: PageLocks) -> None:
    with device.as_current():
        failure_of(device)  # no copy may be in flight when memory is unpinned
        locks.release()


def _nothing() -> None:
    """No I/O engine was started."""


def _no_bound(parameters: ParameterStore) -> None:
    """Gathered parameters are not host memory."""


def _closing(reads: InferenceReads) -> Callable[[], None]:
    """For the end of the process; an engine that is dropped before is not kept for it."""
    known = weakref.ref(reads)

    def close() -> None:
        found = known()
        if found is not None:
            found._close_io()

    return close


def _is_free(partition: Partition) -> bool:
    return partition.store is None and isinstance(partition.source, ParkedValues)


def _read_bytes(activation: Activation, stored_bytes: int) -> int:
    """As the plan of an engine that trains has it, of what other engines leave: the same on all ranks. Of a budget that
    the block names, half of that if the parameters need it: others may follow.
    """
    config = activation.config
    if config.plan is not None and config.plan.prefetch_bytes is not None:
        return int(config.plan.prefetch_bytes)
    if config.dram_budget_bytes == "auto":
        count_neighbours()
        return most_prefetch_bytes(int(least(float(free_memory_of_rank() * 8 // 10))[0]))
    left = int(least(float(max(0, int(config.dram_budget_bytes) - sum(planned_host_bytes.values()))))[0])
    return max(most_prefetch_bytes(left), min(left // 2, whole_bytes(stored_bytes)))


def watch(engine: Any, offload: Any, activation: Activation) -> None:
    """From now on the parameters of an engine without an optimizer (``offload``: its ``DeepSpeedZeRoOffload``) are read
    ahead, until it is destroyed or another engine takes them."""
    module = engine.module
    reads = InferenceReads(module, activation)
    coordinator = offload.get_param_coordinator()
    watch_gathers(module, coordinator)
    stock_fetch, stock_reset = coordinator.fetch_sub_module, coordinator.reset_step
    stock_destroy = offload.destroy

    def fetch_sub_module(current_submodule: torch.nn.Module, forward: bool) -> None:
        reads.before_module(current_submodule, iter_module_params(current_submodule))
        stock_fetch(current_submodule, forward)

    def reset_step() -> None:
        reads.forward_ended()
        stock_reset()

    def destroy() -> None:
        reads.is_destroyed = True
        with ExitStack() as ending:  # from the last line to the first; what fails keeps nothing else from ending
            ending.callback(forget_modules, module, coordinator)
            ending.callback(stock_destroy)
            ending.callback(unwatch_gathers, module, coordinator)
            ending.callback(reads.end)

    coordinator.fetch_sub_module = for_training(fetch_sub_module)
    without_prefetch_to_host(coordinator)
    coordinator.reset_step, offload.destroy = reset_step, destroy
    device = rank_device(pin_memory=activation.pin_memory)
    ahead = run_ahead(device)
    if ahead is not None:
        watch_releases(coordinator, ahead.let_go, device.current_stream)
    else:

        def bound(parameters: ParameterStore) -> None:
            bound_gathered(coordinator, parameters, offload.dtype.itemsize)

        reads.bound = bound
        if reads.parameters is not None:
            bound(reads.parameters)
    offload.fuyou_reads = reads


def end_reads(params: Iterable[Parameter]) -> None:
    """An engine that trains takes these."""
    taken = list(params)
    stores, numbers = set(stores_of(taken)), {param.ds_id for param in taken}
    for reads in reads_of_inference():
        if reads.parameters in stores or reads.pinned & numbers:
            reads.end()


def reads_of_inference() -> list[InferenceReads]:
    """Of all engines of this process that only infer."""
    return list(_live)
