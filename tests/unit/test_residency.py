# SPDX-License-Identifier: Apache-2.0
"""Shares of every class in host memory: which chunks stay, what goes to storage, and equal results either way."""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host import memory
from ds_fuyou.host.device import HostDevice
from ds_fuyou.host.memory import PageLocks
from ds_fuyou.optimizer.clip_policy import Overlap
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.placement import ChunkPlacement, regions_for
from ds_fuyou.optimizer.residency import ChunkResidency, spread_evenly
from ds_fuyou.optimizer.rules import GroupHyper, OptimizerKind
from ds_fuyou.state_layout import FP32, INT8
from ds_fuyou.storage.io import IoSettings
from ds_fuyou.storage.store import RunIdentity, SlotStore
from tests.harness.small_core import small_core

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
    found = ChunkResidency.of_shares(layout, 0.0, 0.5, 1.0)
    kept = [layout.chunks[i].position for i, resident in enumerate(found.states) if resident]
    assert sorted(kept) == [0, 1, 5][: len(kept)]
    assert sum(layout.chunks[i].numel for i, resident in enumerate(found.states) if resident) <= layout.numel / 2
    assert not any(found.params)
    assert all(found.grads)
    assert found.needs_storage
    assert not ChunkResidency.of_shares(layout, 1.0, 1.0, 1.0).needs_storage


def spread(sizes: list[int], room: float) -> list[bool]:
    return spread_evenly(sizes, [(place,) for place in range(len(sizes))], room)


def test_the_largest_are_in_memory_where_they_fit() -> None:
    """Memory for reads holds two of the largest on storage: a small share must not send an embedding there."""
    sizes = [400] + [60] * 30 + [400]
    assert [index for index, stay in enumerate(spread(sizes, 500)) if stay] == [0, 11]
    assert spread(sizes, 1000)[:: len(sizes) - 1] == [True, True]
    assert not spread(sizes, 399)[0]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.68, 0.9, 1.0])
@pytest.mark.parametrize("sizes", [[100] * 32, [8, 1, 6, 1, 8, 2] * 12, [1, 1000, 1, 1]], ids=["even", "blocks", "one"])
def test_parameters_in_memory_are_spread_over_the_model(sizes: list[int], share: float) -> None:
    """Of any stretch as much as of all, give or take two of the largest; and no room is left that one would fit."""
    room = share * sum(sizes)
    stays = spread(sizes, room)
    kept = [size if stay else 0 for size, stay in zip(sizes, stays, strict=True)]
    assert sum(kept) <= room * (1 + 1e-9)
    assert all(size > room * (1 + 1e-9) - sum(kept) for size, stay in zip(sizes, stays, strict=True) if not stay)
    for begin, end in itertools.combinations(range(0, len(sizes) + 1, 3), 2):
        assert abs(sum(kept[begin:end]) - share * sum(sizes[begin:end])) <= 2 * max(sizes)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("split", [1, 4])
def test_chunks_of_parameters_in_memory_are_spread_over_the_model(split: int, share: float) -> None:
    """Of blocks whose parameters begin and end amid chunks, in sub-groups that come in any order; and what is in memory
    is so as a whole.
    """
    shapes = [("norm", 100), ("qkv", 9 * K), ("out", 3 * K + 500), ("up", 12 * K), ("down", 12 * K), ("bias", 700)]
    blocks = [
        [(f"{block}.{name}", str(block), numel, 10 * block + place) for place, (name, numel) in enumerate(shapes)]
        for block in range(24)
    ]
    groups = [[entry for block in blocks[first::split] for entry in block] for first in range(split)]
    layout = build_layout(groups, LayoutLimits(max_elements=4 * K, min_elements=K))
    found = ChunkResidency.of_shares(layout, share, 0.0, 1.0).params
    resident = {index for index, stays in enumerate(found) if stays}
    held = sum(layout.chunks[index].numel for index in resident)
    assert share * layout.numel - 4 * K <= held <= share * layout.numel
    order = sorted(layout.chunks, key=lambda chunk: chunk.position)
    for begin, end in itertools.combinations(range(0, len(order) + 1, 9), 2):
        stretch = order[begin:end]
        numel = sum(chunk.numel for chunk in stretch)
        kept = sum(chunk.numel for chunk in stretch if chunk.index in resident)
        assert abs(kept - share * numel) <= 60 * K, (begin, end)  # of some 870 in all
    whole = [span for span in layout.params if resident.issuperset(layout.chunks_of_param[span.index])]
    needed = {index for span in whole if span.numel > 500 for index in layout.chunks_of_param[span.index]}
    assert len(resident - needed) <= 4, "what was left of the room"


def test_versions_of_parameters_in_memory_lie_beside_each_other() -> None:
    """Of chunks that are apart in the sub-group; and what is on storage between them is not to be had."""
    layout = build_layout(
        [[(f"{block}.{name}", str(block), 5 * K, 2 * block + place) for place, name in enumerate("ab")]
         for block in range(2)],
        LIMITS,
    )  # fmt: skip
    params = tuple(chunk.index in (0, 1, 2, 3, 4, 8, 9, 15, 16, 17, 18, 19) for chunk in layout.chunks)
    nothing = (False,) * len(params)
    options = core_options(ChunkResidency(params, nothing, nothing))
    place = ChunkPlacement(layout, options, 2, None, PageLocks(HostDevice()))
    assert place.num_param_versions == 2
    whole = [span for span in layout.params if place.is_in_memory(span)]
    assert [span.name for span in whole] == ["0.a", "1.b"]
    for version in range(2):
        for chunk in layout.chunks:
            if params[chunk.index]:
                place.chunk_params(chunk, version).fill_(100 * version + chunk.index)
    for version, span in itertools.product(range(2), whole):
        expected = [100 * version + index for index in layout.chunks_of_param[span.index] for _ in range(K)]
        assert place.span_params(span, version).tolist() == expected
    with pytest.raises(FuyouStateError, match="elements 10240 to 20480 of a sub-group is not in one place"):
        place.span_params(layout.params[1], 0)
    place.close()


def core_options(residency: ChunkResidency, policy: str = "speculate") -> CoreOptions:
    """Staging memory holds two chunks."""
    return CoreOptions(
        residency=residency,
        num_slots=2,
        overlap=Overlap.BACKWARD_AND_FORWARD,
        clip_policy=policy,
        param_dtype=torch.bfloat16,
        grad_dtype=torch.bfloat16,
        staging_bytes=1,
        num_update_threads=1,
        io=IoSettings(engine="threads"),
    )


@contextmanager
def open_core(
    directory: Path, params: float, states: float, grads: float, *, policy: str = "speculate"
) -> Iterator[OutOfCoreOptimizer]:
    options = core_options(ChunkResidency.of_shares(LAYOUT, params, states, grads), policy)
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


def bytes_with_pages(tensor: torch.Tensor) -> int:
    """How many of the tensor's bytes lie in pages that the system has given: bits 62 and 63 of ``/proc/self/pagemap``
    say swapped and present. (What the whole process holds changes with what earlier tests left.)
    """
    page = mmap.PAGESIZE
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = begin // page, -(-end // page)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)
        entries = struct.unpack(f"={last - first}Q", pagemap.read(8 * (last - first)))
    return sum(
        min(end, (first + place + 1) * page) - max(begin, (first + place) * page)
        for place, entry in enumerate(entries)
        if entry >> 62
    )


@pytest.mark.parametrize("moments", [FP32, INT8])
@pytest.mark.parametrize("brings_in", [True, False])
def test_memory_of_states_is_taken_when_they_are_made(
    moments: str, brings_in: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the first step: what is free after the build is what others may have. (A system before Linux 5.14 does not
    bring pages in.)"""
    initialize = OutOfCoreOptimizer.initialize
    held_bytes = total_bytes = 0

    def measured(core: OutOfCoreOptimizer, *arguments: Any) -> None:
        nonlocal held_bytes, total_bytes
        initialize(core, *arguments)
        states = [state for chunk in core.layout.chunks if (state := core.place.state(chunk.index)) is not None]
        held_bytes, total_bytes = sum(map(bytes_with_pages, states)), sum(state.nbytes for state in states)

    monkeypatch.setattr(OutOfCoreOptimizer, "initialize", measured)
    if not brings_in:
        monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 12_345)
    layout = build_layout([[("a", "a", 8 << 20, 0)]], LayoutLimits(max_elements=4 << 20, min_elements=K))
    with small_core(tmp_path, layout, residency=(0.0, 1.0, 0.0), moments=moments) as core:
        assert held_bytes == total_bytes > layout.numel
        for chunk in layout.chunks:
            assert not any(part.any() for part in core.states.read(chunk.index)[1:])
