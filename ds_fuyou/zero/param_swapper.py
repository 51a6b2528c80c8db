# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed takes for its parameter swapper: it decides when a partition is there, and fetches it.

DeepSpeed asks through ``param.nvme_swapper`` and the status of ``param.ds_tensor``: a partition whose status
is NOT_AVAILABLE stops the prefetch scan, and a gather of it calls :meth:`FuyouParameterSwapper.swap_in`. That
protocol serves every tier here: NOT_AVAILABLE means "on storage" or "its update is not published yet".

Until the optimizer is built (inside ``zero.Init``) partitions live in DRAM or in an anonymous staging file;
then :meth:`attach` hands the trainable ones to the out-of-core optimizer. Frozen ones stay where they are;
those on storage are read ahead (:meth:`read_frozen_from`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fuyou.ds_json import Activation, activation_of
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.fence import ReleaseFence
from ds_fuyou.host.memory import HeapGuard, aligned_tensor, round_up_to_page
from ds_fuyou.parameters.frozen import FrozenParameters, StagedParam
from ds_fuyou.planner.host_memory import available_host_bytes
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.staging_file import StagingFile
from ds_fuyou.zero.budgets import local_ranks
from ds_fuyou.zero.device import rank_device

__all__ = ["FuyouParameterSwapper", "ParameterSource"]

AVAILABLE, NOT_AVAILABLE = PartitionedParamStatus.AVAILABLE, PartitionedParamStatus.NOT_AVAILABLE


class ParameterSource(Protocol):
    """Where trainable parameters come from once the optimizer exists."""

    def fetch(self, param: Any) -> torch.Tensor: ...

    def release(self, param: Any) -> bool:
        """Whether the partition leaves DRAM with its release."""

    def edit(self, param: Any, values: torch.Tensor) -> None: ...


class FuyouParameterSwapper:
    """Duck-typed AsyncPartitionedParameterSwapper. Used by the training thread alone."""

    def __init__(self, ds_config: Any, model_dtype: torch.dtype) -> None:
        activation = activation_of(ds_config)
        if activation is None:
            raise FuyouStateError("the parameter swapper is built for configurations with an active fuyou block")
        self.activation: Activation = activation
        self.dtype = model_dtype
        self.swap_element_size = model_dtype.itemsize
        self.invalid_buffers: dict[torch.dtype, torch.Tensor] = {}
        # By ds_id: one zero.Init may build the models of several engines.
        self._sources: dict[int, ParameterSource] = {}
        self._staged: dict[int, StagedParam] = {}
        self._frozen: dict[int, FrozenParameters] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._file: StagingFile | None = None
        self._dram_left = self._staging_budget()
        self._heap = HeapGuard()
        device = rank_device(pin_memory=activation.absorbed.pin_memory)
        self._fence = ReleaseFence(device)

    def _staging_budget(self) -> int:
        """Bytes of P16 that zero.Init may keep in DRAM before the tiers are decided for the whole model."""
        config = self.activation.config
        if config.parameters.tier == "nvme":
            return 0
        if config.parameters.tier == "cpu" or not self.activation.state_paths:
            return 1 << 62
        budget = config.dram_budget_bytes
        return (available_host_bytes() // local_ranks() if budget == "auto" else int(budget)) // 4

    # ---- DeepSpeed's questions ----------------------------------------------------------------------------

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Whether a partition built now goes to the staging file."""
        count = param.ds_tensor.ds_numel if param is not None else numel
        num_bytes = int(count or 0) * self.swap_element_size
        if num_bytes <= self._dram_left:
            self._dram_left -= num_bytes
            return False
        return True

    def available_swap_in_buffers(self) -> int:
        """Zero: DeepSpeed's own look-ahead is not used, ours knows more."""
        return 0

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """Memory for a partition that is about to be filled and swapped out."""
        memory = aligned_tensor(round_up_to_page(numel * param.dtype.itemsize))
        self._buffers[param.ds_id] = memory
        return memory.view(param.dtype)[:numel]

    def reserve_partitioned_swap_space(self, partition_num_elems: Iterable[int]) -> None:
        """Nothing to reserve: updates write P16 from their own staging memory."""

    def swap_out_and_release(
        self, params: list[Any], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """The partition was built or edited; its new values are in ``param.ds_tensor``."""
        for param in params:
            source = self._sources.get(param.ds_id)
            if source is not None:
                source.edit(param, param.ds_tensor.data)
            elif param.ds_tensor.final_location == OffloadDeviceEnum.nvme:
                self._stage(param)
            self._release(param)

    def swap_in(self, params: list[Any], async_op: bool = True, swap_in_buffers: Any = None) -> None:
        """Makes the partitions available; returns when they are.

        DeepSpeed asks the first parameter's swapper for all of them; others may have been built by another zero.Init.
        """
        self._fence.sweep()
        for param in params:
            param.ds_tensor.data = param.nvme_swapper._values(param)
            param.ds_tensor.status = AVAILABLE

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        dest_buffer.data.copy_(self._values(param))

    def synchronize_reads(self) -> None:
        """Reads end in :meth:`swap_in`."""

    def synchronize_writes(self) -> None:
        """Writes end in :meth:`swap_out_and_release`."""

    def remove_partition_and_release_buffers(self, params: list[Any]) -> None:
        """The gathered parameter was released."""
        for param in params:
            self._release(param)

    # ---- the two lives of a partition ---------------------------------------------------------------------

    def attach(self, source: ParameterSource, params: Iterable[Any]) -> None:
        """From here on ``source`` holds these parameters; their staged copies are dropped."""
        for param in params:
            self._sources[param.ds_id] = source
            staged = self._staged.pop(param.ds_id, None)
            if staged is not None and self._file is not None:
                self._file.forget(staged.offset, staged.num_bytes)
            param.ds_tensor.final_location = OffloadDeviceEnum.nvme
        if self._file is not None and not self._staged:
            self.close()

    def detach(self, params: Iterable[Any]) -> None:
        """Their engine was destroyed: nothing of these parameters is kept, and no reference to what held them."""
        for param in params:
            self._buffers.pop(param.ds_id, None)
            self._frozen.pop(param.ds_id, None)
            staged = self._staged.pop(param.ds_id, None)
            if self._sources.pop(param.ds_id, None) is not None or staged is not None:
                self.mark_away(param)
        if not self._staged:
            self.close()

    def is_staged(self, param: Any) -> bool:
        return param.ds_id in self._staged

    def staged(self, param: Any) -> StagedParam:
        """Where a partition lies that is not attached."""
        return self._staged[param.ds_id]

    def read_frozen_from(self, frozen: FrozenParameters) -> None:
        """From here on ``frozen`` reads the partitions it knows."""
        self._frozen.update({ds_id: frozen for ds_id in self._staged if ds_id in frozen})

    def _values(self, param: Any) -> torch.Tensor:
        source = self._sources.get(param.ds_id)
        if source is not None:
            return source.fetch(param)
        if param.ds_id in self._frozen:
            return self._frozen[param.ds_id].fetch(param.ds_id)
        staged = self._staged.get(param.ds_id)
        if staged is None:
            raise FuyouStateError(
                f"parameter {param.ds_id} has no values any more: the engine that held them was destroyed, or failed "
                "while it was built. Read or save parameters before engine.destroy(); build the model anew for "
                "another engine"
            )
        memory = aligned_tensor(staged.num_bytes)
        staged.file.read(staged.offset, memory)
        return staged.view(memory)

    def staged_values(self, param: Any) -> torch.Tensor:
        """A partition's values before :meth:`attach`, wherever they are.

        Raises:
            FuyouStateError: an engine took them, and is gone.
        """
        away = self.is_staged(param) or param.ds_tensor.status == NOT_AVAILABLE
        return self._values(param) if away else param.ds_tensor.data

    def _stage(self, param: Any) -> None:
        values = param.ds_tensor.data
        num_bytes = round_up_to_page(values.numel() * values.element_size())
        memory = self._buffers.pop(param.ds_id, None)
        if memory is None:
            memory = aligned_tensor(num_bytes)
            memory.view(values.dtype)[: values.numel()].copy_(values)
        staged = self._staged.get(param.ds_id)
        if staged is None:
            file = self._staging_file()
            staged = StagedParam(file, file.reserve(num_bytes), values.numel(), num_bytes, values.dtype)
            self._staged[param.ds_id] = staged
        if param.ds_id in self._frozen:
            self._frozen[param.ds_id].forget(param.ds_id)
        staged.file.write(staged.offset, memory)
        self._heap.check()

    def replace_staged(self, param: Any, values: torch.Tensor) -> None:
        """Writes new values of a staged partition (1-D, its dtype)."""
        staged = self._staged[param.ds_id]
        memory = aligned_tensor(staged.num_bytes)
        memory.view(staged.dtype)[: staged.numel].copy_(values.view(-1))
        if param.ds_id in self._frozen:
            self._frozen[param.ds_id].forget(param.ds_id)
        staged.file.write(staged.offset, memory)
        if param.ds_tensor.status == AVAILABLE:
            param.ds_tensor.data.copy_(values.view(-1))

    def _release(self, param: Any) -> None:
        """Lets the partition go, unless a gather in flight reads it (DeepSpeed releases persistent ones early)."""
        if param.ds_status == ZeroParamStatus.INFLIGHT:
            return
        source = self._sources.get(param.ds_id)
        leaves = source.release(param) if source is not None else self.is_staged(param)
        if leaves:
            self.mark_away(param)

    def mark_away(self, param: Any) -> None:
        """The partition is not in DRAM: a gather has to ask for it. A one-element tensor stands in."""
        dtype = param.ds_tensor.dtype
        self._fence.hold(param.ds_tensor.data)
        if dtype not in self.invalid_buffers:
            self.invalid_buffers[dtype] = torch.empty(1, dtype=dtype)
        param.ds_tensor.data = self.invalid_buffers[dtype].data
        param.ds_tensor.status = NOT_AVAILABLE

    def _staging_file(self) -> StagingFile:
        if self._file is None:
            directory = Path(self.activation.state_paths[0])
            make_io: Callable[[], IoLane] = lambda: IoLane(  # noqa: E731
                IoSettings(engine=self.activation.config.io.engine), lambda fd: directory
            )
            self._file = StagingFile(directory, make_io)
        return self._file

    def close(self) -> None:
        """Frees the staging file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
