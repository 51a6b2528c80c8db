# SPDX-License-Identifier: Apache-2.0
"""Locks that killed builds left are told from those that somebody holds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_fuyou import plugin
from ds_fuyou.cli import doctor, main
from ds_fuyou.cli.finding import Finding
from ds_fuyou.ops import stock_operators
from ds_fuyou.storage import probe


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path


@pytest.fixture
def file_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As older versions of torch have them."""
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "FileBaton", object, raising=False)


@pytest.mark.usefixtures("file_locks")
def test_a_lock_that_a_process_holds_is_no_leftover(directory: Path) -> None:
    lock = directory / "cpu_adam" / "lock"
    with open(lock, "w", encoding="utf-8"):
        assert stock_operators.left_locks(directory) == []
    assert stock_operators.left_locks(directory) == [lock]


@pytest.mark.usefixtures("file_locks")
@pytest.mark.parametrize("then", ["nobody builds", "another builds"])
def test_a_lock_that_is_being_released_is_no_leftover(
    directory: Path, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed before it is removed, so nobody may have it open when it is looked at."""
    lock, looks = directory / "cpu_adam" / "lock", []
    lock.touch()

    def released(secs: float) -> None:
        looks.append(secs)
        lock.unlink()
        if then == "another builds":
            (directory / "other").touch()  # takes the inode that is free
            lock.touch()

    monkeypatch.setattr(stock_operators.time, "sleep", released)
    assert stock_operators.left_locks(directory) == []
    assert len(looks) == 1


def test_a_file_that_the_kernel_locked_is_no_lock(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of newer versions of torch, which leave it after every build."""
    from torch.utils import cpp_extension

    (directory / "cpu_adam" / "lock").touch()
    monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)
    assert stock_operators.left_locks(directory) == []


def test_the_folder_is_torchs_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils import cpp_extension

    for given in (str(tmp_path), None):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", given or "")
        if given is None:
            monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
            monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path / "root"))
        expected = cpp_extension._get_build_directory("x", False)
        assert stock_operators.build_directory() / "x" == Path(expected)


def test_operators_that_are_built_are_not_named(directory: Path) -> None:
    assert stock_operators.operators_to_compile("AdamW") == ["cpu_adam", "deepspeed_shm_comm"]
    assert stock_operators.operators_to_compile("Lion")[0] == "cpu_lion"
    (directory / "cpu_adam" / "cpu_adam.so").touch()
    assert stock_operators.operators_to_compile("AdamW") == ["deepspeed_shm_comm"]


@pytest.mark.parametrize(
    ("optimizer", "command"),
    [(None, "fuyou build"), ("AdamW", "fuyou build"), ("Lion", "fuyou build --optimizer Lion")],
)
def test_the_command_that_builds_beforehand_names_whose_operator_is_another(
    optimizer: str | None, command: str, directory: Path, told: Callable[[], str]
) -> None:
    assert stock_operators.build_command(optimizer) == command
    plugin._tell_of_builds(SimpleNamespace(optimizer_name=optimizer))
    assert f"`{command}` does it beforehand" in told()


def test_doctor_looks_for_the_operators_of_all_its_files(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in ("_hook", "_other_ways", "_compiler", "_versions"):
        monkeypatch.setattr(doctor, check, lambda: Finding("stub", "fine"))
    files = []
    for name in ("AdamW", "Lion", "none"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"optimizer": {"type": name}} if name != "none" else {}))
    for name in ("cpu_adam", "deepspeed_shm_comm"):
        (directory / name).mkdir(exist_ok=True)
        (directory / name / f"{name}.so").touch()
    main(["doctor", *map(str, files)])
    said = capsys.readouterr().out
    assert "cpu_lion would be compiled at the first start" in said
    assert "fix: fuyou build --optimizer Lion\n" in said
    main(["doctor", str(files[0])])
    assert f"compiled, in {directory}" in capsys.readouterr().out


@pytest.mark.usefixtures("file_locks")
def test_a_run_says_what_it_would_wait_for(directory: Path, told: Callable[[], str]) -> None:
    lock = directory / "cpu_adam" / "lock"
    lock.touch()
    plugin._tell_of_builds(SimpleNamespace(optimizer_name="adamw"))
    assert f"rm {lock}" in told()
    assert "compiles cpu_adam and deepspeed_shm_comm now" in told()


@pytest.fixture
def taken(directory: Path) -> Path:
    """A lock beside an operator that is there, long ago."""
    for name in ("cpu_adam", "deepspeed_shm_comm"):
        (directory / name).mkdir(exist_ok=True)
        (directory / name / f"{name}.so").touch()
    lock = directory / "cpu_adam" / "lock"
    lock.touch()
    os.utime(lock, (1.0, 1.0))
    return lock


def tell() -> None:
    plugin._tell_of_builds(SimpleNamespace(optimizer_name="adamw"))


@pytest.mark.usefixtures("file_locks")
def test_a_start_removes_what_one_left_that_was_killed_while_it_looked(taken: Path, told: Callable[[], str]) -> None:
    tell()
    assert not taken.exists()
    assert f"{taken} is gone" in told()
    assert "every start waits" not in told()


@pytest.mark.usefixtures("file_locks")
@pytest.mark.parametrize("namespace", ["the first", "another"])
def test_it_waits_until_nobody_can_have_it_any_more(
    namespace: str, taken: Path, told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer where other containers' processes cannot be seen, which may build an operator once more."""
    is_first = namespace == "the first"
    here = os.readlink("/proc/self/ns/pid")
    monkeypatch.setattr(stock_operators, "_FIRST_PROCESSES", here if is_first else "pid:[1]")
    monkeypatch.setattr(stock_operators, "_SURE_SECS" if is_first else "_SURE_SECS_IN_CONTAINER", 1.0)
    taken.touch()
    begin = taken.stat().st_mtime
    tell()
    assert time.time() - begin >= 1.0
    assert not taken.exists()


@pytest.mark.usefixtures("file_locks")
@pytest.mark.parametrize("held", ["here", "elsewhere", "while it compiles"])
def test_a_lock_that_somebody_may_hold_stays(
    held: str, taken: Path, told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(taken, encoding="utf-8") as file:
        if held != "here":
            file.close()
        if held == "elsewhere":
            monkeypatch.setattr(probe, "filesystem_type", lambda fd: "nfs4")
        if held == "while it compiles":
            (taken.parent / "cpu_adam.so").unlink()
        tell()
        assert taken.exists()
        assert (f"rm {taken}" in told()) == (held != "here")


@pytest.mark.usefixtures("file_locks")
def test_build_refuses_to_wait_for_a_lock_that_was_left(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ds_fuyou.cli import build

    builder = SimpleNamespace(build=lambda: Path("/cache/core.so"), load=lambda: None)
    monkeypatch.setattr(build, "builder_module", lambda: SimpleNamespace(FuyouCoreBuilder=lambda: builder))
    lock = directory / "cpu_adam" / "lock"
    lock.touch()
    assert main(["build"]) == 2
    assert f"rm {lock}" in capsys.readouterr().err
    os.unlink(lock)
    assert main(["build", "--core"]) == 0


def test_build_compiles_deepspeeds_operators(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ds_fuyou.cli import build

    builder = SimpleNamespace(build=lambda: Path("/cache/core.so"), load=lambda: None)
    loaded: list[str] = []
    operators = [SimpleNamespace(name=n, load=lambda verbose, n=n: loaded.append(n)) for n in ("cpu_adam", "x")]
    monkeypatch.setattr(build, "builder_module", lambda: SimpleNamespace(FuyouCoreBuilder=lambda: builder))
    monkeypatch.setattr(stock_operators, "_builders", lambda optimizer: operators)
    (directory / "x").mkdir()
    (directory / "x" / "x.so").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["build", "--optimizer", "Adan"])
    assert "must be Adam, AdamW, Adagrad or Lion, found 'Adan'" in capsys.readouterr().err
    assert main(["build", "--optimizer", "adamw"]) == 0
    assert loaded == ["cpu_adam", "x"]
    said = capsys.readouterr().out
    assert "cpu_adam" in said
    assert said.count("compiling") == 1
