# SPDX-License-Identifier: Apache-2.0
"""G16 in DRAM and on storage holds what was written, in a bounded number of buffers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ds_fuyou.host.device import HostDevice
from ds_fuyou.host.memory import PageLocks, round_up_to_page
from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer.gradients import DramGradients, StoredGradients
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.store import Extent

LAYOUT = build_layout(
    [[(f"block{i}.weight", f"block{i}", 2 * CUT_ELEMENTS + 100, i) for i in range(8)]],
    LayoutLimits(max_elements=2 * CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
)
UNLOCKED = PageLocks(HostDevice())
CHUNK_BYTES = round_up_to_page(2 * CUT_ELEMENTS * 2)


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


def write_all(memory: StoredGradients | DramGradients) -> None:
    for span in reversed(LAYOUT.params):
        at = 0
        for piece in memory.pieces(span):
            piece.copy_(values_of(span.index)[at : at + piece.numel()])
            at += piece.numel()
        memory.seal_all()


def check_all(memory: StoredGradients | DramGradients) -> None:
    for span in LAYOUT.params:
        assert torch.equal(torch.cat(memory.pieces(span)), values_of(span.index))
        memory.seal_all()


def test_dram_gradients_are_one_piece_and_have_an_address() -> None:
    memory = DramGradients(LAYOUT, torch.bfloat16, UNLOCKED)
    write_all(memory)
    check_all(memory)
    assert all(len(memory.pieces(span)) == 1 for span in LAYOUT.params)
    first, second = LAYOUT.chunks[:2]
    assert memory.pointer(1) - memory.pointer(0) == 2 * (second.begin - first.begin)


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
    for _, transfer in memory._sealed.values():
        transfer.wait()
    writes = io.stats()["write"].num_operations
    for span in LAYOUT.params:
        assert torch.equal(torch.cat(memory.values(span)), values_of(span.index))
    assert [chunk.index for chunk in LAYOUT.chunks if memory.pointer(chunk.index)] == resident
    memory.seal_all()
    assert io.stats()["write"].num_operations == writes
    for span in LAYOUT.params:  # what is written after it was read is read anew
        memory.pieces(span)[0][0] = -1.0
        assert memory.values(span)[0][0] == -1.0
        memory.seal_all()
    assert all(memory.values(span)[0][0] == -1.0 for span in LAYOUT.params)


def test_a_write_that_failed_keeps_nothing_from_closing(stored: tuple[StoredGradients, list[int]], io: IoLane) -> None:
    core = load_core()
    memory, _ = stored
    memory.pieces(LAYOUT.params[0])
    io.engine.add_fault(core.IoKind.WRITE, core.IoFaultEffect.ERROR, count=1 << 40)
    memory.seal_all()
    memory.close()
    assert not any(memory.pointer(chunk.index) for chunk in LAYOUT.chunks)


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
