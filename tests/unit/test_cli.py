# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ds_fuyou.cli import doctor, main
from ds_fuyou.cli.main import COMMANDS
from ds_fuyou.errors import FuyouBuildError
from ds_fuyou.ops.core import builder_module


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"usage: fuyou {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["init"], ["build", "--nonsense"]])
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: fuyou" in capsys.readouterr().err


def test_closed_streams_are_written_to_nowhere() -> None:
    for closed in (">&-", "2>&-"):
        command = (
            f"{sys.executable} -c 'from ds_fuyou.cli import main; raise SystemExit(main())' plan --model 6B {closed}"
        )
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_commands_are_imported_only_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COMMANDS:
        monkeypatch.delitem(sys.modules, f"ds_fuyou.cli.{name}", raising=False)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert not [name for name in COMMANDS if f"ds_fuyou.cli.{name}" in sys.modules]


def test_build_prints_the_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ds_fuyou.cli import build

    builder = SimpleNamespace(build=lambda: Path("/cache/core.so"), load=lambda: None)
    monkeypatch.setattr(build, "builder_module", lambda: SimpleNamespace(FuyouCoreBuilder=lambda: builder))
    assert main(["build", "--core"]) == 0
    assert capsys.readouterr().out == "/cache/core.so\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (FuyouBuildError("no compiler"), 2),
        (ModuleNotFoundError("No module named 'torch'"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_have_a_status_and_no_traceback(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ds_fuyou.cli import build

    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(build, "run", fail)
    assert main(["build"]) == status
    said = capsys.readouterr().err
    assert said.startswith("fuyou build: ")
    assert "Traceback" not in said


def test_a_terminal_without_the_characters_and_a_reader_that_leaves_are_no_failures(tmp_path: Path) -> None:
    model = tmp_path / "\u00e9\u6a21.json"
    plan = [sys.executable, "-c", "import sys; from ds_fuyou.cli import main; sys.exit(main())", "plan", "--model"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[2])}
    model.write_text("{}", encoding="utf-8")
    done = subprocess.run([*plan, str(model)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("fuyou plan: --model ")
    assert "??.json" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    left = subprocess.run([*plan, "6B"], env=environment, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert left.returncode == 141
    assert not left.stderr


def test_clean_wants_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", "/no/such/directory"]) == 2
    assert "must be an existing directory" in capsys.readouterr().err


@dataclasses.dataclass
class State:
    path: str
    alive: bool
    num_bytes: int = 4096

    @property
    def why_not(self) -> str:
        return "in use by a running process, left alone" if self.alive else ""


def test_clean_removes_what_nobody_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [State("dead", alive=False), State("live", alive=True)]
    removed: list[State] = []
    cleanup = ModuleType("ds_fuyou.storage.cleanup")
    cleanup.find_state = lambda path: states  # type: ignore[attr-defined]
    cleanup.remove_state = removed.append  # type: ignore[attr-defined]
    cleanup.state_of_others = lambda path: {}  # type: ignore[attr-defined]
    cleanup.what_it_holds = lambda state: "holds"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, cleanup.__name__, cleanup)
    assert main(["clean", "--dry-run", str(tmp_path)]) == 1
    assert "dead: 4096 bytes, would be removed; holds" in capsys.readouterr().out
    assert removed == []
    assert main(["clean", str(tmp_path)]) == 1
    assert removed == states[:1]
    assert "live: in use by a running process, left alone" in capsys.readouterr().out
    states.clear()
    assert main(["clean", str(tmp_path)]) == 0
    assert "no state found" in capsys.readouterr().out


def test_clean_takes_one_runs_directory_or_that_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one is what fuyou recover takes. Runs may be in a directory that is called as theirs."""
    leaves = (
        "import sys; from pathlib import Path; from ds_fuyou.storage.store import *\n"
        "for name in ('one', 'three', 'two'):\n"
        "    regions, identity = [RegionSpec('state', 4096, 2)], RunIdentity('test', 0, 1, name)\n"
        "    SlotStore.create([Path(sys.argv[1])], regions, identity, budget_bytes=None, keep=True).close()\n"
    )
    for nvme_path in (tmp_path, tmp_path / "ds_fuyou"):
        nvme_path.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-c", leaves, nvme_path], check=True)
        made = sorted((nvme_path / "ds_fuyou").glob("*-rank0"))
        assert main(["clean", str(made[1])]) == 0
        assert [path.exists() for path in made] == [True, False, True]
        assert main(["clean", str(nvme_path / "ds_fuyou")]) == 0
        assert [path.exists() for path in made] == [False] * 3
        assert capsys.readouterr().out.count("removed") == 3


def test_doctor_reports_a_check_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> doctor.Finding:
        raise RuntimeError("this check is broken")

    for check in ("_hook", "_other_ways", "_compiler", "_versions"):
        monkeypatch.setattr(doctor, check, lambda: doctor.Finding("stub", "fine"))
    monkeypatch.setattr(doctor, "_operators_check", lambda optimizers: doctor._io_uring)
    assert main(["doctor"]) == 0
    monkeypatch.setattr(doctor, "_hook", broken)
    assert main(["doctor"]) == 1
    assert "the check failed: this check is broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "value", "fix"),
    [
        ("DS_FUYOU_DISABLE", "1", "unset DS_FUYOU_DISABLE"),
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", "deepspeed --module ds_fuyou SCRIPT"),
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "false", "deepspeed --module ds_fuyou SCRIPT"),
    ],
)
def test_doctor_says_why_the_hook_is_not_live(
    variable: str, value: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    finding = doctor._hook()
    assert not finding.ok
    assert fix in finding.fix


def test_doctor_finds_the_live_hook() -> None:
    assert doctor._hook().ok


def test_doctor_tries_the_ways_without_plugin_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor._other_ways()
    assert finding.ok
    assert "import ds_fuyou" in finding.found
    assert "deepspeed --module ds_fuyou" in finding.found
    monkeypatch.setenv("DS_FUYOU_DISABLE", "1")
    assert doctor._other_ways().ok, "the hook's own check says it"
    monkeypatch.setattr(doctor, "_is_disabled", lambda: False)
    finding = doctor._other_ways()
    assert not finding.ok
    assert "not live: import ds_fuyou, deepspeed --module ds_fuyou" in finding.found


def test_doctor_measures_where_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--measure"]) == 2
    assert "name the nvme_path directories" in capsys.readouterr().err
    finding = doctor._rates_check(str(tmp_path))()
    assert finding.ok
    assert "GB/s" in finding.found
    assert not doctor._rates_check(str(tmp_path / "none"))().ok
    shares = doctor._shares_check([str(tmp_path), str(tmp_path)])()
    assert f"of every chunk, {tmp_path} 50 %, {tmp_path} 50 %" in shares.found


def test_doctor_checks_paths(tmp_path: Path) -> None:
    found = doctor._path_check(str(tmp_path))()
    assert found.ok
    assert "GB free" in found.found
    memory = doctor._path_check("/dev/shm")()
    assert memory.ok
    assert "this is host memory" in memory.found
    assert doctor._host_memory().ok
    missing = doctor._path_check(str(tmp_path / "no"))()
    assert (missing.ok, missing.fix) == (False, f"mkdir -p {tmp_path / 'no'}")


def test_doctor_names_missing_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    finding = doctor._compiler()
    assert not finding.ok
    assert "install g++" in finding.fix


def test_doctor_asks_for_no_compiler_where_the_core_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image without one, whose cache may be read-only."""
    monkeypatch.delenv("CXX", raising=False)
    assert builder_module().FuyouCoreBuilder().build().is_file()
    monkeypatch.setenv("PATH", "/nonexistent")
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **how: mode != os.W_OK and may(path, mode, **how))
    finding = doctor._compiler()
    assert finding.ok
    assert "none is needed; the core is built, in" in finding.found


def test_doctor_misses_pythons_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUYOU_CACHE", str(tmp_path / "cache"))
    path = sysconfig.get_path

    def elsewhere(name: str, *how: Any, **more: Any) -> str:
        return str(tmp_path) if name == "include" else path(name, *how, **more)

    monkeypatch.setattr(sysconfig, "get_path", elsewhere)
    finding = doctor._compiler()
    assert not finding.ok
    assert "install python3-dev" in finding.fix


def test_doctor_names_the_cache_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUYOU_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    finding = doctor._compiler()
    assert not finding.ok
    assert "set FUYOU_CACHE" in finding.fix


def test_build_says_why_an_operator_of_deepspeed_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ds_fuyou.cli import build

    def fail(optimizer: str) -> Iterator[str]:
        yield "cpu_adam"
        raise RuntimeError("Error building extension 'cpu_adam'")

    core = SimpleNamespace(build=lambda: Path("/cache/core.so"), load=lambda: None)
    monkeypatch.setattr(build, "builder_module", lambda: SimpleNamespace(FuyouCoreBuilder=lambda: core))
    monkeypatch.setattr(build.stock_operators, "compile_operators", fail)
    assert main(["build"]) == 2
    assert "could not be compiled in" in capsys.readouterr().err


def test_refused_io_uring_and_small_lock_limit_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = SimpleNamespace(syscall=lambda *arguments: -1)
    monkeypatch.setattr(doctor, "libc", lambda: libc)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (65536, 65536))
    for finding in (doctor._io_uring(), doctor._locked_memory()):
        assert finding.ok
        assert finding.fix
