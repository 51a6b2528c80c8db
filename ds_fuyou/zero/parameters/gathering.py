# SPDX-License-Identifier: Apache-2.0
"""Many parameters gathered at once, or one after another to be saved: read ahead, in little host memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus, is_zero_param
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from ds_fuyou.host.device import failure_of
from ds_fuyou.host.memory import normal_tensors
from ds_fuyou.zero.device import rank_device
from ds_fuyou.zero.parameters.param_swapper import (
    hold,
    in_order,
    is_held,
    partition_bytes,
    partition_of,
    stores_of,
    swaps_here,
)

__all__ = [
    "edits_kept",
    "for_training",
    "in_portions",
    "in_use_order",
    "not_of_persistent",
    "release_gathered",
    "replaced",
    "settle",
    "shapes_alone",
    "unwatch_gathers",
    "watch_forwards",
    "watch_gathers",
]


@dataclass
class _Watched:
    """``wants_gradients``: the forward that runs, when it began; re-entrant checkpointing turns them off inside."""

    coordinator: Any
    wants_gradients: bool = False


_GATHERING: weakref.WeakKeyDictionary[torch.nn.Module, _Watched] = weakref.WeakKeyDictionary()
"""Models of engines, with which DeepSpeed keeps the handles of gathers in flight."""


def in_portions(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Init._all_gather``: what ``GatheredParameters`` asks for. DeepSpeed has all partitions in host memory before
    the first is gathered. Here as many are as a quarter of the look-ahead holds, the next ones are read meanwhile, and
    the memory of those that are gathered is used again; but for one rank of the host: its gathered tensors are that
    memory. In an evaluation as in :func:`for_training`: a module's forward may ask for another one's parameters.
    """

    @functools.wraps(original)
    def _all_gather(self: Any, param_list: list[Parameter], async_op: bool = False, hierarchy: Any = None) -> Any:
        if torch.is_inference_mode_enabled() and any(map(swaps_here, param_list)):
            with normal_tensors(), torch.no_grad():
                return _all_gather(self, param_list, async_op, hierarchy)
        if not async_op:
            settle(param_list)
        stores = [] if async_op else stores_of(param_list)
        if not stores:
            gather = original(self, param_list, async_op=async_op, hierarchy=hierarchy)
            if not async_op:
                _await_copies(param_list)
            return gather
        with in_order(param_list):
            for portion in _portions(param_list, max(1, min(store.read_bytes for store in stores) // 4)):
                away = [param for param in portion if param.ds_status is ZeroParamStatus.NOT_AVAILABLE]
                original(self, portion, async_op=False, hierarchy=hierarchy)
                if dist.get_world_size() > 1:
                    _let_go(away)
        _await_copies(param_list)
        for param in param_list:
            partition = partition_of(param)
            if partition is not None and partition.store is not None:
                partition.store.lend(partition)
        return None

    return _all_gather


def _portions(params: Sequence[Parameter], limit_bytes: int) -> Iterator[list[Parameter]]:
    """The same on all ranks. One alone gathers nothing together on the host: there all are one portion."""
    if dist.get_world_size() == 1 and rank_device().is_host:
        yield list(params)
        return
    portion: list[Parameter] = []
    num_bytes = 0
    for param in params:
        size = partition_bytes(param)
        if portion and num_bytes + size > limit_bytes:
            yield portion
            portion, num_bytes = [], 0
        portion.append(param)
        num_bytes += size
    yield portion


def _await_copies(params: Sequence[Parameter]) -> None:
    """Of one rank, as stock does behind a gather that it does not return a handle of: a script may use the values on
    another stream, and what is gathered next is copied on another one, whose end says nothing of these copies. What was
    gathered already may be on its way on DeepSpeed's gathering stream."""
    if dist.get_world_size() == 1 and any(map(swaps_here, params)):
        rank_device().synchronize()


def _let_go(params: Sequence[Parameter]) -> None:
    """Of several ranks: a blocking gather was issued, and the gathered tensor is another one than the partition."""
    device = rank_device()
    event = None if device.is_host else device.record_event()
    for param in params:
        if swaps_here(param):
            param.nvme_swapper.copied(param, event)


def watch_gathers(module: torch.nn.Module, coordinator: Any) -> None:
    """An engine of ours gathers this model's parameters from now on."""
    _GATHERING[module] = _Watched(coordinator)


def unwatch_gathers(module: torch.nn.Module, coordinator: Any) -> None:
    """The engine is destroyed, unless another one has the model by now."""
    if module in _GATHERING and _GATHERING[module].coordinator is coordinator:
        del _GATHERING[module]


def for_training(fetch: Callable[..., None]) -> Callable[..., None]:
    """``fetch_sub_module``: what an evaluation under ``torch.inference_mode()`` gathers may still be gathered when
    training goes on (small parameters stay so), and autograd saves no tensor that was made in that mode."""

    @functools.wraps(fetch)
    def fetch_sub_module(current_submodule: torch.nn.Module, forward: bool) -> None:
        if not torch.is_inference_mode_enabled():
            return fetch(current_submodule, forward)
        with normal_tensors(), torch.no_grad():
            return fetch(current_submodule, forward)

    return fetch_sub_module


def not_of_persistent(register: Callable[[torch.nn.Module, Parameter], None]) -> Callable[..., None]:
    """``register_external_parameter``, as reading a parameter that is not gathered calls it. Once the order of training
    is recorded stock has gathered small ones by then, so it no more notes them as another module's, too; here the first
    use after a step gathers them. Noted then, or in an evaluation, they would not be in that order, and training would
    end with an error. While it is recorded they have to be: stock releases them behind their module, and who computes
    the reader again finds them by what was noted alone.
    """

    @functools.wraps(register)
    def register_external_parameter(module: torch.nn.Module, parameter: Parameter) -> None:
        is_returned = getattr(parameter, "is_external_param", False) is True  # by a module: stock notes these
        if is_returned or not (swaps_here(parameter) and parameter.ds_persist) or _is_recording(parameter):
            register(module, parameter)

    return register_external_parameter


def _is_recording(parameter: Parameter) -> bool:
    """Whether a forward runs of the parameter's engine, of training, whose order DeepSpeed does not know yet."""
    return any(
        watched.wants_gradients and not watched.coordinator.is_complete_trace()
        for module, watched in _GATHERING.items()
        if any(parameter is each for each in module.parameters())
    )


def settle(params: Sequence[Parameter]) -> None:
    """Ends gathers in flight. In an evaluation DeepSpeed prefetches for a backward that does not come; what that left
    it can neither use nor partition before the next forward.
    """
    for registry in [module.ds_inflight_param_registry for module in _GATHERING]:
        for param in params if registry else ():
            if param in registry:
                registry.pop(param).wait()


def watch_forwards(module: torch.nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """From now on a forward says when it begins whether it is of training, and one without gradients leaves no gather
    in flight. DeepSpeed prefetches for a backward that does not come, and scripts gather what ``ds_status`` says is not
    available, as DeepSpeed-Chat's saving does: of a parameter in flight they would see no values. (Stock seldom comes
    to it: it keeps 1e9 gathered elements.)
    """
    watched = _GATHERING[module]

    def before(*_: Any) -> None:
        watched.wants_gradients = torch.is_grad_enabled()

    def after(module: torch.nn.Module, *_: Any) -> None:
        watched.wants_gradients = False
        if not torch.is_grad_enabled():
            registry = module.ds_inflight_param_registry
            for param in list(registry):
                registry.pop(param).wait()
                param.partition()

    begins = module.register_forward_pre_hook(torch.compiler.disable(before))
    return begins, module.register_forward_hook(torch.compiler.disable(after))


@contextmanager
def shapes_alone(params: Iterable[Parameter]) -> Iterator[None]:
    """Inside, ``param.all_gather()`` gives a partitioned parameter its shape, and no values, until it is partitioned.
    Stock gathers one after the other to hang hooks on their gradients, which ask for a shape alone: all of P16 would be
    read before the first forward.
    """
    kept: dict[Parameter, tuple[Any, Any, torch.Tensor]] = {}

    def shape(param: Parameter) -> None:
        one = torch.empty(1, dtype=param.dtype, device=param.device)
        param.data = one.as_strided(param.ds_shape, (0,) * len(param.ds_shape))

    def free(param: Parameter) -> None:
        param.data = kept[param][2]

    for param in params:
        if param.ds_status is ZeroParamStatus.NOT_AVAILABLE:
            kept[param] = (param.all_gather, param.partition, param.data)
            param.all_gather, param.partition = functools.partial(shape, param), functools.partial(free, param)
    try:
        yield
    finally:
        for param, (all_gather, partition, freed) in kept.items():
            param.all_gather, param.partition, param.data = all_gather, partition, freed


def release_gathered(module: torch.nn.Module) -> None:
    """Partitions every gathered parameter of a model; its partition has the same values."""
    params = in_use_order(module)
    settle(params)
    for param in params:
        if param.ds_status is ZeroParamStatus.AVAILABLE:
            param.ds_active_sub_modules.clear()
            param.partition()


@contextmanager
def edits_kept(module: torch.nn.Module) -> Iterator[None]:
    """Around an engine's end: what a ``GatheredParameters`` that is still open has gathered is so behind it, too, with
    the values that the script has given it. The context's end broadcasts and partitions them. A collective. A device
    that has failed has none of them any more.
    """
    held = [param for param in in_use_order(module) if swaps_here(param) and is_held(param)]
    if held and failure_of(rank_device()):
        held = []
    values = [param.detach().clone() for param in held]
    yield
    if not held:
        return
    held[0].all_gather(held)
    for param, given in zip(held, values, strict=True):
        param.data.copy_(given)
        hold(param)


@contextmanager
def replaced(module: torch.nn.Module) -> Iterator[None]:
    """Around what replaces states and P16 by a call of the script's own: parameters may be gathered, behind an
    evaluation or because the script holds them. As in stock these keep their values, but where those are the memory of
    the partition, as on one rank of the host: then they are new. No collective: a rank may fail in what is inside.
    """
    params = in_use_order(module)
    settle(params)
    gathered = [param for param in params if param.ds_status is ZeroParamStatus.AVAILABLE and swaps_here(param)]
    shared = [param for param in gathered if not param.ds_active_sub_modules and _is_its_partition(param)]
    for param in shared:
        param.partition()
    try:
        yield
    finally:
        again = [param for param in shared if param.ds_persist]
        if again:
            again[0].all_gather(again)
        for param in gathered:  # DeepSpeed takes for granted that partitions of what is gathered are there
            if (
                param.ds_status is ZeroParamStatus.AVAILABLE
                and param.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE
            ):
                param.nvme_swapper.swap_in([param], async_op=False)


def _is_its_partition(param: Parameter) -> bool:
    address = param.data.untyped_storage().data_ptr()
    return address != 0 and address == param.ds_tensor.untyped_storage().data_ptr()


def in_use_order(module: torch.nn.Module) -> list[Parameter]:
    """Partitioned parameters as a walk over the modules comes to them: about the order of forward, and that of
    ``state_dict``."""
    every = (param for child in module.modules() for param in child.parameters(recurse=False))
    return list(dict.fromkeys(param for param in every if is_zero_param(param)))
