# SPDX-License-Identifier: Apache-2.0
"""One cached build of a `CompilePlan`: keyed by content, built by one process, published atomically.

[Note: one builder]
Ranks of a job ask for the same library at once. Whoever gets the kernel's file lock builds, the others
wait for the lock and then find the result. The kernel drops the lock with its holder, so a killed build
leaves no lock behind, only a temporary directory, which the next builder removes. The finished directory
is renamed into place, so that what has the final name is complete. Where locks are missing, or each
machine's own (a home on a network), several build: the first one to publish has done it for all, and what
changed within the hour is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ds_fuyou.errors import FuyouBuildError
from ds_fuyou.files import CACHE_VARIABLE, cache_path
from ds_fuyou.log import get_logger
from ds_fuyou.storage.probe import may_be_shared

if TYPE_CHECKING:
    from ds_fuyou.op_builder.fuyou_core import CompilePlan

__all__ = [
    "build_cached",
    "cache_directory",
    "cache_key",
    "find_built",
    "missing_headers",
    "missing_tool",
    "remembered",
]

JOBS_VARIABLE = "MAX_JOBS"
_LAST_LINES = 40
_ABANDONED_SECS = 3600.0
MOST_KEPT = 16  # builds: one for each environment and version, 5 MB each


def cache_directory(*, writes: bool = True) -> Path:
    """:func:`ds_fuyou.files.cache_path`, created. What is built already may be used from one that cannot be written.

    Raises:
        FuyouBuildError: it belongs to another user (whose code would be run), or, if ``writes``, cannot be written.
    """
    path = cache_path()
    try:
        named = os.environ.get(CACHE_VARIABLE)  # root may build for others, who only read
        path.mkdir(parents=True, exist_ok=True, mode=0o755 if named else 0o700)
        found = path.stat()
    except OSError as error:
        raise FuyouBuildError(
            f"the build cache {path} must be a writable directory: {error}; set {CACHE_VARIABLE} to one that is"
        ) from error
    if not _is_private(found):
        raise FuyouBuildError(
            f"the build cache {path} must be writable by this user (id {os.geteuid()}) and by nobody else, whose code "
            f"would be run; found owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}. "
            f"Set {CACHE_VARIABLE} to another directory, or chmod go-w this one"
        )
    if writes and not os.access(path, os.W_OK):
        raise FuyouBuildError(
            f"the build cache {path} cannot be written ({_why_not(path)}), and what this environment needs is not "
            f"there; set {CACHE_VARIABLE} to a directory that can be, or run `fuyou build` where it can"
        )
    return path


def _why_not(path: Path) -> str:
    return "its file system is read-only" if os.statvfs(path).f_flag & os.ST_RDONLY else "its mode forbids it"


def _is_private(found: os.stat_result) -> bool:
    """Whether what this user runs from there can have been written by this user, or root, alone."""
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_there(library: Path) -> bool:
    """Whether the library has been built.

    Raises:
        FuyouBuildError: it is there, and somebody else may have written it.
    """
    try:
        parts = (library.parent.lstat(), library.lstat())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise FuyouBuildError(
            f"the built core {library} must be readable by this user (id {os.geteuid()}): {error}. Make its folder so, "
            f"or set {CACHE_VARIABLE} to another directory"
        ) from error
    if not all(_is_private(part) for part in parts) or not stat.S_ISREG(parts[1].st_mode):
        raise FuyouBuildError(
            f"the built core {library} must be a file that this user (id {os.geteuid()}) alone can have written, in a "
            f"folder of the same kind; found owners {[part.st_uid for part in parts]}, modes "
            f"{[f'{stat.S_IMODE(part.st_mode):o}' for part in parts]}. Remove the folder, or set {CACHE_VARIABLE}"
        )
    return True


def remembered(name: str, compute: Callable[[], list[str]]) -> list[str]:
    """The words `compute` gives, kept in the file `name` of the cache after the first time."""
    path = cache_directory(writes=False) / name
    with contextlib.suppress(OSError):  # it is not there, or for another user alone
        if _is_private(path.lstat()):  # the words become arguments of the compiler
            return path.read_text(encoding="utf-8").split()
    words = compute()
    if not os.access(path.parent, os.W_OK):
        return words
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(" ".join(words))
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return words


def cache_key(plan: CompilePlan) -> str:
    """Digest of everything that decides the library's content, file contents included.

    Where an environment keeps torch does not: the linker looks there, and the library names no folder. Nor does which
    of two folders with headers comes first by its path. So environments with the same versions share a build.
    """
    digest = hashlib.sha256()
    links = [flag for flag in plan.link_flags if not flag.startswith("-L")]
    for text in (*plan.versions, plan.compiler, *plan.cxx_flags, *links):
        digest.update(text.encode() + b"\0")
    files = [(os.path.basename(path), Path(path).read_bytes()) for path in (*plan.sources, *plan.headers)]
    for name, content in sorted(files):
        digest.update(f"{name} {len(content)}".encode() + b"\0" + content)
    return digest.hexdigest()[:20]


def find_built(name: str, plan: CompilePlan) -> Path | None:
    """The library ``name.so`` for `plan` if the cache has it. Raises FuyouBuildError if it cannot be used."""
    library = _library(name, plan)
    return library if _is_there(library) else None


def _library(name: str, plan: CompilePlan) -> Path:
    return cache_directory(writes=False) / f"{name}-{cache_key(plan)}" / f"{name}.so"


def build_cached(name: str, plan: CompilePlan) -> Path:
    """Path of the library ``name.so`` for `plan`, building it when the cache has none.

    Raises:
        FuyouBuildError: no compiler or ninja, a compile error (with the compiler's last lines), or a
            cache directory that cannot be used.
    """
    library = _library(name, plan)
    if _is_there(library):
        with contextlib.suppress(OSError):  # of another user: root's, say
            os.utime(library.parent)
        return library
    cache, label = cache_directory(), library.parent.name
    with _lock(cache / f"{label}.lock", f"the C++ core to be built in {cache}") as is_locked:
        if _is_there(library):
            return library
        for leftover in cache.glob(f".build-{label}-*"):
            if _is_left(leftover, is_locked=is_locked):
                shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".build-{label}-", dir=cache))
        try:
            _compile(name, plan, work)
            built = work / library.name
            built.chmod(0o755)  # the linker follows the umask
            work.chmod(0o755)
            _publish(work, library)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process does the same
            _drop_old(name, cache)
    return library


def _publish(work: Path, library: Path) -> None:
    """What another machine has published meanwhile is as good, and may be in use."""
    try:
        os.rename(work, library.parent)
    except OSError:
        if not _is_there(library):
            shutil.rmtree(library.parent, ignore_errors=True)
            os.rename(work, library.parent)


def _is_left(work: Path, *, is_locked: bool) -> bool:
    """Whether nobody builds any more in a folder whose lock this process has, or could not take. On a network locks may
    be each machine's own, so there, too, what changed of late is left alone.
    """
    if is_locked and not may_be_shared(work.parent):
        return True
    try:
        newest = max(path.stat().st_mtime for path in (work, *work.iterdir()))
    except OSError:  # it goes
        return False
    return time.time() - newest > _ABANDONED_SECS


def _drop_old(name: str, cache: Path) -> None:
    """Builds but those that were made or used last, and what builds that were killed left. Loaded ones stay mapped."""
    built = sorted((path for path in cache.glob(f"{name}-*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    old = {path.name: [path] for path in built[:-MOST_KEPT]}
    for path in cache.glob(f".build-{name}-*"):
        old.setdefault(path.name.removeprefix(".build-").rpartition("-")[0], []).append(path)
    for label, paths in old.items():
        with contextlib.suppress(OSError), open(cache / f"{label}.lock", "a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody builds it
            for path in paths:
                if not path.name.startswith(".build-") or _is_left(path, is_locked=True):
                    shutil.rmtree(path, ignore_errors=True)
            if not (cache / label).exists():
                os.unlink(lock.name)


@contextmanager
def _lock(path: Path, awaited: str) -> Iterator[bool]:
    """Holds the kernel's lock on `path`; says what it waits for if another process has it. False where the file system
    has no locks: there everybody builds, and one of them publishes first.
    """
    is_locked = True
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            get_logger().info("process %d waits for %s by process %s", os.getpid(), awaited, holder)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            is_locked = False
            get_logger().info("%s has no locks (%s): it is not waited for %s", path.parent, error.strerror, awaited)
        if is_locked:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield is_locked


def missing_tool(compiler: str) -> str | None:
    """What is missing to build, with the fix; None when nothing is."""
    if shutil.which((shlex.split(compiler) or [""])[0]) is None:
        return f"a C++ compiler ({compiler!r} is not on PATH): install g++ or clang, or set CXX"
    if _ninja() is None:
        return "ninja: pip install ninja"
    return None


def missing_headers() -> str | None:
    """Python's, where they are usually; the compiler may find them elsewhere."""
    headers = sysconfig.get_path("include", scheme="posix_prefix")
    if os.path.isfile(os.path.join(headers, "Python.h")):
        return None
    return f"Python's headers (no Python.h in {headers}): install python3-dev, or python3-devel"


def _ninja() -> list[str] | None:
    """The command that runs ninja: the one on PATH, else the Python package's."""
    found = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))
    if found:
        return [found]
    return [sys.executable, "-m", "ninja"] if importlib.util.find_spec("ninja") else None


def _compile(name: str, plan: CompilePlan, work: Path) -> None:
    missing = missing_tool(plan.compiler)
    ninja = _ninja()
    if missing or ninja is None:
        raise FuyouBuildError(f"building the C++ core needs {missing}")
    (work / "build.ninja").write_text(_ninja_file(name, plan), encoding="utf-8")
    jobs = os.environ.get(JOBS_VARIABLE, "")
    command = [*ninja, "-C", str(work), *(["-j", jobs] if jobs.isdigit() else [])]
    status, output = _run_with_progress(command, len(plan.sources) + 1)
    if status != 0:
        raise FuyouBuildError(
            f"the C++ core must compile with {plan.compiler!r}; it ended with status {status}. "
            f"The last lines were:\n" + "\n".join(output)
        )


def _ninja_file(name: str, plan: CompilePlan) -> str:
    flags = [
        *plan.cxx_flags,
        *(f"-I{path}" for path in plan.include_dirs),
        *(argument for path in plan.system_include_dirs for argument in ("-isystem", path)),
    ]
    lines = [
        f"cxx = {plan.compiler}",
        f"flags = {_ninja_escape(shlex.join(flags))}",
        f"links = {_ninja_escape(shlex.join(plan.link_flags))}",
        "rule compile",
        "  command = $cxx $flags -c $in -o $out",
        "rule link",
        "  command = $cxx $in $links -o $out",
    ]
    objects = [f"{index}_{Path(source).stem}.o" for index, source in enumerate(plan.sources)]
    for source, target in zip(plan.sources, objects, strict=True):
        lines.append(f"build {target}: compile {_ninja_escape(source, is_path=True)}")
    lines.append(f"build {name}.so: link {' '.join(objects)}")
    return "\n".join(lines) + f"\ndefault {name}.so\n"


def _ninja_escape(text: str, is_path: bool = False) -> str:
    text = text.replace("$", "$$")
    return text.replace(" ", "$ ").replace(":", "$:") if is_path else text


def _run_with_progress(command: list[str], num_steps: int) -> tuple[int, list[str]]:
    """Runs ninja with a progress bar. Returns its status and the last lines of its output.

    The compilers are in a process group of their own and end with us, also on an interrupt.
    """
    from tqdm import tqdm

    last: deque[str] = deque(maxlen=_LAST_LINES)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "NINJA_STATUS": "[%f/%t] "},
    )
    with process:
        try:
            with tqdm(total=num_steps, desc="building the ds_fuyou core", unit="file", leave=False) as bar:
                for line in process.stdout or ():
                    last.append(line.rstrip())
                    step = re.match(r"\[(\d+)/\d+\]", line)
                    if step:
                        bar.update(int(step[1]) - bar.n)
            return process.wait(), list(last)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
