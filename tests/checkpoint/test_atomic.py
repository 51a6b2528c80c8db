# SPDX-License-Identifier: Apache-2.0
"""Names of checkpoints: whole or absent, whatever is there already."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou import files
from ds_fuyou.checkpoint import atomic
from ds_fuyou.checkpoint.unfinished import discard_left
from ds_fuyou.errors import FuyouConfigError, FuyouStateError, FuyouStorageError
from tests.unit.test_filesystems import can_mount


def written(save_dir: Path, tag: str, text: str) -> Path:
    folder = save_dir / atomic.incomplete_tag(tag)
    (folder / "nested").mkdir(parents=True)
    (folder / "nested" / "file").write_text(text)
    return folder


def test_names() -> None:
    assert atomic.incomplete_tag("global_step3") == ".incomplete-global_step3"
    assert atomic.incomplete_tag("run/best") == "run/.incomplete-best"
    assert atomic.checked_tag("run//best/") == "run/best"


@pytest.mark.parametrize("tag", ["", ".", "..", "a/..", "/abs", "../up", ".incomplete-x", "a/.replaced-x"])
def test_a_tag_that_is_no_folder_below_save_dir_is_refused(tag: str) -> None:
    with pytest.raises(FuyouConfigError, match="below save_dir"):
        atomic.checked_tag(tag)


def test_a_tag_that_is_a_file_beside_checkpoints_is_refused() -> None:
    for tag in ("latest", "./zero_to_fp32.py", "latest/x"):
        with pytest.raises(FuyouConfigError, match="name of a file"):
            atomic.checked_tag(tag)
    assert atomic.checked_tag("run/latest") == "run/latest"


def test_half_an_exchange_in_two_steps_is_undone(tmp_path: Path) -> None:
    atomic.publish(written(tmp_path, "tag", "first"), tmp_path / "tag")
    (tmp_path / "tag").rename(tmp_path / ".replaced-tag")
    atomic.recover(tmp_path / "tag")
    atomic.recover(tmp_path / "tag")
    assert (tmp_path / "tag" / "nested" / "file").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


def test_two_machines_may_undo_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    atomic.publish(written(tmp_path, "tag", "first"), tmp_path / ".replaced-tag")
    exists = Path.exists

    def exists_until_the_other_one_comes(path: Path) -> bool:
        found = exists(path)
        if path.name == "tag":
            monkeypatch.undo()
            atomic.recover(tmp_path / "tag")
        return found

    monkeypatch.setattr(Path, "exists", exists_until_the_other_one_comes)
    atomic.recover(tmp_path / "tag")
    assert (tmp_path / "tag" / "nested" / "file").read_text() == "first"


def test_a_link_and_what_cannot_be_deleted_do_not_stop_a_save(tmp_path: Path, monkeypatch, caplog) -> None:
    atomic.publish(written(tmp_path, "real", "first"), tmp_path / "real")
    (tmp_path / "tag").symlink_to(tmp_path / "real")
    atomic.publish(written(tmp_path, "tag", "second"), tmp_path / "tag")
    assert not (tmp_path / "tag").is_symlink()

    def fail(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "not empty")

    monkeypatch.setattr(atomic.shutil, "rmtree", fail)
    atomic.publish(written(tmp_path, "tag", "third"), tmp_path / "tag")
    assert (tmp_path / "tag" / "nested" / "file").read_text() == "third"
    assert "could not be deleted" in caplog.text


def test_only_files_of_ranks_that_are_no_more_go(tmp_path: Path) -> None:
    """A script may have called its own files, or another engine of it, as DeepSpeed calls some."""
    ours = ["zero_pp_rank_{}_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"]
    others = [
        "rng_states.pt",
        "ema_model_states.pt",
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",  # of an engine of stage 1 in another type
        "layer_0_expert_5_mp_rank_00_model_states.pt",
        "old_zero_pp_rank_7_mp_rank_00_model_states.pt",
    ]
    tag = tmp_path / "tag"
    for num_ranks in (11, 2):
        folder, names = written(tmp_path, "tag", "x"), [name.format(r) for name in ours for r in range(num_ranks)]
        for name in names:
            (folder / name).touch()
        atomic.publish(folder, tag)
        if num_ranks == 11:
            for name in others:
                (tag / name).touch()
    assert sorted(path.name for path in tag.iterdir() if path.is_file()) == sorted([*names, *others])


def test_what_a_script_keeps_in_the_folder_stays(tmp_path: Path) -> None:
    """Beside the files of a checkpoint, and checkpoints below it."""
    tag = tmp_path / "tag"
    atomic.publish(written(tmp_path, "tag", "first"), tag)
    (tag / "tokenizer.json").write_text("mine")
    (tag / "link").symlink_to("tokenizer.json")
    (tag / "nested" / "other").write_text("mine")
    atomic.publish(written(tmp_path, "tag/step2", "below"), tag / "step2")
    (tag / ".incomplete-step3").mkdir()
    for text in ("second", "third"):
        atomic.publish(written(tmp_path, "tag", text), tag)
        found = {str(path.relative_to(tag)): path.read_text() for path in tag.rglob("*") if path.is_file()}
        assert found == {
            "nested/file": text,
            "nested/other": "mine",
            "tokenizer.json": "mine",
            "link": "mine",
            "step2/nested/file": "below",
        }
        assert (tag / "link").is_symlink()
        assert [path.name for path in tmp_path.iterdir()] == ["tag"]


@pytest.mark.parametrize("can_link", [True, False])
def test_what_lies_there_need_not_be_readable(can_link: bool, tmp_path: Path, monkeypatch) -> None:
    """Only what the save wrote is opened: to open a FIFO waits for a writer, a link may lead nowhere."""
    if not can_link:
        monkeypatch.setattr(os, "link", lambda *_, **__: denied())
    atomic.publish(written(tmp_path, "tag", "first"), tmp_path / "tag")
    (tmp_path / "tag" / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "tag" / "mine").mkdir()
    for folder in (tmp_path / "tag", tmp_path / "tag" / "nested", tmp_path / "tag" / "mine"):
        os.mkfifo(folder / "fifo")
        (folder / "secret").write_text("unreadable")
    (tmp_path / "tag" / "closed").mkdir()
    copy, copy_tree, opened = shutil.copy2, shutil.copytree, os.open

    def copy2(source: str, target: str, **named: bool) -> None:
        if source.endswith("secret"):
            os.mknod(target)  # as far as it comes
            denied()
        copy(source, target, **named)

    def copytree(source: str, *given: Path, **named: Any) -> None:
        if source.endswith("closed"):
            denied()
        copy_tree(source, *given, **named)

    def open_(path: Path, *given: int, **named: int) -> int:
        assert not str(path).endswith(("fifo", "secret", "dangling")), path
        return opened(path, *given, **named)

    monkeypatch.setattr(shutil, "copy2", copy2)
    monkeypatch.setattr(shutil, "copytree", copytree)
    monkeypatch.setattr(os, "open", open_)
    for text in ("second", "third"):
        atomic.publish(written(tmp_path, "tag", text), tmp_path / "tag")
    tag = tmp_path / "tag"
    assert (tag / "nested" / "file").read_text() == "third"
    assert (tag / "dangling").is_symlink()
    assert (tag / "closed").is_dir()
    for folder in (tag, tag / "nested", tag / "mine"):
        assert (folder / "fifo").is_fifo()
        assert (folder / "secret").read_text() == "unreadable"
    assert [path.name for path in tmp_path.iterdir()] == ["tag"]


def denied() -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_second_save_replaces_the_first(can_exchange: bool, tmp_path: Path, monkeypatch) -> None:
    if not can_exchange:
        monkeypatch.setattr(files, "libc", object)
    for text in ("first", "second"):
        atomic.publish(written(tmp_path, "tag", text), tmp_path / "tag")
        assert (tmp_path / "tag" / "nested" / "file").read_text() == text
        assert [path.name for path in tmp_path.iterdir()] == ["tag"]


@pytest.mark.skipif(not can_mount(), reason="mounts an overlay")
def test_what_an_image_holds_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """An overlay renames no folder of a lower layer."""
    atomic.publish(written(tmp_path / "lower", "old", "old"), tmp_path / "lower" / "old")
    for layer in ("upper", "work", "mounted"):
        (tmp_path / layer).mkdir()
    layers = ",".join(f"{layer}dir={tmp_path / layer}" for layer in ("lower", "upper", "work"))
    folder = tmp_path / "mounted"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, folder], check=True)
    try:
        atomic.publish(written(folder, "new", "new"), folder / "new")
        atomic.require_replaceable(folder / "none", written(folder, "none", "none"))
        atomic.require_replaceable(folder / "new", written(folder, "new", "newer"))
        atomic.publish(folder / ".incomplete-new", folder / "new")
        with pytest.raises(FuyouStorageError, match="part of a container's image"):
            atomic.require_replaceable(folder / "old", written(folder, "old", "older"))
        assert (folder / "old" / "nested" / "file").read_text() == "old"
        assert (folder / ".incomplete-old" / "nested" / "file").read_text() == "older"
        assert (folder / "new" / "nested" / "file").read_text() == "newer"
    finally:
        subprocess.run(["umount", folder], check=True)


def test_publishing_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FuyouStateError, match="not there"):
        atomic.publish(tmp_path / ".incomplete-tag", tmp_path / "tag")


def test_a_failing_flush_is_an_error_and_publishes_nothing(tmp_path: Path, monkeypatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    folder = written(tmp_path, "tag", "x")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FuyouStorageError, match="flushing"):
        atomic.publish(folder, tmp_path / "tag")
    assert not (tmp_path / "tag").exists()


def test_a_name_that_cannot_be_exchanged_is_an_error(tmp_path: Path, monkeypatch) -> None:
    class Libc:
        @staticmethod
        def renameat2(*_: object) -> int:
            files.ctypes.set_errno(errno.EACCES)
            return -1

    atomic.publish(written(tmp_path, "tag", "first"), tmp_path / "tag")
    monkeypatch.setattr(files, "libc", Libc)
    with pytest.raises(FuyouStorageError, match="exchanging"):
        atomic.publish(written(tmp_path, "tag", "second"), tmp_path / "tag")
    assert (tmp_path / "tag" / "nested" / "file").read_text() == "first"


def test_two_runs_that_save_to_one_folder_keep_their_own_texts(tmp_path: Path) -> None:
    latest = tmp_path / "latest"
    one, other = atomic.write_beside(latest, "one-5"), atomic.write_beside(latest, "other-5")
    atomic.replace(one, latest)
    assert latest.read_text() == "one-5"
    atomic.replace(other, latest)
    assert latest.read_text() == "other-5"
    assert list(tmp_path.iterdir()) == [latest]


def test_latest_is_replaced_in_one_step(tmp_path: Path) -> None:
    for text in ("global_step1", "global_step2"):
        atomic.replace(atomic.write_beside(tmp_path / "latest", text), tmp_path / "latest")
        assert (tmp_path / "latest").read_text() == text
    assert len(list(tmp_path.iterdir())) == 1


def test_too_little_space_says_how_much(tmp_path: Path) -> None:
    assert atomic.require_space(tmp_path, 1, 1) is None
    message = atomic.require_space(tmp_path, 1 << 60, 1 << 60)
    assert message is not None
    assert "2305843009.21 GB" in message
    assert "nothing was written" in message


def test_discard_removes_a_cut_short_save(tmp_path: Path) -> None:
    folder = written(tmp_path, "tag", "x")
    atomic.discard(folder)
    atomic.discard(folder)
    assert not folder.exists()


def test_a_link_that_a_save_left_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    """A save over a tag that is a link, killed before it removed what it had replaced."""
    atomic.publish(written(tmp_path, "real", "first"), tmp_path / "real")
    left = tmp_path / atomic.incomplete_tag("tag")
    for remove in (atomic.discard, atomic.remove_hidden, discard_left):
        left.symlink_to(tmp_path / "real")
        remove(left)
        assert not left.is_symlink()
        assert (tmp_path / "real" / "nested" / "file").read_text() == "first"


def test_half_an_exchange_is_undone_at_once(tmp_path: Path, monkeypatch) -> None:
    """Where it takes two steps, and the second one fails."""
    atomic.publish(written(tmp_path, "tag", "first"), tmp_path / "tag")
    new = written(tmp_path, "tag", "second")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path == new:
            raise OSError(errno.ESTALE, "stale")
        return rename(path, target)

    monkeypatch.setattr(atomic, "exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(FuyouStorageError, match="exchanging a checkpoint"):
        atomic.publish(new, tmp_path / "tag")
    assert (tmp_path / "tag" / "nested" / "file").read_text() == "first"
    assert (new / "nested" / "file").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([new.name, "tag"])


def test_what_cannot_be_moved_is_kept_under_another_name(tmp_path: Path, monkeypatch, caplog) -> None:
    atomic.publish(written(tmp_path, "tag", "first"), tmp_path / "tag")
    (tmp_path / "tag" / "own").write_text("mine")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(atomic, "_link", refuse)
    monkeypatch.setattr(atomic, "_have_moved", lambda names, old, new: not names)
    atomic.publish(written(tmp_path, "tag", "second"), tmp_path / "tag")
    (kept,) = tmp_path.glob("tag.kept-*")
    assert (kept / "own").read_text() == "mine"
    assert f"what was replaced is in {kept}" in caplog.text
    assert (tmp_path / "tag" / "nested" / "file").read_text() == "second"
    discard_left(tmp_path / atomic.incomplete_tag("tag"))
    assert (kept / "own").read_text() == "mine"
