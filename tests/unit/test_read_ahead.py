# SPDX-License-Identifier: Apache-2.0
"""States that are read before their gradients come: which, what becomes of them, and the same results."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from tests.harness.small_core import backward, hypers, small_core, step, values

K = 128 * CUT_ELEMENTS  # 3 MiB of P32 and moments: a quarter of the staging memory holds one such chunk
NAMES = ("a", "b", "c", "d")
LAYOUT = build_layout(
    [[(name, name, K, position) for position, name in enumerate(NAMES)]], LayoutLimits(max_elements=K, min_elements=K)
)


def open_window(core: OutOfCoreOptimizer) -> set[int]:
    core.open_window(hypers(LAYOUT), 1.0, managed=True)
    return set(core.window.held)


def bytes_read(core: OutOfCoreOptimizer, at_least: int) -> int:
    """As soon as they are that many; the threads of the I/O engine count them."""
    while core.io.stats()["read"].num_bytes < at_least:
        time.sleep(0.001)
    return int(core.io.stats()["read"].num_bytes)


def state(core: OutOfCoreOptimizer) -> list[torch.Tensor]:
    return [part.clone() for _, parts in core.states.read_all(range(len(LAYOUT.chunks))) for part in parts]


def test_what_is_needed_first_is_read_before_its_gradient_comes(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, clip_policy="speculate") as core:
        step(core, 1)
        before = bytes_read(core, 0)
        assert open_window(core) == {0}  # the first in forward, the last in backward; a quarter of the memory
        assert bytes_read(core, before + 12 * K) == before + 12 * K
        backward(core, 2)
        assert core.window.prepared.keys() == {0, 1, 2, 3}
        assert not core.window.held
        core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
        core.wait_all()
        assert core.num_redone_chunks == 0
        assert bytes_read(core, before + 4 * 12 * K) == before + 4 * 12 * K  # nothing twice


def test_it_changes_no_result(tmp_path: Path) -> None:
    """Against updates that begin in step(); also where a step is skipped, and where one is redone."""

    def run(policy: str) -> list[torch.Tensor]:
        (tmp_path / policy).mkdir()
        with small_core(tmp_path / policy, LAYOUT, clip_policy=policy) as core:
            step(core, 1)
            backward(core, 2)
            core.skip()
            backward(core, 3)
            core.apply(hypers(LAYOUT), 0.5, expected_multiplier=1.0)
            step(core, 4)
            return state(core)

    for one, other in zip(run("speculate"), run("defer"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ends", ["applied", "skipped", "replaced"])
def test_while_micro_batches_accumulate_more_is_read(ends: str, tmp_path: Path) -> None:
    """From the end of the first of them on: half of the memory, once, and with the same results."""

    def run(directory: Path, *, reads_ahead: bool) -> list[torch.Tensor]:
        directory.mkdir()
        with small_core(directory, LAYOUT, clip_policy="speculate") as core:
            step(core, 1)
            before = bytes_read(core, 0)
            for seed in (2, 3):
                core.add_gradients([(span, values(span, seed)) for span in reversed(LAYOUT.params)], last=False)
                core.end_micro_batch(reads_ahead=reads_ahead)
                assert core.window.held == ({0, 1} if reads_ahead else set())
            if reads_ahead:
                assert bytes_read(core, before + 2 * 12 * K) == before + 2 * 12 * K
            if ends == "replaced":
                core.states.write(1, [part + 1 for part in core.states.read(1)])
                assert core.window.held == ({0} if reads_ahead else set())
            backward(core, 4)
            assert not core.window.held
            if ends == "skipped":
                core.skip()
            else:
                core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
            step(core, 5)
            return state(core)

    expected = run(tmp_path / "late", reads_ahead=False)
    found = run(tmp_path / "early", reads_ahead=True)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_step_that_is_forgotten_drops_what_was_read(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, clip_policy="speculate") as core:
        step(core, 1)
        expected = state(core)
        assert open_window(core) == {0}
        core.forget_gradients()
        assert not core.window.held
        core.wait_all()
        for one, other in zip(expected, state(core), strict=True):
            assert torch.equal(one, other)
        assert open_window(core) == {0}


def test_chunks_that_the_last_step_left_alone_are_not_read(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, clip_policy="speculate") as core:
        step(core, 1, without=["a"])
        assert open_window(core) == {1}
        core.add_gradients([(span, values(span, 2)) for span in reversed(LAYOUT.params)])
        core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
        assert open_window(core) == {0}


def test_deadlines_as_observed_count(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, clip_policy="speculate") as core:
        core.set_positions((span.index, 3 - span.index) for span in LAYOUT.params)
        assert open_window(core) == {3}


@pytest.mark.parametrize("at", ["before", "after"])
def test_an_interrupt_leaves_no_chunk_that_nobody_reads(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_core(tmp_path, LAYOUT, clip_policy="speculate") as core:
        step(core, 1)
        enqueue = core._updates._enqueue

        def interrupted(*args: object, **kwargs: object) -> None:
            if at == "after":
                enqueue(*args, **kwargs)
            raise KeyboardInterrupt

        monkeypatch.setattr(core._updates, "_enqueue", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_window(core)
        monkeypatch.undo()
        assert not core.window.held
        backward(core, 2)  # the window is open; its updates are asked for as ever
        core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
        core.wait_all()
        found = state(core)
    (tmp_path / "other").mkdir()
    with small_core(tmp_path / "other", LAYOUT, clip_policy="speculate") as core:
        step(core, 1)
        step(core, 2)
        assert all(torch.equal(one, other) for one, other in zip(found, state(core), strict=True))


def test_zero_grad_closes_a_window_that_nothing_came_to(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(0.0, 1.0, 1.0), clip_policy="defer") as core:
        assert open_window(core) == set()
        assert core.window.rules is not None
        core.forget_gradients()
        assert core.window.rules is None
