# SPDX-License-Identifier: Apache-2.0
"""What the package asks of the device that computes: one interface, so that no other file knows which device it is.

:class:`HostDevice` is the host itself. Every other device is asked through DeepSpeed's accelerator
(``zero/device.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from ds_fuyou.host.available_memory import available_host_bytes, total_host_bytes

__all__ = ["Device", "HostDevice", "failure_of"]


class Device(Protocol):
    """One rank's device. Streams and events are those of PyTorch; sizes in bytes."""

    @property
    def name(self) -> str:
        """Of the hardware, for people and for fingerprints."""

    @property
    def is_host(self) -> bool:
        """Its memory is host memory, and what it is asked has ended when the call returns. It has no streams."""

    @property
    def is_unified(self) -> bool:
        """It computes by itself in the host's memory: what leaves it for that frees nothing."""

    @property
    def pins(self) -> bool:
        """Host memory can be registered with it; copies from and to registered memory run beside computing."""

    @property
    def waits_block(self) -> bool:
        """Whether a thread that waits for it takes no processor time. CUDA's driver polls, unless told otherwise."""

    @property
    def torch_device(self) -> torch.device: ...

    def register(self, address: int, num_bytes: int) -> None:
        """Makes host memory known to the device until :meth:`unregister`; only where it :attr:`pins`.

        Raises:
            FuyouStateError: the device or the system refuses.
        """

    def unregister(self, address: int) -> None:
        """Takes a registration back. No copy from or to the memory may be in flight."""

    def new_stream(self) -> Any:
        """A queue of work that runs beside the others."""

    def current_stream(self) -> Any: ...

    def computes_here(self) -> bool:
        """Whether the current stream is the default one, on which models compute."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Work that is issued inside goes to ``stream``."""

    def record_event(self, *, timed: bool = False, blocking: bool = False) -> Any:
        """A new event, recorded on the current stream. ``blocking``: a thread that waits for it takes no processor
        time, where the device can do that; it goes on some tens of microseconds later."""

    def synchronize(self) -> None:
        """Until all work has ended."""

    def make_current(self) -> None:
        """In this thread, before it asks for events: threads begin with the first device of the machine, and would take
        memory of it, which is another rank's.
        """

    def as_current(self) -> AbstractContextManager[Any]:
        """The same for as long as the context is open: for what Python's collector may run in any thread."""

    def random_state(self) -> torch.Tensor:
        """Of the generator that draws on it where the script names none; a copy, in host memory."""

    def set_random_state(self, state: torch.Tensor) -> None: ...

    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int: ...

    def usable_bytes(self) -> int:
        """What this process has of it, and what nobody has."""

    def allocated_bytes(self) -> int:
        """Memory of tensors on the device now; 0 where that is host memory, which is counted there."""

    def peak_bytes(self) -> int:
        """The most that :meth:`allocated_bytes` was since :meth:`reset_peak`, or since the process began."""

    def reset_peak(self) -> None: ...

    def num_retries(self) -> int:
        """How often its allocator found no memory, gave back what it kept for later and asked again, since the process
        began; 0 where it does not tell. Each of them waits for all work."""


class HostDevice:
    """The host computes."""

    name = "cpu"
    is_host = True
    waits_block = True
    is_unified = False
    pins = False
    torch_device = torch.device("cpu")

    def register(self, address: int, num_bytes: int) -> None:
        """Nothing copies."""

    def unregister(self, address: int) -> None:
        """Nothing was registered."""

    def new_stream(self) -> None:
        return None

    def computes_here(self) -> bool:
        return True

    def current_stream(self) -> None:
        return None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def record_event(self, *, timed: bool = False, blocking: bool = False) -> Any:
        raise TypeError("the host has no streams: ask is_host before an event is recorded")

    def synchronize(self) -> None:
        """Work has ended when its call returned."""

    def make_current(self) -> None:
        """There is one."""

    def as_current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def total_bytes(self) -> int:
        return total_host_bytes()

    def free_bytes(self) -> int:
        return available_host_bytes()

    def usable_bytes(self) -> int:
        return self.total_bytes()

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        """Nothing is counted."""

    def num_retries(self) -> int:
        return 0


def failure_of(device: Device) -> str:
    """Waits until all work has ended; what the device says if it has failed, and then copies nothing any more."""
    try:
        device.synchronize()
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return ""
