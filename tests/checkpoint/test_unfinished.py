# SPDX-License-Identifier: Apache-2.0
"""``fuyou clean`` and what saves leave in folders of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_fuyou.checkpoint import atomic, unfinished
from ds_fuyou.checkpoint.atomic import LOCK_NAME, publish
from ds_fuyou.checkpoint.parts import Parts
from ds_fuyou.checkpoint.unfinished import WritingLock, discard_left, find_unfinished
from ds_fuyou.cli import main
from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage import directory
from ds_fuyou.storage.directory import LOCK_NAME as LOCK

FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def begun(folder: Path) -> WritingLock:
    lock = WritingLock(folder)
    (folder / FILE).write_bytes(b"x" * 5000)
    return lock


def test_what_is_being_written_stays_and_what_was_left_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the top, and in a folder of its own as the Trainer has it."""
    lock = begun(tmp_path / ".incomplete-one")
    other = begun(tmp_path / "checkpoint-2" / ".incomplete-two")
    assert main(["clean", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("in use by a running process, left alone") == 2
    del lock
    assert main(["clean", "--dry-run", str(tmp_path)]) == 1
    assert f"{tmp_path}/.incomplete-one: " in capsys.readouterr().out
    assert main(["clean", str(tmp_path)]) == 1
    assert sorted(path.name for path in tmp_path.rglob(".incomplete*")) == [".incomplete-two"]
    del other
    assert main(["clean", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint-2"]


@pytest.mark.parametrize("filesystem", ["nfs4", "gpfs", "beegfs", "virtiofs", "fuse.juicefs", "unknown"])
def test_what_another_machine_may_write_to_stays(
    filesystem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path / ".incomplete-one").release()
    with monkeypatch.context() as shared:
        shared.setattr(unfinished, "filesystem_type", lambda fd: filesystem)
        assert main(["clean", str(tmp_path)]) == 1
    assert "another machine may write into it, left alone" in capsys.readouterr().out
    assert main(["clean", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []


def test_several_ranks_lock_one_folder(tmp_path: Path) -> None:
    locks = [WritingLock(tmp_path / ".incomplete-one") for _ in range(2)]
    del locks[0]
    assert find_unfinished(tmp_path)[0].why_not
    del locks[0]
    assert not find_unfinished(tmp_path)[0].why_not


def test_what_is_not_recognisably_ours_stays(tmp_path: Path) -> None:
    begun(tmp_path / "elsewhere" / "deep" / ".incomplete-one")
    (tmp_path / ".incomplete-theirs").mkdir()
    (tmp_path / ".incomplete-link").symlink_to(tmp_path / "elsewhere" / "deep" / ".incomplete-one")
    (tmp_path / ".incomplete-linked").mkdir()
    (tmp_path / ".incomplete-linked" / LOCK_NAME).symlink_to(tmp_path / "victim")
    begun(tmp_path / "whole")
    if os.geteuid() == 0:
        begun(tmp_path / ".incomplete-others")
        os.chown(tmp_path / ".incomplete-others", 65534, 65534)
    before = sorted(tmp_path.rglob("*"))
    assert main(["clean", str(tmp_path)]) == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_a_whole_checkpoint_has_no_lock(tmp_path: Path) -> None:
    parts = Parts(tmp_path / ".incomplete-a", tmp_path / "a", 0, [0], None, begun(tmp_path / ".incomplete-a"))
    assert parts.written()
    assert [path.name for path in (tmp_path / "a").iterdir()] == [FILE]
    (tmp_path / ".incomplete-a").mkdir()
    publish(tmp_path / ".incomplete-a", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_save_clears_what_was_left_and_not_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "_PATIENCE_SECS", 0.0)
    hidden = tmp_path / ".incomplete-a"
    unfinished.discard_left(hidden)
    lock = begun(hidden)
    with pytest.raises(FuyouStorageError, match="another process writes a checkpoint there"):
        unfinished.discard_left(hidden)
    assert len(list(hidden.iterdir())) == 2
    lock.release()
    unfinished.discard_left(hidden)
    assert list(tmp_path.iterdir()) == []


def test_of_two_saves_that_begin_at_once_one_makes_the_folder(tmp_path: Path) -> None:
    first = WritingLock(tmp_path / ".incomplete-a", "first", is_first=True)
    with pytest.raises(FileExistsError):
        WritingLock(tmp_path / ".incomplete-a", "second", is_first=True)
    assert WritingLock(tmp_path / ".incomplete-a", "second").maker() == first.maker() == "first"


def test_a_folder_that_was_put_in_its_place_is_not_published(tmp_path: Path) -> None:
    parts = Parts(tmp_path / ".incomplete-a", tmp_path / "a", 0, [0], None, begun(tmp_path / ".incomplete-a"))
    (tmp_path / ".incomplete-a").rename(tmp_path / "moved")
    other = begun(tmp_path / ".incomplete-a")
    with pytest.raises(FuyouStorageError, match="another one is there"):
        parts.publish()
    parts.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".incomplete-a", "moved"]
    other.release()


@pytest.mark.parametrize("dies_in", ["_exchange", "rename", "_have_moved", "rmtree"])
def test_what_a_save_leaves_that_dies_while_it_publishes_is_found(
    dies_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish() -> None:
        lock = begun(tmp_path / ".incomplete-a")
        (tmp_path / ".incomplete-a" / "nested").mkdir()
        Parts(tmp_path / ".incomplete-a", tmp_path / "a", 0, [0], None, lock).publish()

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if dies_in != "rename":
        publish()
    place = {"rename": Path, "rmtree": atomic.shutil}.get(dies_in, atomic)
    with monkeypatch.context() as patched:
        patched.setattr(place, dies_in, dies)
        with pytest.raises(KeyboardInterrupt):
            publish()
    assert [found.path.name for found in find_unfinished(tmp_path)] == [".incomplete-a"]
    assert main(["clean", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == (["a"] if dies_in != "rename" else [])
    publish()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["nested", FILE]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_may_not_be_removed_does_not_keep_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        for name in ("a-rank0", "b-rank0"):
            (path / "ds_fuyou" / name).mkdir(parents=True)
            (path / "ds_fuyou" / name / LOCK).write_bytes(directory._MARK)
    (first / "ds_fuyou" / "a-rank0" / "notes.txt").write_text("of somebody else")
    begun(first / ".incomplete-one")
    assert main(["clean", str(first), str(second)]) == 1
    assert "a-rank0" in (said := capsys.readouterr().err)
    assert "must hold only state files, found also: notes.txt" in said
    assert [path.name for path in (first / "ds_fuyou").iterdir() if path.is_dir()] == ["a-rank0"]
    assert not (first / ".incomplete-one").exists()
    assert list(second.rglob("*-rank0")) == []


def test_a_child_that_outlives_the_run_holds_no_lock(tmp_path: Path) -> None:
    """A data loader's worker, forked while a checkpoint was written; then the run was killed."""
    folder = tmp_path / ".incomplete-tag"
    reading, writing = os.pipe()
    run = os.fork()
    if not run:
        lock = WritingLock(folder)
        if not os.fork():
            os.close(writing)
            os.read(reading, 1)  # until the test ends
            os._exit(0)
        assert lock.is_in_place()
        os._exit(0)
    try:
        assert os.waitpid(run, 0)[1] == 0
        discard_left(folder)
        assert not folder.exists()
    finally:
        os.close(writing)
        os.close(reading)
