# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed takes for its parameter swapper: a thin adapter of the partitions' states to ``param.ds_tensor``.

DeepSpeed asks through ``param.nvme_swapper`` and the status of ``param.ds_tensor``: a partition whose status
is NOT_AVAILABLE stops the prefetch scan, and a gather of it calls :meth:`FuyouParameterSwapper.swap_in`. That
protocol serves every tier here: NOT_AVAILABLE means "on storage" or "its update is not published yet".

Until an engine takes them (inside ``zero.Init``, and after ``destroy()``) partitions live in host memory, where they
are DeepSpeed's own tensors, or on storage (``storage/parked.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.nn import Parameter

from ds_fuyou.ds_json import Activation, activation_of
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.memory import HeapGuard, PageLocks, aligned_tensor, normal_tensors, round_up_to_page
from ds_fuyou.optimizer.layout import own_numel
from ds_fuyou.parameters.partition import Partition, Presence, Source
from ds_fuyou.parameters.store import ParameterStore
from ds_fuyou.storage.parked import HEAD_BYTES, ParkedValues
from ds_fuyou.storage.probe import probe_path
from ds_fuyou.zero.agreement import all_or_none, least
from ds_fuyou.zero.device import rank_device
from ds_fuyou.zero.run.neighbours import free_memory_of_rank
from ds_fuyou.zero.run.striping import parked_space

__all__ = [
    "PARTITION_TENSORS",
    "FuyouParameterSwapper",
    "gathers_to_read",
    "held_bytes",
    "held_gathered",
    "held_inside",
    "hold",
    "in_order",
    "is_held",
    "is_in_host_memory",
    "is_what_scripts_write_to",
    "only_reading",
    "partition_bytes",
    "partition_of",
    "pin_partition",
    "stores_of",
    "swaps_here",
    "through_own_swapper",
]

AVAILABLE, NOT_AVAILABLE = PartitionedParamStatus.AVAILABLE, PartitionedParamStatus.NOT_AVAILABLE
_NO_LIMIT = 1 << 62
_HELD = "GatheredParameters"
"""``is_external_param`` of what is gathered and stays so meanwhile; of what a module has handed out: True."""
_READS_ONLY: ContextVar[bool] = ContextVar("ds_fuyou_reads_only", default=False)


def swaps_here(param: Parameter) -> bool:
    """Whether its partition goes through a swapper of ours."""
    return isinstance(getattr(param, "nvme_swapper", None), FuyouParameterSwapper)


def partition_of(param: Parameter) -> Partition | None:
    """What we hold of a parameter; None if its partition is DeepSpeed's alone."""
    swapper = getattr(param, "nvme_swapper", None)
    return swapper.partitions.get(param.ds_id) if isinstance(swapper, FuyouParameterSwapper) else None


def partition_bytes(param: Parameter) -> int:
    """Of this rank, padding included."""
    return int(param.ds_tensor.ds_numel * param.ds_tensor.element_size())


def is_in_host_memory(param: Parameter) -> bool:
    """Whether DeepSpeed's own tensor of this rank's partition is."""
    return bool(param.ds_tensor.device.type == "cpu")


def pin_partition(param: Parameter, locks: PageLocks) -> bool:
    """Moves a partition of DeepSpeed's own from the heap to pages that the device copies from without a detour; False
    where it is on such pages, or none of the heap's.

    Raises:
        FuyouMemoryError: there is none.
        FuyouStateError: the device refuses.
    """
    tensor = param.ds_tensor
    if not locks.pins or not is_in_host_memory(param) or not tensor.numel() or PageLocks.are_held(tensor):
        return False
    memory = aligned_tensor(round_up_to_page(tensor.numel() * tensor.element_size()))
    memory.view(tensor.dtype)[: tensor.numel()].copy_(tensor.view(-1))
    tensor.data = locks.lock(memory).view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
    return True


def is_what_scripts_write_to(param: Parameter) -> bool:
    """Of a partition that is DeepSpeed's alone: where one rank has it, on the host, a gathered parameter is its
    partition, and nobody is told of writes to it."""
    is_alone = dist.get_world_size(group=param.ds_process_group) == 1
    return (is_alone and rank_device().is_host) or param.ds_tensor.device.type != "cpu"


def held_bytes(params: Iterable[Parameter]) -> dict[str, int]:
    """Bytes of this rank's partitions by tier ("cpu", "nvme"), without those that a training engine has: it tells of
    them.
    """
    held = {"cpu": 0, "nvme": 0}
    for param in params:
        partition = partition_of(param)
        if partition is None:
            held["cpu"] += partition_bytes(param)
        elif isinstance(partition.source, ParkedValues):
            held["nvme"] += partition.num_bytes
    return held


def stores_of(params: Iterable[Parameter]) -> list[ParameterStore]:
    """Who serves these parameters, in the order of the first that each serves."""
    partitions = [partition for param in params if (partition := partition_of(param)) is not None]
    return list(dict.fromkeys(partition.store for partition in partitions if partition.store is not None))


@contextmanager
def in_order(params: Sequence[Parameter], *, is_saved: bool = False) -> Iterator[None]:
    """Inside, these are gathered once, in this order: they are read ahead (``ParameterStore.in_order``)."""
    if len(params) < 2:
        yield
        return
    members: dict[ParameterStore, dict[Partition, None]] = {}
    for param in params:
        partition = partition_of(param)
        if partition is not None and partition.store is not None:
            members.setdefault(partition.store, {})[partition] = None
    with ExitStack() as stack:
        for store, partitions in members.items():
            stack.enter_context(store.in_order(list(partitions), is_saved=is_saved))
        yield


@contextmanager
def only_reading() -> Iterator[None]:
    """Inside, nobody edits what ``GatheredParameters`` gathers, whatever it is told (:func:`gathers_to_read`)."""
    token = _READS_ONLY.set(True)
    try:
        yield
    finally:
        _READS_ONLY.reset(token)


class _PartitionTensors:
    """Shows partitions to DeepSpeed as ``ds_tensor``. A partition's handle is its parameter."""

    def __init__(self) -> None:
        self._stand_ins: dict[torch.dtype, torch.Tensor] = {}

    def here(self, partition: Partition, values: torch.Tensor) -> None:
        tensor = partition.handle.ds_tensor
        tensor.data = values
        tensor.status = AVAILABLE

    def away(self, partition: Partition) -> None:
        """A one-element tensor stands in for what is on storage; what lies in memory stays, but is not to be used."""
        tensor = partition.handle.ds_tensor
        if partition.num_bytes:
            self.stand_in(tensor)
        tensor.status = NOT_AVAILABLE

    def gathered(self, partition: Partition) -> None:
        """The device has the values of a partition on storage; what host memory has of them stays as it is."""
        if partition.num_bytes:
            if partition.presence is Presence.AWAY:
                partition.presence = Presence.GATHERED
            partition.handle.ds_tensor.status = AVAILABLE

    def stand_in(self, tensor: torch.Tensor) -> None:
        dtype = tensor.dtype
        if dtype not in self._stand_ins:
            with normal_tensors():
                self._stand_ins[dtype] = torch.empty(1, dtype=dtype, device="cpu")
        tensor.data = self._stand_ins[dtype].data

    def is_idle(self, partition: Partition) -> bool:
        """What was put aside is not: it is neither read ahead nor offered, whatever host memory has of it. That may
        differ between ranks, and what is offered must not."""
        param = partition.handle
        return param.ds_status is ZeroParamStatus.NOT_AVAILABLE and not param.nvme_swapper.is_aside(param)


PARTITION_TENSORS = _PartitionTensors()


class FuyouParameterSwapper:
    """Duck-typed AsyncPartitionedParameterSwapper of one ``zero.Init``. Used by the training thread alone."""

    def __init__(self, ds_config: Any, model_dtype: torch.dtype) -> None:
        activation = activation_of(ds_config)
        if activation is None:
            raise FuyouStateError("the parameter swapper is built for configurations with an active fuyou block")
        self.activation: Activation = activation
        self.dtype = model_dtype
        self.swap_element_size = model_dtype.itemsize
        self.partitions: dict[int, Partition] = {}  # by ds_id: those that are not DeepSpeed's alone
        self._buffers: dict[int, torch.Tensor] = {}
        self._aside: dict[int, torch.Tensor] = {}  # by ds_id: gathered values of what is partitioned
        self._edits_wait: dict[int, Callable[[], object]] = {}  # by ds_id: of what is DeepSpeed's alone
        self.as_taken: dict[int, int | None] = {}
        """By ds_id: of what a checkpoint may leave out, a number for the values that the first engine found. None once
        they are, or may be, others. See zero/saving/frozen_base.py."""
        self.as_built: dict[int, tuple[int | None, tuple[int, int]]] = {}
        """By ds_id: of what an engine found frozen its number, and what ``sums_of`` there said then."""
        self._dram_left: int | None = None
        self._heap = HeapGuard()

    # ---- where a partition is built -------------------------------------------------------------------------

    def agree(self, group: Any) -> None:
        """How much of the model stays in DRAM: the same number on all ranks of ``group``, because gathers of frozen
        parameters in memory run ahead and others do not. A collective of those who build this model, once.
        """
        if self._dram_left is None:
            with all_or_none("look at its storage", group):
                for path in self.activation.state_paths:
                    probe_path(Path(path))
            self._dram_left = int(least(float(self._dram_budget()), group=group)[0])

    def _dram_budget(self) -> int:
        """Bytes of P16 that zero.Init may keep in DRAM before the tiers are decided for the whole model."""
        config = self.activation.config
        if config.parameters.tier == "nvme":
            return 0
        if config.parameters.tier == "cpu" or not self.activation.state_paths:
            return _NO_LIMIT
        budget = config.dram_budget_bytes
        return (free_memory_of_rank() if budget == "auto" else int(budget)) // 4

    def swappable_tensor(self, param: Parameter | None = None, numel: int | None = None) -> bool:
        """Whether a partition built now goes to storage."""
        count = param.ds_tensor.ds_numel if param is not None else numel
        num_bytes = int(count or 0) * self.swap_element_size
        left = self._dram_budget() if self._dram_left is None else self._dram_left
        self._dram_left = left - num_bytes if num_bytes <= left else left
        return num_bytes > left

    def get_buffer(self, param: Parameter, numel: int) -> torch.Tensor:
        """Memory for a partition that is about to be filled and swapped out. Of the type in which DeepSpeed makes one
        in host memory: within ``zero.Init`` ``torch.empty`` gives the model's, whatever the parameter was made in."""
        dtype = torch.empty(0, dtype=param.dtype, device="cpu").dtype
        memory = aligned_tensor(round_up_to_page(numel * dtype.itemsize))
        self._buffers[param.ds_id] = memory
        return memory.view(dtype)[:numel]

    # ---- DeepSpeed's questions ------------------------------------------------------------------------------

    def available_swap_in_buffers(self) -> int:
        """Zero: DeepSpeed's own look-ahead is not used, ours knows more."""
        return 0

    def reserve_partitioned_swap_space(self, partition_num_elems: Iterable[int]) -> None:
        """Nothing to reserve: updates write P16 from their own staging memory."""

    def swap_out_and_release(
        self, params: list[Parameter], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """The partition was built or edited; its new values are in ``param.ds_tensor``.

        DeepSpeed asks the first parameter's swapper for all of them; others may have been built by another zero.Init.
        """
        for param in params:
            swapper = param.nvme_swapper
            if isinstance(swapper, FuyouParameterSwapper):
                swapper._take(param)
                swapper._release(param)
            else:
                swapper.swap_out_and_release([param], async_op, force_buffer_release)

    def swap_in(self, params: list[Parameter], async_op: bool = True, swap_in_buffers: Any = None) -> None:
        """Makes the partitions available; returns when they are. Parameters of other swappers are asked there."""
        with in_order(params):
            for param in params:
                swapper = param.nvme_swapper
                if isinstance(swapper, FuyouParameterSwapper):
                    swapper._fetch(param)
                else:
                    swapper.swap_in([param], async_op=False)
        for store in stores_of(params):
            store.move_on()
        self._heap.check()  # stock gathers parameter by parameter while an engine is built

    def swap_into_buffer(self, param: Parameter, dest_buffer: torch.Tensor) -> None:
        dest_buffer.data.copy_(self.values(param))

    def synchronize_reads(self) -> None:
        """Reads end in :meth:`swap_in`."""

    def synchronize_writes(self) -> None:
        """Writes end in :meth:`swap_out_and_release`."""

    def remove_partition_and_release_buffers(self, params: list[Parameter]) -> None:
        """The gathered parameter was released."""
        for param in params:
            swapper = param.nvme_swapper
            if isinstance(swapper, FuyouParameterSwapper):
                swapper._release(param)
            else:
                swapper.remove_partition_and_release_buffers([param])

    # ---- states ---------------------------------------------------------------------------------------------

    def hold(self, param: Parameter, source: Source) -> Partition:
        """From here on ``source`` has the values of a parameter that is not gathered."""
        self._buffers.pop(param.ds_id, None)
        self._aside.pop(param.ds_id, None)
        partition = self.partitions.get(param.ds_id)
        if partition is None:
            partition = self.partitions[param.ds_id] = Partition(param, source)
        else:
            partition.move(source)
        param.ds_tensor.final_location = OffloadDeviceEnum.nvme
        PARTITION_TENSORS.away(partition)
        return partition

    def give_back(self, param: Parameter, values: torch.Tensor) -> None:
        """From here on the partition is DeepSpeed's alone, as ``zero.Init`` builds it in host memory."""
        partition = self.partitions.pop(param.ds_id, None)
        if partition is not None:
            partition.move(partition.source)  # its store has nothing to take back any more
        self._buffers.pop(param.ds_id, None)
        self._aside.pop(param.ds_id, None)
        param.ds_tensor.data = values
        param.ds_tensor.status = AVAILABLE
        param.ds_tensor.final_location = None

    def park(self, param: Parameter, values: torch.Tensor) -> None:
        """From here on the values of a parameter that is not gathered are on storage."""
        space = parked_space(self.activation)
        self.hold(param, space.park(f"parameter {param.ds_id}", values.view(-1)))
        self._heap.check()

    def values(self, param: Parameter) -> torch.Tensor:
        """The partition's values, for reading, wherever they are.

        Raises:
            FuyouStateError: an engine took them, and is gone.
        """
        partition = self.partitions.get(param.ds_id)
        if partition is None or (partition.presence is Presence.HERE and partition.num_bytes):
            tensor: torch.Tensor = param.ds_tensor.data
            return tensor
        return partition.copy()

    def parked(self, param: Parameter) -> ParkedValues | None:
        """What holds the values where no optimizer does and they are on storage, also while they are gathered."""
        partition = self.partitions.get(param.ds_id)
        return partition.source if partition is not None and isinstance(partition.source, ParkedValues) else None

    def head(self, param: Parameter) -> torch.Tensor:
        """The first values of a partition that no optimizer updates, ``HEAD_BYTES`` of them, as they are where it
        lives. Nothing is read."""
        parked = self.parked(param)
        values: torch.Tensor = param.ds_tensor.data if parked is None else parked.head
        return values.view(-1)[: HEAD_BYTES // values.element_size()]

    @contextmanager
    def noting_edit(self, param: Parameter) -> Iterator[None]:
        """Inside, the values of a parameter may become others (:attr:`as_taken`)."""
        known = self.as_taken.get(param.ds_id)
        if known is None:
            yield
            return
        self.as_taken[param.ds_id] = None
        before = self._published(param).clone()
        yield
        if _are_same(before, self._published(param)):
            self.as_taken[param.ds_id] = known

    def is_news(self, param: Parameter, values: torch.Tensor) -> bool:
        """Whether the parameter has other values than these (1-D, this rank's part), which it will get; True where
        nobody wants to know (:attr:`as_taken`)."""
        if self.as_taken.get(param.ds_id) is None:
            return True
        if _are_same(self._published(param), _without_padding(param, values)):
            return False
        self.as_taken[param.ds_id] = None
        return True

    def _published(self, param: Parameter) -> torch.Tensor:
        """This rank's part of the values as they are where it lives, whatever a gathered parameter has."""
        partition = self.partitions.get(param.ds_id)
        tensor: torch.Tensor = param.ds_tensor.data
        return _without_padding(param, tensor if partition is None else partition.copy())

    def replace(self, param: Parameter, values: torch.Tensor) -> None:
        """The values := ``values`` (1-D, this rank's part), wherever they live; on storage alone if it is gathered."""
        partition = self.partitions[param.ds_id]
        self._aside.pop(param.ds_id, None)
        self._write(partition, values)
        is_idle = PARTITION_TENSORS.is_idle(partition)
        if partition.store is not None and (is_idle or partition.presence is not Presence.HERE):
            partition.store.forget(partition)
        elif partition.presence is Presence.HERE and partition.values is not None:
            partition.values.copy_(values.view(-1))

    def copied(self, param: Parameter, event: Any = None) -> None:
        """The device copies the partition until ``event``, or the gather has ended: host memory that was read for that
        may go then.
        """
        partition = self.partitions.get(param.ds_id)
        if partition is not None and partition.store is not None and partition.store.copied(partition, event):
            PARTITION_TENSORS.stand_in(param.ds_tensor)

    def put_aside(self, param: Parameter) -> None:
        """The gathered values stay on the device while the parameter is partitioned. Edits pass here, and end that; a
        step does not, and must say so (:meth:`forget_gathered`)."""
        self._aside[param.ds_id] = param.data
        partition = self.partitions.get(param.ds_id)
        if partition is not None and partition.presence in (Presence.GATHERED, Presence.KEPT):
            PARTITION_TENSORS.away(partition)  # what the device has is neither read ahead nor offered
        else:
            self._release(param)

    def is_aside(self, param: Parameter) -> bool:
        return param.ds_id in self._aside

    def take_gathered(self, param: Parameter) -> torch.Tensor | None:
        """What was put aside, which the parameter is about to have again; None if it was edited, or gathered, since.
        DeepSpeed's look-ahead passes over a partition that is shown, as those of other gathered parameters are, and
        ends at one that is not."""
        values = self._aside.pop(param.ds_id, None)
        if values is None or param.ds_status is not ZeroParamStatus.NOT_AVAILABLE:
            return None
        partition = self.partitions.get(param.ds_id)
        if partition is not None:
            PARTITION_TENSORS.gathered(partition)
        return values

    def forget_gathered(self, param: Parameter) -> None:
        """What was put aside is not needed any more."""
        if self._aside.pop(param.ds_id, None) is not None and param.ds_status is ZeroParamStatus.NOT_AVAILABLE:
            self._release(param)

    def read_behind(self, param: Parameter, wait: Callable[[], object]) -> None:
        """Another thread reads what is DeepSpeed's alone; edits wait for ``wait``, which ends with that."""
        self._edits_wait[param.ds_id] = wait

    def before_edit(self, param: Parameter) -> None:
        """DeepSpeed is about to write a gathered parameter's values into the partition: it must have memory."""
        self._edits_wait.pop(param.ds_id, _nothing)()
        self._aside.pop(param.ds_id, None)
        partition = self.partitions.get(param.ds_id)
        if partition is None or partition.presence is Presence.HERE:
            return
        if partition.store is not None:
            partition.store.forget(partition)
        if partition.presence in (Presence.GATHERED, Presence.AWAY):
            param.ds_tensor.data = self.get_buffer(param, param.ds_tensor.ds_numel)

    def _fetch(self, param: Parameter) -> None:
        partition = self.partitions[param.ds_id]
        if partition.store is not None:
            partition.store.use(partition)
            values = partition.store.fetch(partition)
        else:
            values = partition.copy()
            partition.show(values)
        PARTITION_TENSORS.here(partition, values)

    def _take(self, param: Parameter) -> None:
        values, partition = param.ds_tensor.data, self.partitions.get(param.ds_id)
        if partition is not None:
            self._buffers.pop(param.ds_id, None)
            self._write(partition, values)
        elif param.ds_tensor.final_location == OffloadDeviceEnum.nvme:
            self.park(param, values)

    def _write(self, partition: Partition, values: torch.Tensor) -> None:
        if partition.store is not None:
            partition.store.before_write()
        partition.source.write(values)

    def _release(self, param: Parameter) -> None:
        """Lets the partition go, unless a gather in flight reads it (DeepSpeed releases persistent ones early)."""
        partition = self.partitions.get(param.ds_id)
        if partition is None or param.ds_status is ZeroParamStatus.INFLIGHT:
            return
        if partition.store is not None:
            leaves = partition.store.release(partition)
        else:
            partition.presence, partition.values, leaves = Presence.AWAY, None, True
        if leaves:
            PARTITION_TENSORS.away(partition)


def _without_padding(param: Parameter, part: torch.Tensor) -> torch.Tensor:
    """Of a partition's values, or a checkpoint's of them, what is behind the parameter's end is memory as it was."""
    rank = dist.get_rank(param.ds_process_group)
    return part.view(-1)[: own_numel(part.numel(), param.ds_numel, rank)]


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit."""
    one, other = (values.detach().contiguous().view(-1) for values in (one, other.to(one.device, one.dtype)))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _nothing() -> None:
    """There is nothing to wait for."""


def gathers_to_read(original: Callable[..., Any]) -> Callable[..., Any]:
    """``GatheredParameters.__init__``: with a modifier rank its values are broadcast and written back at the end."""

    @functools.wraps(original)
    def __init__(
        self: Any, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None:
        original(self, params, None if _READS_ONLY.get() else modifier_rank, fwd_module, enabled)

    return __init__


def held_inside(original: Callable[..., None]) -> Callable[..., None]:
    """``GatheredParameters.__enter__``: a forward inside lets nothing go that the context has gathered, whatever
    little may stay gathered; edits would go with it. As DeepSpeed lets go of no parameter that a module has handed out.
    Until it is partitioned: by the context's end, or a step.
    """

    @functools.wraps(original)
    def __enter__(self: Any) -> None:
        original(self)
        for param in self.params if self.enabled else ():
            hold(param)

    return __enter__


def is_held(param: Parameter) -> bool:
    """Whether a ``GatheredParameters`` that is open has gathered it."""
    return param.is_external_param is _HELD


def hold(param: Parameter) -> None:
    """No forward lets it go until it is partitioned."""
    if swaps_here(param) and not param.is_external_param:
        param.is_external_param = _HELD


@contextmanager
def held_gathered(module: nn.Module) -> Iterator[None]:
    """Inside, forwards of the module's parts let nothing go of it that is gathered now: a backward may have asked for
    it. Who asked lets it go."""
    held = [
        param
        for param in module.parameters()
        if swaps_here(param) and param.ds_status is ZeroParamStatus.AVAILABLE and not param.is_external_param
    ]
    for param in held:
        hold(param)
    try:
        yield
    finally:
        for param in held:
            _hold_no_more(param)


def _hold_no_more(param: Parameter) -> None:
    if is_held(param):
        param.is_external_param = False


def through_own_swapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Init._partition_param``: DeepSpeed partitions all parameters of a context with the first one's ``zero.Init``,
    and its swapper; here values go where their own parameter lives. What is freed under ``torch.inference_mode()`` can
    be trained afterwards.
    """

    @functools.wraps(original)
    def _partition_param(
        self: Any, param: Parameter, buffer: Any = None, has_been_updated: bool = False, free_data: bool = True
    ) -> None:
        swapper, of_first = param.nvme_swapper, self.param_swapper
        with ExitStack() as ending:
            if isinstance(swapper, FuyouParameterSwapper):
                _hold_no_more(param)
                if param.ds_tensor is None:
                    swapper.agree(param.ds_process_group)
                if has_been_updated:
                    ending.enter_context(swapper.noting_edit(param))
                    swapper.before_edit(param)
                self.param_swapper = swapper
                ending.callback(setattr, self, "param_swapper", of_first)
            original(self, param, buffer, has_been_updated, free_data)
        if param.is_inference() and not param.numel():  # training may not use it, but asks for its node
            with normal_tensors():
                param.data = torch.empty(0, dtype=param.dtype, device=param.device)

    return _partition_param
