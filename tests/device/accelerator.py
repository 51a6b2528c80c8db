# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed on the stand-in device: the accelerator, and collectives that gloo does on copies in host memory."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.utils._pytree import tree_leaves

from tests.device.backend import NAME, install_backend
from tests.device.faults import leave_out

__all__ = ["StandinAccelerator", "install", "install_from"]


class StandinAccelerator(CPU_Accelerator):
    """Operators that DeepSpeed compiles are the CPU's; all else is answered by ``torch.standin``."""

    _torch_pins_host_memory = True
    waits_block = True

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = NAME, "gloo"

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(NAME) if device_index is None else torch.device(NAME, device_index)

    def current_device_name(self) -> str:
        return f"{NAME}:{self.current_device()}"

    def visible_devices_envs(self) -> list[str]:
        return ["STANDIN_VISIBLE_DEVICES"]

    def is_fp16_supported(self) -> bool:
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME

    # As for devices with memory of their own; CPU_Accelerator pins nothing.
    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        return super(CPU_Accelerator, self).pin_memory(tensor, make_copy=make_copy, match_shape=match_shape)

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        return tensor.new_empty(shape, pin_memory=True)

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        torch.standin.core.register_host_memory(address, num_bytes)
        return True

    def unregister_host_memory(self, address: int) -> None:
        torch.standin.core.unregister_host_memory(address)


def _forwarded(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(torch.standin, name)(*args, **kwargs)


for _name in (
    "set_device",
    "current_device",
    "device_count",
    "synchronize",
    "stream",
    "current_stream",
    "default_stream",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "empty_cache",
):
    setattr(StandinAccelerator, _name, _forwarded(_name))
for _name, _other in (
    ("memory_cached", "memory_reserved"),
    ("max_memory_cached", "max_memory_reserved"),
    ("reset_max_memory_allocated", "reset_peak_memory_stats"),
    ("reset_max_memory_cached", "reset_peak_memory_stats"),
):
    setattr(StandinAccelerator, _name, _forwarded(_other))
for _name in ("Stream", "Event"):
    setattr(StandinAccelerator, _name, property(lambda self, name=_name: getattr(torch.standin, name)))
StandinAccelerator.available_memory = lambda self, device_index=None: torch.standin.mem_get_info()[0]
StandinAccelerator.total_memory = lambda self, device_index=None: torch.standin.mem_get_info()[1]
for _name, _dtype in (
    ("BFloat16", torch.bfloat16),
    ("Byte", torch.uint8),
    ("Double", torch.double),
    ("Float", torch.float),
    ("Half", torch.half),
    ("Int", torch.int),
    ("Long", torch.long),
):
    made = functools.partial(torch.tensor, dtype=_dtype, device=NAME)
    setattr(StandinAccelerator, f"{_name}Tensor", property(lambda self, made=made: made))


def install(**settings: float) -> StandinAccelerator:
    """The device for torch and DeepSpeed in this process, before the first engine."""
    install_backend(**settings)
    accelerator = StandinAccelerator()
    set_accelerator(accelerator)
    _stage_collectives()
    return accelerator


class _Done:
    def wait(self) -> None:
        pass


_COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "all_gather")
_COLLECTIVES += ("all_gather_into_tensor", "all_gather_coalesced", "all_to_all_single", "gather", "scatter")


def _of_the_device_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """As NCCL's, which takes no tensor in host memory."""

    @functools.wraps(collective)
    def checked(self: Any, *args: Any, **named: Any) -> Any:
        if any(leaf.device.type == "cpu" for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)):
            raise RuntimeError("No backend type associated with device type cpu")
        return collective(self, *args, **named)

    return checked


def _stage_collectives() -> None:
    """DeepSpeed has staging for another device; where the output is a part of the input it loses the sum.

    DeepSpeed 0.19.8 copies inputs back as well as outputs, and stage 3's output of a reduce-scatter is a view of its
    input. So that one collective is staged here; and the one that the Trainer asks of torch.
    """
    comm = importlib.import_module("deepspeed.comm.torch")
    comm._needs_cpu_staging = lambda value: isinstance(value, torch.Tensor) and value.device.type == NAME
    if getattr(comm.TorchBackend, "_staged_for_standin", False):
        return
    comm.TorchBackend._staged_for_standin = True
    torch.distributed.all_gather = _staged(torch.distributed.all_gather)
    on_host = comm.TorchBackend.reduce_scatter_tensor

    def on_device_alone(name: str, *places: str) -> None:
        """A single rank's collective is a copy on the device, as NCCL's; or nothing, where it works in place.

        ``places``: its arguments in their order. DeepSpeed names them or does not.
        """
        staged = getattr(comm.TorchBackend, name)

        @functools.wraps(staged)
        def collective(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            named = dict(zip(places, args, strict=False)) | kwargs
            given = [each for each in named.values() if isinstance(each, torch.Tensor)]  # the output first
            if given[0].device.type != NAME or torch.distributed.get_world_size(named.get("group")) > 1:
                return staged(self, **named)
            if len(given) == 2:
                given[0].view(-1).copy_(given[1].view(-1))
            return _Done() if named.get("async_op") else None

        setattr(comm.TorchBackend, name, collective)

    def reduce_scatter_tensor(self, output_tensor, input_tensor, *args, async_op=False, **kwargs):  # type: ignore[no-untyped-def]
        output = torch.empty_like(output_tensor, device="cpu")
        on_host(self, output, input_tensor.cpu(), *args, async_op=False, **kwargs)
        output_tensor.copy_(output)
        return _Done() if async_op else None

    comm.TorchBackend.reduce_scatter_tensor = reduce_scatter_tensor
    on_device_alone("all_reduce", "tensor", "op", "group", "async_op")
    on_device_alone("reduce_scatter_tensor", "output_tensor", "input_tensor", "op", "group", "async_op")
    on_device_alone("all_gather_into_tensor", "output_tensor", "input_tensor", "group", "async_op")
    for name in _COLLECTIVES:
        setattr(comm.TorchBackend, name, _of_the_device_alone(getattr(comm.TorchBackend, name)))


def _staged(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.all_gather`` that takes tensors of the device, too."""

    def by_way_of_the_host(outputs: list[torch.Tensor], given: torch.Tensor, *args: Any, **named: Any) -> Any:
        if given.device.type != NAME:
            return all_gather(outputs, given, *args, **named)
        on_host = [torch.empty_like(output, device="cpu") for output in outputs]
        done = all_gather(on_host, given.cpu(), *args, **{**named, "async_op": False})
        for output, values in zip(outputs, on_host, strict=True):
            output.copy_(values)
        return _Done() if named.get("async_op") else done

    return by_way_of_the_host


def install_from(environment: Mapping[str, str]) -> None:
    """What the harness asks of a process: settings as JSON in STANDIN; nothing where that is not set. Its device is
    that of its number on this machine, as launchers count; it must touch none of the others.

    ``fault``: an ordering call of the package to leave out, as faults.py names it.
    """
    if "STANDIN" not in environment:
        return
    settings = {"index": int(environment.get("LOCAL_RANK", "0")), **json.loads(environment["STANDIN"])}
    fault = settings.pop("fault", None)
    install(**settings)
    if fault is not None:
        leave_out(fault)
