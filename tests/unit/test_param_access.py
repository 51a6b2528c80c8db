# SPDX-License-Identifier: Apache-2.0
"""P16 that lives on storage is read from the update that made it, before it is written."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.optimizer.param_access import PublishedSpan
from tests.harness.small_core import backward, hypers, small_core, step

LAYOUT = build_layout(  # parameters over several chunks, chunks of several parameters, pages that are shared
    [[("a", "a", 5 * CUT_ELEMENTS + 100, 1), ("b", "b", 33, 2), ("c", "c", 2 * CUT_ELEMENTS, 3)], [("d", "d", 77, 0)]],
    LayoutLimits(max_elements=2 * CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
)


@contextmanager
def unwritten(core: OutOfCoreOptimizer, *sources: PublishedSpan) -> Iterator[None]:
    """Inside no record is written, so of two steps that are made there the second one's updates are not written, which
    all ``sources`` have. A step that was made before may be committed by then.
    """
    store: Any = core.store
    commit, may_commit = store.commit, threading.Event()

    def late(*args: Any, **named: Any) -> None:
        may_commit.wait()
        commit(*args, **named)

    store.commit = late
    try:
        step(core, 1)
        backward(core, 2)
        core.apply(hypers(core.layout), 1.0, expected_multiplier=1.0)
        for source in sources:
            source.wait()
        yield
    finally:
        may_commit.set()
        store.commit = commit


def read(source: PublishedSpan) -> tuple[torch.Tensor, int]:
    """The values, and how many reads of storage that took."""
    source.wait()
    values = source.start_reading(aligned_tensor(source.num_bytes))
    values.wait()
    return values.values, len(values.transfers)


@pytest.mark.parametrize("params_in_memory", [0.0, 0.5])
def test_p16_is_read_before_it_is_written(params_in_memory: float, tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(params_in_memory, 0.0, 1.0)) as core:
        sources = [PublishedSpan(core, span) for span in LAYOUT.params]
        sources = [source for source in sources if source.num_bytes]
        assert sources
        with unwritten(core, *sources):
            stored = [i for i, in_memory in enumerate(core.place.residency.params) if not in_memory]
            assert not any(core.pipeline.is_published(chunk, core.generation) for chunk in stored)
            handed_over = [read(source) for source in sources]
        core.wait_all()
        for source, (values, num_reads) in zip(sources, handed_over, strict=True):
            again, num_reads_again = read(source)
            assert num_reads == 0 < num_reads_again, source.span.name
            assert torch.equal(values, again), source.span.name
            assert torch.equal(values, core.params.read(source.span)), source.span.name
            assert torch.equal(values, core.states.read_param(source.span, 0).bfloat16()), source.span.name


def is_refused_in_a_forked_child(source: PublishedSpan) -> bool:
    child = os.fork()
    if child == 0:
        try:
            source.start_reading(aligned_tensor(source.num_bytes))
        except FuyouStateError as error:
            os._exit(7 if "forked" in str(error) else 1)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_forked_child_is_refused_what_is_in_staging_memory(tmp_path: Path) -> None:
    """It is zeros for it."""
    with small_core(tmp_path, LAYOUT, residency=(0.0, 0.0, 1.0)) as core:
        source = PublishedSpan(core, LAYOUT.params[0])
        with unwritten(core, source):
            assert is_refused_in_a_forked_child(source)


def test_a_forked_child_is_refused_what_is_left_in_it(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(0.0, 1.0, 1.0)) as core:
        source = PublishedSpan(core, LAYOUT.params[-1])
        step(core, 1)
        assert is_refused_in_a_forked_child(source)


def test_whoever_needs_the_place_waits_for_the_write(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(0.0, 0.0, 1.0)) as core:
        span = LAYOUT.params[0]
        source = PublishedSpan(core, span)
        with unwritten(core, source):
            assert not any(core.pipeline.is_published(chunk, 2) for chunk in LAYOUT.chunks_of_param[span.index])
        source.write(torch.ones(span.numel, dtype=torch.bfloat16))  # or the update's write would come after it
        core.wait_all()
        assert torch.equal(read(source)[0], torch.ones(span.numel, dtype=torch.bfloat16))


@contextmanager
def held_writes(core: OutOfCoreOptimizer) -> Iterator[None]:
    """Inside no write of storage ends."""
    core_types = load_core()
    core.io.engine.add_fault(core_types.IoKind.WRITE, core_types.IoFaultEffect.HOLD, count=1000)
    try:
        yield
    finally:
        core.io.engine.clear_faults()


def test_p16_that_was_written_is_read_from_memory_that_nobody_needed(tmp_path: Path) -> None:
    """Where updates make nothing else, for states are in memory."""
    with small_core(tmp_path, LAYOUT, residency=(0.0, 1.0, 1.0)) as core:
        sources = [PublishedSpan(core, span) for span in LAYOUT.params]
        for number in (1, 2):
            step(core, number)
            assert not core.staging.used_bytes
            handed_over = [read(source) for source in sources]
            assert sum(num_reads for _, num_reads in handed_over) < sum(len(one.location().runs) for one in sources)
            for source, (values, _) in zip(sources, handed_over, strict=True):
                assert torch.equal(values, core.params.read(source.span)), source.span.name
        taken = core.staging.try_allocate(core.staging.capacity_bytes)
        assert taken is not None
        taken.fill_(7)
        for source, (values, _) in zip(sources, handed_over, strict=True):
            again, num_reads = read(source)
            assert num_reads, source.span.name
            assert torch.equal(values, again), source.span.name


def test_an_edit_that_is_announced_while_an_update_is_queued_is_what_is_read(tmp_path: Path) -> None:
    layout = build_layout(
        [[(f"p{i}", f"p{i}", CUT_ELEMENTS, i) for i in range(16)]],
        LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
    )
    with small_core(tmp_path, layout, residency=(0.0, 1.0, 1.0)) as core:
        room = 2 * core.place.job_bytes(layout.chunks[0])
        taken = core.staging.try_allocate(core.staging.capacity_bytes - room)
        assert taken is not None
        with held_writes(core):
            backward(core, 1)
            core.apply(hypers(core.layout), 1.0, expected_multiplier=1.0)
            threading.Event().wait(0.1)
            span = layout.params[-1]
            assert not core.is_updated(span)  # what is being written holds the rest of staging memory
            source, edited = PublishedSpan(core, span), torch.full((span.numel,), 3.0, dtype=torch.bfloat16)
            writer = threading.Thread(target=source.write, args=(edited,))
            writer.start()
            threading.Event().wait(0.1)  # it has announced the edit, and waits for the update
        writer.join()
        core.wait_all()
        assert torch.equal(core.params.read(span), edited)
        assert torch.equal(read(source)[0], edited)


def test_what_could_not_be_written_is_not_read_from_its_old_place(tmp_path: Path) -> None:
    core_types = load_core()
    # One chunk: others that wait for their write when it fails are still whole in memory, and rightly read from there.
    layout = build_layout([[("a", "a", 100, 0)]], LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS))
    assert len(layout.chunks) == 1
    with small_core(tmp_path, layout, residency=(0.0, 0.0, 1.0)) as core:
        source = PublishedSpan(core, layout.params[0])
        with unwritten(core, source):
            core.io.engine.add_fault(core_types.IoKind.WRITE, core_types.IoFaultEffect.ERROR, error=5, count=1000)
        while not core.pipeline.failed:
            threading.Event().wait(0.001)
        with pytest.raises(FuyouStorageError, match="writing the state"):
            read(source)
