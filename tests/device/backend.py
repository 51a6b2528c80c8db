# SPDX-License-Identifier: Apache-2.0
"""``torch.standin``: what torch and DeepSpeed ask of a device's module, and what tests ask of this device."""

from __future__ import annotations

import atexit
import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.device.build import load

__all__ = ["NAME", "Usage", "Wait", "install_backend", "preset", "usage"]

NAME = "standin"


@dataclass(frozen=True)
class Wait:
    """The host asked for the end of something. ``blocked``: the device was not there yet, so it waited ``secs``."""

    what: str
    blocked: bool
    secs: float
    stack: str


@dataclass(frozen=True)
class Usage:
    """Seconds since the start: on the clock, and in which an engine was busy."""

    wall: float
    compute: float
    up: float
    down: float

    def since(self, before: Usage) -> Usage:
        return Usage(*(getattr(self, name) - getattr(before, name) for name in ("wall", "compute", "up", "down")))

    @property
    def idle(self) -> float:
        return max(0.0, self.wall - self.compute)


def preset(name: str, *, speed: float = 1.0, memory: float = 1.0) -> dict[str, float]:
    """Settings of timed mode for a GPU of the planner's presets; rates times ``speed``, capacity times ``memory``."""
    from ds_fuyou.planner.presets import find_gpu

    gpu = find_gpu(name)
    return {
        "timed": 1,
        "skip": 1,
        "flops": gpu.matmul_flops * speed,
        "memory_rate": gpu.memory_rate * speed,
        "up_rate": gpu.link_rate * speed,
        "down_rate": gpu.link_rate * speed,
        "capacity": gpu.memory_bytes * memory,
    }


class _StreamContext:
    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream
        self._before: list[int] = []

    def __enter__(self) -> torch.Stream | None:
        self._before.append(_core().current_stream())
        if self._stream is not None:
            _core().set_current_stream(self._stream.stream_id)
        return self._stream

    def __exit__(self, *_: object) -> None:
        _core().set_current_stream(self._before.pop())


def _core() -> Any:
    return torch.standin.core


def usage() -> Usage:
    _, compute, up, down = _core().busy_secs()
    return Usage(_core().now_ns() / 1e9, compute, up, down)


def _stream_of(number: int) -> torch.Stream:
    device_type = torch._C._autograd.DeviceType.PrivateUse1.value
    return torch.Stream(stream_id=number, device_index=_core().current_device(), device_type=device_type)


def _on_current(what: str, asked: Callable[[], Any]) -> Callable[..., Any]:
    """Of the current device, whatever ``device`` whoever asks names: it must be this process's."""

    def ask(device: object = None) -> Any:
        _core().require_own_device(what)
        return asked()

    return ask


def _set_device(device: object) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None:
        _core().set_device(index)


def _memory_stats() -> dict[str, int]:
    now = _core().memory()
    return {
        "allocated_bytes.all.current": now["allocated"],
        "allocated_bytes.all.peak": now["peak"],
        "active_bytes.all.current": now["active"],
        "active_bytes.all.peak": now["peak_active"],
        "reserved_bytes.all.current": now["reserved"],
        "reserved_bytes.all.peak": now["peak_reserved"],
        "num_alloc_retries": now["num_flushes"],
    }


@contextlib.contextmanager
def _held(stream: torch.Stream) -> Iterator[None]:
    """Work that is launched on ``stream`` inside waits until the end; the host must not wait for it inside."""
    let_go = _core().hold(stream.stream_id)
    try:
        yield
    finally:
        let_go()


@contextlib.contextmanager
def _as_current(device: object) -> Iterator[None]:
    before = _core().current_device()
    _set_device(device)
    try:
        yield
    finally:
        _core().set_device(before)


def _free_and_total() -> tuple[int, int]:
    now = _core().memory()
    return now["capacity"] - now["reserved"], now["capacity"]


_ASKED = {
    "current_stream": _on_current("a stream", lambda: _stream_of(_core().current_stream())),
    "default_stream": _on_current("a stream", lambda: _stream_of(0)),
    "synchronize": _on_current("a wait", lambda: _core().synchronize()),
    "device_count": lambda: _core().device_count(),
    "current_device": lambda: _core().current_device(),
    "set_device": _set_device,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_is_in_bad_fork": lambda: False,
    "is_current_stream_capturing": lambda: False,
    "is_bf16_supported": lambda: True,
    "get_device_name": lambda device=None: NAME,
    "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    "get_rng_state": lambda device=None: _core().random_state(),
    "set_rng_state": lambda state, device=None: _core().set_random_state(state),
    "manual_seed": lambda seed: _core().seed(seed),
    "manual_seed_all": lambda seed: _core().seed(seed),
    "initial_seed": lambda: _core().initial_seed(),
    "memory_allocated": _on_current("memory", lambda: _core().memory()["allocated"]),
    "max_memory_allocated": _on_current("memory", lambda: _core().memory()["peak"]),
    "memory_reserved": _on_current("memory", lambda: _core().memory()["reserved"]),
    "max_memory_reserved": _on_current("memory", lambda: _core().memory()["peak_reserved"]),
    "memory_stats": _on_current("memory", _memory_stats),
    "mem_get_info": _on_current("memory", _free_and_total),
    "reset_peak_memory_stats": _on_current("memory", lambda: _core().reset_peaks()),
    "empty_cache": lambda: _core().empty_cache(),
}


def install_backend(**settings: float) -> types.ModuleType:
    """Makes the device known to torch in this process. Settings are those of native/streams.h."""
    if hasattr(torch, NAME):
        torch.standin.core.configure(settings)
        return torch.standin
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.core = load()
    for name, function in _ASKED.items():
        setattr(module, name, function)
    module._lazy_init, module._initialized = lambda: None, True
    module.Stream = _on_current("a stream", lambda: torch.Stream(device=f"{NAME}:{_core().current_device()}"))
    # A class of its own would be refused by torch.Event.elapsed_time.
    module.Event = lambda enable_timing=False, blocking=False, interprocess=False: torch.Event(
        device=f"{NAME}:{_core().device_count() - 1}", enable_timing=enable_timing
    )
    module.held = _held
    module.stream = module.StreamContext = _StreamContext
    module.set_stream = lambda stream: _core().set_current_stream(stream.stream_id)
    module.device = _as_current
    module.default_generators = [torch.default_generator]
    module.get_device_properties = lambda device=None: types.SimpleNamespace(
        name=NAME, total_memory=_core().memory()["capacity"]
    )
    module.take_waits = lambda: [Wait(*each) for each in _core().take_waits()]
    module.take_trips = lambda: [f"{what}, launched at\n{stack}" for what, stack in _core().take_trips()]
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    module.core.configure(settings)
    atexit.register(_come_to_rest)
    return module


def _come_to_rest() -> None:
    """Workers must not run while the interpreter and torch go."""
    with contextlib.suppress(RuntimeError):
        _core().synchronize()
