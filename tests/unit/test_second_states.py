# SPDX-License-Identifier: Apache-2.0
"""States in host memory with a spare block: updated in backward, the same bits, and the old ones until step()."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.optimizer.residency import ChunkResidency
from tests.harness.small_core import apply, backward, everything, hypers, small_core

LAYOUT = build_layout(
    [[(name, name, 3 * CUT_ELEMENTS, place) for place, name in enumerate("abcd", 1)], [("e", "e", 77, 0)]],
    LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
)
NUM_CHUNKS = len(LAYOUT.chunks)
RESIDENT = (1.0, 1.0, 0.0)


def run(path: Path, moves: dict[int, float], **options: Any) -> list[torch.Tensor]:
    """Twelve steps, some clipped, one skipped, one without some gradients; before some of them states begin to move."""
    path.mkdir()
    with small_core(path, LAYOUT, **options) as core:
        for seed in range(12):
            if seed in moves:
                core.mover.move_to(ChunkResidency.of_shares(LAYOUT, 0.0, moves[seed], 0.0).states, 1 << 20)
            if seed == 5:
                backward(core, seed)
                core.skip()
            else:
                apply(core, seed, 0.5 if seed % 3 == 0 else 1.0, ["b", "e"] if seed == 7 else [])
        return everything(core)


@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("shares", "moves"),
    [
        ((1.0, 1.0, 0.0, 1.0), {}),
        ((0.3, 1.0, 1.0, 0.5), {}),
        ((0.0, 0.6, 1.0, 0.3), {}),
        ((1.0, 1.0, 0.5, 1.0), {2: 0.3, 8: 1.0}),
    ],
    ids=["all", "half, some parameters on storage", "some, parameters on storage", "states leave and come back"],
)
def test_a_run_with_second_states_equals_one_without(
    shares: tuple[float, ...], moves: dict[int, float], moments: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"moments": moments, "masters": "whole" if moments == "fp32" else "split"}
    expected = run(tmp_path / "one", {}, residency=RESIDENT, clip_policy="defer", **options)
    found = run(tmp_path / "other", moves, residency=shares, clip_policy="speculate", **options)
    assert all(map(torch.equal, expected, found))


def test_their_updates_are_made_in_backward_and_seen_after_step(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(1.0, 1.0, 0.0, 1.0), clip_policy="speculate") as core:
        apply(core, 0)
        core.wait_all()
        before, done = everything(core), core.pipeline.stats().num_updated_elements
        backward(core, 1)
        assert core.window.prepared.keys() == set(range(NUM_CHUNKS))
        while core.pipeline.stats().num_updated_elements - done < LAYOUT.numel:
            time.sleep(0.01)
        states = [part.clone() for _, parts in core.states.read_all(range(NUM_CHUNKS)) for part in parts]
        assert all(map(torch.equal, states, before)), "whoever reads sees what was published"
        core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
        core.wait_all()
        assert core.num_redone_chunks == 0
        assert core.pipeline.stats().num_updated_elements == done + LAYOUT.numel, "once"
        assert not torch.equal(everything(core)[0], before[0])


def test_a_spare_block_goes_with_the_state_that_leaves_memory(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(1.0, 1.0, 0.0, 1.0), clip_policy="speculate") as core:
        whole = core.place.spare_bytes
        assert whole == sum(core.place.state(chunk).numel() for chunk in range(NUM_CHUNKS))
        core.mover.move_to((False,) * NUM_CHUNKS, 1 << 30)
        for seed in range(4):
            apply(core, seed)
        core.wait_all()
        core.mover.settle(wait=True)
        assert core.place.spare_bytes == 0


def test_the_last_of_those_in_memory_have_spare_blocks() -> None:
    found = ChunkResidency.of_shares(LAYOUT, 1.0, 0.7, 1.0, 0.3)
    twice = [chunk.position for chunk in LAYOUT.chunks if found.spares[chunk.index]]
    once = [c.position for c in LAYOUT.chunks if found.states[c.index] and not found.spares[c.index]]
    assert twice
    assert min(twice) >= max(once)
    assert all(found.states[chunk.index] for chunk in LAYOUT.chunks if found.spares[chunk.index])
    numel = sum(chunk.numel for chunk in LAYOUT.chunks if found.spares[chunk.index])
    assert 0.3 * LAYOUT.numel - CUT_ELEMENTS <= numel <= 0.3 * LAYOUT.numel


@pytest.mark.parametrize("shares", [(1.0, 1.0, 0.0, 1.0), (1.0, 1.0, 0.0), (1.0, 0.0, 0.0)])
def test_a_checkpoint_within_a_step_holds_what_was_published(shares: tuple[float, ...], tmp_path: Path) -> None:
    """It is copied while the step, and the next one, are made."""
    with small_core(tmp_path, LAYOUT, residency=shares, clip_policy="speculate") as core:
        apply(core, 0)
        core.wait_all()
        before = {
            chunk.index: [part.clone() for part in parts] for chunk, parts in core.states.read_all(range(NUM_CHUNKS))
        }
        backward(core, 1)
        copied = core.snapshot()
        core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
        found = {chunk.index: [part.clone() for part in parts] for chunk, parts in copied.states()}
        core.wait_all()
        assert found.keys() == before.keys()
        assert all(all(map(torch.equal, found[index], before[index])) for index in before)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_skipped_step_changes_no_parameter_on_storage(num_slots: int, tmp_path: Path) -> None:
    """With one slot the write of P16 would replace what is in use."""
    shares = (0.0, 1.0, 1.0, 1.0)
    with small_core(tmp_path, LAYOUT, residency=shares, clip_policy="speculate", num_slots=num_slots) as core:
        apply(core, 0)
        core.wait_all()
        before = [core.params.read(span).clone() for span in LAYOUT.params]
        backward(core, 1)
        assert bool(core.window.prepared) == (num_slots == 2)
        core.skip()
        core.wait_all()
        assert all(
            torch.equal(core.params.read(span), values) for span, values in zip(LAYOUT.params, before, strict=True)
        )
