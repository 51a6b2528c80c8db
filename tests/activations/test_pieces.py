# SPDX-License-Identifier: Apache-2.0
"""Large tensors in pieces: through an arena that holds a few of them, over all paths, with every piece in every state
when a record dies or a transfer fails.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_fuyou.activations.copies import CopyLane, HostCopies
from ds_fuyou.activations.records import IN_MEMORY, PieceState, Record
from ds_fuyou.activations.tier import StorageHome, SwapTier
from ds_fuyou.errors import FuyouChecksumError, FuyouStorageError
from ds_fuyou.ops.core import load_core
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.swap_space import SwapSpace
from ds_fuyou.storage.types import Extent
from tests.activations.late import LateCopies
from tests.activations.support import MIB, attached

PAGE = 4096
ARENA = 32 * PAGE  # pieces are two pages


class Large(nn.Module):
    """Saves two tensors that are much larger than the arena, of no round size."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sin().sum()


@pytest.mark.parametrize("late", [0, 3])
def test_tensors_of_256_mib_pass_through_64(late: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.rand(64 * MIB + 1003)
    model = Large(x.numel()).train()
    model(x).backward()
    expected, model.scale.grad = model.scale.grad, None
    copies = LateCopies(late) if late else HostCopies()
    with attached(model, tmp_path, arena_bytes=64 * MIB, copies=copies) as swapped:
        model(x).backward()
        assert torch.equal(model.scale.grad, expected)
        assert swapped.tier.arena_peak_bytes <= 64 * MIB
        assert swapped.tier.counters.out_bytes >= 2 * 256 * MIB
        assert swapped.tier.counters.read_bytes >= 128 * MIB
        if late:
            assert swapped.tier.counters.overflow_bytes == 0
        assert swapped.nothing_is_left()


@dataclass
class Rig:
    """A tier without a model."""

    tier: SwapTier
    io: IoLane
    space: SwapSpace

    def put(self, num_bytes: int, seed: int = 0, **how: int) -> tuple[Record, torch.Tensor]:
        """A record of random bytes, and those."""
        values = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        record = self.tier.put(values, f"record {seed}", lambda: True, **how)
        assert record is not None
        return record, values

    def wait_for_all(self) -> None:
        for flight in self.tier._traffic or ():
            flight.transfer.wait_ended()
        for copy, _ in (*self.tier._copies_out, *self.tier._copies_in):
            with contextlib.suppress(RuntimeError):
                copy.wait()

    def drain(self) -> None:
        """Everything has gone to storage; what the arena holds is there too."""
        for _ in range(1000):
            self.wait_for_all()
            self.tier.poll()
            if not (self.tier._copies_out or self.tier._waiting or self.tier._unwritten or list(self.tier._traffic)):
                return

    def put_and_drain(self, num_records: int) -> None:
        records = []
        for seed in range(num_records):
            records.append(self.put(80 * PAGE, seed))
            self.drain()

    def read_all(self, order: list[Record]) -> None:
        """As many hooks as bring back everything that may come early."""
        for _ in range(100):
            self.tier.read_ahead(order, order)
            for flight in self.tier._traffic or ():
                flight.transfer.wait_ended()

    def nothing_is_left(self) -> bool:
        for _ in range(3):
            self.wait_for_all()
            with contextlib.suppress(OSError, RuntimeError):
                self.tier.poll()
        return (self.tier.held.now, self.tier.arena_used_bytes, self.space.leased_bytes) == (0, 0, 0)


@contextlib.contextmanager
def rig(directories: list[Path], copies: CopyLane, arena_bytes: int = ARENA, **home: object) -> Iterator[Rig]:
    for directory in directories:
        directory.mkdir(exist_ok=True)
    space = SwapSpace(directories)
    io = IoLane(IoSettings(block_bytes=PAGE), space.path_of)
    tier = SwapTier(arena_bytes, copies, StorageHome(io, space, **home))  # type: ignore[arg-type]
    try:
        yield Rig(tier, io, space)
    finally:
        io.engine.clear_faults()
        tier.close()
        io.close()


LANES = [HostCopies, lambda: LateCopies(2), lambda: LateCopies(1000)]
LANE_NAMES = ["host", "late", "very late"]


@pytest.mark.parametrize("lane", LANES, ids=LANE_NAMES)
def test_bytes_come_back_in_whatever_order(lane: object, tmp_path: Path) -> None:
    with rig([tmp_path], lane()) as found:  # type: ignore[operator]
        sizes = [15 * PAGE, 100, 40 * PAGE + 5, 2 * PAGE, 3 * PAGE - 1, 80 * PAGE]
        for order in (range(6), reversed(range(6)), (3, 0, 5, 1, 4, 2)):
            records = [found.put(size, seed) for seed, size in enumerate(sizes)]
            if order == (3, 0, 5, 1, 4, 2):
                found.drain()
            for index in order:
                record, values = records[index]
                assert torch.equal(found.tier.take(record), values)
                found.tier.read_ahead([r for r, _ in reversed(records)], [r for r, _ in reversed(records)])
                assert torch.equal(found.tier.take(record), values), "a second time, as with retain_graph"
            assert found.tier.arena_peak_bytes <= ARENA
            del record, values, records
        assert found.nothing_is_left()


def test_one_record_uses_all_paths(tmp_path: Path) -> None:
    with rig([tmp_path / name for name in "abc"], HostCopies()) as found:
        record, values = found.put(48 * PAGE)
        found.drain()
        paths = [piece.lease.path for piece in record.pieces if piece.lease is not None]
        assert paths == [0, 1, 2] * 8
        assert torch.equal(found.tier.take(record), values)


def test_transfers_in_flight_keep_every_path_busy(tmp_path: Path) -> None:
    """As many pieces on each path as are allowed on one, whatever the size of the record."""
    with rig([tmp_path / name for name in "abc"], LateCopies(1), arena_bytes=256 * PAGE, write_pieces=2) as found:
        core, traffic = load_core(), found.tier._traffic
        assert traffic is not None
        found.io.engine.add_fault(core.IoKind.WRITE, core.IoFaultEffect.HOLD, count=1 << 40)
        record, _ = found.put(120 * PAGE)
        for _ in range(20):
            found.tier.poll()
        assert [len(lane) for lane in traffic._lanes[True]] == [2, 2, 2]
        found.io.engine.clear_faults()
        found.drain()
        found.tier._free_memory(256 * PAGE, (1 << 60, 0))
        found.io.engine.add_fault(core.IoKind.READ, core.IoFaultEffect.HOLD, count=1 << 40)
        found.tier.read_ahead([record], [])
        assert [len(lane) for lane in traffic._lanes[False]] == [3, 3, 2], "half of the arena"


@pytest.mark.parametrize("kind", ["READ", "WRITE"])
@pytest.mark.parametrize("number", [0, 7, 19])
@pytest.mark.parametrize("lane", LANES[:2], ids=LANE_NAMES[:2])
def test_the_piece_that_fails_says_so(lane: object, number: int, kind: str, tmp_path: Path) -> None:
    """At the next use, at latest when the step ends; the record is as it was before, and can be had afterwards."""
    core = load_core()
    with rig([tmp_path], lane()) as found:  # type: ignore[operator]

        def fail() -> None:
            found.io.engine.add_fault(
                kind=getattr(core.IoKind, kind), effect=core.IoFaultEffect.ERROR, error=errno.EIO, first=number, count=1
            )

        if kind == "WRITE":
            fail()
            with pytest.raises(FuyouStorageError, match="writing record"):
                found.put_and_drain(3)
            found.io.engine.clear_faults()
            gc.collect()  # the error knows the frames that hold the records
            assert found.nothing_is_left()
        record, values = found.put(80 * PAGE)
        found.drain()
        if kind == "READ":
            fail()
            with pytest.raises(FuyouStorageError, match="reading record 0"):
                found.tier.take(record)
            found.io.engine.clear_faults()
            gc.collect()  # the error knows the frames that hold the memory
        assert torch.equal(found.tier.take(record), values)
        del record, values
        assert found.nothing_is_left()


@pytest.mark.parametrize("effect", ["SHORT", "DELAY"])
@pytest.mark.parametrize("lane", LANES[:2], ids=LANE_NAMES[:2])
def test_short_and_late_pieces_are_completed(lane: object, effect: str, tmp_path: Path) -> None:
    core = load_core()
    with rig([tmp_path / name for name in "ab"], lane()) as found:  # type: ignore[operator]
        for kind in (core.IoKind.READ, core.IoKind.WRITE):
            for first in (1, 6, 13):
                found.io.engine.add_fault(
                    kind=kind, effect=getattr(core.IoFaultEffect, effect), delay_secs=0.01, first=first, count=2
                )
        records = [found.put(30 * PAGE + 1, seed) for seed in range(3)]
        while records:
            record, values = records.pop()
            assert torch.equal(found.tier.take(record), values)
            found.tier.read_ahead([r for r, _ in reversed(records)], [])
            del record
        assert found.nothing_is_left()


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_what_is_needed_first_stays_in_memory(is_recomputed: bool, tmp_path: Path) -> None:
    """What was saved last; but a block that is computed again asks first for its input, then in the order of saving."""
    with rig([tmp_path], LateCopies(3)) as found:
        records = [found.put(ARENA // 4, seed)[0] for seed in range(2)]
        found.drain()
        begun_at = found.tier.num_saved
        records.append(found.put(ARENA // 4, 2)[0])  # the block's input
        for seed in range(3, 9):
            how = {"made_after": begun_at} if is_recomputed else {}
            records.append(found.put(ARENA // 4, seed, **how)[0])
            found.drain()
        in_memory = [seed for seed, record in enumerate(records) if _states_of(record) <= IN_MEMORY]
        # The last one came after the arena was full of what is needed sooner, and what leaves has to pass through.
        assert in_memory == ([2, 3, 4, 8] if is_recomputed else [5, 6, 7, 8])
        records.clear()
        assert found.nothing_is_left()


def _states_of(record: Record) -> set[PieceState]:
    return {piece.state for piece in record.pieces}


def test_a_record_may_die_with_its_pieces_in_any_state(tmp_path: Path) -> None:
    """Seen: every state there is. Each time nothing is left, and the bytes of another record stay right."""
    seen: set[PieceState] = set()
    with rig([tmp_path], LateCopies(3)) as found:
        for reads, num_hooks in itertools.product((False, True), range(0, 18, 2)):
            kept, values = found.put(4 * PAGE, 1)
            dying, _ = found.put(48 * PAGE, 2)
            if reads:
                found.drain()
            for hook in range(num_hooks):
                if hook % 2:
                    found.wait_for_all()
                found.tier.poll()
                if reads:
                    found.tier.read_ahead([dying], [dying])
            seen |= _states_of(dying)
            del dying
            assert torch.equal(found.tier.take(kept), values)
            del kept
            assert found.nothing_is_left()
    assert seen == set(PieceState)


def test_closing_with_everything_in_flight(tmp_path: Path) -> None:
    core = load_core()
    with rig([tmp_path], LateCopies(4)) as found:
        found.io.engine.add_fault(
            kind=core.IoKind.WRITE, effect=core.IoFaultEffect.DELAY, delay_secs=0.01, first=0, count=1000
        )
        record, _ = found.put(80 * PAGE)
        found.tier.poll()
        del record


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_copy_out_that_fails_raises_and_the_tensor_stays(number: int, tmp_path: Path) -> None:
    copies = LateCopies(2)
    copies.out.fails_at = number
    with rig([tmp_path], copies) as found:
        record, values = found.put(8 * PAGE, 1)
        with pytest.raises(RuntimeError, match="a copy failed"):
            found.drain()
        found.drain()
        assert torch.equal(found.tier.take(record), values)
        del record
        assert found.nothing_is_left()


def test_a_copy_in_that_fails_raises_and_is_never_used(tmp_path: Path) -> None:
    copies = LateCopies(2)
    with rig([tmp_path], copies) as found:
        record, _ = found.put(8 * PAGE, 1)
        found.drain()
        copies.back.fails_at = copies.back.num_copies
        with pytest.raises(RuntimeError, match="a copy failed"):
            found.read_all([record])
        with pytest.raises(RuntimeError, match="could not be copied to the device"):
            found.tier.take(record)
        del record
        assert found.nothing_is_left()


def test_put_waits_for_no_copy_while_the_device_has_room(tmp_path: Path) -> None:
    """Host memory is full: what it cannot take stays on the device, and the hook goes on. Beside one record as much
    stays as the arena holds.
    """
    copies = LateCopies(10_000_000)
    with rig([tmp_path], copies) as found:
        records = [found.put(2 * PAGE, seed) for seed in range(17)]
        assert copies.out.num_waits == 0
        assert found.tier.counters.waited_secs == 0
        states = [record.pieces[0].state for record, _ in records]
        assert states == [PieceState.LEAVING] * 16 + [PieceState.WAITING]
        records.append(found.put(60 * PAGE, 99))
        assert found.tier._on_device_bytes <= ARENA + 60 * PAGE, "the others had to leave first"
        assert copies.out.num_waits > 0
        for record, values in reversed(records):
            assert torch.equal(found.tier.take(record), values)
        del record, records
        assert found.nothing_is_left()


def test_hooks_ask_what_may_have_ended_and_no_more(tmp_path: Path) -> None:
    """One thousand copies in flight: each hook asks the oldest alone."""
    copies = LateCopies(100_000)
    with rig([tmp_path], copies, arena_bytes=2000 * PAGE) as found:
        records = [found.put(PAGE, seed) for seed in range(1000)]
        assert copies.out.num_queries <= 2 * len(records)
        del records
        assert found.nothing_is_left()


def test_a_large_record_does_not_block_reading_ahead(tmp_path: Path) -> None:
    """It is larger than the arena: its pieces come as far as there is room, and on as room comes."""
    copies = LateCopies(1)
    with rig([tmp_path], copies) as found:
        small, small_values = found.put(2 * PAGE, 1)
        large, large_values = found.put(48 * PAGE, 2)
        found.drain()
        found.tier._free_memory(ARENA, (1 << 60, 0))
        order = [large, small]
        found.read_all(order)
        assert _states_of(large) == {PieceState.ARRIVED}
        assert _states_of(small) == {PieceState.CLEAN}, "read, and not copied up before the large one is used"
        assert torch.equal(found.tier.take(large), large_values)
        assert torch.equal(found.tier.take(small), small_values)
        assert found.tier.num_demand_reads == 0


def test_on_the_host_one_record_that_never_fits_comes_back_early(tmp_path: Path) -> None:
    with rig([tmp_path], HostCopies()) as found:
        records = [found.put(48 * PAGE, seed) for seed in range(4)]
        found.drain()
        order = [record for record, _ in reversed(records)]
        found.read_all(order)
        assert [record.target is not None for record in order] == [True, False, False, False]
        assert torch.equal(found.tier.take(order[0]), records[3][1])
        assert found.tier.num_demand_reads == 0
        found.read_all(order)
        assert [record.target is not None for record in order] == [True, True, False, False]
        for record, values in reversed(records):
            assert torch.equal(found.tier.take(record), values)


def test_what_comes_back_early_is_bounded_in_bytes(tmp_path: Path) -> None:
    """However many records follow: as much as the arena, and one record that exceeds it."""
    copies = LateCopies(1)
    with rig([tmp_path], copies) as found:
        records = [found.put(20 * PAGE, seed) for seed in range(6)]
        found.drain()
        order = [record for record, _ in reversed(records)]
        found.read_all(order)
        assert copies.new_bytes == 2 * 20 * PAGE
        assert [record.target is not None for record in order] == [True, True, False, False, False, False]


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_flipped_bit_on_storage_is_noticed(late: int, checksum: bool, tmp_path: Path) -> None:
    copies = LateCopies(late) if late else HostCopies()
    with rig([tmp_path / "one", tmp_path / "two"], copies, checksum=checksum) as found:
        for _ in range(3):  # in space that other pieces had before
            found.put_and_drain(2)
        record, values = found.put(80 * PAGE)
        found.drain()
        found.put_and_drain(1)  # the arena forgets the record
        piece = next(piece for piece in record.pieces if piece.state is PieceState.STORED and piece.lease is not None)
        assert piece.lease is not None
        place = piece.lease.extent
        with open(f"/proc/self/fd/{place.fd}", "r+b", buffering=0) as file:
            file.seek(place.offset + PAGE + 7)
            (byte,) = file.read(1)
            file.seek(place.offset + PAGE + 7)
            file.write(bytes([byte ^ 32]))
            os.fsync(file.fileno())
        if checksum:
            with pytest.raises(FuyouChecksumError, match="reading record 0 failed: the bytes read are not those"):
                found.tier.take(record)
        else:
            assert not torch.equal(found.tier.take(record), values)
        del record, piece
        gc.collect()
        assert found.nothing_is_left()


def test_the_end_takes_no_memory_for_files_that_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watching costs 8 bytes a page of all that was ever leased."""
    with rig([tmp_path / "one", tmp_path / "two"], HostCopies()) as found:
        found.put_and_drain(2)
        places = found.space.files
        forgotten: list[Extent] = []
        forget = IoLane.forget

        def noted(self: IoLane, extents: Iterable[Extent]) -> None:
            forgotten.extend(extents)
            forget(self, extents)

        with monkeypatch.context() as patch:
            patch.setattr(IoLane, "watch", lambda *_: pytest.fail("watched at the end"))
            patch.setattr(IoLane, "forget", noted)
            found.tier.close()
        assert forgotten == places


def test_after_the_end_what_is_opened_as_the_same_descriptor_is_compared_with_nothing(tmp_path: Path) -> None:
    with rig([tmp_path / "one"], HostCopies()) as found:
        found.put_and_drain(2)
        (place,) = found.space.files
        found.tier.close()
        other = tmp_path / "other"
        other.write_bytes(bytes(place.num_bytes))
        fd = os.open(other, os.O_RDONLY)
        os.dup2(fd, place.fd)
        memory = torch.ones(place.num_bytes, dtype=torch.uint8)
        found.io.read([place], memory, "reading another file").wait()
        assert not memory.any()
        for each in {fd, place.fd}:
            os.close(each)
