# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_fuyou.errors import FuyouBuildError
from ds_fuyou.ops.core import builder_module
from tests.conftest import RunPython
from tests.harness.limits import HANG_SECS

fuyou_core = builder_module()
build_cache = __import__("ds_fuyou.op_builder.build_cache", fromlist=["build_cached"])

SOURCE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "answer.h"
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_tiny()
{
    PyObject* made = PyModule_Create(&module);
    PyModule_AddIntConstant(made, "answer", ANSWER);
    return made;
}
"""


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small extension that needs neither torch nor DeepSpeed headers, and an empty cache."""
    monkeypatch.setenv("FUYOU_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "csrc with spaces"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "tiny.cpp").write_text(SOURCE)
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    return folder


@pytest.fixture
def count_compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Wraps the compiler so that every call is counted."""
    log = tmp_path / "calls"
    log.touch()
    wrapper = tmp_path / "counting-cxx"
    wrapper.write_text(f'#!/bin/sh\necho call >> "{log}"\nexec c++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    return lambda: len(log.read_text().splitlines())


def builder(csrc: Path) -> fuyou_core.FuyouCoreBuilder:
    return fuyou_core.FuyouCoreBuilder(csrc=csrc, name="tiny")


@pytest.mark.compat
def test_builds_once_and_loads(
    csrc: Path, count_compilations: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ds_fuyou.ops.tiny", raising=False)
    assert builder(csrc).load().answer == 42
    assert builder(csrc).load() is builder(csrc).load()
    assert builder(csrc).build() == builder(csrc).build()
    assert count_compilations() == 2  # one source, one link
    cache = Path(os.environ["FUYOU_CACHE"])
    assert not list(cache.glob(".build-*"))
    monkeypatch.delitem(sys.modules, "ds_fuyou.ops.tiny")


def test_key_follows_everything_that_matters(csrc: Path) -> None:
    plan = builder(csrc).compile_plan()
    key = build_cache.cache_key(plan)
    assert key == build_cache.cache_key(builder(csrc).compile_plan())
    variants = [
        dataclasses.replace(plan, compiler="other"),
        dataclasses.replace(plan, cxx_flags=(*plan.cxx_flags, "-DX")),
        dataclasses.replace(plan, versions=("torch 1.0", *plan.versions[1:])),
    ]
    keys = {key, *(build_cache.cache_key(variant) for variant in variants)}
    (csrc / "answer.h").write_text("#define ANSWER 43\n")
    keys.add(build_cache.cache_key(builder(csrc).compile_plan()))
    assert len(keys) == 5


def test_environments_with_the_same_versions_share_a_build(csrc: Path) -> None:
    """Wherever each has torch, the package and DeepSpeed: the library that is built names no folder."""
    plan = builder(csrc).compile_plan()
    folders = [flag for flag in plan.link_flags if flag.startswith("-L")]
    assert folders
    elsewhere = tuple(f"{flag}-of-another" if flag in folders else flag for flag in plan.link_flags)
    there = dataclasses.replace(
        plan,
        link_flags=elsewhere,
        include_dirs=("/another/include", *plan.include_dirs),
        headers=plan.headers[::-1],
    )
    without = dataclasses.replace(plan, link_flags=plan.link_flags[:-1])
    key = build_cache.cache_key(plan)
    assert [build_cache.cache_key(other) == key for other in (there, without)] == [True, False]
    library = builder(csrc).build().read_bytes()
    assert not [folder for folder in folders if folder.removeprefix("-L").encode() in library]


@pytest.mark.compat
def test_arithmetic_flags_are_deepspeeds_own() -> None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    stock = CPUAdamBuilder().cxx_args()
    ours = fuyou_core.FuyouCoreBuilder().cxx_args()
    wanted = [flag for flag in stock if flag.startswith(("-m", "-D__", "-O", "-ff"))]
    assert wanted
    assert [flag for flag in ours if flag.startswith(("-m", "-D__", "-O", "-ff"))] == wanted


@pytest.mark.compat
def test_plan_of_the_real_core() -> None:
    plan = fuyou_core.FuyouCoreBuilder().compile_plan()
    assert all(os.path.isabs(path) for path in (*plan.sources, *plan.include_dirs))
    assert any(path.endswith("core_binding.cpp") for path in plan.sources)
    for header in ("cpu_adam_impl.cpp", "cpu_lion_impl.cpp", "cpu_adagrad.cpp", "cpu_adam.h"):
        assert any((Path(folder) / header).is_file() for folder in plan.include_dirs), header
        assert any(path.endswith(header) for path in plan.headers), header


def test_compile_error_shows_the_compilers_last_lines(csrc: Path) -> None:
    (csrc / "answer.h").write_text("#error the reason is here\n")
    with pytest.raises(FuyouBuildError, match=r"must compile with 'c\+\+'(?s:.*)the reason is here"):
        builder(csrc).build()
    assert not [path for path in Path(os.environ["FUYOU_CACHE"]).iterdir() if path.is_dir()]


def test_no_compiler(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(FuyouBuildError, match=r"'no-such-compiler -m64' is not on PATH\): install g\+\+"):
        builder(csrc).build()
    assert not builder(csrc).is_compatible()


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(FuyouBuildError, match=r"must hold the C\+\+ sources of the core, found none"):
        builder(tmp_path).compile_plan()


def test_cache_that_is_a_file(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUYOU_CACHE", str(tmp_path / "file"))
    with pytest.raises(FuyouBuildError, match=r"must be a writable directory.*set FUYOU_CACHE"):
        builder(csrc).build()


def test_cache_of_another_user(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    (tmp_path / "cache").mkdir()
    owner = os.stat(tmp_path / "cache").st_uid
    if owner == 0:  # root's files are trusted by everyone
        os.chown(tmp_path / "cache", 12345, -1)
    with pytest.raises(FuyouBuildError, match=r"must be writable by this user"):
        builder(csrc).build()


def test_what_is_built_is_used_from_a_cache_that_cannot_be_written(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image with a read-only root, whose core was built with it."""
    built = builder(csrc).build()
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and may(path, mode))
    assert builder(csrc).build() == built
    assert build_cache.remembered("another-word", lambda: ["of", "this", "process"]) == ["of", "this", "process"]
    assert not (built.parents[1] / "another-word").exists()
    (csrc / "answer.h").write_text("#define ANSWER 43\n")
    with pytest.raises(FuyouBuildError, match=r"cannot be written \(its mode forbids it\), and what .* is not there"):
        builder(csrc).build()


def test_a_damaged_library_says_what_to_do(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ds_fuyou.ops.tiny", raising=False)
    builder(csrc).build().write_bytes(b"not a library")
    with pytest.raises(FuyouBuildError, match=r"cannot be loaded: .*Remove the file"):
        builder(csrc).load()


BUILD = """
import sys
from pathlib import Path
from ds_fuyou.ops.core import builder_module
builder_module().FuyouCoreBuilder(csrc=Path(sys.argv[1]), name="tiny").build()
"""


def start_build(csrc: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(csrc)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_line(path: Path, writer: subprocess.Popen[str]) -> str:
    """In a file that another process makes."""
    while not (path.exists() and path.read_text().endswith("\n")):
        assert writer.poll() is None, writer.communicate()[0]
        time.sleep(0.01)
    return path.read_text()


def is_running(pid: int) -> bool:
    """Whether the process still does anything; one that nobody has waited for yet does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in ("Z", "X")


def slow_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A compiler that says it has started and then waits for leave to go on."""
    started, leave = tmp_path / "started", tmp_path / "leave"
    wrapper = tmp_path / "slow-cxx"
    wrapper.write_text(
        f'#!/bin/sh\necho $$ > "{started}"\nwhile [ ! -e "{leave}" ]; do sleep 0.05; done\nexec c++ "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    return started, leave


def test_one_rank_builds_and_the_others_say_what_they_wait_for(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, leave = slow_compiler(tmp_path, monkeypatch)
    first = start_build(csrc)
    wait_for_line(started, first)
    second = start_build(csrc)
    assert second.stdout is not None
    said = second.stdout.readline()
    leave.touch()
    assert f"waits for the C++ core to be built in {tmp_path / 'cache'} by process {first.pid}" in said
    for process in (first, second):
        process.communicate(timeout=HANG_SECS)
        assert process.returncode == 0


def test_a_killed_build_leaves_nothing_in_the_way(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, leave = slow_compiler(tmp_path, monkeypatch)
    killed = start_build(csrc)
    compiler = int(wait_for_line(started, killed))
    killed.kill()
    os.kill(compiler, signal.SIGKILL)
    killed.communicate(timeout=HANG_SECS)
    monkeypatch.setattr(build_cache, "may_be_shared", lambda _: False)
    cache = tmp_path / "cache"
    assert list(cache.glob(".build-*"))
    leave.touch()
    assert builder(csrc).build().is_file()
    assert not list(cache.glob(".build-*"))


def test_old_builds_and_what_killed_ones_left_go(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cache, "MOST_KEPT", 2)
    monkeypatch.setattr(build_cache, "may_be_shared", lambda _: False)
    cache = build_cache.cache_directory()
    for age, name in enumerate(("tiny-c", "tiny-b", "tiny-a", "other-a", ".build-tiny-d-x", ".build-tiny-e-x")):
        (cache / name).mkdir()
        os.utime(cache / name, (age, age))
    (cache / "tiny-c.lock").touch()
    with open(cache / "tiny-e.lock", "w") as held:  # somebody builds it
        fcntl.flock(held, fcntl.LOCK_EX)
        library = builder(csrc).build()
        left = {path.name for path in cache.iterdir() if path.is_dir()}
    assert left == {library.parent.name, "tiny-a", "other-a", ".build-tiny-e-x"}
    assert not (cache / "tiny-c.lock").exists()
    os.utime(library.parent, (0, 0))
    builder(csrc).build()
    assert library.parent.stat().st_mtime > 1e9  # used now


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_without_locks_everybody_builds_and_the_first_one_publishes(
    number: int, csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre without ``flock``, NFS without its daemon."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    compile_here, theirs = build_cache._compile, list[int]()

    def beside_another(name: str, plan: object, work: Path) -> None:
        compile_here(name, plan, work)
        if not theirs:
            theirs.append(0)
            theirs[0] = builder(csrc).build().stat().st_ino

    monkeypatch.setattr(build_cache, "_compile", beside_another)
    library = builder(csrc).build()
    assert library.stat().st_ino == theirs[0], "another one may have it in use"
    assert not list(library.parents[1].glob(".build-*"))


def test_on_a_network_what_another_machine_may_be_building_is_left_alone(
    csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_cache, "may_be_shared", lambda _: True)
    cache = build_cache.cache_directory()
    label = f"tiny-{build_cache.cache_key(builder(csrc).compile_plan())}"
    works = [cache / f".build-{label}-{age}" for age in ("new", "old")]
    for work in works:
        work.mkdir()
        (work / "object.o").touch()
    for path in (works[1], works[1] / "object.o"):
        os.utime(path, (1.0, 1.0))
    builder(csrc).build()
    assert [work.exists() for work in works] == [True, False]


def test_what_root_builds_others_use(csrc: Path) -> None:
    """An image whose recipe runs ``fuyou build``, and whose user is another one."""
    before = os.umask(0o022)
    try:
        library = builder(csrc).build()
        build_cache.remembered("words", lambda: ["-O3"])
    finally:
        os.umask(before)
    cache = library.parents[1]
    for path, mode in ((cache, 0o755), (library.parent, 0o755), (library, 0o644), (cache / "words", 0o644)):
        assert path.stat().st_mode & mode == mode, path


def test_what_was_built_for_its_builder_alone_is_named(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, look = builder(csrc).build(), Path.lstat
    assert build_cache.remembered("words", lambda: ["-O3"]) == ["-O3"]

    def hidden(path: Path) -> os.stat_result:
        if path.name in ("tiny.so", "words"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path)

    monkeypatch.setattr(Path, "lstat", hidden)
    with pytest.raises(FuyouBuildError, match=rf"{library} must be readable by this user .* or set FUYOU_CACHE"):
        builder(csrc).build()
    assert build_cache.remembered("words", lambda: ["-O2"]) == ["-O2"], "computed, and used by this process"


def test_an_interrupt_ends_the_compilers(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, _ = slow_compiler(tmp_path, monkeypatch)
    interrupted = start_build(csrc)
    compiler = int(wait_for_line(started, interrupted))
    assert interrupted.stdout is not None
    said = ""
    while "building the ds_fuyou core" not in said:
        said += interrupted.stdout.read(1)
    interrupted.send_signal(signal.SIGINT)
    interrupted.communicate(timeout=HANG_SECS)
    assert not is_running(compiler)
    assert not list((tmp_path / "cache").glob(".build-*"))


def test_works_from_a_source_tree_that_is_only_on_the_path(run_python: RunPython) -> None:
    """As in an uninstalled checkout: no ds_fuyou.op_builder, but op_builder/ beside the package."""
    root = Path(__file__).resolve().parents[2]
    code = f"""
import sys
editable = [finder for finder in sys.meta_path if '__editable__' in getattr(finder, '__module__', '')]
sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in editable]
sys.path.insert(0, {str(root)!r})
from ds_fuyou.ops.core import builder_module
module = builder_module()
assert module.__name__ == 'ds_fuyou.op_builder.fuyou_core', module
import ds_fuyou.op_builder.build_cache
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_deepspeed_does_not_take_the_folder_for_its_own(run_python: RunPython) -> None:
    root = Path(__file__).resolve().parents[2]
    names = {path.stem for path in (root / "op_builder").glob("*.py")}
    assert not names & {"builder", "pin_memory", "all_ops"}
    code = f"""
import sys
sys.path.insert(0, {str(root)!r})
import op_builder
assert op_builder.__file__.startswith({str(root)!r})
assert not hasattr(op_builder, '__deepspeed__')
from deepspeed.accelerator import get_accelerator
assert get_accelerator().op_builder_dir().startswith('deepspeed.ops'), get_accelerator().op_builder_dir()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("what", ["cache", "folder", "library"])
def test_what_others_can_write_is_not_run(csrc: Path, what: str) -> None:
    """The key is made of public things, so another user can plant a library under it."""
    library = builder(csrc).build()
    planted = {"cache": library.parent.parent, "folder": library.parent, "library": library}[what]
    planted.chmod(0o777)
    with pytest.raises(FuyouBuildError, match=r"alone can have written|by nobody else"):
        builder(csrc).build()
    planted.chmod(0o700)
    assert builder(csrc).build() == library


def test_remembered_words_of_others_are_computed_again(csrc: Path) -> None:
    assert build_cache.remembered("words", lambda: ["-O3"]) == ["-O3"]
    file = build_cache.cache_directory() / "words"
    file.write_text("-fplugin=evil.so")
    file.chmod(0o666)
    assert build_cache.remembered("words", lambda: ["-O2"]) == ["-O2"]
    assert build_cache.remembered("words", lambda: ["-O1"]) == ["-O2"]


def test_a_generous_umask_builds_a_private_library(csrc: Path) -> None:
    before = os.umask(0o002)
    try:
        library = builder(csrc).build()
    finally:
        os.umask(before)
    assert not library.stat().st_mode & 0o022
    assert builder(csrc).build() == library


@pytest.mark.thorough
def test_what_needs_torch_is_c_plus_plus_17(tmp_path: Path) -> None:
    """As which the core is compiled where torch is older than 2.12; tests/csrc does so with everything else."""
    builder = builder_module().FuyouCoreBuilder()
    plan = builder.compile_plan()
    csrc, files = Path(builder.csrc), ("kernels/adagrad_rule.cpp", "bindings/core_binding.cpp")
    file = tmp_path / "all.cpp"  # torch's headers take longer than all else: once
    file.write_text("".join(f'#include "{csrc / name}"\n' for name in files))
    flags = [flag for flag in plan.cxx_flags if not flag.startswith(("-std=", "-O"))]
    places = [*(f"-I{path}" for path in plan.include_dirs), *(f"-isystem{path}" for path in plan.system_include_dirs)]
    command = [plan.compiler, "-std=c++17", "-fsyntax-only", *flags, *places, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[:4000]
