# SPDX-License-Identifier: Apache-2.0
"""The last rank that has written gives the folder its name: one rank, once, whoever comes when."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from ds_fuyou.checkpoint import atomic
from ds_fuyou.checkpoint.atomic import name_beside
from ds_fuyou.checkpoint.parts import Parts
from ds_fuyou.errors import FuyouStorageError

RANKS = 4


def parts_in(folder: Path, num_ranks: int = RANKS) -> list[Parts]:
    hidden = folder / atomic.incomplete_tag("tag")
    hidden.mkdir()
    for rank in range(num_ranks):
        (hidden / f"file-{rank}").write_text("new")
    makers = [0] * num_ranks
    return [Parts(hidden, folder / "tag", rank, makers, (folder / "latest", "tag")) for rank in range(num_ranks)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_nothing_appears_before_the_last(order: tuple[int, ...], tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    for rank in order[:-1]:
        assert not parts[rank].written()
        assert [path.name for path in tmp_path.iterdir()] == [".incomplete-tag"]
    assert parts[order[-1]].written()
    assert sorted(path.name for path in (tmp_path / "tag").iterdir()) == [f"file-{rank}" for rank in range(RANKS)]
    assert (tmp_path / "latest").read_text() == "tag"


@pytest.mark.parametrize("replaces", [False, True])
def test_all_that_see_all_marks_at_once_publish_once(replaces: bool, tmp_path: Path, monkeypatch) -> None:
    if replaces:
        (tmp_path / "tag").mkdir()
        (tmp_path / "tag" / "file-0").write_text("old")
    parts, all_have_counted = parts_in(tmp_path), threading.Barrier(RANKS)
    listdir, result = os.listdir, dict.fromkeys(range(RANKS), False)

    def counted(folder) -> list[str]:
        all_marked.wait()
        found = listdir(folder)
        all_have_counted.wait()
        return found

    all_marked = threading.Barrier(RANKS)

    def write(rank: int) -> None:
        result[rank] = parts[rank].written()

    def only_when_counting(folder) -> list[str]:
        return counted(folder) if isinstance(folder, int) else listdir(folder)

    monkeypatch.setattr(os, "listdir", only_when_counting)
    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(result.values()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "tag"]
    assert (tmp_path / "tag" / "file-0").read_text() == "new"


def test_a_rank_that_comes_after_the_folder_was_replaced_leaves_the_new_one(tmp_path: Path, monkeypatch) -> None:
    """It has counted all marks, and is late with the rest: the hidden name may be the old folder's by then."""
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "file-0").write_text("old")
    first, late = parts_in(tmp_path, 2)
    (tmp_path / ".incomplete-tag" / ".written-0").touch()
    unlink, published = os.unlink, []

    def late_unlink(name, *, dir_fd: int | None = None) -> None:
        if not published:
            published.append(True)
            monkeypatch.setattr(atomic, "_remove", lambda folder: None)  # as if it took long
            assert first.written()
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", late_unlink)
    assert not late.written()
    assert (tmp_path / "tag" / "file-0").read_text() == "new"


def test_a_mark_that_cannot_be_made_is_named_with_its_folder(tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    (tmp_path / ".incomplete-tag" / ".written-2").mkdir()
    with pytest.raises(FuyouStorageError) as caught:
        parts[2].written()
    assert caught.value.filename == str(tmp_path / ".incomplete-tag" / ".written-2")
    assert caught.value.errno == errno.EISDIR


def test_where_latest_cannot_be_written_no_folder_gets_its_name(tmp_path: Path) -> None:
    blocked = name_beside(tmp_path / "latest", "tag")
    blocked.mkdir()
    first, last = parts_in(tmp_path, 2)
    assert not first.written()
    with pytest.raises(FuyouStorageError, match=r"writing latest failed.*\blatest"):
        last.written()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".incomplete-tag", blocked.name]
