# SPDX-License-Identifier: Apache-2.0
"""A model that something else held before an engine takes it: another engine, or a ``zero.Init`` without our swapper.

Called before stock's constructor runs, in the same way on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from torch.nn import Parameter

from ds_fuyou.log import current_rank, get_logger
from ds_fuyou.telemetry.placement import Placed, placement_table
from ds_fuyou.zero.param_swapper import FuyouParameterSwapper, held_bytes, partition_of

__all__ = ["bring_home", "owners", "release_gathered", "report_inference", "take_over"]

owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By ds_id: what has to end before another training engine may have a parameter (a ``FuyouStage3Optimizer``)."""


def release_gathered(module: torch.nn.Module) -> None:
    """Partitions every gathered parameter of a model; its partition has the same values."""
    registry = getattr(module, "ds_inflight_param_registry", None)
    for param in _zero_params(module):
        if registry is not None and param in registry:
            registry.pop(param).wait()
        if param.ds_status is ZeroParamStatus.AVAILABLE:
            param.ds_active_sub_modules.clear()
            param.partition()


def report_inference(module: torch.nn.Module) -> None:
    """Says on rank 0 where the parameters of an engine without an optimizer live: those that it shares with a training
    engine stand in that one's table.
    """
    params = _zero_params(module)
    rows = [Placed("P16 (parameters)", tier, size) for tier, size in held_bytes(params).items() if size]
    if rows and current_rank() == 0:
        numel = sum(param.ds_tensor.ds_numel for param in params)
        get_logger().info("%s", placement_table(rows, numel, "parameters without an optimizer"))


def take_over(engine: Any, optimizer: Any) -> None:
    """Makes a model's parameters free for ``engine``, and gives those a swapper of ours that have none.

    A training engine that has any of the parameters ``optimizer`` is for makes no further steps: its hooks go, and the
    model keeps its values. (Two would take each other's gradients.)
    """
    module = engine.module
    release_gathered(module)
    for group in optimizer.param_groups if optimizer is not None else ():
        for param in group["params"]:
            earlier = owners.get(getattr(param, "ds_id", -1))
            if earlier is not None:
                earlier.lose_parameters()
    if optimizer is None:
        return  # whatever computes with them only asks whoever has them
    swapper: FuyouParameterSwapper | None = None
    for param in _zero_params(module):
        if isinstance(param.nvme_swapper, FuyouParameterSwapper):
            continue
        if swapper is None:
            swapper = FuyouParameterSwapper(engine._config, param.dtype)
        _adopt(param, swapper)


def _adopt(param: Parameter, swapper: FuyouParameterSwapper) -> None:
    """The partition lies where a ``zero.Init`` with the block would have built it: a frozen one stays there."""
    swapper.agree(param.ds_process_group)
    values = _values(param)
    param.nvme_swapper = swapper
    if param.requires_grad or not swapper.swappable_tensor(param):
        swapper.give_back(param, values if values.device.type == "cpu" else values.cpu())
    else:
        swapper.park(param, values)


def bring_home(engine: Any) -> None:
    """Stock takes a model of ours: its partitions become DeepSpeed's own tensors again."""
    module = engine.module
    ours = [param for param in _zero_params(module) if isinstance(param.nvme_swapper, FuyouParameterSwapper)]
    if not ours:
        return
    release_gathered(module)
    for param in ours:
        earlier = owners.get(param.ds_id)
        if earlier is not None:
            earlier.lose_parameters()
    for param in ours:
        if partition_of(param) is not None:
            param.nvme_swapper.give_back(param, param.nvme_swapper.values(param))
        param.nvme_swapper = None


def _values(param: Parameter) -> torch.Tensor:
    """A partition that another swapper, or none, holds."""
    tensor = param.ds_tensor
    if tensor.status is PartitionedParamStatus.AVAILABLE:
        values: torch.Tensor = tensor.data
        return values
    param.nvme_swapper.swap_in([param], async_op=False)
    copy: torch.Tensor = tensor.data.clone()
    param.nvme_swapper.remove_partition_and_release_buffers([param])
    return copy


def _zero_params(module: torch.nn.Module) -> Iterable[Parameter]:
    return [param for param in module.parameters() if is_zero_param(param)]
