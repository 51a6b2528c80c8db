# SPDX-License-Identifier: Apache-2.0
"""The few stock functions that differ between the supported DeepSpeed versions, under one name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime import utils as ds_utils
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module
from torch.nn import Parameter

from ds_fuyou.errors import FuyouCompatError
from ds_fuyou.parameters.store import ParameterStore

__all__ = [
    "bound_gathered",
    "combined_grad_norm",
    "forget_modules",
    "get_norm_dtype",
    "is_boundary",
    "is_ours",
    "is_served",
    "iter_module_params",
    "of_coordinator",
    "reused_numel",
    "set_of_coordinator",
    "staying_numel",
    "watch_releases",
    "without_prefetch_to_host",
]

_PRIVATE = "_PartitionedParameterCoordinator__"
_BOUNDS = ("max_reuse_dist_in_numel", "max_n_available_params")


def is_ours(optimizer: Any) -> bool:
    """Whether an engine's ``optimizer`` is a ``FuyouStage3Optimizer``, without importing that module."""
    return hasattr(optimizer, "rank_state")


def iter_module_params(module: torch.nn.Module) -> Sequence[Parameter]:
    """The parameters DeepSpeed fetches with a module, in a fixed order."""
    is_leaf = bool(module._modules) and z3_leaf_module(module)  # without children it is all the same, and asking slow
    if is_leaf or getattr(module, "_external_params", True):
        params = iter_params(module, recurse=is_leaf)
    else:
        params = module._parameters.values()  # what iter_params() finds then, without its walk
    found = [param for param in params if param is not None]
    return found if len(found) < 2 else [*{param.ds_id: param for param in found}.values()]


def without_prefetch_to_host(coordinator: Any) -> None:
    """DeepSpeed does not look for partitions to bring to host memory, module by module: that is done here, by who knows
    more (``FuyouParameterSwapper.available_swap_in_buffers`` would answer that there is nothing to do)."""
    set_of_coordinator(coordinator, "prefetch_nvme", False)


def bound_gathered(coordinator: Any, parameters: ParameterStore, itemsize: int) -> None:
    """Gathered parameters are host memory: as many stay alive as a quarter of the look-ahead holds, not the 1e9
    elements that stock allows a device; unless none is read, or one rank, whose gathered parameters are the
    look-ahead's memory, has room for all. To be called again where parameters have moved.
    """
    stock = vars(coordinator).setdefault(
        "fuyou_stock_bounds", {name: of_coordinator(coordinator, name) for name in _BOUNDS}
    )
    is_bound = parameters.reads and not (dist.get_world_size() == 1 and parameters.holds_all)
    for name, value in stock.items():
        set_of_coordinator(coordinator, name, min(value, parameters.read_bytes // itemsize // 4) if is_bound else value)
    _cache_of(of_coordinator(coordinator, "params_to_release")).cache_clear()  # it remembers answers of another bound


def is_served(module: torch.nn.Module) -> bool:
    """Whether an engine fetches the module's parameters."""
    hooks = module._forward_pre_hooks.values()
    return any(getattr(hook, "__module__", "") == parameter_offload.__name__ for hook in hooks)


def forget_modules(module: torch.nn.Module, coordinator: Any) -> None:
    """An engine of this model has ended: what no other one serves goes when the script lets it go, and its parameters
    with it. DeepSpeed keeps the roots of all engines of a process, what runs of a forward that an exception ended, and
    each module whose parameters it has let go. In such a forward whoever reads a parameter would gather it for ever.
    """
    ended = {child for child in module.modules() if not is_served(child)}
    for child in ended:
        if getattr(child._parameters, "_in_forward", False):
            child._parameters._in_forward = False
    kept = parameter_offload.FWD_MODULE_STACK
    for each in [each for each in kept if each in ended]:  # an engine may end in a thread beside another one's forward
        kept.remove(each)
    _cache_of(of_coordinator(coordinator, "params_to_release")).cache_clear()


def _cache_of(function: Any) -> Any:
    """What ``functools.lru_cache`` made, behind decorators of DeepSpeed that do not say what they wrap.

    Raises:
        FuyouCompatError: nothing is remembered there.
    """
    behind = [getattr(function, "__func__", function)]
    for each in behind:
        if hasattr(each, "cache_clear"):
            return each
        behind += [
            cell.cell_contents for cell in getattr(each, "__closure__", None) or () if callable(cell.cell_contents)
        ]
    raise FuyouCompatError(f"{function} of DeepSpeed remembers nothing: this version is not supported")


def of_coordinator(coordinator: Any, name: str) -> Any:
    """What DeepSpeed's coordinator keeps under a private name."""
    return getattr(coordinator, _PRIVATE + name)


def set_of_coordinator(coordinator: Any, name: str, value: Any) -> None:
    """Raises AttributeError if it keeps nothing under that name."""
    of_coordinator(coordinator, name)
    setattr(coordinator, _PRIVATE + name, value)


def reused_numel(offload: Any) -> int:
    """Elements of parameters that are not let go at the end of forward: those that backward needs again within the
    distance that is set. On the way there each is passed twice.
    """
    coordinator = offload.get_param_coordinator()
    return int(of_coordinator(coordinator, "max_reuse_dist_in_numel")) // 2


def staying_numel(coordinator: Any) -> int:
    """Elements of parameters that may stay from one micro-batch to the next beside those that are gathered ahead."""
    most, ahead = (of_coordinator(coordinator, name) for name in ("max_n_available_params", "prefetch_bucket_sz"))
    return max(0, int(most) - int(ahead))


def watch_releases(coordinator: Any, let_go: Callable[[int], None], current_stream: Callable[[], Any]) -> None:
    """``let_go`` is told, behind each release of a parameter, how many bytes of gathered values that let go.

    Without ``free_data`` DeepSpeed drops them itself, after this and without a word to the allocator, which would give
    them to the next gather of the same stream while the one that computes still reads them.
    """
    stock_release = of_coordinator(coordinator, "release_param")

    @torch.compiler.disable
    def release(param: Parameter, free_data: bool = True) -> None:
        num_bytes = param.data.nbytes if param.ds_status is ZeroParamStatus.AVAILABLE else 0
        if num_bytes and not free_data:
            param.data.record_stream(current_stream())
        stock_release(param, free_data)
        if num_bytes and param.ds_status is ZeroParamStatus.NOT_AVAILABLE:
            let_go(num_bytes)

    set_of_coordinator(coordinator, "release_param", release)


def combined_grad_norm(norm_groups: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Global norm of the sub-groups' norms as the installed version combines them, and whether it is invalid.

    DeepSpeed 0.18 has no check after the overflow check; a non-finite norm skips the step here in every version.
    """
    combine = getattr(ds_utils, "combine_grad_norm_groups", None)
    if combine is not None:
        norm = combine(norm_groups)
        return norm, bool(ds_utils.is_invalid_grad_norm(norm))
    stacked = torch.stack(list(norm_groups))
    norm = torch.linalg.vector_norm(stacked)
    return norm, bool((~torch.isfinite(stacked)).any()) or bool((stacked < 0).any())


def is_boundary(optimizer: Any) -> bool:
    """Whether this micro-batch is the last of the step: a method since 0.19, an attribute before."""
    flag = optimizer.is_gradient_accumulation_boundary
    return bool(flag() if callable(flag) else flag)


def get_norm_dtype() -> torch.dtype:
    """In which dtype the installed version accumulates gradient norms: fp64, or fp32 on devices without it."""
    stock = getattr(zero_utils, "get_norm_dtype", None)
    dtype: torch.dtype = stock() if stock is not None else torch.float64
    return dtype
