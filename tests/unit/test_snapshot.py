# SPDX-License-Identifier: Apache-2.0
"""States of one step, taken away while further steps are made: whoever is faster, they are those of that step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ds_fuyou.errors import FuyouChecksumError, FuyouStateError, FuyouStorageError
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, Chunk, LayoutLimits, build_layout
from ds_fuyou.optimizer.snapshot import _TIMES, Pace, Snapshot
from ds_fuyou.state_layout import SPLIT, WHOLE
from ds_fuyou.storage.types import Extent
from tests.harness.damage import flip_bit
from tests.harness.small_core import Disk, backward, hypers, small_core, step

LAYOUT = build_layout(
    [[(name, name, 3 * CUT_ELEMENTS, place) for place, name in enumerate("abcd", 1)], [("e", "e", 77, 0)]],
    LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
)
States = dict[int, list[torch.Tensor]]


def states_of(core: OutOfCoreOptimizer) -> States:
    return {
        chunk.index: [part.clone() for part in parts]
        for chunk, parts in core.states.read_all(range(len(LAYOUT.chunks)))
    }


def taken(snapshot: Snapshot) -> States:
    return {chunk.index: [part.clone() for part in parts] for chunk, parts in snapshot.states()}


def same(one: States, other: States) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for index in one for a, b in zip(one[index], other[index], strict=True)
    )


def apply(core: OutOfCoreOptimizer, seed: int) -> None:
    """A step that waits for nothing."""
    backward(core, seed)
    core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)


class Copier(threading.Thread):
    """Takes a snapshot away; ``between`` is called before each chunk is let go."""

    def __init__(self, snapshot: Snapshot, between: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.found: States = {}
        self._snapshot, self._between = snapshot, between
        self.start()

    def run(self) -> None:
        for chunk, parts in self._snapshot.states():
            self._between()
            self.found[chunk.index] = [part.clone() for part in parts]


PLACES = [
    pytest.param((0.0, 0.0, 0.0), "speculate", 2, id="storage, updates in backward"),
    pytest.param((1.0, 0.0, 1.0), "defer", 2, id="storage, updates after step()"),
    pytest.param((1.0, 0.0, 1.0), "defer", 1, id="one slot"),
    pytest.param((0.0, 1.0, 1.0), "defer", 2, id="host memory"),
    pytest.param((0.4, 0.5, 0.3), "speculate", 2, id="both"),
    pytest.param((0.0, 0.0, 0.0), "speculate", 3, id="three slots"),
    pytest.param((0.4, 0.5, 0.3), "defer", 3, id="both, three slots"),
]


@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize(("residency", "clip_policy", "num_slots"), PLACES)
def test_steps_do_not_change_what_is_taken(
    residency: tuple[float, float, float], clip_policy: str, num_slots: int, before: int, tmp_path: Path
) -> None:
    with small_core(tmp_path, LAYOUT, residency=residency, clip_policy=clip_policy, num_slots=num_slots) as core:
        for seed in range(before):
            step(core, seed)
        expected = states_of(core)
        snapshot = core.snapshot()
        may_go = threading.Semaphore(len(LAYOUT.chunks) // 3)
        copier = Copier(snapshot, may_go.acquire)
        apply(core, 10)
        may_go.release(len(LAYOUT.chunks))
        for seed in range(3):
            apply(core, 11 + seed)  # waits for updates, which wait for the copier
        copier.join()
        assert same(copier.found, expected)
        core.wait_all()
        changed = states_of(core)
        assert not any(torch.equal(changed[index][0], expected[index][0]) for index in expected)
        again = core.snapshot()
        assert same(taken(again), changed)


def test_updates_that_would_write_over_what_was_not_taken_wait(tmp_path: Path) -> None:
    """With two slots those of the first step wait for a buffer to hand states over; without, those of the second."""
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 0)
        expected = states_of(core)
        snapshot = core.snapshot()
        apply(core, 1)
        assert not core.pipeline.wait_durable(core.generation, 0.3)
        assert same(taken(snapshot), expected)
        core.wait_all()
        core.pipeline.keep_states([chunk.index for chunk in LAYOUT.chunks])
        step(core, 2)
        apply(core, 3)
        assert not core.pipeline.wait_durable(core.generation, 0.3)
        core.pipeline.drop_kept()
        core.wait_all()


def test_with_three_slots_no_update_waits_for_what_was_not_taken(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(0.0, 0.0, 0.0), num_slots=3) as core:
        for first in (0, 10):
            step(core, first)
            expected = states_of(core)
            snapshot = core.snapshot()
            for seed in range(5):
                step(core, first + 1 + seed)
                core.wait_all()
                core.commits.settle()
            snapshot.hurry()
            assert same(taken(snapshot), expected)


def test_between_two_pieces_copied_behind_training_it_moves_more_or_storage_is_idle_as_long() -> None:
    moved, now = 1_000, 50.0
    pace = Pace(lambda: moved, lambda: now)
    assert pace.is_due(False)
    pace.begin()
    moved, now = 90_000, 53.0
    assert not pace.is_due(True), "never two at once"
    pace.end(500)
    moved += _TIMES * 500 - 1
    assert not pace.is_due(False)
    moved += 1
    assert pace.is_due(False)
    pace.begin()
    now = 55.0
    pace.end(500)
    rest = _TIMES * 2.0
    now += rest - 0.1
    assert not pace.is_due(True), "the last one took two seconds"
    assert not pace.is_due(False), "somebody was there meanwhile"
    now += rest - 0.1
    assert not pace.is_due(True)
    moved += 1
    assert not pace.is_due(True), "and again"
    now += rest + 0.1
    assert pace.is_due(True)


class EveryThird(Pace):
    """Something is due whenever it was asked three times; whoever begins without being told so fails."""

    def __init__(self) -> None:
        super().__init__(lambda: 0)
        self._asked = 3
        self.num_begun = 0

    def is_due(self, is_idle: bool) -> bool:
        self._asked += 1
        return self._asked >= 3

    def begin(self) -> None:
        assert self._asked >= 3, "read before it was due"
        self._asked, self.num_begun = 0, self.num_begun + 1


@pytest.mark.parametrize("masters", [WHOLE, SPLIT])
def test_what_cannot_be_cloned_is_read_when_it_is_due(masters: str, tmp_path: Path) -> None:
    """Split masters cannot, and a file system that shares no blocks says so at the first one."""
    with small_core(tmp_path, LAYOUT, num_slots=3, masters=masters) as core:
        step(core, 0)
        expected = states_of(core)
        snapshot = core.snapshot()
        snapshot._pace = pace = EveryThird()
        asked: list[Chunk] = []

        def clone(chunk: Chunk, parts: Sequence[Sequence[Extent]]) -> None:
            asked.append(chunk)

        found = {chunk.index: [part.clone() for part in parts] for chunk, parts in snapshot.states(clone)}
        assert same(found, expected)
        assert len(asked) == (masters == WHOLE)
        assert pace.num_begun == len(LAYOUT.chunks)


def test_updates_hand_over_what_they_replace(tmp_path: Path) -> None:
    """As many as there are buffers, so that nobody reads them again: in host memory an update need not wait."""
    with small_core(tmp_path, LAYOUT, residency=(0.0, 1.0, 1.0)) as core:
        step(core, 0)
        expected = states_of(core)
        snapshot = core.snapshot()
        apply(core, 1)
        for chunk in sorted(LAYOUT.chunks, key=lambda chunk: chunk.position)[:4]:
            assert core.pipeline.wait_published(chunk.index, core.generation, 30.0)
        handed_over = [core.pipeline.take_kept(30.0, True) for _ in range(4)]
        assert all(kept is not None and kept[2] for kept in handed_over)
        for index, _, address, _ in handed_over:
            chunk = LAYOUT.chunks[index]
            state = core.states.parts(chunk, snapshot._lent[address][: core.states.num_bytes(chunk)])
            assert all(torch.equal(a, b) for a, b in zip(state, expected[index], strict=True))
        snapshot.close()
        core.wait_all()


def test_a_snapshot_of_updates_in_flight(tmp_path: Path) -> None:
    """It is made without waiting; what it holds is the step that was applied, and not the one before."""
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 0)
        core.pipeline.set_committed(-1)  # the next step's writes wait
        apply(core, 1)
        snapshot = core.snapshot()
        copier = Copier(snapshot, lambda: None)
        core.pipeline.set_committed(1)
        copier.join()
        core.wait_all()
        assert same(copier.found, states_of(core))


def test_prepared_updates_that_are_dropped_change_nothing(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(0.0, 0.0, 0.0), clip_policy="speculate") as core:
        step(core, 0)
        expected = states_of(core)
        backward(core, 1)
        snapshot = core.snapshot()
        core.skip()
        backward(core, 2)
        core.forget_gradients()
        apply(core, 3)
        assert same(taken(snapshot), expected)
        core.wait_all()


def test_states_are_replaced_when_they_were_taken(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 0)
        expected = states_of(core)
        snapshot = core.snapshot()
        copier = Copier(snapshot, lambda: None)
        for chunk in LAYOUT.chunks:
            core.states.write(chunk.index, [torch.full((chunk.numel,), 3.0)] * 3)
        copier.join()
        assert same(copier.found, expected)
        assert float(core.states.read(0)[0][0]) == 3.0


@pytest.mark.parametrize("is_read_by_an_update", [True, False])
def test_a_byte_that_changed_is_not_taken(
    is_read_by_an_update: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_fuyou.optimizer.snapshot._NUM_LENT", 0)  # so that nothing is handed over
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 0)
        index = max(LAYOUT.chunks, key=lambda chunk: chunk.position).index
        disk = Disk(core, f"state/{index}", core.slot(index))
        snapshot = core.snapshot()
        if is_read_by_an_update:
            apply(core, 1)
            core.wait_all()
        disk.flip(40)
        with pytest.raises(FuyouChecksumError, match=f"the state of chunk {index}"):
            taken(snapshot)
        assert snapshot.wait(0.0), "nothing waits for it"


def test_a_read_that_fails_is_named_and_lets_updates_go(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 0)
        snapshot = core.snapshot()
        engine, types = core.io.engine, core.io._core
        engine.add_fault(types.IoKind.READ, types.IoFaultEffect.ERROR, error=5, count=1)
        with pytest.raises(FuyouStorageError, match=r"reading the state of chunk \d+ for a checkpoint"):
            taken(snapshot)
        assert snapshot.wait(0.0)
        step(core, 1)  # it costs the checkpoint alone
        step(core, 2)


def test_a_snapshot_that_is_closed_meanwhile_ends_who_copies_it(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 0)
        snapshot = core.snapshot()
        states = snapshot.states()
        next(states)
        snapshot.close()
        with pytest.raises(FuyouStateError, match="let go"):
            for _ in states:
                pass


def test_one_snapshot_at_a_time_and_a_closed_one_holds_nothing(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 0)
        snapshot = core.snapshot()
        with pytest.raises(RuntimeError, match="kept already"):
            core.snapshot()
        snapshot.close()
        snapshot.close()
        step(core, 1)
        step(core, 2)
        assert same(taken(core.snapshot()), states_of(core))


@pytest.mark.parametrize("fault", ["", "shorter", "flipped"])
def test_a_clone_that_cannot_be_read_is_named_by_its_own_file(fault: str, tmp_path: Path) -> None:
    """As a file system that shares blocks makes them; here they are copied."""
    copy = tmp_path / "checkpoint"
    with small_core(tmp_path, LAYOUT) as core, copy.open("w+b", buffering=0) as file:

        def clone(chunk: Chunk, parts: Sequence[Sequence[Extent]]) -> list[Extent]:
            begin = file.seek(0, os.SEEK_END)
            for extent in (extent for extents in parts for extent in extents):
                with core.store.paths_of_fd(extent.fd).open("rb") as source:  # type: ignore[union-attr]
                    source.seek(extent.offset)
                    file.write(source.read(extent.num_bytes))
            if fault == "flipped" and chunk.index == 3:
                flip_bit(copy, begin)
            return [Extent(file.fileno(), begin, file.seek(0, os.SEEK_END) - begin)]

        step(core, 0)
        expected = states_of(core)
        states, found = core.snapshot().states(clone), {}
        index, parts = next((chunk.index, parts) for chunk, parts in states)  # all were cloned before one is read
        found[index] = [part.clone() for part in parts]
        if fault == "shorter":
            os.truncate(copy, os.path.getsize(copy) - 4096)
        if not fault:
            found |= {chunk.index: [part.clone() for part in parts] for chunk, parts in states}
            assert same(found, expected)
        else:
            kind = FuyouChecksumError if fault == "flipped" else FuyouStorageError
            with pytest.raises(kind, match=r"reading the state of chunk \d+") as caught:
                list(states)
            assert caught.value.filename == str(copy)
        step(core, 1)
        step(core, 2)
