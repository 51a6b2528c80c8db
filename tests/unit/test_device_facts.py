# SPDX-License-Identifier: Apache-2.0
"""What is asked of a device reaches profiles: the name of its hardware, and rates by its own clock."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ds_fuyou.config import FuyouConfig
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.profiling.lane_rates import probe_link
from ds_fuyou.zero.device import AcceleratorDevice
from ds_fuyou.zero.run.budgets import device_budget
from tests.harness.timed_device import TimedDevice


def accelerator(**changes: object) -> SimpleNamespace:
    """As much of DeepSpeed's interface as is asked at the beginning."""
    found = {
        "Stream": object,
        "Event": object,
        "is_synchronized_device": lambda: False,
        "device_name": lambda index=None: "cuda" if index is None else f"cuda:{index}",
        "current_device_name": lambda: "cuda:0",
    }
    return SimpleNamespace(**{**found, **changes})


def test_two_models_of_a_device_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept profiles are found by it; "cuda:0" would be the same for both."""
    asked: list[torch.device] = []

    def module_of(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(get_device_name=lambda device: asked.append(device) or "NVIDIA GeForce RTX 4090")

    monkeypatch.setattr(torch, "get_device_module", module_of)
    device = AcceleratorDevice(accelerator(), pin_memory=True)
    assert device.name == "NVIDIA GeForce RTX 4090"
    assert asked == [torch.device("cuda:0")]


@pytest.mark.parametrize(
    ("says", "unified"), [({"is_integrated": 1}, True), ({"is_integrated": 0}, False), ({}, False)]
)
def test_a_device_in_the_hosts_memory_is_known(
    monkeypatch: pytest.MonkeyPatch, says: dict[str, int], unified: bool
) -> None:
    properties = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**says))
    monkeypatch.setattr(torch, "get_device_module", lambda device: properties)
    assert AcceleratorDevice(accelerator(), pin_memory=True).is_unified is unified


@pytest.mark.parametrize(
    ("is_integrated", "fraction", "usable"), [(0, 1.0, 50), (1, 1.0, 40), (1, 0.5, 40), (0, 0.3, 24)]
)
def test_memory_is_what_torch_counts_and_others_leave(
    monkeypatch: pytest.MonkeyPatch, is_integrated: int, fraction: float, usable: int
) -> None:
    """NVML cannot be asked for a device that CUDA_VISIBLE_DEVICES names by its UUID. A script may let a process have a
    part of the device alone."""
    module = SimpleNamespace(
        mem_get_info=lambda device: (20 << 30, 80 << 30),
        get_device_properties=lambda device: SimpleNamespace(is_integrated=is_integrated),
        get_per_process_memory_fraction=lambda device: fraction,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    asked = {
        "available_memory": lambda: int("GPU-5a0a9b2c"),
        "memory_reserved": lambda: 30 << 30,
        "total_memory": lambda: 80 << 30,
    }
    device = AcceleratorDevice(accelerator(**asked), pin_memory=True)
    assert device.free_bytes() == 20 << 30
    assert device.usable_bytes() == usable << 30
    assert device_budget(FuyouConfig(), device) == int(0.9 * (usable << 30))
    assert device_budget(FuyouConfig(gpu_budget_bytes=7000), device) == 7000


def test_waits_take_no_processor_time_where_events_can_do_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's take it unless they are told not to; Intel's know no such argument."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            self.made_with = (enable_timing, blocking)

        def record(self, stream: object) -> None:
            """At once."""

    class PollingEvent(Event):
        def __init__(self, enable_timing: bool = False) -> None:
            super().__init__(enable_timing)

    for event, blocks in ((Event, True), (PollingEvent, False)):
        named = {"current_device_name": lambda: "meta", "current_stream": lambda: None}
        device = AcceleratorDevice(accelerator(Event=event, **named), pin_memory=True)
        assert device.record_event().made_with == (False, False)
        assert device.record_event(timed=True).made_with == (True, False)
        assert device.record_event(blocking=True).made_with == (False, blocks)


def test_devices_whose_module_counts_nothing_are_asked_through_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert AcceleratorDevice(accelerator(available_memory=lambda: 5), pin_memory=True).free_bytes() == 5


def test_a_thread_makes_the_device_of_the_rank_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    made: list[int] = []
    asked = {"current_device_name": lambda: "cuda:3", "set_device": made.append}
    AcceleratorDevice(accelerator(**asked), pin_memory=True).make_current()
    assert made == [3]


def test_what_any_thread_may_end_is_waited_for_on_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    module = SimpleNamespace(device=lambda device: nullcontext(made.append(device)))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    asked = {"current_device_name": lambda: "cuda:3", "synchronize": made.append}
    device = AcceleratorDevice(accelerator(**asked), pin_memory=True)
    with device.as_current():
        device.synchronize()
    assert made == [torch.device("cuda:3"), 3]


def test_a_device_without_streams_is_refused_by_name() -> None:
    for lacking in ({"Stream": None}, {"Event": None}, {"is_synchronized_device": lambda: True}):
        with pytest.raises(FuyouConfigError, match=r"'cuda' has no streams and events"):
            AcceleratorDevice(accelerator(**lacking), pin_memory=True)


def test_host_memory_goes_back_though_a_device_that_failed_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())

    def refuse(*_: int) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    named = {"current_device_name": lambda: "meta"}
    failed = accelerator(unregister_host_memory=refuse, synchronize=refuse, **named)
    AcceleratorDevice(failed, pin_memory=True).unregister(4096)
    sound = accelerator(unregister_host_memory=refuse, synchronize=lambda index: None, **named)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        AcceleratorDevice(sound, pin_memory=True).unregister(4096)


class _Link(TimedDevice):
    """A copy is what was issued between two events: the first three go up."""

    num_events = 0

    def record_event(self, *, timed: bool = False, blocking: bool = False) -> object:
        if self.num_events % 2:
            self.compute(0.25 if self.num_events < 6 else 0.5)
        self.num_events += 1
        return super().record_event(timed=timed)


def test_the_link_is_measured_by_the_device_s_own_clock() -> None:
    assert probe_link(_Link(), 4096) == (4 * 4096, 2 * 4096)
