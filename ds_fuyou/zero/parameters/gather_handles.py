# SPDX-License-Identifier: Apache-2.0
"""Gathers that do not stop the host, nor a module for the sake of a later one.

Stock's handles of a gather on one rank copy the partition to the device and then synchronise the stream, in backward
too. Here an event follows the copies, and the stream that waits for the handle comes after it: the coordinator's
gathering stream, which the computing stream waits for and whose work in flight it bounds, or the computing stream
itself. Host memory that was read for such a copy is given up after the same event, if it is not kept for a later use.

At every module the computing stream waits for all that the gathering stream was given. Stock launches gathers there,
those of later modules, too. Here, on one rank, copies have a stream of their own, and the gathering stream comes after
them when a module needs one of them: so no module waits for what was gathered ahead for later ones, but for what came
in one gather with its own. Gathers that are launched where the model computes (``overlap_comm: false``) stay there:
DeepSpeed lets their memory go in the order of that stream alone.

On several ranks stock waits for each partition's copy to the device, which lies on the gathering stream behind the
collective before it, so behind the other ranks. Here partitions are copied on a stream of their own, and are on their
way when stock asks for them; the gathering stream comes after them. Their memory there goes when the gather was waited
for, behind the stream that waited: until then the collective may read it. The rest is launched where stock launches it,
for its buffers are let go in the order of that stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.nn import Parameter

from ds_fuyou.zero.device import rank_device
from ds_fuyou.zero.parameters.param_swapper import swaps_here

__all__ = ["copied_ahead", "copying_stream", "event_ordered"]


def event_ordered(original: type) -> Callable[[Any], Any]:
    """Replaces a handle class: ours for parameters of an engine with the block, stock's for all others."""

    class EventOrderedHandle(original):
        def __init__(self, params: Any) -> None:
            self._params = list(params) if isinstance(params, (list, tuple)) else [params]
            device = rank_device()
            with nullcontext() if device.computes_here() else device.stream(copying_stream()):
                super().__init__(params)
                self._copied = None if device.is_host else device.record_event()
            if self._copied is not None:
                for param in self._params:
                    param.nvme_swapper.copied(param, self._copied)

        def wait(self, **kwargs: Any) -> None:
            """Orders the current stream; marks the parameters available, once: each of them waits for their handle."""
            if self._copied is not None:
                rank_device().current_stream().wait_event(self._copied)
            for param in self._params:
                param.ds_status = ZeroParamStatus.AVAILABLE
            self._params = []

    @functools.wraps(original, updated=())
    def make(params: Any) -> Any:
        every = params if isinstance(params, (list, tuple)) else [params]
        return EventOrderedHandle(params) if all(map(swaps_here, every)) else original(params)

    return make


def copied_ahead(original: Callable[[Any, Parameter], None]) -> Callable[[Any, Parameter], None]:
    """``Init._convert_to_deepspeed_param``, which hangs the functions of a gather on a parameter."""

    @functools.wraps(original)
    def _convert_to_deepspeed_param(self: Any, param: Parameter) -> None:
        original(self, param)
        gather = param.all_gather_coalesced

        @functools.wraps(gather)
        def all_gather_coalesced(params: Iterable[Parameter], safe_mode: bool = False, quantize: bool = False) -> Any:
            params = list(params)
            with _undone_where_it_fails(params):
                ours = not quantize and all(map(swaps_here, params))
                if not ours or not _are_shared(params) or not _are_here(self, params):
                    return gather(params, safe_mode=safe_mode, quantize=quantize)
                with _on_the_device(params) as copies:
                    return _Gather(gather(params, safe_mode=safe_mode, quantize=quantize), copies)

        param.all_gather_coalesced = all_gather_coalesced

    return _convert_to_deepspeed_param


@contextmanager
def _undone_where_it_fails(params: Iterable[Parameter]) -> Iterator[None]:
    """No handle comes of a gather that raises: a device is out of memory, and the script tries a smaller batch. In
    stock its parameters stay "in flight", and no forward after it can gather them.
    """
    try:
        yield
    except BaseException:
        for param in params:
            if param.ds_status is ZeroParamStatus.INFLIGHT and swaps_here(param):
                param.ds_status = ZeroParamStatus.NOT_AVAILABLE
                param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        raise


def _are_shared(params: Iterable[Parameter]) -> bool:
    """Each among several ranks with devices, and what is gathered is what we hold: no second partition in a node."""
    return not rank_device().is_host and all(
        dist.get_world_size(group=param.ds_process_group) > 1 and param.ds_secondary_tensor is None for param in params
    )


def _are_here(init: Any, params: list[Parameter]) -> bool:
    """In host memory, after a wait; unless the memory of one was taken for another of them."""
    init._ensure_availability_of_partitioned_params(params)
    return all(param.ds_tensor.status is PartitionedParamStatus.AVAILABLE for param in params)


class _Gather:
    """A handle of stock's, and what its collective reads."""

    def __init__(self, handle: Any, copies: list[torch.Tensor]) -> None:
        self._handle, self._copies = handle, copies

    def wait(self, **kwargs: Any) -> None:
        """Each of its parameters waits for it."""
        self._handle.wait(**kwargs)
        stream = rank_device().current_stream()
        for copy in self._copies:
            copy.record_stream(stream)
        self._copies = []


@functools.cache
def copying_stream() -> Any:
    """Of this process's device: it has one."""
    return rank_device().new_stream()


@contextmanager
def _on_the_device(params: list[Parameter]) -> Iterator[list[torch.Tensor]]:
    """Inside, partitions are shown on the device, where they are by the time that work of the current stream runs.
    Where a gather raises, nobody uses the copies, and host memory is as it was.
    """
    device = rank_device()
    gathering, copying = device.current_stream(), copying_stream()
    partitions = [param.ds_tensor for param in params]
    copies: list[torch.Tensor] = []
    try:
        with device.stream(copying):
            for partition in partitions:
                copy = partition.data.to(device.torch_device, non_blocking=True)
                copy.__dict__.update(partition.__dict__)  # what DeepSpeed notes of a partition
                copies.append(copy)
            copied = device.record_event()
        gathering.wait_event(copied)
        for param, copy in zip(params, copies, strict=True):
            copy.record_stream(gathering)
            param.ds_tensor = copy
        yield copies
    finally:
        for param, partition in zip(params, partitions, strict=True):
            param.ds_tensor = partition
    for param in params:
        param.nvme_swapper.copied(param, copied)
