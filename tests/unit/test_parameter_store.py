# SPDX-License-Identifier: Apache-2.0
"""One object holds the parameters of an engine: what is read, when, into which memory, and when that is free again."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.device import HostDevice
from ds_fuyou.parameters.partition import Lost, Partition, Presence
from ds_fuyou.parameters.size_class import SMALL_BYTES
from ds_fuyou.parameters.store import ParameterStore
from ds_fuyou.parameters.trace import Ahead
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.parked import ParkedSpace

LARGE = 150_000  # elements of two bytes: more than SMALL_BYTES, and not a whole number of pages
LARGE_BYTES = 303_104


class Event:
    """Of a device that is late: it passes when the host waits for it, or when the test says so."""

    def __init__(self) -> None:
        self.has_passed = False
        self.num_waits = 0

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self.num_waits += 1
        self.has_passed = True


class LateDevice(HostDevice):
    """A device with memory of its own."""

    is_host = False


class Tensors:
    """What DeepSpeed would see."""

    def __init__(self) -> None:
        self.shown: dict[Partition, torch.Tensor] = {}
        self.in_use: set[Partition] = set()

    def here(self, partition: Partition, values: torch.Tensor) -> None:
        self.shown[partition] = values

    def away(self, partition: Partition) -> None:
        self.shown.pop(partition, None)

    def is_idle(self, partition: Partition) -> bool:
        return partition not in self.in_use


class Trained:
    """A source that steps change: on storage or in memory, published or not."""

    changes = True

    def __init__(self, parked: Any, memory: torch.Tensor | None = None) -> None:
        self.parked, self._memory = parked, memory
        self.num_bytes = 0 if memory is not None else parked.num_bytes
        self.size_bytes = parked.size_bytes
        self.is_published = True
        self.num_waits = 0

    @property
    def io(self) -> IoLane:
        lane: IoLane = self.parked.io
        return lane

    def is_ready(self) -> bool:
        return self.is_published

    def wait(self) -> None:
        self.num_waits += 0 if self.is_published else 1
        self.is_published = True

    def memory(self) -> torch.Tensor | None:
        return self._memory

    def start_reading(self, memory: torch.Tensor, priority: int = 0) -> Any:
        return self.parked.start_reading(memory, priority)

    def location(self) -> Any:
        return self.parked.location()

    def write(self, values: torch.Tensor) -> None:
        self.parked.write(values)


class Bench:
    """A store over parked values, and a script that uses one parameter after another."""

    def __init__(self, space: ParkedSpace, io: IoLane) -> None:
        self.space, self.io = space, io
        self.tensors = Tensors()
        self.expected: dict[Partition, torch.Tensor] = {}
        self.stores: list[ParameterStore] = []

    def partition(
        self, number: int, numel: int = LARGE, *, trained: bool = False, in_memory: bool = False
    ) -> Partition:
        values = torch.full((numel,), number, dtype=torch.bfloat16)
        parked: Any = self.space.park(f"parameter {number}", values)
        source = Trained(parked, values if in_memory else None) if trained else parked
        partition = Partition(number, source)
        self.expected[partition] = values
        return partition

    def store(self, partitions: Sequence[Partition], read_bytes: int, **more: Any) -> ParameterStore:
        device = more.pop("device", HostDevice())
        store = ParameterStore(self.tensors, device, self.io, read_bytes=read_bytes, **more)
        store.take(partitions)
        self.stores.append(store)
        return store

    def run(self, store: ParameterStore, partitions: Sequence[Partition], *, step: bool = True) -> int:
        """Uses each once, one at a time; returns how many were read on demand."""
        before = store.num_demand_reads
        for partition in partitions:
            store.use(partition)
            store.move_on()
            assert torch.equal(self.tensors.shown[partition], self.expected[partition]), partition.handle
            if store.release(partition):
                self.tensors.away(partition)
        if step:
            store.step_applied()
        return store.num_demand_reads - before


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    space = ParkedSpace.at((str(tmp_path / "first"), str(tmp_path / "second")), "auto", None)
    io = IoLane(IoSettings(), lambda fd: tmp_path)
    bench = Bench(space, io)
    yield bench
    for store in bench.stores:
        store.close()
    io.close()
    space.rest()


def test_the_second_round_is_read_ahead(bench: Bench) -> None:
    every = [bench.partition(i) for i in range(8)]
    store = bench.store(every, read_bytes=1_000_000)
    assert bench.run(store, every) == 8
    assert store.capacity_bytes < 8 * LARGE_BYTES
    for _ in range(3):
        assert bench.run(store, every) <= 1


def test_forward_and_backward_are_read_ahead_though_each_is_used_twice(bench: Bench) -> None:
    """What was released in forward is read again for backward: the walk comes back to it."""
    every = [bench.partition(i, trained=True) for i in range(8)]
    both = [*every, *reversed(every)]
    store = bench.store(every, read_bytes=3 * LARGE_BYTES)
    bench.run(store, both)
    assert bench.run(store, both) <= 3  # the first, and what is used twice in a row
    assert bench.run(store, both) <= 3


def test_steps_change_what_was_read(bench: Bench) -> None:
    every = [bench.partition(i, trained=True) for i in range(4)]
    store = bench.store(every, read_bytes=1 << 20)
    for step in range(3):
        bench.run(store, every)
        for partition in every:
            bench.expected[partition] = torch.full((LARGE,), 10 * step + 7, dtype=torch.bfloat16)
            partition.source.write(bench.expected[partition])
        store.trace.turn += 1
        for partition in every:
            store.forget(partition)


def test_nothing_of_the_next_step_is_read_before_it_is_published(bench: Bench) -> None:
    """Only what never changes is read beyond the end of the step."""
    trained = [bench.partition(i, trained=True) for i in range(4)]
    frozen = [bench.partition(10 + i) for i in range(4)]
    every = [*trained, *frozen]
    store = bench.store(every, read_bytes=16 * LARGE_BYTES)
    bench.run(store, every)
    bench.run(store, every, step=False)
    store.move_on()
    reading = {p for p in every if p.presence is not Presence.AWAY}
    assert reading == set(frozen)
    trained[1].source.is_published = False
    store.step_applied()
    assert {p for p in trained if p.presence is not Presence.AWAY} == {trained[0]}, "the second is not published yet"
    trained[1].source.is_published = True
    store.use(trained[0])
    store.move_on()
    assert all(p.presence is not Presence.AWAY for p in trained)


def bytes_read(bench: Bench, store: ParameterStore) -> int:
    """So far, with all that is on its way."""
    for partition in store.partitions:
        if partition.read is not None:
            for transfer in partition.read.transfers:
                transfer.wait_ended()
    return int(bench.io.stats()["read"].num_bytes)


def passes(bench: Bench, store: ParameterStore, every: Sequence[Partition], number: int) -> list[int]:
    """Bytes that each pass over the model reads: tokens of a generation, no step between them."""
    for partition in every:
        partition.source.read_by(bench.io)
    at, each = bytes_read(bench, store), []
    for _ in range(number):
        bench.run(store, every, step=False)
        now = bytes_read(bench, store)
        each.append(now - at)
        at = now
    return each


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("order_is_known", [False, True])
def test_a_model_that_fits_is_read_once_for_all_tokens(order_is_known: bool, is_late: bool, bench: Bench) -> None:
    every = [bench.partition(i) for i in range(8)]
    store = bench.store(every, read_bytes=9 * LARGE_BYTES, device=LateDevice() if is_late else HostDevice())
    if order_is_known:
        store.trace.expect(every)
    each = passes(bench, store, every, 6)
    assert sum(each) == (8 if order_is_known else 16) * LARGE_BYTES, "what nobody expects again does not stay"
    assert each[2:] == [0] * 4
    assert store.num_demand_reads <= (1 if order_is_known else 10)


def test_of_a_model_that_does_not_fit_three_quarters_of_the_pool_stay(bench: Bench) -> None:
    every = [bench.partition(i) for i in range(24)]
    store = bench.store(every, read_bytes=12 * LARGE_BYTES)
    store.trace.expect(every)
    each = passes(bench, store, every, 8)
    assert max(each[2:]) <= (24 - 12 * 3 // 4 + 1) * LARGE_BYTES
    assert min(each[2:]) >= (24 - 12) * LARGE_BYTES, "no less than the best: something must come"
    assert store.num_demand_reads <= 2, "and what comes is read ahead"
    assert store.num_overflows == 0


def test_a_copy_that_goes_on_keeps_values_that_stay(bench: Bench) -> None:
    """On a device that is late: memory of a copy that has not ended is not read into."""
    every = [bench.partition(i) for i in range(12)]
    store = bench.store(every, read_bytes=6 * LARGE_BYTES, device=LateDevice())
    store.trace.expect(every)
    sources: list[tuple[Event, Any, bytes]] = []  # memory by its address: a tensor would hold it
    for _ in range(4):
        for partition in every:
            store.use(partition)
            values, event = bench.tensors.shown[partition], Event()
            memory = (ctypes.c_char * 1000).from_address(values.data_ptr())
            sources.append((event, memory, memory.raw))
            del values
            store.copied(partition, event)
            bench.tensors.in_use.add(partition)
            store.move_on()
            bench.tensors.in_use.discard(partition)
            store.release(partition)
            bench.tensors.away(partition)
            for late, memory, copy in sources:
                assert late.has_passed or memory.raw == copy
            for late, _, _ in sources[:-2]:
                late.has_passed = True
            sources = [source for source in sources if not source[0].has_passed]
    assert store.num_overflows == 0
    assert store.num_demand_reads + store.num_ahead_reads < 4 * len(every), "something stayed"


def test_parameters_of_a_module_are_read_together(bench: Bench) -> None:
    every = [bench.partition(i) for i in range(4)]
    store = bench.store(every, read_bytes=8 * LARGE_BYTES)
    began = []
    start = store._start

    def noted(partition: Any, *args: Any, **kwargs: Any) -> None:
        began.append(sum(p.presence is Presence.READING for p in every))
        start(partition, *args, **kwargs)

    store._start = noted
    store.use(*every)
    assert began == [0, 1, 2, 3], "all are asked for before one is waited for"
    assert all(torch.equal(bench.tensors.shown[p], bench.expected[p]) for p in every)


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_announced_uses_are_read_ahead(is_late: bool, is_saved: bool, bench: Bench) -> None:
    """Gathered together: each stays in use. Saved: one after the other, and the host keeps the tensors."""
    every = [bench.partition(i) for i in range(12)]
    store = bench.store(every, read_bytes=4 * LARGE_BYTES, device=LateDevice() if is_late else HostDevice())
    bench.run(store, every[:2], step=False)
    demanded, held = store.num_demand_reads, {}
    with store.in_order(every, is_saved=is_saved):
        for partition in every:
            store.use(partition)
            values = bench.tensors.shown[partition]
            assert torch.equal(values, bench.expected[partition])
            if is_late:
                event = Event()
                event.has_passed = True
                store.copied(partition, event)
            else:
                held[partition] = values
                store.lend(partition)
            if is_late or is_saved:
                store.release(partition)
                bench.tensors.away(partition)
            store.move_on()
    assert store.num_demand_reads == demanded, "nothing was waited for that had not been asked for before"
    if not is_late:
        assert store.num_overflows == (0 if is_saved else 8), "gathered together is more than the pool"
        for partition, values in held.items():
            values.zero_()  # whose they are now
            assert is_saved == (partition.presence is Presence.AWAY)
            store.release(partition)
            bench.tensors.away(partition)
        if is_saved:
            assert store.used_bytes == 0, "the pool is not what a script keeps"
    bench.run(store, every)


def test_what_is_announced_stays_where_it_was_offered(bench: Bench) -> None:
    """Who gathers many asks for those alone that are away; the others have to be there when all have come."""
    every = [bench.partition(i, trained=i >= 6) for i in range(8)]
    store = bench.store(every, read_bytes=4 * LARGE_BYTES)
    for _ in range(2):
        bench.run(store, every)
    store.move_on()
    offered = [partition for partition in every if partition in bench.tensors.shown]
    assert 0 < len(offered) < len(every)
    for partition in every[6:]:
        partition.source.is_published = False  # not read before somebody waits for it
    with store.in_order(every):
        for partition in [partition for partition in reversed(every) if partition not in bench.tensors.shown]:
            store.fetch(partition)
        assert all(torch.equal(bench.tensors.shown[p], bench.expected[p]) for p in every)


def test_what_is_announced_and_not_fetched_is_forgotten(bench: Bench) -> None:
    every = [bench.partition(i) for i in range(6)]
    store = bench.store(every, read_bytes=1)
    with store.in_order(every, is_saved=True):
        store.use(every[0])
    assert all(p.presence is Presence.AWAY for p in every[1:])
    bench.run(store, every)


def test_memory_in_use_is_not_read_into(bench: Bench) -> None:
    every = [bench.partition(i) for i in range(6)]
    store = bench.store(every, read_bytes=1)
    bench.run(store, every)
    held = {}
    for partition in every:  # autograd keeps every one of them
        store.use(partition)
        held[partition] = bench.tensors.shown[partition]
        bench.tensors.in_use.add(partition)
        store.release(partition)
        store.move_on()
    assert all(torch.equal(values, bench.expected[p]) for p, values in held.items())
    assert store.num_overflows > 0


def test_small_partitions_are_read_into_a_pool_of_their_own_and_no_further_ahead_than_it_reaches(bench: Bench) -> None:
    small = [bench.partition(i, 30_000, trained=True) for i in range(40)]
    assert small[0].num_bytes < SMALL_BYTES
    large = [bench.partition(100 + i, trained=True) for i in range(2)]
    every = [*large, *small]
    store = bench.store(every, read_bytes=1 << 20)
    bench.run(store, every)
    in_flight = [p for p in small if p.presence is Presence.READING]
    assert 0 < sum(p.num_bytes for p in in_flight) <= store.used_bytes <= store.capacity_bytes
    assert len(in_flight) < len(small)
    assert bench.run(store, every) <= 2
    assert store.num_overflows == 0, "all of them lie in memory that the device knows"


def test_a_walk_ahead_costs_the_same_for_long_orders(bench: Bench) -> None:
    """Each place is looked at once a pass, however much is read ahead already."""
    few = [bench.partition(i, 1000, trained=True) for i in range(300)]
    store = bench.store(few, read_bytes=1 << 30)
    bench.run(store, few)
    looked = 0
    wants = store._size_classes[0].ahead._wants

    def counted(partition: Any, is_next_step: bool) -> bool:
        nonlocal looked
        looked += 1
        return wants(partition, is_next_step)

    store._size_classes[0].ahead._wants = counted
    bench.run(store, few)
    assert looked <= 4 * len(few)


def test_host_memory_is_free_when_the_copy_has_ended_not_when_the_module_has_run(bench: Bench) -> None:
    every = [bench.partition(i) for i in range(3)]
    store = bench.store(every, read_bytes=2 * LARGE_BYTES, device=LateDevice())
    store.use(every[0])
    event = Event()
    assert store.copied(every[0], event)
    bench.tensors.away(every[0])
    bench.tensors.in_use.add(every[0])
    assert every[0].presence is Presence.GATHERED
    store.move_on()
    assert store.used_bytes == LARGE_BYTES
    event.has_passed = True
    store.use(every[1])
    assert store.used_bytes == LARGE_BYTES, "the first one's memory is free, though it is gathered still"
    assert store.release(every[0])
    assert torch.equal(store.fetch(every[0]), bench.expected[every[0]])


def test_a_full_pool_is_waited_for_copy_by_copy(bench: Bench) -> None:
    """The host runs ahead of the device: memory stays what the plan says."""
    every = [bench.partition(i) for i in range(12)]
    store = bench.store(every, read_bytes=1, device=LateDevice())
    assert store.capacity_bytes == 2 * LARGE_BYTES
    events = []
    for partition in every:
        store.use(partition)
        bench.tensors.in_use.add(partition)
        events.append(Event())
        store.copied(partition, events[-1])
        bench.tensors.away(partition)
        store.move_on()
    assert store.num_overflows == 0
    assert store.used_bytes <= store.capacity_bytes
    assert [event.num_waits for event in events] == [1] * 10 + [0] * 2, "the oldest first, and no more than needed"


def test_what_was_read_ahead_gives_way_to_what_is_needed(bench: Bench) -> None:
    every = [bench.partition(i) for i in range(6)]
    late = bench.partition(50)
    store = bench.store([*every, late], read_bytes=1, device=LateDevice())
    bench.run(store, every)
    assert store.used_bytes == store.capacity_bytes, "two are read ahead for the next step"
    store.use(late)
    assert store.num_overflows == 0
    assert torch.equal(bench.tensors.shown[late], bench.expected[late])


def test_values_in_memory_are_offered_as_soon_as_they_are_published(bench: Bench) -> None:
    every = [bench.partition(i, trained=True, in_memory=True) for i in range(6)]
    store = bench.store(every, read_bytes=1)
    assert not store.reads
    bench.run(store, every)
    assert not bench.tensors.shown
    for partition in every[3:]:
        partition.source.is_published = False
    store.use(every[0])
    store.move_on()
    assert set(bench.tensors.shown) == set(every[:3]), "in their order, up to the first that is not published"
    assert sum(partition.source.num_waits for partition in every) == 0
    bench.run(store, every[1:])
    assert [partition.source.num_waits for partition in every] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("in_memory", [False, True])
def test_several_ranks_offer_by_position_whatever_has_come(in_memory: bool, bench: Bench) -> None:
    """Which reads have ended and which updates are published differs between ranks; what is offered may not."""
    large = 3 * 1024 * 1024  # elements: 6 MiB
    every = [bench.partition(i, large, trained=True, in_memory=in_memory) for i in range(5)]
    store = bench.store(every, read_bytes=1 << 30, is_alone=False)
    bench.run(store, every)
    for unpublished in (every[1:], every[2:], []):
        for partition in every:
            partition.source.is_published = partition not in unpublished
        store.use(every[0])
        store.move_on()
        assert set(bench.tensors.shown) == set(every[:3]), "the one in use, and what begins within the next 8 MiB"
        bench.run(store, every[1:])


MIB = 1 << 20


@pytest.mark.parametrize(("read_mib", "num_offered"), [(120, 2), (41, 2), (30, 1), (20, 1)])
def test_several_ranks_offer_two_of_the_largest_where_the_pool_has_room(
    read_mib: int, num_offered: int, bench: Bench
) -> None:
    every = [bench.partition(i, 5 * MIB, trained=True) for i in range(6)]  # of 10 MiB
    store = bench.store(every, read_bytes=read_mib * MIB, is_alone=False)
    bench.run(store, every)
    for at in range(3):
        store.use(every[at])
        store.move_on()
        assert set(bench.tensors.shown) == set(every[at : at + 1 + num_offered])
        bench.run(store, every[at : at + 1], step=False)
    assert store.num_overflows == 0


def test_several_ranks_offer_no_more_small_ones_than_their_pool_holds(bench: Bench) -> None:
    """Where there are no large ones the window is a quarter of what is read to."""
    every = [bench.partition(i, 40_000, trained=True) for i in range(40)]  # of 80 KB
    store = bench.store(every, read_bytes=MIB, is_alone=False)
    for _ in range(3):
        bench.run(store, every)
        assert store._offered_bytes <= MIB // 4 + 80_000
    assert store.num_overflows == 0


def test_several_ranks_offer_no_more_than_their_pool_holds(bench: Bench) -> None:
    """With the window of the largest a small one and a large one were offered beside a large one in use."""
    sizes = [MIB, 5 * MIB, 2 * MIB, 5 * MIB, 5 * MIB, MIB, MIB, 5 * MIB]
    every = [bench.partition(i, size, trained=True) for i, size in enumerate(sizes)]
    store = bench.store(every, read_bytes=20 * MIB, is_alone=False)
    for _ in range(3):
        bench.run(store, every)
    assert store.num_overflows == 0


@pytest.mark.parametrize("num_kept", [1, 150])
def test_several_ranks_offer_the_same_whatever_memory_has_of_what_is_gathered(num_kept: int, bench: Bench) -> None:
    """All stay gathered for some tokens, as under ``GatheredParameters``; then a script lets go of a few."""
    offered: list[list[Any]] = []
    for num_in_memory in (0, num_kept):
        every = [bench.partition(i, 1000) for i in range(150)]
        store = bench.store(every, read_bytes=MIB, is_alone=False)
        bench.run(store, every)
        for _ in range(4):
            for partition in every:
                store.use(partition)
                store.move_on()
                if partition not in bench.tensors.in_use:
                    bench.tensors.in_use.add(partition)
                    store.copied(partition)
                    if every.index(partition) >= num_in_memory and partition.presence is Presence.KEPT:
                        store._size_class_of[partition].kept.discard(partition)
                        store._free(partition)
                        partition.presence = Presence.GATHERED
        for partition in (every[5], every[40], every[140]):
            bench.tensors.in_use.discard(partition)
            assert store.release(partition)
            bench.tensors.away(partition)
        seen = []
        for partition in every[:5]:
            store.use(partition)
            store.move_on()
            seen.append([each.handle for each in store._offered])
        offered.append(seen)
        bench.tensors.in_use.clear()
        store.close()
    assert any(offered[0])
    assert offered[0] == offered[1]


def test_several_ranks_take_back_what_was_offered_for_an_order_that_did_not_come(bench: Bench) -> None:
    every = [bench.partition(i) for i in range(6)]
    store = bench.store(every, read_bytes=1 << 30, is_alone=False)
    bench.run(store, every)
    store.use(every[0])
    store.move_on()
    offered = set(bench.tensors.shown)
    assert offered == set(every)  # 2 MB in all
    bench.tensors.in_use.update(every[:2])  # gathered
    store.use(every[4])
    store.move_on()
    assert set(bench.tensors.shown) == {*every[:2], *every[4:]}


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_was_offered_and_is_released_without_a_use_counts_no_more(is_alone: bool, bench: Bench) -> None:
    """An evaluation begins with what was gathered ahead for a training step. Whether the values that the device has are
    in memory as well may differ between ranks, what is offered may not.
    """
    every = [bench.partition(i) for i in range(12)]
    offered: list[list[Any]] = []
    for is_kept in (True, False):
        store = bench.store(every, read_bytes=16 * LARGE_BYTES, is_alone=is_alone, device=LateDevice())
        bench.run(store, every)
        for used in every[:3]:
            store.use(used)
            ended_reads(store)
            store.move_on()
            bench.tensors.in_use.update(gathered := list(store._offered))
            assert len(gathered) > 1
            for partition in gathered:
                store.copied(partition, Passed())
                size_class = store._size_class_of[partition]
                if not is_kept and partition.presence is Presence.KEPT:
                    size_class.kept.discard(partition)
                    store._free(partition)
                    partition.presence = Presence.GATHERED
            bench.tensors.in_use.clear()
            for partition in gathered:
                if store.release(partition):
                    bench.tensors.away(partition)
            assert store._offered_bytes == sum(partition.size_bytes for partition in store._offered) == 0
            store.move_on()
            if not is_alone:
                offered.append([partition.handle for partition in store._offered])
        bench.tensors.shown.clear()
        store.close()
    assert offered[: len(offered) // 2] == offered[len(offered) // 2 :]


def test_small_ones_stay_until_the_step_if_the_plan_says_so(bench: Bench) -> None:
    every = [bench.partition(i, 1000, trained=True) for i in range(3)]
    store = bench.store(every, read_bytes=1 << 20, keep_below=4097)
    bench.run(store, every, step=False)
    assert set(bench.tensors.shown) == set(every)
    assert bench.run(store, every) == 0
    assert not bench.tensors.shown


def test_rewritten_values_are_read_again(bench: Bench) -> None:
    every = [bench.partition(i) for i in range(4)]
    store = bench.store(every, read_bytes=1 << 20)
    bench.run(store, every)  # and the next round is on its way
    bench.expected[every[1]] = torch.full((LARGE,), 55, dtype=torch.bfloat16)
    every[1].source.write(bench.expected[every[1]])
    store.forget(every[1])
    bench.run(store, every)


def test_other_dtypes_and_sizes(bench: Bench) -> None:
    values = [
        torch.randint(0, 255, (400_001,), dtype=torch.uint8),
        torch.arange(7, dtype=torch.int8),
        torch.randn(LARGE),
    ]
    every = [Partition(i, bench.space.park("a parameter", value)) for i, value in enumerate(values)]
    bench.expected = dict(zip(every, values, strict=True))
    store = bench.store(every, read_bytes=1 << 20)
    for _ in range(3):
        bench.run(store, every)


def test_after_the_end_partitions_are_read_without_a_store_and_memory_is_given_back(bench: Bench) -> None:
    every = [bench.partition(i) for i in range(4)]
    store = bench.store(every, read_bytes=1 << 20)
    bench.run(store, every)
    store.close()
    assert store.used_bytes == 0
    assert not bench.tensors.shown
    assert all(p.store is None and torch.equal(p.copy(), bench.expected[p]) for p in every)


def test_what_is_lost_says_why() -> None:
    lost = Partition(1, Lost("parameter head.weight", "their engine failed (disk is gone)"))
    with pytest.raises(FuyouStateError, match=r"head.weight has no values any more: .*disk is gone"):
        lost.copy()


class Passed(Event):
    def __init__(self) -> None:
        super().__init__()
        self.has_passed = True


def ended_reads(store: ParameterStore) -> None:
    for partition in store.partitions:
        if partition.read is not None:
            partition.read.wait()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("num_micro_batches", "pool", "expected"), [(1, 80, 78), (4, 80, 312), (1, 20, 77), (4, 20, 305)]
)
def test_on_a_device_what_is_used_was_offered_before(
    num_micro_batches: int, pool: int, expected: int, trained: bool, bench: Bench
) -> None:
    """But for the first of a step, and for what is used twice in a row."""
    every = [bench.partition(i, 2048, trained=trained) for i in range(40)]
    store = bench.store(every, read_bytes=pool * every[0].num_bytes, device=LateDevice())
    order = [*every, *reversed(every)] * num_micro_batches
    for _ in range(4):
        offered = 0
        for partition in order:
            ended_reads(store)
            offered += partition.presence is Presence.HERE
            store.use(partition)
            store.copied(partition, Passed())
            bench.tensors.in_use.add(partition)
            store.move_on()
            bench.tensors.in_use.discard(partition)
            if store.release(partition):
                bench.tensors.away(partition)
        store.step_applied()
    assert offered >= expected


def test_where_everything_stays_gathered_one_rank_looks_for_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [bench.partition(i, trained=True) for i in range(6)]
    store = bench.store(every, read_bytes=16 * LARGE_BYTES)

    def token() -> None:
        for partition in every:
            store.use(partition)
            store.move_on()
            bench.tensors.in_use.add(partition)
            assert torch.equal(bench.tensors.shown[partition], bench.expected[partition])

    walks = []
    peek = Ahead.peek
    monkeypatch.setattr(Ahead, "peek", lambda self: (walks.append(1), peek(self))[1])
    for _ in range(3):
        token()
    assert walks
    walks.clear()
    token()
    assert not walks
    assert store.trace.next_place(every[0]) == store.trace.cursor, "the order moves on"
    bench.tensors.in_use.clear()  # one is released, and all change: it begins anew
    store.release(every[2])
    bench.tensors.away(every[2])
    token()
    assert walks
    bench.tensors.in_use.clear()
    before = store.num_demand_reads
    for partition in every:
        bench.expected[partition] = bench.expected[partition] + 1
        partition.source.write(bench.expected[partition])
    store.step_applied()
    for _ in range(2):
        token()
    assert store.num_demand_reads - before <= 1, "the rest is read ahead"


def test_what_is_kept_for_long_costs_no_more_memory(bench: Bench) -> None:
    every = [bench.partition(i, 2048) for i in range(8)]
    store = bench.store(every, read_bytes=1 << 20)
    store.trace.expect(every)
    for _ in range(40):
        bench.run(store, every, step=False)
    size_class = store._size_classes[0]
    assert len(size_class.kept._latest) <= 2 * len(every) + 65
    assert len(size_class.ahead._again) + len(store._offers._again) <= 2 * len(every)
    assert len(size_class.in_flight) <= len(every)


def test_a_use_that_is_an_exception_costs_a_few_steps_of_the_walks(bench: Bench) -> None:
    """Experts: two of four in each layer, others for each token."""
    every = [bench.partition(i, 1000) for i in range(720)]
    store = bench.store(every, read_bytes=1 << 21)
    chosen, looked = random.Random(3), 0

    def token() -> list[Partition]:
        layers = [every[at : at + 9] for at in range(0, len(every), 9)]
        return [partition for layer in layers for partition in [*layer[:5], *chosen.sample(layer[5:], 2)]]

    bench.run(store, token(), step=False)
    bench.run(store, token(), step=False)
    at = store.trace.at

    def counted(place: int) -> Any:
        nonlocal looked
        looked += 1
        return at(place)

    store.trace.at = counted  # type: ignore[method-assign]
    turns, num_uses = store.trace.turn, 0
    for _ in range(6):
        order = token()
        num_uses += len(order)
        bench.run(store, order, step=False)
    assert store.trace.turn == turns
    assert looked <= 8 * num_uses
    assert store.num_overflows == 0


def test_a_state_dict_takes_back_what_was_offered(bench: Bench) -> None:
    every = [bench.partition(i) for i in range(4)]
    store = bench.store(every, read_bytes=16 * LARGE_BYTES)
    store.trace.expect(every)
    bench.run(store, every, step=False)
    ended_reads(store)
    store.use(every[0])
    store.move_on()
    assert store.release(every[0])
    bench.tensors.away(every[0])
    assert any(partition.presence is Presence.HERE for partition in every)
    with store.in_order(every, is_saved=True):
        assert store.used_bytes == 0
        for partition in every:
            store.use(partition)
            if store.release(partition):
                bench.tensors.away(partition)
    assert store.used_bytes == 0
