# SPDX-License-Identifier: Apache-2.0
"""A model that something else held before an engine takes it: another engine, or a ``zero.Init`` without our swapper.

Called before stock's constructor runs, in the same way on all ranks.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch.nn import Parameter

from ds_fuyou.ds_json import Activation
from ds_fuyou.log import current_rank, get_logger
from ds_fuyou.telemetry.placement import Placed, placement_table
from ds_fuyou.zero.parameters.gathering import release_gathered
from ds_fuyou.zero.parameters.inference import end_reads
from ds_fuyou.zero.parameters.param_swapper import (
    FuyouParameterSwapper,
    held_bytes,
    partition_of,
    stores_of,
    swaps_here,
)
from ds_fuyou.zero.stock import is_served

__all__ = ["activation_of_params", "bring_home", "owners", "report_inference", "take_over"]

owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By ds_id: what has to end before another training engine may have a parameter (a ``FuyouStage3Optimizer``)."""


def activation_of_params(module: torch.nn.Module) -> Activation | None:
    """Of the block that a model's parameters were built with, or an engine had; None where DeepSpeed alone has them."""
    ours = (param.nvme_swapper for param in module.parameters() if swaps_here(param))
    swapper: FuyouParameterSwapper | None = next(ours, None)
    return None if swapper is None else swapper.activation


def report_inference(module: torch.nn.Module) -> None:
    """Says on rank 0 where the parameters of an engine without an optimizer live: those that it shares with a training
    engine stand in that one's table.
    """
    params = _zero_params(module)
    rows = [Placed("P16 (parameters)", tier, size) for tier, size in held_bytes(params).items() if size]
    pool_bytes = sum(store.capacity_bytes for store in stores_of(params))
    if pool_bytes:
        rows.append(Placed("look-ahead pool", "cpu", pool_bytes, "parameters in use or read ahead"))
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
    if optimizer is not None:
        end_reads(_zero_params(module))
    for group in optimizer.param_groups if optimizer is not None else ():
        for param in group["params"]:
            earlier = owners.get(getattr(param, "ds_id", -1))
            if earlier is not None:
                earlier.lose_parameters()
    _forget_ended(module)
    if optimizer is None:
        return  # whatever computes with them only asks whoever has them
    swapper: FuyouParameterSwapper | None = None
    held = _zero_params(module)
    plain = [param for param in module.parameters() if not is_zero_param(param)]
    if held and plain:  # stock's constructor does it in this way, but later: with the zero.Init of the first
        held[0].convert_to_zero_parameters(param_list=plain)
    for param in _zero_params(module):
        if swaps_here(param):
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


def _forget_ended(module: torch.nn.Module) -> None:
    """Takes away what an engine that has ended left at modules that no other serves: functions by which a backward
    fetches and releases parameters. DeepSpeed makes none where it finds some, and the next engine's backward would ask
    a coordinator that knows neither its order nor its reads, and whose gathers in flight nobody ends.
    """
    for child in module.modules():
        if not is_served(child):
            for name in ("pre_bwd_fn", "post_bwd_fn"):
                child.__dict__.pop(name, None)


def bring_home(engine: Any) -> None:
    """Stock takes a model of ours: its partitions become DeepSpeed's own tensors again."""
    module = engine.module
    ours = [param for param in _zero_params(module) if swaps_here(param)]
    if not ours:
        return
    release_gathered(module)
    end_reads(ours)
    for param in ours:
        earlier = owners.get(param.ds_id)
        if earlier is not None:
            earlier.lose_parameters()
    _forget_ended(module)
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


def _zero_params(module: torch.nn.Module) -> list[Parameter]:
    return [param for param in module.parameters() if is_zero_param(param)]
