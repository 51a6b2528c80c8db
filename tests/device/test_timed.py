# SPDX-License-Identifier: Apache-2.0
"""Timed mode: what an operation or a copy occupies, by rates. Times here are those of the device's clock: exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from tests.device.backend import preset, usage
from tests.device.test_backend import LAYERS

pytestmark = pytest.mark.standin

DEVICE = "standin"
RATES = {"flops": 1e12, "memory_rate": 1e11, "up_rate": 1e10, "down_rate": 5e9, "launch_secs": 0.0}


@pytest.fixture(autouse=True)
def timed() -> Iterator[None]:
    torch.standin.synchronize()
    torch.standin.core.configure({"timed": 1, "skip": 1, "delay_secs": 0, **RATES})
    yield
    torch.standin.synchronize()
    torch.standin.core.configure({"timed": 0, "skip": 0})


def events(num: int) -> list[torch.Event]:
    return [torch.standin.Event(enable_timing=True) for _ in range(num)]


def test_a_product_takes_its_flops() -> None:
    a = torch.empty(1000, 1000, device=DEVICE)
    first, last = events(2)
    before = usage()
    with torch.standin.held(torch.standin.current_stream()):
        first.record()
        for _ in range(5):
            a @ a
        last.record()
    torch.standin.synchronize()
    assert first.elapsed_time(last) == pytest.approx(5 * 2.0)  # 2e9 FLOPs at 1e12 a second, in milliseconds
    assert usage().since(before).compute == pytest.approx(0.01)


def test_what_moves_memory_takes_its_bytes_and_every_launch_its_latency() -> None:
    torch.standin.core.configure({"launch_secs": 1e-4})
    a = torch.empty(25_000_000, device=DEVICE)
    first, last = events(2)
    with torch.standin.held(torch.standin.current_stream()):
        first.record()
        a.add_(1)  # reads 100 MB; that it writes them back is not counted twice
        last.record()
    torch.standin.synchronize()
    assert first.elapsed_time(last) == pytest.approx(1.0 + 0.1)


def test_copies_share_their_direction_of_the_link() -> None:
    host = torch.empty(10_000_000, dtype=torch.uint8).pin_memory()
    there = torch.empty(10_000_000, dtype=torch.uint8, device=DEVICE)
    torch.standin.synchronize()
    streams = [torch.standin.Stream() for _ in range(3)]
    first, *last = events(4)
    before = usage()
    with torch.standin.held(streams[0]):
        with torch.standin.stream(streams[0]):
            first.record()
        for number, stream in enumerate(streams):
            stream.wait_event(first)
            with torch.standin.stream(stream):
                if number < 2:
                    there.copy_(host, non_blocking=True)  # 1 ms
                else:
                    host.copy_(there, non_blocking=True)  # 2 ms
                last[number].record()
    torch.standin.synchronize()
    took = sorted(first.elapsed_time(event) for event in last[:2])
    assert took == pytest.approx([1.0, 2.0])
    assert first.elapsed_time(last[2]) == pytest.approx(2.0)
    since = usage().since(before)
    assert (since.up, since.down, since.compute) == pytest.approx((0.002, 0.002, 0.0))


def test_waiting_for_an_event_takes_over_its_time() -> None:
    a, side = torch.empty(1000, 1000, device=DEVICE), torch.standin.Stream()
    first, middle, last = events(3)
    with torch.standin.held(torch.standin.current_stream()):
        first.record()
        a @ a
        middle.record()
        side.wait_event(middle)
        with torch.standin.stream(side):
            a @ a
            last.record()
    torch.standin.synchronize()
    assert first.elapsed_time(last) == pytest.approx(4.0)


def test_attention_takes_the_flops_of_both_products() -> None:
    q = torch.empty(2, 4, 512, 64, device=DEVICE)
    before = usage()
    F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.standin.synchronize()
    assert usage().since(before).compute == pytest.approx(4 * 2 * 4 * 512 * 512 * 64 / 1e12, rel=1e-4)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_memory_of_the_device_takes_none_of_the_host() -> None:
    before = resident_bytes()
    a = torch.zeros(1 << 28, device=DEVICE)
    b = a * 2 + 1
    torch.standin.synchronize()
    assert torch.standin.memory_allocated() >= 2 << 30
    del a, b
    assert resident_bytes() - before < 64 << 20


def test_small_values_are_computed_and_large_ones_are_zeros_to_the_host() -> None:
    small, large = torch.full((100,), 7.0, device=DEVICE), torch.full((100_000,), 7.0, device=DEVICE)
    assert float(small.sum()) == 700.0
    assert float(large.sum()) == 0.0
    assert not bool(large.cpu().any())
    assert not bool(torch.isnan(large).any())


@pytest.mark.parametrize("zeros", [0, 1])
def test_late_copies_down_write_zeros_where_asked(zeros: int) -> None:
    torch.standin.core.configure({"zeros": zeros})
    host = torch.empty(1 << 20, dtype=torch.uint8).pin_memory().fill_(7)
    host.copy_(torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE), non_blocking=True)
    torch.standin.synchronize()
    torch.standin.core.configure({"zeros": 0})
    assert host.unique().tolist() == [0 if zeros else 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_shapes_are_those_of_computed_values(name: str, dtype: torch.dtype) -> None:
    layer, x = LAYERS[name]().to(dtype).to(DEVICE), torch.randn(4, 33, 64).to(dtype)
    shapes = []
    for skip in (0, 1):
        torch.standin.synchronize()
        torch.standin.core.configure({"skip": skip, "timed": skip})
        layer.zero_grad()
        given = x.clone().to(DEVICE).requires_grad_()
        out = layer(given)
        out.float().square().mean().backward()
        tensors = [out, given.grad, *(param.grad for param in layer.parameters())]
        shapes.append([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])
    assert shapes[0] == shapes[1]


def test_a_gpu_of_the_presets_is_one_line() -> None:
    settings = preset("rtx4090", speed=0.5, memory=0.25)
    assert settings["capacity"] == 6 << 30
    assert settings["up_rate"] == settings["down_rate"] == 10.5e9
    assert settings["flops"] == pytest.approx(178.5e12 / 2)


def test_nobody_waits_for_attention() -> None:
    """It draws random numbers only where there is dropout, for which another kernel is chosen."""
    query = torch.empty(2, 4, 256, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    before = usage()
    torch.standin.take_waits()
    F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    assert torch.standin.take_waits() == []
    torch.standin.synchronize()
    assert usage().since(before).compute >= 14 * query.numel() * 256 / RATES["flops"]


def test_operations_are_told_by_their_seconds() -> None:
    a = torch.empty(1000, 1000, device=DEVICE)
    before = torch.standin.core.counters().get("ns of aten::mm", 0)
    a @ a
    assert torch.standin.core.counters()["ns of aten::mm"] - before == 2_000_000
