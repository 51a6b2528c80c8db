# SPDX-License-Identifier: Apache-2.0
"""The stand-in device by itself: streams, events, memory, copies, trip wires, counters. Each test sees it at rest."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_fuyou.host.memory import aligned_tensor

pytestmark = pytest.mark.standin

DEVICE = "standin"


@pytest.fixture(autouse=True)
def at_rest() -> Iterator[None]:
    device = torch.standin
    settings = {"delay_secs": 0.0, "timed": 0, "skip": 0, "watch": 1, "capacity": 1 << 33, "index": 0}
    device.core.configure(settings)
    device.synchronize()
    device.take_trips()
    device.take_waits()
    yield
    device.core.clear_failure()
    device.set_device(0)
    device.core.configure(settings)
    device.synchronize()
    assert device.take_trips() == []
    assert device.core.num_flights() == 0


def pinned(numel: int, value: float) -> torch.Tensor:
    return torch.full((numel,), value).pin_memory()


# ---- streams and events -------------------------------------------------------------------------------------


def test_work_waits_in_its_stream_and_nowhere_else() -> None:
    side = torch.standin.Stream()
    values = torch.zeros(1000, device=DEVICE)
    torch.standin.synchronize()
    with torch.standin.held(side), torch.standin.stream(side):
        late = values + 1
        assert not side.query()
        with torch.standin.stream(torch.standin.default_stream()):
            assert float((values + 2).sum()) == 2000
        late.record_stream(torch.standin.default_stream())
    side.synchronize()
    assert float(late.sum()) == 1000


def test_an_event_orders_streams_and_tells_what_has_passed() -> None:
    side, event = torch.standin.Stream(), torch.standin.Event()
    target = torch.zeros(1000, device=DEVICE)
    torch.standin.synchronize()
    with torch.standin.held(side):
        with torch.standin.stream(side):
            target.add_(1)
            event.record()
        assert not event.query()
        torch.standin.current_stream().wait_event(event)
        target.mul_(3)  # waits in its queue, the host does not
        assert not torch.standin.current_stream().query()
    assert float(target.sum()) == 3000
    assert event.query()


def test_elapsed_time_is_between_events_of_the_device() -> None:
    first, last = (torch.standin.Event(enable_timing=True) for _ in range(2))
    first.record()
    a = torch.ones(64, 64, device=DEVICE)
    for _ in range(10):
        a = a @ a * 0.01
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) > 0
    assert last.elapsed_time(first) < 0


def test_backward_runs_on_the_streams_of_its_forward() -> None:
    side = torch.standin.Stream()
    weight = torch.full((8, 8), 0.5, device=DEVICE, requires_grad=True)
    seen = []
    weight.register_hook(lambda grad: seen.append(torch.standin.current_stream().stream_id))
    torch.standin.synchronize()
    with torch.standin.stream(side):
        loss = (weight @ weight).sum()
    loss.backward()
    assert seen == [side.stream_id]


# ---- memory -------------------------------------------------------------------------------------------------


def test_freed_memory_serves_its_own_stream_at_once_and_is_overwritten() -> None:
    first = torch.full((1 << 16,), 7.0, device=DEVICE)
    address = first.data_ptr()
    del first
    second = torch.empty(1 << 16, device=DEVICE)
    assert second.data_ptr() == address
    assert not bool((second == 7.0).any())


@pytest.mark.parametrize("is_recorded", [False, True])
def test_what_another_stream_still_uses_must_be_recorded(is_recorded: bool) -> None:
    side = torch.standin.Stream()
    values = torch.full((1 << 16,), 7.0, device=DEVICE)
    side.wait_stream(torch.standin.current_stream())
    with torch.standin.stream(side), torch.standin.held(side):
        total = values.sum()
        if is_recorded:
            values.record_stream(side)
        del values
        torch.standin.default_stream().synchronize()
        with torch.standin.stream(torch.standin.default_stream()):
            torch.empty(1 << 16, device=DEVICE)
    side.synchronize()
    assert (float(total) == 7 * (1 << 16)) == is_recorded


def test_capacity_is_a_limit_in_bytes() -> None:
    torch.standin.empty_cache()
    there = torch.standin.memory_reserved()
    torch.standin.core.configure({"capacity": there + (64 << 20)})
    kept = torch.empty(40 << 20, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"):
        torch.empty(40 << 20, dtype=torch.uint8, device=DEVICE)
    free, total = torch.standin.mem_get_info()
    assert (free, total) == (24 << 20, there + (64 << 20))
    del kept
    with torch.standin.stream(torch.standin.Stream()):  # the cache of another stream is given back for it
        torch.empty(60 << 20, dtype=torch.uint8, device=DEVICE)
    assert torch.standin.memory_stats()["num_alloc_retries"] > 0


def test_blocks_are_split_and_joined() -> None:
    torch.standin.empty_cache()
    parts = [torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(8)]
    reserved = torch.standin.memory_reserved()
    parts.clear()
    whole = torch.empty(2 << 20, dtype=torch.uint8, device=DEVICE)
    assert torch.standin.memory_reserved() == reserved
    assert whole.numel() == 2 << 20


def test_peaks() -> None:
    torch.standin.reset_peak_memory_stats()
    before = torch.standin.memory_allocated()
    a = torch.empty(1 << 20, device=DEVICE)
    del a
    assert torch.standin.memory_allocated() == before
    assert torch.standin.max_memory_allocated() == before + (4 << 20)


def test_storage_may_grow_and_shrink() -> None:
    values = torch.arange(100.0, device=DEVICE)
    values.untyped_storage().resize_(0)
    assert values.untyped_storage().nbytes() == 0
    values.untyped_storage().resize_(400)
    values.fill_(2)
    assert float(values.sum()) == 200


# ---- copies and host memory ---------------------------------------------------------------------------------


def test_copies_from_pinned_memory_are_late() -> None:
    source, target = pinned(1000, 3.0), torch.zeros(1000, device=DEVICE)
    stream = torch.standin.current_stream()
    with torch.standin.held(stream):
        target.copy_(source, non_blocking=True)
        assert not stream.query()
    assert float(target.sum()) == 3000


def test_copies_to_pinned_memory_are_late_and_convert_on_the_device() -> None:
    values, target = torch.full((1000,), 3.0, device=DEVICE), pinned(1000, 0.0).double().pin_memory()
    stream = torch.standin.current_stream()
    with torch.standin.held(stream):
        target.copy_(values, non_blocking=True)
    stream.synchronize()
    assert float(target.sum()) == 3000


def waits() -> list[str]:
    return [wait.what for wait in torch.standin.take_waits()]


def test_pageable_memory_is_waited_for() -> None:
    values, there = torch.ones(1 << 16, device=DEVICE), torch.zeros(1 << 16)
    torch.standin.synchronize()
    waits()
    there.copy_(values, non_blocking=True)
    assert float(there.sum()) == 1 << 16
    values.copy_(there, non_blocking=True)
    assert waits() == ["pageable copy"] * 2
    small = torch.ones(64)
    values[:64].copy_(small, non_blocking=True)  # is taken at once
    assert waits() == []
    small.zero_()
    assert float(values[:64].sum()) == 64


def test_a_copy_of_part_of_a_registration_is_late_and_one_beyond_it_is_refused() -> None:
    memory = torch.zeros(3 * 1024)
    offset = -memory.data_ptr() % 4096 // 4
    page = memory[offset : offset + 1024]
    torch.standin.core.register_host_memory(page.data_ptr(), 4096)
    values = torch.ones(2048, device=DEVICE)
    waits()
    page[10:1000].copy_(values[10:1000], non_blocking=True)
    assert waits() == []
    with pytest.raises(RuntimeError, match="pinned in part"):  # as CUDA's documentation says of regions that span both
        memory[offset : offset + 1030].copy_(values[:1030], non_blocking=True)
    memory[offset + 1024 : offset + 1030].copy_(values[:6], non_blocking=True)
    assert waits() == ["pageable copy"]
    torch.standin.synchronize()
    torch.standin.core.unregister_host_memory(page.data_ptr())


def test_pages_are_registered_once() -> None:
    memory = aligned_tensor(4 * 4096)  # what follows stays in its first page
    core = torch.standin.core
    core.register_host_memory(memory.data_ptr(), 100)
    for offset in (0, 200):  # of the same page
        with pytest.raises(RuntimeError, match="registered already"):
            core.register_host_memory(memory.data_ptr() + offset, 8)
    assert core.is_pinned(memory.data_ptr(), 100)
    assert not core.is_pinned(memory.data_ptr(), 101)
    core.unregister_host_memory(memory.data_ptr())
    with pytest.raises(RuntimeError, match="not registered"):
        core.unregister_host_memory(memory.data_ptr())


# ---- trip wires ---------------------------------------------------------------------------------------------


def one_trip(line: int) -> str:
    """The only trip; it names the line of this file that launched."""
    torch.standin.synchronize()
    (trip,) = torch.standin.take_trips()
    assert f"test_backend.py:{line} in " in trip
    return trip


def here() -> int:
    return inspect.currentframe().f_back.f_lineno


def test_the_source_of_a_late_copy_must_not_change() -> None:
    source, target = pinned(1000, 3.0), torch.zeros(1000, device=DEVICE)
    with torch.standin.held(torch.standin.current_stream()):
        line = here() + 1
        target.copy_(source, non_blocking=True)
        source[500] = 4
    assert "changed the source" in one_trip(line)


def test_the_target_of_a_late_copy_must_not_be_written() -> None:
    values, target = torch.ones(1000, device=DEVICE), pinned(1000, 0.0)
    with torch.standin.held(torch.standin.current_stream()):
        line = here() + 1
        target.copy_(values, non_blocking=True)
        target[500] = 4
    assert "wrote into the target" in one_trip(line)


def test_the_target_of_a_late_copy_has_no_old_values() -> None:
    values, target = torch.ones(1000, device=DEVICE), pinned(1000, 1.0)
    with torch.standin.held(torch.standin.current_stream()):
        target.copy_(values, non_blocking=True)
        assert not bool((target == 1).any())
    torch.standin.synchronize()
    assert bool((target == 1).all())


def test_memory_in_flight_must_stay_registered() -> None:
    memory, values = torch.zeros(4096), torch.ones(1024, device=DEVICE)
    torch.standin.core.register_host_memory(memory.data_ptr(), 16384)
    with torch.standin.held(torch.standin.current_stream()):
        line = here() + 1
        values.copy_(memory[:1024], non_blocking=True)
        torch.standin.core.unregister_host_memory(memory.data_ptr())
    assert "unregistered while a copy" in one_trip(line)


def test_copies_of_one_memory_in_the_order_of_a_stream_are_right() -> None:
    there, values = pinned(1000, 1.0), torch.zeros(1000, device=DEVICE)
    for _ in range(3):
        values.copy_(there, non_blocking=True)
        values += 1
        there.copy_(values, non_blocking=True)
    torch.standin.synchronize()
    assert float(there.sum()) == 4000


def test_pinned_memory_is_not_handed_on_while_a_copy_uses_it() -> None:
    values = torch.zeros(1000, device=DEVICE)
    with torch.standin.held(torch.standin.current_stream()):
        source = pinned(1000, 5.0)
        values.copy_(source, non_blocking=True)
        address = source.data_ptr()
        del source
        assert pinned(1000, 6.0).data_ptr() != address
    assert float(values.sum()) == 5000


# ---- counters and failures ----------------------------------------------------------------------------------


def test_host_waits_are_told_with_their_stack() -> None:
    values, event = torch.ones(10, device=DEVICE), torch.standin.Event()
    torch.standin.synchronize()
    event.record()
    torch.standin.take_waits()
    event.synchronize()
    torch.standin.current_stream().synchronize()
    torch.standin.synchronize()
    values.sum().item()
    values.cpu()
    found = torch.standin.take_waits()
    assert [wait.what for wait in found] == ["event", "stream", "device", "item", "copy"]
    assert all("test_host_waits_are_told_with_their_stack" in wait.stack for wait in found)


def test_copies_are_counted_by_stream() -> None:
    side, before = torch.standin.Stream(), torch.standin.core.counters()
    target = torch.zeros(1000, device=DEVICE)
    side.wait_stream(torch.standin.current_stream())
    with torch.standin.stream(side):
        target.copy_(pinned(1000, 3.0), non_blocking=True)
    side.synchronize()
    name = f"copies up late on stream {side.stream_id}"
    assert torch.standin.core.counters()[name] - before.get(name, 0) == 1


def test_a_failed_copy_is_heard_of_at_the_next_call() -> None:
    target = torch.zeros(1000, device=DEVICE)
    torch.standin.core.fail_copy(2)
    for _ in range(2):
        target.copy_(pinned(1000, 3.0), non_blocking=True)
    for _ in range(2):  # nothing that follows is trusted
        with pytest.raises(RuntimeError, match="the device failed in a copy up"):
            torch.standin.synchronize()
    with pytest.raises(RuntimeError, match="the device failed in a copy up"):
        target.add_(1)


def test_an_index_out_of_bounds_is_heard_of_later() -> None:
    table, index = torch.ones(10, 4, device=DEVICE), torch.tensor([3], device=DEVICE)
    F.embedding(index, table)
    index.fill_(30)
    F.embedding(index, table)
    with pytest.raises(RuntimeError, match="index out of range"):
        torch.standin.synchronize()


def test_what_was_refused_is_told_to_the_next_kernel() -> None:
    memory = aligned_tensor(4096)
    torch.standin.core.register_host_memory(memory.data_ptr(), 4096)
    with pytest.raises(RuntimeError, match="registered already"):
        torch.standin.core.register_host_memory(memory.data_ptr(), 4096)
    with pytest.raises(RuntimeError, match=r"of an earlier call: .* registered already"):
        torch.ones(1, device=DEVICE)
    assert float(torch.ones(1, device=DEVICE)) == 1
    torch.standin.core.unregister_host_memory(memory.data_ptr())


def test_a_thread_begins_with_the_first_device_which_may_be_another_ranks() -> None:
    torch.standin.core.configure({"index": 1})
    torch.standin.set_device("standin:1")
    values, event = torch.ones(4, device=DEVICE), torch.standin.Event()
    assert values.device.index == torch.standin.current_device() == 1
    event.record()

    def ask() -> None:
        for wrong in (event.query, event.synchronize, torch.standin.current_stream, torch.standin.memory_allocated):
            with pytest.raises(RuntimeError, match="on device 0 in a process of device 1"):
                wrong()
        with pytest.raises(RuntimeError, match="memory on device 0"):
            torch.empty(1, device=DEVICE)
        assert float(values.sum()) == 4, "torch makes a tensor's device current"
        torch.standin.set_device(1)
        event.synchronize()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(ask).result()


def test_random_numbers_come_in_the_order_of_the_script() -> None:
    torch.standin.core.configure({"delay_secs": 0.001})
    drawn = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(3)
        noise = torch.randn(1000, device=device)
        drawn.append([noise.cpu(), torch.rand(5), torch.bernoulli(noise.sigmoid()).cpu(), torch.rand(5)])
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))


# ---- bits ---------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = x.float().argmax(-1)
        return x + self.table(index) * (x > 0)


LAYERS = {
    "linear": lambda: nn.Linear(64, 65),
    "norm": lambda: nn.LayerNorm(64),
    "rms_norm": lambda: nn.RMSNorm(64),
    "group_norm": lambda: nn.GroupNorm(3, 33),
    "gelu": lambda: nn.Sequential(nn.GELU(), nn.Linear(64, 8), nn.SiLU()),
    "softmax": lambda: nn.Softmax(-1),
    "dropout": lambda: nn.Dropout(0.3),
    "attention": Attention,
    "indexing": Sampled,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_bits_are_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    torch.standin.core.configure({"delay_secs": 0.001})
    torch.manual_seed(0)
    layer, x = LAYERS[name]().to(dtype), torch.randn(4, 33, 64).to(dtype)
    results = []
    for device in ("cpu", DEVICE, DEVICE):  # the second time it is known what comes out
        there = layer.to(device)
        there.zero_grad()
        given = x.clone().to(device).requires_grad_()
        torch.manual_seed(1)
        loss = there(given).float().square().mean()
        loss.backward()
        results.append([loss.detach(), given.grad, *(param.grad for param in there.parameters())])
        results[-1] = [value.cpu() for value in results[-1]]
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], found, strict=True))
