# SPDX-License-Identifier: Apache-2.0
"""States that move between host memory and storage while steps are made: the same bits, the right records and bytes."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fuyou.checkpoint.recovery import recover_weights
from ds_fuyou.errors import FuyouError, FuyouMemoryError, FuyouStateError, FuyouStorageError
from ds_fuyou.host.memory import HostPool
from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer import moving
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.state_layout import SPLIT, WHOLE
from ds_fuyou.storage import growing
from ds_fuyou.storage.store import SlotStore
from tests.harness.small_core import apply, backward, everything, hypers, small_core, step, values

LAYOUT = build_layout(
    [[(name, name, 3 * CUT_ELEMENTS, place) for place, name in enumerate("abcd", 1)], [("e", "e", 77, 0)]],
    LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
)
NUM_CHUNKS = len(LAYOUT.chunks)
STATE_BYTES = 3 * CUT_ELEMENTS * 4  # of every chunk but the last, which is smaller


def move(core: OutOfCoreOptimizer, share: float, step_bytes: int = 4 * STATE_BYTES) -> None:
    core.mover.move_to(ChunkResidency.of_shares(LAYOUT, 0.0, share, 0.0).states, step_bytes)


def in_memory(core: OutOfCoreOptimizer) -> int:
    return sum(core.place.residency.states)


def run(path: Path, moves: dict[int, float], **options: Any) -> list[torch.Tensor]:
    """Twelve steps, some clipped, one skipped, one without some gradients; before some of them a move begins."""
    path.mkdir()
    with small_core(path, LAYOUT, **options) as core:
        for seed in range(12):
            if seed in moves:
                move(core, moves[seed])
            if seed == 5:
                backward(core, seed)
                core.skip()
            else:
                apply(core, seed, 0.5 if seed % 3 == 0 else 1.0, ["b", "e"] if seed == 7 else [])
        counts = core.mover.counts
        assert bool(counts.num_to_memory or counts.num_to_storage) == bool(moves)
        return everything(core)


PLACES = [
    pytest.param((0.0, 0.0, 0.0), "speculate", 2, id="storage, updates in backward"),
    pytest.param((1.0, 0.0, 1.0), "speculate", 2, id="states on storage, updates in backward"),
    pytest.param((1.0, 0.3, 0.0), "defer", 2, id="some in memory, updates after step()"),
    pytest.param((1.0, 0.3, 1.0), "defer", 1, id="one slot"),
    pytest.param((0.0, 1.0, 1.0), "speculate", 2, id="states in memory"),
]


@pytest.mark.parametrize(("residency", "clip_policy", "num_slots"), PLACES)
def test_a_run_in_which_states_move_equals_one_in_which_they_do_not(
    residency: tuple[float, float, float], clip_policy: str, num_slots: int, tmp_path: Path
) -> None:
    options = {"residency": residency, "clip_policy": clip_policy, "num_slots": num_slots}
    expected = run(tmp_path / "one", {}, **options)
    moves = {1: 0.6, 4: 0.0, 6: 1.0, 9: 0.2}
    if residency[1] == 1.0:
        moves = {1: 0.4, 4: 1.0, 6: 0.0, 9: 0.7}
    found = run(tmp_path / "other", moves, **options)
    assert all(map(torch.equal, expected, found))


def test_what_moves_is_bounded_and_leaves_before_others_come(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(1.0, 0.5, 1.0), clip_policy="speculate") as core:
        target = tuple(not resident for resident in core.place.residency.states)
        leaving = sum(core.place.residency.states)
        core.mover.move_to(target, 4 * STATE_BYTES)
        seen = [(0, 0)]
        for seed in range(16):
            step(core, seed)
            counts = core.mover.counts
            seen.append((counts.num_to_storage, counts.num_to_memory))
        assert core.place.residency.states == target
        assert core.mover.is_idle
    gone = [one[0] for one in seen]
    assert all(later - earlier <= 5 for earlier, later in itertools.pairwise(gone)), seen
    assert all(one[0] == other[0] or one[1] == other[1] for one, other in itertools.pairwise(seen)), seen
    assert all(came == 0 for left, came in seen if left < leaving), seen
    assert seen[-1] == (leaving, NUM_CHUNKS - leaving)


def blocks_of(store: SlotStore) -> int:
    """In whole units of 64 KiB: the file system takes a few blocks for itself."""
    return sum((path / "data").stat().st_blocks * 512 for path in store.directories) >> 16


def test_memory_and_space_are_given_back_and_moving_moves_nothing_twice(tmp_path: Path) -> None:
    """A state that comes is read and not written, one that leaves written and not read."""
    with small_core(tmp_path, LAYOUT, residency=(1.0, 0.0, 1.0)) as core:
        assert core.store is not None
        step(core, 0)
        whole = sum(region.num_bytes * region.num_slots for region in core.store.regions.values())
        assert core.store.total_bytes == whole
        assert blocks_of(core.store) == whole >> 16
        one = sum(core.place.state_spec(chunk).num_bytes for chunk in LAYOUT.chunks)

        def moved_bytes(seed: int) -> tuple[int, int]:
            before = core.io.stats()
            step(core, seed)
            after = core.io.stats()
            return tuple(after[lane].num_bytes - before[lane].num_bytes for lane in ("read", "write"))  # type: ignore[return-value]

        assert moved_bytes(1) == (one, one)
        move(core, 1.0, step_bytes=2 * one)
        assert moved_bytes(2) == (one, 0), "only read"
        assert moved_bytes(3) == (0, 0)
        assert in_memory(core) == NUM_CHUNKS
        while not core.mover.is_idle:
            step(core, 4)
        assert core.store.total_bytes == 0 == blocks_of(core.store), core.store.total_bytes
        assert core.staging.capacity_bytes == 4096, "nothing passes through it any more"
        move(core, 0.0, step_bytes=2 * one)
        assert core.store.total_bytes == whole, "room is there before anything moves"
        assert blocks_of(core.store) == whole >> 16
        assert moved_bytes(5) == (0, one), "only written"
        assert moved_bytes(6) == (one, one)
        assert in_memory(core) == 0
        assert not core.place._states
        assert core.staging.capacity_bytes > 4096


def weights_of(directories: Sequence[Path], out: Path) -> dict[str, torch.Tensor]:
    recover_weights(directories, out)
    return torch.load(out)


def test_records_say_what_they_lack_and_are_whole_again_when_all_has_left(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(1.0, 0.0, 1.0), keep=True) as core:
        store = core.store
        assert store is not None

        def committed() -> list[tuple[int, int]]:
            core.commits.forget_params()  # waits
            return [(one.step, int(str(one.meta["states_in_memory"]))) for one in store.commits()]

        step(core, 0)
        step(core, 1)
        assert committed() == [(2, 0), (1, 0)]
        assert core.keeps_steps
        move(core, 0.5, step_bytes=1)
        step(core, 2)
        assert committed() == [(3, 1)]
        assert not core.keeps_steps
        step(core, 3)
        assert committed() == [(4, 2)]
        move(core, 0.0, step_bytes=10 * STATE_BYTES)
        step(core, 4)
        assert committed() == [(5, 2)], "they were on their way when it was ordered"
        step(core, 5)
        assert committed() == [(6, 0)]
        assert core.keeps_steps
        step(core, 6)
        assert committed() == [(7, 0), (6, 0)]
        directories = store.directories
        expected = [parts[0].clone() for _, parts in core.states.read_all(range(NUM_CHUNKS))]
    found = weights_of(directories, tmp_path / "out.pt")
    assert torch.equal(torch.cat(expected), torch.cat([found[span.name].view(-1) for span in LAYOUT.params]))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_nobody_recovers_what_lacks_states(share: float, tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(1.0, 0.0, 1.0), keep=True) as core:
        step(core, 0)
        move(core, share, step_bytes=1 << 30)
        step(core, 1)
        step(core, 2)
        while not core.mover.is_idle:
            step(core, 3)
        assert core.store is not None
        directories, count = core.store.directories, in_memory(core)
    with pytest.raises(FuyouStateError, match=f"P32 of {count} of {NUM_CHUNKS} chunks was in host memory"):
        recover_weights(directories, tmp_path / "out.pt")


def test_until_a_step_that_moves_is_committed_the_one_before_is_there(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, keep=True) as core:
        step(core, 0)
        step(core, 1)
        expected = [parts[0].clone() for _, parts in core.states.read_all(range(NUM_CHUNKS))]
        move(core, 1.0, step_bytes=1 << 30)
        core.commits.holds_orders = True  # the step's commit is not ordered: as if it were killed before
        step(core, 2)
        assert core.store is not None
        assert in_memory(core) == NUM_CHUNKS
        directories = core.store.directories
    found = weights_of(directories, tmp_path / "out.pt")
    assert torch.equal(torch.cat(expected), torch.cat([found[span.name].view(-1) for span in LAYOUT.params]))


def test_without_room_nothing_moves_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "one").mkdir()
    expected = run(tmp_path / "plain", {}, residency=(0.0, 1.0, 1.0))
    with small_core(tmp_path / "one", LAYOUT, residency=(0.0, 1.0, 1.0)) as core:
        store = core.store
        assert store is not None
        before, sizes = dict(store.regions), blocks_of(store)
        calls = []

        def refuse(fd: int, num_bytes: int, offset: int = 0) -> None:
            calls.append(offset)
            os.posix_fallocate(fd, offset, num_bytes)
            raise OSError(errno.ENOSPC, "no room")

        for seed in range(12):
            if seed == 2:
                with monkeypatch.context() as full:
                    full.setattr(growing, "preallocate", refuse)
                    with pytest.raises(FuyouStorageError, match="more bytes cannot be allocated") as caught:
                        move(core, 0.0)
                assert caught.value.errno == errno.ENOSPC
                assert calls
                assert dict(store.regions) == before
                assert blocks_of(store) == sizes
                assert core.mover.is_idle
            if seed == 3:
                with pytest.raises(FuyouStorageError, match="which may be used: nvme_budget_bytes"):
                    core.mover.move_to((False,) * NUM_CHUNKS, 1, budget_bytes=store.total_bytes + 4096)
            if seed == 5:
                backward(core, seed)
                core.skip()
            else:
                apply(core, seed, 0.5 if seed % 3 == 0 else 1.0, ["b", "e"] if seed == 7 else [])
        assert in_memory(core) == NUM_CHUNKS
        assert all(map(torch.equal, expected, everything(core)))


def test_a_state_that_cannot_be_written_stays_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(tmp_path / "plain", {}, residency=(1.0, 1.0, 0.0))
    (tmp_path / "one").mkdir()
    native = load_core()
    with small_core(tmp_path / "one", LAYOUT, residency=(1.0, 1.0, 0.0)) as core:
        for seed in range(12):
            if seed == 2:
                move(core, 0.0, step_bytes=2 * STATE_BYTES)
                assert core.store is not None
                bad = core.store.extents("state/1", 0)[0]
                for slot in (0, 1):
                    bad = core.store.extents("state/1", slot)[0]
                    core.io.engine.add_fault(
                        kind=native.IoKind.WRITE,
                        effect=native.IoFaultEffect.ERROR,
                        error=errno.EIO,
                        count=1 << 30,
                        fd=bad.fd,
                        offset_begin=bad.offset,
                        offset_end=bad.offset + bad.num_bytes,
                    )
            if seed == 5:
                backward(core, seed)
                core.skip()
            else:
                apply(core, seed, 0.5 if seed % 3 == 0 else 1.0, ["b", "e"] if seed == 7 else [])
        assert core.place.residency.states[1]
        assert 1 < in_memory(core) < NUM_CHUNKS
        assert core.mover.failure is not None
        assert core.mover.is_idle
        assert core.store is not None
        assert "state/1" not in core.store.regions
        assert all(map(torch.equal, expected, everything(core)))
    said = [record.message for record in caplog.records if "not moved any further" in record.message]
    assert len(said) == 1
    assert "chunk 1 could not be written" in said[0]


def test_without_memory_what_came_stays_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(tmp_path / "plain", {}, residency=(1.0, 0.0, 1.0))
    (tmp_path / "one").mkdir()
    given = []

    def scarce(num_bytes: int, *, inherited: bool) -> torch.Tensor:
        if len(given) == 3:
            raise FuyouMemoryError(num_bytes)
        given.append(num_bytes)
        return allocate(num_bytes, inherited=inherited)

    allocate = moving.aligned_tensor
    monkeypatch.setattr(moving, "aligned_tensor", scarce)
    with small_core(tmp_path / "one", LAYOUT, residency=(1.0, 0.0, 1.0)) as core:
        for seed in range(12):
            if seed == 2:
                move(core, 1.0, step_bytes=2 * STATE_BYTES)
            if seed == 5:
                backward(core, seed)
                core.skip()
            else:
                apply(core, seed, 0.5 if seed % 3 == 0 else 1.0, ["b", "e"] if seed == 7 else [])
        assert in_memory(core) == 3
        assert isinstance(core.mover.failure, FuyouMemoryError)
        assert all(map(torch.equal, expected, everything(core)))


@pytest.mark.parametrize("masters", [WHOLE, SPLIT])
def test_where_there_is_no_room_states_leave_through_two_chunks_of_staging_memory(masters: str, tmp_path: Path) -> None:
    """It becomes as large as it should be when they have left, and there is room."""
    options: dict[str, Any] = {"residency": (1.0, 0.95, 1.0), "masters": masters}
    expected = run(tmp_path / "one", {}, **options)
    stored, seen, room = (False,) * NUM_CHUNKS, list[int](), [0]
    path = tmp_path / "other"
    path.mkdir()
    with small_core(path, LAYOUT, **options) as core:
        away = replace(core.place.residency, states=stored)
        two = 2 * max(core.place.job_bytes(chunk, away) for chunk in LAYOUT.chunks)
        for seed in range(12):
            if seed == 1:
                core.mover.move_to(stored, 4 * STATE_BYTES, room=lambda: room[0])
            if seed == 2:
                room[0] = 3 * two // 2
            if seed == 5:
                backward(core, seed)
                core.skip()
            else:
                apply(core, seed, 0.5 if seed % 3 == 0 else 1.0, ["b", "e"] if seed == 7 else [])
            seen.append(core.staging.capacity_bytes)
        assert not in_memory(core)
        assert all(map(torch.equal, expected, everything(core)))
        assert seen[0] < seen[1] == two < core.place.staging_bytes()
        step(core, 12)
        step(core, 13)
        assert core.staging.capacity_bytes == room[0]


def test_without_memory_for_staging_the_old_one_serves_and_no_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When all has moved staging is made anew: whatever comes of that, the step was applied."""

    def scarce(num_bytes: int, *_: object) -> HostPool:
        raise FuyouMemoryError(num_bytes)

    with small_core(tmp_path, LAYOUT, residency=(1.0, 0.0, 1.0)) as core:
        step(core, 0)
        before = core.staging.capacity_bytes
        move(core, 1.0, step_bytes=100 * STATE_BYTES)
        monkeypatch.setattr("ds_fuyou.optimizer.core.HostPool", scarce)
        for seed in range(1, 5):
            step(core, seed)
        assert in_memory(core) == NUM_CHUNKS
        assert core.staging.capacity_bytes == before
        assert caplog.text.count("staging memory stays as large as it is") == 1


@pytest.mark.parametrize("error", [FuyouMemoryError(1), FuyouStateError("the device does not register it")])
def test_staging_memory_that_is_refused_ends_the_move_and_no_run(
    error: FuyouError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an error of memory, whoever refuses it: other ranks are told of those."""

    def refused(*_: object) -> HostPool:
        raise error

    expected = run(tmp_path / "plain", {}, residency=(1.0, 0.95, 1.0))
    (tmp_path / "one").mkdir()
    with small_core(tmp_path / "one", LAYOUT, residency=(1.0, 0.95, 1.0)) as core:
        for seed in range(12):
            if seed == 2:
                with monkeypatch.context() as patched:
                    patched.setattr("ds_fuyou.optimizer.core.HostPool", refused)
                    with pytest.raises(FuyouMemoryError):
                        move(core, 0.0)
            if seed == 5:
                backward(core, seed)
                core.skip()
            else:
                apply(core, seed, 0.5 if seed % 3 == 0 else 1.0, ["b", "e"] if seed == 7 else [])
        assert all(map(torch.equal, expected, everything(core)))


def test_moves_wait_while_states_are_copied_and_what_is_copied_is_one_step(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(1.0, 0.3, 1.0), clip_policy="speculate") as core:
        apply(core, 0)
        move(core, 1.0)
        apply(core, 1)
        snapshot = core.snapshot()
        expected = everything(core)[: 3 * NUM_CHUNKS]
        counted = core.mover.counts.num_to_memory
        assert counted
        found = {}
        states = snapshot.states()
        for chunk, parts in states:
            found[chunk.index] = [part.clone() for part in parts]
            if len(found) == 1:
                backward(core, 2)
                core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
                assert core.mover.counts.num_to_memory == counted
                assert not any(map(core.mover.is_due, range(NUM_CHUNKS)))
        assert all(map(torch.equal, expected, [part for index in range(NUM_CHUNKS) for part in found[index]]))
        for seed in range(3, 9):
            step(core, seed)
        assert in_memory(core) == NUM_CHUNKS


def test_what_gets_no_gradient_moves_and_stays_as_it_is(tmp_path: Path) -> None:
    """Also values that the script wrote into P16 alone, which an update would narrow anew."""
    found = []
    for moves in (False, True):
        path = tmp_path / str(moves)
        path.mkdir()
        with small_core(path, LAYOUT, residency=(0.0, 0.0, 0.0)) as core:
            step(core, 0)
            span = next(span for span in LAYOUT.params if span.name == "b")
            core.params.edited(span)
            core.params.write(span, core.params.read(span) * 0.75)
            if moves:
                move(core, 1.0)
            for seed in range(1, 8):
                step(core, seed, without=["b"])
            assert in_memory(core) == (NUM_CHUNKS if moves else 0)
            found.append(everything(core))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("clip_policy", ["defer", "speculate"])
def test_what_is_read_ahead_or_prepared_already_moves_a_step_later(clip_policy: str, tmp_path: Path) -> None:
    """States were being copied when the window opened, and are not any more when the step is applied."""
    found = []
    for moves in (False, True):
        path = tmp_path / str(moves)
        path.mkdir()
        with small_core(path, LAYOUT, residency=(1.0, 0.0, 1.0), clip_policy=clip_policy) as core:
            step(core, 0)
            if moves:
                move(core, 1.0, step_bytes=1 << 30)
            snapshot = core.snapshot()
            backward(core, 1)
            snapshot.close()
            core.apply(hypers(LAYOUT), 0.5, expected_multiplier=1.0)
            between = everything(core)
            for seed in range(2, 5):
                step(core, seed)
            assert in_memory(core) == (NUM_CHUNKS if moves else 0)
            found.append([*between, *everything(core)])
    assert all(map(torch.equal, *found))


def test_what_is_lent_to_sums_leaves_staging_for_updates_of_states_that_leave(tmp_path: Path) -> None:
    """Also when they have left, and nobody has taken note: it is lent before that. Two chunks, of which one needs more
    than half of staging memory, and than the other leaves of it."""
    limits = LayoutLimits(max_elements=5 * CUT_ELEMENTS, min_elements=CUT_ELEMENTS)
    layout = build_layout([[("a", "a", 5 * CUT_ELEMENTS, 1)], [("e", "e", 2 * CUT_ELEMENTS, 0)]], limits)
    with small_core(tmp_path, layout, residency=(0.0, 1.0, 0.0)) as core:
        step(core, 0)
        core.mover.move_to((False,) * len(layout.chunks), 1 << 30)
        core.io.engine.set_throttle(0.0, 1e6)  # a step returns before its states have left
        for number in range(1, 4):
            held = [memory for _ in range(50) if (memory := core._lend(4096)) is not None]
            del held[: len(held) // 2]
            backward(core, number)
            core.apply(hypers(layout), 1.0, expected_multiplier=1.0)
            assert core.pipeline.wait_durable(core.generation, 30.0)
            held.clear()


def test_what_is_lent_to_sums_does_not_keep_staging_memory_small(tmp_path: Path) -> None:
    """G16 of several micro-batches that lies in it is on storage when a step has ended, and has no use of it."""
    stored = (False,) * NUM_CHUNKS
    with small_core(tmp_path, LAYOUT, residency=(1.0, 0.95, 0.0)) as core:
        away = replace(core.place.residency, states=stored)
        room = [8 * max(core.place.job_bytes(chunk, away) for chunk in LAYOUT.chunks)]
        core.mover.move_to(stored, 4 * STATE_BYTES, room=lambda: room[0])
        for number in range(9):
            if number == 1:
                room[0] = 1 << 30
            core.add_gradients([(span, values(span, number)) for span in LAYOUT.params], last=False)
            core.end_micro_batch()
            assert core.gradients.lent_bytes, "the case is there"
            apply(core, number)
        assert not in_memory(core)
        assert core.staging.capacity_bytes == core.place.staging_bytes()


def test_a_move_is_asked_for_between_steps(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(1.0, 0.0, 1.0)) as core:
        backward(core, 0)
        with pytest.raises(FuyouStateError, match="between steps only"):
            move(core, 1.0)


def test_another_target_takes_the_place_of_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with small_core(tmp_path, LAYOUT, residency=(1.0, 1.0, 0.0)) as core:
        assert core.store is not None
        before = core.store.total_bytes
        move(core, 0.0, step_bytes=STATE_BYTES)
        step(core, 0)
        move(core, 1.0, step_bytes=STATE_BYTES)
        step(core, 1)
        while not core.mover.is_idle:
            step(core, 2)
        assert in_memory(core) == NUM_CHUNKS
        assert core.store.total_bytes == before, "what was reserved and not used is given back"
    assert not caplog.records


def test_staging_is_not_made_smaller_for_a_target_that_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What leaves memory has left it in the core before Python takes note: staging must still hold a chunk."""
    with small_core(tmp_path, LAYOUT, residency=(1.0, 0.5, 1.0), clip_policy="speculate") as core:
        used = core.staging.try_allocate(4096)
        assert used is not None, "staging memory is in use: it stays as large as it is"
        move(core, 1.0, NUM_CHUNKS * STATE_BYTES)
        for seed in range(8):
            step(core, seed)
        assert in_memory(core) == NUM_CHUNKS
        del used
        move(core, 0.0)
        ended = core.mover.step_ended

        def late() -> None:
            core.pipeline.wait_durable(core.generation, 60.0)
            ended()

        monkeypatch.setattr(core.mover, "step_ended", late)
        for seed in range(8):
            apply(core, seed)
        core.wait_all()
        assert in_memory(core) == 0
