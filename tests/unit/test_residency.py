# SPDX-License-Identifier: Apache-2.0
"""Shares of every class in host memory: which chunks stay, what goes to storage, and equal results either way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ds_fuyou.optimizer.clip_policy import Overlap
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.placement import regions_for
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.optimizer.rules import GroupHyper, OptimizerKind
from ds_fuyou.storage.io import IoSettings
from ds_fuyou.storage.store import RunIdentity, SlotStore

K = CUT_ELEMENTS
LIMITS = LayoutLimits(max_elements=K, min_elements=K)
KIND = OptimizerKind("adam", ("exp_avg", "exp_avg_sq"))
HYPERS = (GroupHyper(1e-2, (0.9, 0.999), 1e-8, 0.0, True),)
# Chunks 0 to 4 at positions 0, 1, 1, 1, 4; the second parameter fills three of them.
LAYOUT = build_layout([[("a", "a", K, 0), ("b", "b", 3 * K, 1), ("c", "c", 100, 4)]], LIMITS)


def test_chunks_stay_in_deadline_order_and_never_more_than_the_share() -> None:
    groups = [
        [("late", "late", 2 * K, 5), ("last", "last", K, 9)],
        [("first", "first", K, 0), ("second", "second", 50, 1)],
    ]
    layout = build_layout(groups, LIMITS)
    assert [chunk.position for chunk in layout.chunks] == [5, 5, 9, 0, 1][: len(layout.chunks)]
    found = ChunkResidency.by_deadline(layout, 0.5, 0.0, 1.0)
    kept = [layout.chunks[i].position for i, resident in enumerate(found.params) if resident]
    assert sorted(kept) == [0, 1, 5][: len(kept)]
    assert sum(layout.chunks[i].numel for i, resident in enumerate(found.params) if resident) <= layout.numel / 2
    assert not any(found.states)
    assert all(found.grads)
    assert found.needs_storage
    assert not ChunkResidency.by_deadline(layout, 1.0, 1.0, 1.0).needs_storage


@contextmanager
def open_core(
    directory: Path, params: float, states: float, grads: float, *, policy: str = "speculate"
) -> Iterator[OutOfCoreOptimizer]:
    """Staging memory holds two chunks."""
    options = CoreOptions(
        residency=ChunkResidency.by_deadline(LAYOUT, params, states, grads),
        num_slots=2,
        overlap=Overlap.BACKWARD_AND_FORWARD,
        clip_policy=policy,
        param_dtype=torch.bfloat16,
        grad_dtype=torch.bfloat16,
        staging_bytes=1,
        num_update_threads=1,
        io=IoSettings(engine="threads"),
    )
    regions = regions_for(LAYOUT, options, 2, 2)
    directory.mkdir()
    store = SlotStore.create([directory], regions, RunIdentity("test", 0, 1, "run")) if regions else None
    core = OutOfCoreOptimizer(LAYOUT, options, KIND, HYPERS, store)
    core.initialize(lambda span: torch.linspace(-1, 1, span.numel).bfloat16(), lambda count: None)
    yield core
    core.close()
    if store is not None:
        store.close()


def train(core: OutOfCoreOptimizer, multipliers: tuple[float, ...] = (1.0, 0.5, 1.0)) -> list[set[int]]:
    """One step a multiplier, 1.0 being what backward expects; returns the chunks prepared in each backward."""
    prepared = []
    for step, multiplier in enumerate(multipliers):
        core.open_window(HYPERS, 1.0, managed=True)
        for span in reversed(LAYOUT.params):
            core.add_gradients([(span, torch.linspace(-1, 1 + step, span.numel).bfloat16())])
        core.end_micro_batch()
        prepared.append(set(core.window.prepared))
        core.apply(HYPERS, multiplier, expected_multiplier=1.0)
    core.wait_all()
    return prepared


def results(core: OutOfCoreOptimizer) -> list[torch.Tensor]:
    states = [part for _, parts in core.states.read_all(range(len(LAYOUT.chunks))) for part in parts]
    return [*states, *(core.params.read(span).float() for span in LAYOUT.params)]


@pytest.mark.parametrize("shares", [(1.0, 0.25, 0.5), (0.5, 0.5, 0.5), (0.0, 0.75, 0.0), (0.5, 1.0, 1.0)])
def test_every_share_leaves_what_memory_alone_leaves(shares: tuple[float, float, float], tmp_path: Path) -> None:
    """Also where the second of three steps is redone. Only chunks whose state is on storage are prepared early."""
    with open_core(tmp_path / "memory", 1.0, 1.0, 1.0) as core:
        train(core)
        expected = results(core)
    with open_core(tmp_path / "shared", *shares) as core:
        on_storage = {index for index, resident in enumerate(core.place.residency.states) if not resident}
        assert train(core) == [on_storage] * 3
        assert core.num_redone_chunks == len(on_storage)
        for wanted, found in zip(expected, results(core), strict=True):
            assert torch.equal(wanted, found)


@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.0), (1.0, 0.3, 0.5)])
def test_updates_that_wait_for_the_step_run_beside_states_that_were_read_ahead(
    shares: tuple[float, float, float], tmp_path: Path
) -> None:
    """Also where staging memory is short and resident states need some of it for their G16 on storage."""
    with open_core(tmp_path / "memory", 1.0, 1.0, 1.0) as core:
        train(core)
        expected = results(core)
    with open_core(tmp_path / "shared", *shares, policy="defer") as core:
        assert train(core) == [set()] * 3
        for wanted, found in zip(expected, results(core), strict=True):
            assert torch.equal(wanted, found)


def test_storage_holds_what_is_not_resident_and_commits_name_nothing_else(tmp_path: Path) -> None:
    with open_core(tmp_path / "shared", 0.6, 0.3, 0.8) as core:
        assert core.store is not None
        train(core)
        residency = core.place.residency
        assert residency.states == (True, False, False, False, False)
        kinds = {"state": residency.states, "param16": residency.params, "grad16": residency.grads}
        for kind, resident in kinds.items():
            assert {f"{kind}/{i}" for i, stays in enumerate(resident) if not stays} == {
                name for name in core.store.regions if name.startswith(f"{kind}/")
            }
        core.close()
        commit = core.store.last_commit()
        assert commit is not None
        assert set(commit.slots) == {"state/1", "state/2", "state/3", "state/4"}
        assert commit.intact


def test_a_parameter_that_lies_in_both_is_read_and_replaced_as_one(tmp_path: Path) -> None:
    with open_core(tmp_path / "shared", 0.6, 0.0, 0.0) as core:
        spread = LAYOUT.params[1]
        assert {core.place.residency.params[i] for i in LAYOUT.chunks_of_param[spread.index]} == {True, False}
        assert not core.place.is_in_memory(spread)
        train(core)
        before = {span.name: core.params.read(span) for span in LAYOUT.params}
        values = torch.arange(spread.numel).bfloat16()
        core.params.write(spread, values)
        assert torch.equal(core.params.read(spread), values)
        for span in (LAYOUT.params[0], LAYOUT.params[2]):
            assert torch.equal(core.params.read(span), before[span.name])
        train(core, (1.0,))
        assert not torch.equal(core.params.read(spread), values)
