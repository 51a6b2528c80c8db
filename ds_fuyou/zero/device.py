# SPDX-License-Identifier: Apache-2.0
"""The device of this rank, by DeepSpeed's accelerator. Nothing else in the package compares names of devices."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_fuyou.errors import FuyouConfigError, FuyouStateError
from ds_fuyou.host.device import Device, HostDevice, failure_of
from ds_fuyou.host.memory import PAGE_BYTES, aligned_tensor, bring_in_pages
from ds_fuyou.log import log_once

__all__ = ["AcceleratorDevice", "num_devices", "rank_device"]


class AcceleratorDevice:
    """A device with memory, streams and events of its own."""

    is_host = False

    def __init__(self, accelerator: Any, *, pin_memory: bool) -> None:
        """``pin_memory``: host memory may be locked.

        Raises:
            FuyouConfigError: the accelerator has no streams or events, on which everything here is ordered.
        """
        if accelerator.Stream is None or accelerator.Event is None or accelerator.is_synchronized_device():
            raise FuyouConfigError(
                f"the accelerator {accelerator.device_name()!r} has no streams and events of its own, which the fuyou "
                "block needs of every device but the host; train with DS_ACCELERATOR=cpu, or without the block"
            )
        self._accelerator = accelerator
        self.torch_device = torch.device(accelerator.current_device_name())
        self.name = _hardware_name(accelerator, self.torch_device)
        self._may_pin = pin_memory

    @functools.cached_property
    def is_unified(self) -> bool:
        """As the driver says: an integrated device, of a GB10 say."""
        asked = getattr(torch.get_device_module(self.torch_device), "get_device_properties", None)
        return asked is not None and bool(getattr(asked(self.torch_device), "is_integrated", False))

    @functools.cached_property
    def pins(self) -> bool:
        """Whether the accelerator takes a page: DeepSpeed's interface says so by trying alone."""
        return self._may_pin and self._can_register()

    def _can_register(self) -> bool:
        page = aligned_tensor(PAGE_BYTES)
        try:
            is_taken = self._register(page.data_ptr(), PAGE_BYTES)
        except RuntimeError as error:
            self._forget_error()
            raise self._refused(PAGE_BYTES, str(error)) from error
        if not is_taken:
            log_once(
                logging.WARNING,
                f"host memory cannot be pinned for {self._accelerator.device_name()!r}: copies from and to it are "
                "made by way of the driver's own memory, and wait",
                on_any_rank=True,
            )
            return False
        self.unregister(page.data_ptr())
        return True

    def _register(self, address: int, num_bytes: int) -> bool:
        register = getattr(self._accelerator, "register_host_memory", None)
        if register is not None:
            return bool(register(address, num_bytes))
        if self.torch_device.type != "cuda":  # DeepSpeed 0.18 asks CUDA alone, and through torch
            return False
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)))
        return True

    def register(self, address: int, num_bytes: int) -> None:
        bring_in_pages(address, num_bytes)
        try:
            done = self._register(address, num_bytes)
        except RuntimeError as error:
            self._forget_error()
            raise self._refused(num_bytes, str(error)) from error
        if not done:
            raise self._refused(num_bytes, "the accelerator says no")

    def _forget_error(self) -> None:
        """CUDA's runtime remembers what it refused, and torch asks for that behind every kernel: the next one would be
        said to have failed, whatever it is. So one is launched here.
        """
        with suppress(RuntimeError):
            torch.ones(1, device=self.torch_device)

    def _refused(self, num_bytes: int, why: str) -> FuyouStateError:
        return FuyouStateError(
            f"registering {num_bytes} bytes of host memory with {self.torch_device.type} failed ({why}); raise the "
            "locked-memory limit (ulimit -l), lower dram_budget_bytes, or set pin_memory of offload_param and "
            "offload_optimizer to false"
        )

    def unregister(self, address: int) -> None:
        """A device that has failed may refuse: its process ends, and the memory with it."""
        unregister = getattr(self._accelerator, "unregister_host_memory", None)
        try:
            if unregister is not None:
                unregister(address)
            else:
                torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))
        except RuntimeError:
            self._forget_error()
            if not failure_of(self):
                raise

    @property
    def waits_block(self) -> bool:
        return bool(getattr(self._accelerator, "waits_block", False))

    def new_stream(self) -> Any:
        return self._accelerator.Stream()

    def current_stream(self) -> Any:
        return self._accelerator.current_stream()

    def computes_here(self) -> bool:
        return bool(self._accelerator.current_stream() == self._accelerator.default_stream())

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._accelerator.stream(stream)
        return context

    def record_event(self, *, timed: bool = False, blocking: bool = False) -> Any:
        more = {"blocking": True} if blocking and self._events_block else {}
        event = self._accelerator.Event(enable_timing=timed, **more)
        event.record(self.current_stream())
        return event

    @functools.cached_property
    def _events_block(self) -> bool:
        """Intel's and others' events have no such argument."""
        try:
            self._accelerator.Event(blocking=True)
        except TypeError:
            return False
        return True

    def synchronize(self) -> None:
        self._accelerator.synchronize(self.torch_device.index)

    def make_current(self) -> None:
        self._accelerator.set_device(self.torch_device.index)

    def as_current(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.get_device_module(self.torch_device).device(self.torch_device)
        return context

    def random_state(self) -> torch.Tensor:
        state: torch.Tensor = self._accelerator.get_rng_state()
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        self._accelerator.set_rng_state(state)

    def total_bytes(self) -> int:
        return int(self._accelerator.total_memory())

    def free_bytes(self) -> int:
        """As torch says, where it does: DeepSpeed asks NVML, which counts devices in another order, cannot be asked for
        those that CUDA_VISIBLE_DEVICES names otherwise than by numbers, and knows no part of one (MIG).
        """
        asked = getattr(torch.get_device_module(self.torch_device), "mem_get_info", None)
        return int(asked(self.torch_device)[0] if asked is not None else self._accelerator.available_memory())

    def usable_bytes(self) -> int:
        """Of one that has the host's memory half: what is free of that, files in memory are not part of. No more than
        the script lets this process have.
        """
        asked = getattr(torch.get_device_module(self.torch_device), "get_per_process_memory_fraction", None)
        share = asked(self.torch_device) if asked is not None else 1.0
        total = self.total_bytes()
        most = int(total * min(1.0, share))
        others_leave = self.free_bytes() + int(self._accelerator.memory_reserved())
        return min(most, total // 2 if self.is_unified else others_leave)

    def allocated_bytes(self) -> int:
        return int(self._accelerator.memory_allocated())

    def peak_bytes(self) -> int:
        return int(self._accelerator.max_memory_allocated())

    def reset_peak(self) -> None:
        self._accelerator.reset_peak_memory_stats()

    def num_retries(self) -> int:
        return int((self._accelerator.memory_stats() or {}).get("num_alloc_retries", 0))


def _hardware_name(accelerator: Any, device: torch.device) -> str:
    """What the driver calls it: two GPU models must not share a profile."""
    asked = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(asked(device)) if asked is not None else str(accelerator.device_name())


def rank_device(*, pin_memory: bool = True) -> Device:
    """The device that DeepSpeed trains on in this process.

    Raises:
        FuyouConfigError: it has no streams and events.
    """
    accelerator: Any = get_accelerator()
    return _device(accelerator, str(accelerator.current_device_name()), pin_memory)


def num_devices() -> int:
    """Devices of this machine that a rank each could train on; the host is one."""
    return 1 if rank_device().is_host else max(1, int(get_accelerator().device_count()))


@functools.cache
def _device(accelerator: Any, name: str, pin_memory: bool) -> Device:
    return HostDevice() if name == "cpu" else AcceleratorDevice(accelerator, pin_memory=pin_memory)
