# SPDX-License-Identifier: Apache-2.0
"""G16 in DRAM and on storage holds what was written, in a bounded number of buffers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.device import HostDevice
from ds_fuyou.host.memory import PageLocks, aligned_tensor, round_up_to_page
from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer.gradients import DramGradients, StoredGradients
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, ParamSpan, build_layout
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.store import Extent

LAYOUT = build_layout(
    [[(f"block{i}.weight", f"block{i}", 2 * CUT_ELEMENTS + 100, i) for i in range(8)]],
    LayoutLimits(max_elements=2 * CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
)
UNLOCKED = PageLocks(HostDevice())
CHUNK_BYTES = round_up_to_page(2 * CUT_ELEMENTS * 2)


class Registering(HostDevice):
    pins = True

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.num_asked = 0

    def register(self, address: int, num_bytes: int) -> None:
        self.registered.add(address)
        self.num_asked += 1

    def unregister(self, address: int) -> None:
        self.registered.remove(address)


class Refusing(Registering):
    """The third time it is asked."""

    def register(self, address: int, num_bytes: int) -> None:
        if self.num_asked == 2:
            raise FuyouStateError("registering host memory failed")
        super().register(address, num_bytes)


@pytest.fixture
def io(tmp_path: Path) -> Iterator[IoLane]:
    lane = IoLane(IoSettings(engine="threads"), lambda fd: tmp_path / "gradients")
    yield lane
    lane.close()


@pytest.fixture
def stored(io: IoLane, tmp_path: Path) -> Iterator[tuple[StoredGradients, list[int]]]:
    detached: list[int] = []
    fd = os.open(tmp_path / "gradients", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, CHUNK_BYTES * len(LAYOUT.chunks))

    def extents(chunk: int) -> tuple[Extent, ...]:
        num_bytes = round_up_to_page(LAYOUT.chunks[chunk].numel * 2)
        return (Extent(fd, chunk * CHUNK_BYTES, num_bytes),)

    def detach(chunk: int, *_: int) -> None:
        detached.append(chunk)

    memory = StoredGradients(LAYOUT, torch.bfloat16, io, extents, detach, UNLOCKED, max_buffers=2)
    yield memory, detached
    memory.close()
    os.close(fd)


def values_of(index: int) -> torch.Tensor:
    numel = LAYOUT.params[index].numel
    return (torch.arange(numel) % 128 + index).to(torch.bfloat16)


def changed(memory: StoredGradients | DramGradients, span: ParamSpan) -> list[torch.Tensor]:
    """Memory to be changed, with what was in it."""
    pieces = memory.pieces(span)
    for _, reading in pieces:
        if reading is not None:
            reading.wait()
    return [values for values, _ in pieces]


def write_all(memory: StoredGradients | DramGradients) -> None:
    for span in reversed(LAYOUT.params):
        at = 0
        for piece in changed(memory, span):
            piece.copy_(values_of(span.index)[at : at + piece.numel()])
            at += piece.numel()
        memory.seal_all()


def check_all(memory: StoredGradients | DramGradients) -> None:
    for span in LAYOUT.params:
        assert torch.equal(torch.cat(changed(memory, span)), values_of(span.index))
        memory.seal_all()


def test_dram_gradients_are_one_piece_and_have_an_address() -> None:
    memory = DramGradients(LAYOUT, torch.bfloat16, UNLOCKED)
    write_all(memory)
    check_all(memory)
    assert all(len(memory.pieces(span)) == 1 for span in LAYOUT.params)
    first, second = LAYOUT.chunks[:2]
    assert memory.pointer(1) - memory.pointer(0) == 2 * (second.begin - first.begin)


def test_buffers_of_a_large_parameter_are_registered_once(io: IoLane, tmp_path: Path) -> None:
    """Its chunks are open together; a device takes milliseconds for each of them, and would wait in every backward."""
    layout = build_layout(
        [[("head", "head", 12 * CUT_ELEMENTS, 0), ("block0.weight", "block0", CUT_ELEMENTS, 1)]],
        LayoutLimits(max_elements=2 * CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
    )
    device = Registering()
    fd = os.open(tmp_path / "gradients", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, CHUNK_BYTES * len(layout.chunks))

    def extents(chunk: int) -> tuple[Extent, ...]:
        return (Extent(fd, chunk * CHUNK_BYTES, round_up_to_page(layout.chunks[chunk].numel * 2)),)

    locks = PageLocks(device)
    memory = StoredGradients(layout, torch.bfloat16, io, extents, lambda *_: None, locks, max_buffers=2)
    asked = []
    for _ in range(3):
        for span in layout.params:
            memory.pieces(span)
        memory.seal_all()
        memory.end_step()
        asked.append(device.num_asked)
    assert asked[0] >= 6
    assert asked == [asked[0]] * 3
    memory.close()
    os.close(fd)
    locks.release()
    assert not device.registered


def test_sealed_gradients_come_back_from_storage(stored: tuple[StoredGradients, list[int]]) -> None:
    memory, detached = stored
    write_all(memory)
    assert detached, "no buffer was taken back"
    check_all(memory)
    check_all(memory)


def test_few_buffers_are_alive_and_only_those_have_an_address(
    stored: tuple[StoredGradients, list[int]],
) -> None:
    memory, _ = stored
    write_all(memory)
    with_memory = [chunk.index for chunk in LAYOUT.chunks if memory.pointer(chunk.index)]
    assert 0 < len(with_memory) <= 4
    assert len(LAYOUT.chunks) > 8


def test_reading_takes_no_buffer_and_writes_nothing(stored: tuple[StoredGradients, list[int]], io: IoLane) -> None:
    memory, _ = stored
    write_all(memory)
    resident = [chunk.index for chunk in LAYOUT.chunks if memory.pointer(chunk.index)]
    for sealed in memory._sealed.values():
        sealed.writing.wait()
    writes = io.stats()["write"].num_operations
    for span in LAYOUT.params:
        assert torch.equal(torch.cat(memory.values(span)), values_of(span.index))
    assert [chunk.index for chunk in LAYOUT.chunks if memory.pointer(chunk.index)] == resident
    memory.seal_all()
    assert io.stats()["write"].num_operations == writes
    for span in LAYOUT.params:  # what is written after it was read is read anew
        changed(memory, span)[0][0] = -1.0
        assert memory.values(span)[0][0] == -1.0
        memory.seal_all()
    assert all(memory.values(span)[0][0] == -1.0 for span in LAYOUT.params)


def test_a_write_that_failed_keeps_nothing_from_closing(stored: tuple[StoredGradients, list[int]], io: IoLane) -> None:
    core = load_core()
    memory, _ = stored
    memory.pieces(LAYOUT.params[0])
    io.engine.add_fault(core.IoKind.WRITE, core.IoFaultEffect.ERROR, count=1 << 40)
    for index in LAYOUT.chunks_of_param[0]:
        memory.seal(index)
    memory.close()
    assert not any(memory.pointer(chunk.index) for chunk in LAYOUT.chunks)


def test_a_buffer_stays_owned_when_the_wait_for_its_write_raises(
    stored: tuple[StoredGradients, list[int]], io: IoLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update may still read it: the memory must not go with the exception."""
    core = load_core()
    memory, detached = stored
    io.engine.add_fault(core.IoKind.WRITE, core.IoFaultEffect.ERROR, count=1 << 40)
    memory.pieces(LAYOUT.params[0])
    first = memory.pointer(0)
    memory.seal(0)
    for wait in (lambda: memory._retire(0), lambda: memory.pieces(LAYOUT.params[0]), memory.check):
        with pytest.raises(OSError, match="writing the gradient of chunk 0 failed"):
            wait()
        assert memory.pointer(0) == first
    assert detached == []


def test_a_buffer_stays_owned_when_its_write_is_not_taken(
    stored: tuple[StoredGradients, list[int]], io: IoLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise KeyboardInterrupt

    memory, _ = stored
    memory.pieces(LAYOUT.params[0])
    before = memory.pointer(0)
    monkeypatch.setattr(io, "write", refuse)
    with pytest.raises(KeyboardInterrupt):
        memory.seal(0)
    assert memory.pointer(0) == before


def test_the_order_of_the_micro_batch_before_is_read_ahead(
    stored: tuple[StoredGradients, list[int]], io: IoLane
) -> None:
    memory, _ = stored

    def micro_batch() -> list[bool]:
        """Whether each chunk that had left was in memory, or on its way, when its gradients came."""
        ahead = []
        for span in reversed(LAYOUT.params):
            for index in LAYOUT.chunks_of_param[span.index]:
                ahead += [index in memory._ahead] if memory.pointer(index) == 0 else []
            at = 0
            for piece in changed(memory, span):
                piece.add_(values_of(span.index)[at : at + piece.numel()])
                at += piece.numel()
            for index in LAYOUT.chunks_of_param[span.index]:
                if LAYOUT.chunks[index].params[0] == span.index:  # the last of them in backward
                    memory.seal(index)
            assert len(memory._ahead) <= 2
            assert len(memory._ahead) + len(memory._sealed) <= 2 * 2 + len(LAYOUT.chunks_of_param[span.index])
            for sealed in memory._sealed.values():
                sealed.writing.wait()
            assert len(memory._free) <= 2
        return ahead

    write_all(memory)
    micro_batch()
    memory.seal_all()
    reads = io.stats()["read"].num_operations
    ahead = micro_batch()
    assert all(ahead)
    assert len(ahead) >= len(LAYOUT.chunks) - 4
    assert io.stats()["read"].num_operations - reads <= len(LAYOUT.chunks)
    for span in LAYOUT.params:
        assert torch.equal(torch.cat(memory.values(span)), 3 * values_of(span.index))
    memory.begin_last()
    memory.seal_all()
    assert not memory._ahead


def test_lent_memory_keeps_a_sum_until_the_last_micro_batch(io: IoLane, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "gradients", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, CHUNK_BYTES * len(LAYOUT.chunks))
    left = [6]

    def lend(num_bytes: int) -> torch.Tensor | None:
        left[0] -= 1
        return aligned_tensor(num_bytes) if left[0] >= 0 else None

    def extents(chunk: int) -> tuple[Extent, ...]:
        return (Extent(fd, chunk * CHUNK_BYTES, round_up_to_page(LAYOUT.chunks[chunk].numel * 2)),)

    def moved() -> int:
        return sum(stats.num_operations for stats in io.stats().values())

    memory = StoredGradients(LAYOUT, torch.bfloat16, io, extents, lambda *_: None, UNLOCKED, 2, lend)
    lent = LAYOUT.params[-2:]
    lent_chunks = {index for span in lent for index in LAYOUT.chunks_of_param[span.index]}
    assert len(lent_chunks) <= 6
    for _ in range(3):
        for span in lent:
            for piece in changed(memory, span):
                piece.fill_(7.0)
            memory.seal_all()
    assert moved() == 0
    assert memory.lent_bytes > 0
    write_all(memory)
    assert moved() > 0
    memory.begin_last()
    memory.seal_all()
    assert memory.lent_bytes <= 2 * CHUNK_BYTES  # on their way to storage
    check_all(memory)
    memory.end_step()
    write_all(memory)
    memory.begin_last()
    memory.seal_all()
    check_all(memory)
    assert memory.lent_bytes == 0
    memory.close()
    os.close(fd)


def test_a_copy_is_waited_for_before_more_than_a_few_buffers_are_open(
    stored: tuple[StoredGradients, list[int]],
) -> None:
    memory, _ = stored
    waited: list[int] = []

    def relieve() -> bool:
        waited.append(len(memory._open))
        memory.seal(next(iter(memory._open)))
        return True

    memory.relieve = relieve
    for span in LAYOUT.params:
        memory.pieces(span)
    assert waited
    assert set(waited) == {5}


def test_a_new_step_does_not_read_the_last_ones_values(stored: tuple[StoredGradients, list[int]], io: IoLane) -> None:
    memory, _ = stored
    write_all(memory)
    memory.end_step()
    before = io.stats()["read"].num_operations
    write_all(memory)
    check_all(memory)
    memory.end_step()
    reads = io.stats()["read"].num_operations
    write_all(memory)
    assert before == 0 or reads >= before
    assert io.stats()["read"].num_operations >= reads


def test_waits_for_transfers_are_counted(stored: tuple[StoredGradients, list[int]], io: IoLane) -> None:
    core = load_core()
    io.engine.add_fault(core.IoKind.WRITE, core.IoFaultEffect.DELAY, delay_secs=0.1, count=1 << 40)
    memory, detached = stored
    write_all(memory)
    assert detached
    assert memory.waited_secs > 0


def test_memory_that_a_device_takes_in_part_is_given_back(io: IoLane) -> None:
    device = Refusing()
    locks = PageLocks(device)
    memory = StoredGradients(LAYOUT, torch.bfloat16, io, lambda chunk: (), lambda *_: None, locks, max_buffers=2)
    with pytest.raises(FuyouStateError, match="registering host memory failed"):
        memory.keep(range(4))
    assert (device.num_asked, device.registered) == (2, set())
    memory.close()
