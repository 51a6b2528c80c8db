# SPDX-License-Identifier: Apache-2.0
"""When the steps of a core are committed, and as what."""

from __future__ import annotations

import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.storage import records
from ds_fuyou.storage.store import SlotStore, commits_in
from tests.harness.small_core import ADAMW, hypers, small_core, step

LIMITS = LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS)
LAYOUT = build_layout([[("a.weight", "a", CUT_ELEMENTS, 0), ("b.weight", "b", CUT_ELEMENTS, 1)]], LIMITS)


@pytest.mark.parametrize("states", [0.0, 0.5])
def test_a_step_whose_end_does_not_come_is_committed_when_the_next_begins(states: float, tmp_path: Path) -> None:
    """Else updates of the third would wait for ever for the commit of the first."""
    with small_core(tmp_path, LAYOUT, residency=(0.0, states, 1.0), keep=True) as core:
        assert set(core.options.residency.states) == ({False} if states == 0.0 else {False, True})
        core.commits.holds_orders = True
        for seed in range(1, 6):
            step(core, seed)
        assert core.store is not None
        directories = core.store.directories
    store = SlotStore.open(directories, None)
    found = [commit.step for commit in store.commits()]
    assert found == ([4, 3] if states == 0.0 else [4]), "the end of the last did not come"
    store.close(remove=True)


def test_what_ends_between_a_step_and_its_end_for_the_engine_leaves_the_one_before(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, keep=True) as core:
        core.commits.holds_orders = True
        for seed in (1, 2, 3):
            step(core, seed)
            core.commits.order({"of": seed})
        step(core, 4)
        assert core.commits.has_unordered
        assert core.store is not None
        directories = core.store.directories
    store = SlotStore.open(directories, None)
    assert [(commit.step, commit.meta["training"]) for commit in store.commits()] == [(3, {"of": 3}), (2, {"of": 2})]
    store.close(remove=True)


def test_replaced_states_of_a_resumed_step_are_another_edition_of_it(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, keep=True) as core:
        step(core, 1)
        core.commits.withdraw()
        core.commits.replaced(None)
        assert core.store is not None
        directories, options = core.store.directories, core.options
    store = SlotStore.open(directories, None)
    commit = store.last_commit()
    assert commit is not None
    assert commit.meta["edition"] == 1
    again = OutOfCoreOptimizer(LAYOUT, options, ADAMW, hypers(LAYOUT), store, commit)
    try:
        again.resume(lambda count: None)
        again.commits.withdraw()
        again.commits.replaced(None)
        replaced = store.last_commit()
        assert replaced is not None
        assert (replaced.step, replaced.meta["edition"]) == (1, 2)
    finally:
        again.close()
        store.close(remove=True)


@contextmanager
def interrupted_behind_the_exchange() -> Iterator[None]:
    """Ctrl-C arrives once, when a record has its name, before its directory is durable."""
    fsync, interrupts = os.fsync, [KeyboardInterrupt()]

    def interrupt(fd: int) -> None:
        if interrupts and stat.S_ISDIR(os.fstat(fd).st_mode):
            raise interrupts.pop()
        fsync(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield
    assert not interrupts


@contextmanager
def withdrawn_core(tmp_path: Path, **given: Any) -> Iterator[tuple[OutOfCoreOptimizer, Path]]:
    """One whose first step was committed, and withdrawn; where its records are."""
    with small_core(tmp_path, LAYOUT, keep=True, **given) as core:
        assert core.store is not None
        step(core, 1)
        core.commits.withdraw()
        yield core, core.store.directories[0]


def test_a_record_whose_writing_was_interrupted_is_withdrawn_before_what_it_names_is_overwritten(
    tmp_path: Path,
) -> None:
    with withdrawn_core(tmp_path) as (core, directory):
        assert (core.commits.is_withdrawn, commits_in(directory)) == (True, [])
        with interrupted_behind_the_exchange():
            core.commits.now()
        assert [commit.step for commit in commits_in(directory)] == [1]
        assert not core.commits.is_withdrawn
        core.commits.withdraw()
        assert (core.commits.is_withdrawn, commits_in(directory)) == (True, [])


def test_a_withdrawal_that_was_interrupted_is_made_again(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, keep=True) as core:
        assert core.store is not None
        directory = core.store.directories[0]
        step(core, 1)
        core.commits.wait()
        with interrupted_behind_the_exchange():
            core.commits.withdraw()
        assert not core.commits.is_withdrawn
        core.commits.withdraw()
        assert (core.commits.is_withdrawn, commits_in(directory)) == (True, [])


@pytest.mark.parametrize("ends_behind", [False, True])
def test_what_is_committed_behind_a_withdrawal_that_was_interrupted_is_the_next_edition(
    ends_behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever Ctrl-C came: of several ranks those of another edition are of another state."""
    with small_core(tmp_path, LAYOUT, keep=True) as core:
        assert core.store is not None
        step(core, 1)
        core.commits.wait()
        withdraw = core.store.withdraw

        def interrupted() -> None:
            if ends_behind:
                withdraw()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(core.store, "withdraw", interrupted)
            with pytest.raises(KeyboardInterrupt):
                core.commits.withdraw()
        core.commits.withdraw()
        core.commits.now()
        (commit,) = core.store.commits()
        assert commit.meta["edition"] == 1


@pytest.mark.parametrize("what", ["now", "withdraw"])
def test_behind_an_interrupted_record_the_next_step_begins_with_one(what: str, tmp_path: Path) -> None:
    """And its updates do not wait for one for ever."""
    with withdrawn_core(tmp_path, residency=(0.0, 0.0, 1.0)) as (core, directory):
        if what == "withdraw":
            core.commits.now()
        with interrupted_behind_the_exchange():
            getattr(core.commits, what)()
        core.commits.settle()
        assert [commit.step for commit in commits_in(directory)] == [1]
        step(core, 2)
        core.commits.wait()
        assert [commit.step for commit in commits_in(directory)] == [2, 1]


def test_p16_is_edited_under_no_record_that_was_interrupted(tmp_path: Path) -> None:
    """It would say what P16 was before."""
    with withdrawn_core(tmp_path, residency=(0.0, 0.0, 1.0)) as (core, directory):
        with interrupted_behind_the_exchange():
            core.commits.now()
        assert commits_in(directory)[0].meta["param_digests"]
        core.commits.forget_params()
        assert not any(commit.meta["param_digests"] for commit in commits_in(directory))


@contextmanager
def no_descriptor_left() -> Iterator[Callable[[], None]]:
    """Inside, until what it gives is called."""
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []

    def give_back() -> None:
        while held:
            os.close(held.pop())

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, limits[1]))
        with suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        yield give_back
    finally:
        give_back()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_commit_waits_for_a_descriptor(tmp_path: Path) -> None:
    """A script that opens many files for a moment would else end the run, whose steps go on without."""
    with small_core(tmp_path, LAYOUT, residency=(0.0, 0.0, 1.0), keep=True) as core:
        step(core, 1)
        core.commits.wait()
        with no_descriptor_left() as give_back:
            is_over = threading.Event()
            later = threading.Timer(0.3, lambda: (is_over.set(), give_back()))
            later.start()
            step(core, 2)
            core.commits.wait()
            assert is_over.is_set(), "there was one all the time"
            later.join()
        step(core, 3)
        core.commits.wait()
        assert core.store is not None
        assert core.store.last_commit().step == 3


def test_a_commit_that_gets_no_descriptor_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_NO_DESCRIPTOR_SECS", 0.1)
    with small_core(tmp_path, LAYOUT, residency=(0.0, 0.0, 1.0)) as core:
        step(core, 1)
        core.commits.wait()
        with no_descriptor_left():
            step(core, 2)
            with pytest.raises(FuyouStorageError, match=r"committing step 2 .*Too many open files"):
                core.commits.wait()


def test_what_is_to_be_given_back_after_the_end_stays_and_nobody_waits_for_it(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 1)
        core.commits.stop()
        ended = threading.Event()
        core.commits.release(["state/0"], ended.set)
        assert ended.wait(0.0)
        assert core.store is not None
        assert "state/0" in core.store.regions
