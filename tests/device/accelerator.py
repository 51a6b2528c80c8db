# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed on the stand-in device: the accelerator."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.device.backend import NAME, install_backend
from tests.device.collectives import order_collectives
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
    "get_rng_state",
    "set_rng_state",
    "manual_seed",
    "manual_seed_all",
    "initial_seed",
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
    order_collectives()
    return accelerator


def install_from(environment: Mapping[str, str]) -> None:
    """What the harness asks of a process: settings as JSON in STANDIN; nothing where that is not set. Its device is
    that of its number on this machine, as launchers count; it must touch none of the others.

    ``polls``: it says that waits for it take processor time, as CUDA's driver does, so that nobody knows what threads
    did themselves. ``fault``: an ordering call of the package to leave out, as faults.py names it. ``of_rank``:
    settings of one rank alone, by its number.
    """
    if "STANDIN" not in environment:
        return
    settings = {"index": int(environment.get("LOCAL_RANK", "0")), **json.loads(environment["STANDIN"])}
    fault, polls = settings.pop("fault", None), settings.pop("polls", False)
    settings |= settings.pop("of_rank", {}).get(os.environ.get("RANK", "0"), {})
    install(**settings).waits_block = not polls
    if fault is not None:
        leave_out(fault)
