# SPDX-License-Identifier: Apache-2.0
"""What is said of a failed transfer: what, where and why, each once, and nothing that nobody has looked at."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_fuyou.cli import main
from ds_fuyou.errors import FuyouError, FuyouStorageError
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from tests.harness.small_core import small_core, step

LAYOUT = build_layout(
    [[(name, name, CUT_ELEMENTS, place) for place, name in enumerate("abc")]],
    LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
)


def left_by_a_run(path: Path) -> Path:
    with small_core(path, LAYOUT, keep=True) as core:
        for seed in range(2):
            step(core, seed)
        core.commits.settle()
    return path / "ds_fuyou" / "run-rank0"


def steps(core: OutOfCoreOptimizer, count: int) -> None:
    for seed in range(count):
        step(core, seed + 1)
        core.commits.settle()


def cut_off(core: OutOfCoreOptimizer) -> None:
    assert core.store is not None
    os.truncate(core.store.directories[0] / "data", 4096)


def fault(kind: str) -> Callable[[OutOfCoreOptimizer], None]:
    def inject(core: OutOfCoreOptimizer) -> None:
        types = core.io._core
        core.io.engine.add_fault(getattr(types.IoKind, kind), types.IoFaultEffect.ERROR, error=errno.EIO, count=1)

    return inject


@pytest.mark.parametrize(
    ("harm", "what", "why"),
    [
        (fault("READ"), "reading the state of chunk", "Input/output error"),
        (fault("WRITE"), "writing the state of chunk", "Input/output error"),
        (cut_off, "reading the state of chunk", "shorter than the layout says"),
    ],
)
def test_a_failed_transfer(
    harm: Callable[[OutOfCoreOptimizer], None], what: str, why: str, tmp_path: Path, told: Callable[[], str]
) -> None:
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 0)
        harm(core)
        with pytest.raises(FuyouStorageError) as failure:
            steps(core, 2)
    assert str(failure.value).replace(str(tmp_path), "").count("failed") == 1
    assert "intact" not in str(failure.value) + told()
    assert str(failure.value).startswith(what)
    assert why in str(failure.value)
    assert f"{tmp_path / 'ds_fuyou' / 'run-rank0' / 'data'} at byte " in str(failure.value)


def test_a_failed_commit(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 0)
        core.commits.settle()
        assert core.store is not None
        directory = core.store.directories[0]
        (directory / "commit.json.tmp").unlink(missing_ok=True)
        (directory / "commit.json.tmp").mkdir()
        with pytest.raises(FuyouError) as failure:
            steps(core, 3)
        (directory / "commit.json.tmp").rmdir()
    assert str(failure.value).startswith("committing step 2")
    assert str(failure.value).count(os.strerror(errno.EISDIR)) == 1
    assert str(failure.value).replace(str(tmp_path), "").count("failed") == 1
    assert str(directory / "commit.json") in str(failure.value)


def test_recovering_from_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = left_by_a_run(tmp_path)

    def fails(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    assert main(["recover", str(directory), "--weights", str(tmp_path / "weights.pt")]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("fuyou recover: reading P32 of chunk 0 failed (Input/output error) [")
    assert f"{directory / 'data'} at byte " in line
    assert not (tmp_path / "weights.pt").exists()


def test_cleaning_where_a_manifest_is_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = left_by_a_run(tmp_path)
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").mkdir()
    before = sorted(directory.rglob("*"))
    assert main(["clean", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "manifest.json" in line
    assert str(directory) in line
    assert sorted(directory.rglob("*")) == before
