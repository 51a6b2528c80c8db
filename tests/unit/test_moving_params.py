# SPDX-License-Identifier: Apache-2.0
"""P16 and G16 that change their home between two steps: the same bits, the right records, bytes and pages."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fuyou.checkpoint.recovery import recover_weights
from ds_fuyou.errors import FuyouChecksumError, FuyouMemoryError, FuyouStateError, FuyouStorageError
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.optimizer.moving_params import ParamMove
from ds_fuyou.optimizer.placement import param_region
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.state_layout import BF16, FP32, INT8, SPLIT, WHOLE
from tests.harness.moving import come_to_rest
from tests.harness.small_core import ADAMW, Disk, apply, backward, everything, hypers, small_core, step, values

LAYOUT = build_layout(
    [[(name, name, 3 * CUT_ELEMENTS + 5, place) for place, name in enumerate("abcd", 1)], [("e", "e", 77, 0)]],
    LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
)
NUM_CHUNKS = len(LAYOUT.chunks)
P16_BYTES = 2 * LAYOUT.numel


def params_of(share: float) -> tuple[bool, ...]:
    return ChunkResidency.of_shares(LAYOUT, share, 0.0, 0.0).params


def place(core: OutOfCoreOptimizer, share: float, num_versions: int | None = None) -> int:
    """Bytes that moved."""
    was = core.place.residency.params
    ParamMove(core, params_of(share), num_versions=num_versions).make()
    assert num_versions in (None, core.place.num_versions)
    now = core.place.residency.params
    assert now == params_of(share)
    return 2 * sum(chunk.numel for chunk in LAYOUT.chunks if was[chunk.index] != now[chunk.index])


def residency_of(options: dict[str, Any]) -> float:
    """The share of P16 that a core begins with."""
    return float(options["residency"][0])


def place_grads(core: OutOfCoreOptimizer, share: float) -> None:
    core.grad_mover.move_to(ChunkResidency.of_shares(LAYOUT, 0.0, 0.0, share).grads)


def run(
    path: Path,
    moves: dict[int, float],
    states: dict[int, float] | None = None,
    grads: dict[int, float] | None = None,
    versions: dict[int, int] | None = None,
    **options: Any,
) -> list[Any]:
    """Twelve steps, some clipped, one skipped, two without some gradients, two edits; before some of them P16 or G16
    moves, or states begin to."""
    path.mkdir()
    with small_core(path, LAYOUT, **options) as core:
        moved = 0
        for seed in range(12):
            if seed in moves:
                come_to_rest(core)
                moved += place(core, moves[seed], None if versions is None else versions[seed])
            if states and seed in states:
                core.mover.move_to(ChunkResidency.of_shares(LAYOUT, 0.0, states[seed], 0.0).states, 1 << 30)
            if grads and seed in grads:
                place_grads(core, grads[seed])
            if seed in (3, 8):
                core.params.edited(LAYOUT.params[1])
                core.params.write(LAYOUT.params[1], torch.full((LAYOUT.params[1].numel,), 0.1 * seed).bfloat16())
            if seed == 5:
                backward(core, seed)
                core.skip()
            else:
                apply(core, seed, 0.5 if seed % 3 == 0 else 1.0, ["b", "e"] if seed in (3, 7) else [])
        assert moved or not moves or residency_of(options) == 1.0
        return everything(core)


PLACES = [
    pytest.param((0.0, 0.0, 0.0), "speculate", 2, WHOLE, FP32, id="all on storage"),
    pytest.param((1.0, 0.0, 1.0), "speculate", 2, WHOLE, FP32, id="P16 in memory"),
    pytest.param((0.5, 0.0, 0.5), "speculate", 2, SPLIT, FP32, id="half of it, split masters"),
    pytest.param((1.0, 0.0, 1.0), "speculate", 2, SPLIT, FP32, id="P16 in memory, split masters"),
    pytest.param((0.0, 0.0, 0.0), "defer", 2, SPLIT, INT8, id="one version, split masters, codes"),
    pytest.param((0.4, 0.3, 1.0), "speculate", 3, SPLIT, INT8, id="some states in memory, three slots"),
    pytest.param((0.6, 0.5, 0.0), "defer", 1, WHOLE, FP32, id="one slot"),
    pytest.param((0.3, 0.0, 1.0), "speculate", 2, BF16, BF16, id="16-bit masters"),
    pytest.param((1.0, 0.5, 1.0, 0.5), "speculate", 2, SPLIT, FP32, id="states twice in memory"),
]


@pytest.mark.parametrize(("residency", "clip_policy", "num_slots", "masters", "moments"), PLACES)
def test_a_run_in_which_p16_moves_equals_one_in_which_it_does_not(
    residency: tuple[float, ...], clip_policy: str, num_slots: int, masters: str, moments: str, tmp_path: Path
) -> None:
    kept_as = (BF16, BF16) if masters == BF16 else (FP32, FP32)
    options = {
        "kind": replace(ADAMW, kept_as=kept_as),
        "residency": residency,
        "clip_policy": clip_policy,
        "num_slots": num_slots,
        "masters": masters,
        "moments": moments,
    }
    expected = run(tmp_path / "one", {}, **options)
    moves = {1: 0.5, 2: 0.0, 4: 1.0, 5: 0.3, 8: 0.7, 9: 0.0, 11: 1.0}
    if residency[0] == 0.5:
        moves[1] = 0.8
    assert all(map(torch.equal, expected, run(tmp_path / "other", moves, **options)))
    states = {0: 0.6, 3: 0.0, 6: 1.0, 10: 0.2}
    assert all(map(torch.equal, expected, run(tmp_path / "third", moves, states, **options)))
    grads = {0: 0.4, 1: 0.0, 5: 1.0, 7: 0.5, 8: 0.0, 10: 1.0}
    assert all(map(torch.equal, expected, run(tmp_path / "fourth", {}, {}, grads, **options)))
    versions = {seed: 1 + number % 2 for number, seed in enumerate(moves)}
    assert all(map(torch.equal, expected, run(tmp_path / "fifth", moves, states, grads, versions, **options)))
    moves = {1: 1.0, 3: 1.0, 4: 1.0, 9: 0.5, 10: 0.5}
    versions = {1: 1, 3: 2, 4: 1, 9: 2, 10: 1}
    assert all(map(torch.equal, expected, run(tmp_path / "sixth", moves, states, {}, versions, **options)))


def regions(core: OutOfCoreOptimizer) -> set[int]:
    """Chunks whose P16 has a place on storage."""
    assert core.store is not None
    return {chunk.index for chunk in LAYOUT.chunks if param_region(chunk.index) in core.store.regions}


def test_what_moves_is_counted_and_its_old_place_is_given_back(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(0.0, 0.0, 1.0), masters=SPLIT) as core:
        assert core.store is not None
        step(core, 0)
        whole = core.store.total_bytes
        assert place(core, 1.0) == P16_BYTES
        assert regions(core) == set()
        freed = 2 * sum(core.place.param_spec(chunk).num_bytes for chunk in LAYOUT.chunks)
        assert core.store.total_bytes == whole - freed
        step(core, 1)
        assert place(core, 1.0) == 0, "it is there"
        half = params_of(0.5)
        moved = place(core, 0.5)
        assert moved == 2 * sum(chunk.numel for chunk in LAYOUT.chunks if not half[chunk.index])
        assert regions(core) == {chunk.index for chunk in LAYOUT.chunks if not half[chunk.index]}
        step(core, 2)
        assert place(core, 0.0) == P16_BYTES - moved
        assert core.store.total_bytes == whole
        assert core.place.num_param_versions == core.published.num_param_versions == 0


def test_g16_moves_when_the_next_step_s_first_gradient_comes(tmp_path: Path) -> None:
    """Until then a script may ask what gradients were; room on storage is taken at once, and given back then."""
    with small_core(tmp_path, LAYOUT, residency=(1.0, 0.0, 1.0)) as core:
        assert core.store is not None
        step(core, 0)
        whole, span = core.store.total_bytes, LAYOUT.params[1]
        before = core.last_gradient(span, torch.float32)
        place_grads(core, 0.0)
        assert core.store.total_bytes == whole + sum(core.place.grad_spec(chunk).num_bytes for chunk in LAYOUT.chunks)
        after = core.last_gradient(span, torch.float32)
        assert before is not None
        assert after is not None
        assert torch.equal(before, after)
        assert all(core.place.residency.grads)
        core.mover.move_to((True,) * NUM_CHUNKS, 1)  # a chunk moves when the next step has begun
        step(core, 1)
        assert not any(core.place.residency.grads)
        for seed in (2, 3):
            core.wait_all()
            assert torch.equal(core.last_gradient(span, torch.bfloat16), values(span, seed - 1))
            place_grads(core, 0.5)
            step(core, seed)
        come_to_rest(core)
        step(core, 4)
        assert sum(core.place.residency.grads) in range(NUM_CHUNKS // 3, NUM_CHUNKS)
        snapshot = core.snapshot()
        place_grads(core, 1.0)
        backward(core, 5)
        assert not all(core.place.residency.grads), "states are being copied"
        snapshot.close()
        core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
        assert core.grad_mover.target is not None
        step(core, 6)
        assert all(core.place.residency.grads)
        assert not any(name.startswith("grad16/") for name in core.store.regions)


@pytest.mark.parametrize("masters", [WHOLE, SPLIT])
def test_the_state_of_the_last_step_can_be_recovered_after_every_move(masters: str, tmp_path: Path) -> None:
    """With P16 that completed split masters gone from its slot, and with P16 there that no update wrote."""
    for share in (0.0, 1.0):
        path = tmp_path / f"{share}"
        path.mkdir()
        with small_core(path, LAYOUT, residency=(share, 0.0, 1.0), masters=masters, keep=True) as core:
            for seed in range(3):
                step(core, seed)
            place(core, 1.0 - share)
            expected = [parts[0].clone() for _, parts in core.states.read_all(range(NUM_CHUNKS))]
            assert core.store is not None
            directories = core.store.directories
        assert recover_weights(directories, tmp_path / "out.pt").verified
        weights = torch.cat([value.view(-1) for value in torch.load(tmp_path / "out.pt").values()])
        assert torch.equal(weights, torch.cat(expected))


def test_what_cannot_be_prepared_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room on storage, or in memory; within a step, while states move or are copied."""
    with small_core(tmp_path, LAYOUT, residency=(0.5, 0.0, 1.0), masters=SPLIT) as core:
        assert core.store is not None
        step(core, 0)
        was, before, num_bytes = core.place.residency, regions(core), core.store.total_bytes
        staging = core.staging.capacity_bytes
        with pytest.raises(FuyouStorageError, match="nvme_budget_bytes"):
            ParamMove(core, params_of(0.0), num_bytes + 4096)
        with monkeypatch.context() as patch:

            def refuse(num_bytes: int, *_: object, **__: object) -> None:
                raise FuyouMemoryError(num_bytes)

            patch.setattr("ds_fuyou.optimizer.placement.aligned_tensor", refuse)
            with pytest.raises(FuyouMemoryError):
                ParamMove(core, params_of(1.0))
            patch.undo()
            patch.setattr("ds_fuyou.optimizer.core.HostPool", refuse)
            with pytest.raises(FuyouMemoryError):
                ParamMove(core, params_of(0.0))
        ParamMove(core, params_of(0.0)).give_up()
        assert (core.place.residency, regions(core), core.store.total_bytes) == (was, before, num_bytes)
        assert core.staging.capacity_bytes == staging
        backward(core, 1)
        with pytest.raises(FuyouStateError, match="between steps"):
            ParamMove(core, params_of(0.0))
        core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
        core.mover.move_to((True,) * NUM_CHUNKS, 1)
        with pytest.raises(FuyouStateError, match="between steps"):
            ParamMove(core, params_of(0.0))
        come_to_rest(core)
        snapshot = core.snapshot()
        with pytest.raises(FuyouStateError, match="between steps"):
            ParamMove(core, params_of(0.0))
        snapshot.close()
        step(core, 2)
        assert place(core, 0.0) > 0


def test_p16_that_was_written_by_a_move_is_compared_when_it_is_read(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(1.0, 0.0, 1.0)) as core:
        step(core, 0)
        place(core, 0.0)
        Disk(core, param_region(5), core.slot(5)).flip(77)
        with pytest.raises(FuyouChecksumError, match="parameter b"):
            core.params.read(LAYOUT.params[1])


def test_a_state_in_the_place_that_p16_has_left_is_not_compared_with_it(tmp_path: Path) -> None:
    """Both have 28,672 bytes and two slots; an update of the state leaves its upper halves as they are, zeros."""
    groups = [[("a", "a", 2048, 1)], [("b", "b", 14336, 2)]]
    layout = build_layout(groups, LayoutLimits(max_elements=1 << 20, min_elements=1024))

    def move(core: OutOfCoreOptimizer, share: float) -> None:
        ParamMove(core, ChunkResidency.of_shares(layout, share, 0.0, 0.0).params).make()

    with small_core(tmp_path, layout, residency=(0.0, 1.0, 1.0), masters=SPLIT) as core:
        for seed in range(1, 4):
            step(core, seed)  # both slots of P16 are written
        move(core, 1.0)
        core.mover.move_to((False, False), 1 << 30)
        step(core, 4)
        come_to_rest(core)
        move(core, 0.0)
        for seed in range(5, 8):
            step(core, seed)
            everything(core)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_move_that_fails_ends_training_and_leaves_no_record_that_lies(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_core(tmp_path, LAYOUT, residency=(1.0 - share, 0.0, 1.0), masters=SPLIT, keep=True) as core:
        assert core.store is not None
        step(core, 0)
        move = ParamMove(core, params_of(share))
        lane, count = core.io, 0
        whole = type(lane)._submit

        def submit(self: Any, kind: Any, extents: Any, memory: Any, what: str, priority: int) -> Any:
            nonlocal count
            if "P16" in what and (count := count + 1) == 5:
                extents = [extent._replace(fd=tmp_fd) for extent in extents]
            return whole(self, kind, extents, memory, what, priority)

        (tmp_path / "empty").touch()
        with open(tmp_path / "empty", "rb") as empty:
            tmp_fd = empty.fileno()
            monkeypatch.setitem(core.store._paths, tmp_fd, tmp_path / "empty")
            monkeypatch.setattr(type(lane), "_submit", submit)
            with pytest.raises(FuyouStorageError) as told:
                move.make()
        assert told.value.errno in (errno.EBADF, errno.ENODATA)
        with pytest.raises(FuyouStorageError):
            core.check()
        assert core.store.last_commit() is None


def test_staging_memory_is_as_large_as_what_is_on_its_way_needs(tmp_path: Path) -> None:
    """G16 that is to leave, P16 that comes meanwhile: nothing else is on storage then; and states that leave later."""
    with small_core(tmp_path, LAYOUT, residency=(0.5, 1.0, 1.0)) as core:
        step(core, 0)
        place_grads(core, 0.0)
        place(core, 1.0)
        step(core, 1)
        assert not any(core.place.residency.grads)
        core.mover.move_to((False,) * NUM_CHUNKS, 1)
        place_grads(core, 1.0)
        for seed in range(2, 4 + NUM_CHUNKS):
            step(core, seed)
        assert not any(core.place.residency.states)
        assert all(core.place.residency.grads)
        backward(core, 0)
        with pytest.raises(FuyouStateError, match="a backward has begun"):
            place_grads(core, 0.0)
