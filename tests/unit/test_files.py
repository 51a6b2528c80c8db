# SPDX-License-Identifier: Apache-2.0
"""Files that take another's place: links, pipes and devices stay what they are; and where caches lie."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.files import cache_path, replacing
from ds_fuyou.ops.core import builder_module
from ds_fuyou.planner.profile import profile_directory
from ds_fuyou.storage.disks import find_disks


def test_a_link_is_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "real.json", tmp_path / "link.json"
    real.parent.mkdir()
    real.write_text("old")
    link.symlink_to(real)
    with replacing(link) as part:
        assert part.parent == real.parent, "the rename is within one file system"
        part.write_text("new")
        assert real.read_text() == "old"
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_what_fails_changes_nothing(tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    real.write_text("new")

    def fail() -> None:
        with replacing(real) as part:
            part.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert real.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["real.json"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    with replacing(pipe) as part:
        part.write_text("through")
    reader.join(60)
    assert found == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_standard_output_is_written_to(run_python: Any) -> None:
    script = "from pathlib import Path; from ds_fuyou.files import replacing\n"
    script += "with replacing(Path('/dev/stdout')) as part: part.write_text('seen')"
    done = run_python(["-c", script])
    assert done.stdout == "seen", done.stderr
    assert Path("/dev/stdout").is_symlink()


def test_what_a_shell_has_open_is_no_name_to_replace(tmp_path: Path) -> None:
    """Whatever else is written through the descriptor would go to a file without a name."""
    file = tmp_path / "out"
    with file.open("w") as opened:
        inode = os.fstat(opened.fileno()).st_ino
        for name in (f"/dev/fd/{opened.fileno()}", f"/proc/self/fd/{opened.fileno()}"):
            with replacing(Path(name)) as part:
                part.write_text("seen")
            assert file.stat().st_ino == inode
            assert file.read_text() == "seen"


def test_a_directory_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match="folder'"), replacing(folder) as part:
        part.write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_user_without_a_home_has_a_cache_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's user may be a number that no file knows, and have no HOME: stock trains there."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "FUYOU_CACHE", "XDG_CACHE_HOME", "DS_FUYOU_PROFILES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"ds_fuyou-{os.geteuid()}"
    assert cache_path() == own
    builder_module()
    from ds_fuyou.op_builder import build_cache

    assert build_cache.cache_directory() == own
    assert own.stat().st_mode & 0o777 == 0o700
    assert profile_directory() == own / "profiles"
    assert isinstance(find_disks(tmp_path), list)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_path() == tmp_path / "cache" / "ds_fuyou"
    monkeypatch.setenv("FUYOU_CACHE", str(tmp_path / "named"))
    assert cache_path() == tmp_path / "named"
