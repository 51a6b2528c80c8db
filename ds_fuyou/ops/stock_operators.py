# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own operators: which of them a run compiles at its first start, and what keeps one from starting.

DeepSpeed has torch compile its operators on first use, without a word, and torch guards each build by a file named
``lock``. Up to some version (2.13 does, 2.15 does not) the file itself is the lock: a process that is killed while it
builds leaves it, and every later start waits for it without end. While it builds, a process has the file open: that is
how a lock that somebody holds is told from one that is left. Newer ones have the kernel lock the file, which stays, and
a killed process holds nothing.

Every start takes the lock, for a part of a second, to see that there is nothing to build. So a run that is killed while
it begins may leave one beside an operator that is whole: that one is removed by the next start. One of an operator that
is not there is told: another machine or container may build it, for minutes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "build_command",
    "build_directory",
    "compile_operators",
    "left_locks",
    "operators_to_compile",
    "remove_lock",
    "told_of_locks",
]

_OWN_BUILDERS = {"adagrad": "CPUAdagradBuilder", "lion": "CPULionBuilder"}
_SURE_SECS = 5.0  # a start that has taken it for a look has long given it back
_SURE_SECS_IN_CONTAINER = 180.0  # another one's processes are not seen from here, and it may build an operator again
_FIRST_PROCESSES = "pid:[4026531836]"
_RELEASED_SECS = 0.2  # far more than a process needs to remove what it has closed


def build_directory() -> Path:
    """Where torch builds operators in this environment: ``$TORCH_EXTENSIONS_DIR``, else a folder of its cache."""
    import torch
    from torch.utils import cpp_extension

    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given is not None:
        return Path(given)
    version = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    kinds = (("rocm", torch.version.hip), ("cu", torch.version.cuda))
    kind = next((f"{name}{found.replace('.', '')}" for name, found in kinds if found is not None), "cpu")
    return Path(cpp_extension.get_default_build_root()) / f"{version}_{kind}"


def build_command(optimizer: str | None) -> str:
    """The command that compiles beforehand what a run with this optimizer (None: Adam) compiles at its start."""
    named = (optimizer or "").lower()
    return "fuyou build" + (f" --optimizer {optimizer}" if named in _OWN_BUILDERS else "")


def left_locks(directory: Path, proc: Path = Path("/proc")) -> list[Path]:
    """Locks of builds in ``directory`` that no process of this user on this machine has open; none where torch waits
    for no file.
    """
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):
        return []
    left = _not_open(directory, proc)
    if left:  # or being released right now: closed before it is removed
        time.sleep(_RELEASED_SECS)
        again = _not_open(directory, proc)
        left = {lock: made for lock, made in left.items() if again.get(lock) == made}
    return sorted(left)


def _not_open(directory: Path, proc: Path) -> dict[Path, tuple[int, int]]:
    """Locks that no process has open, and which files they are: the next build makes a new one of the same name."""
    found = {}
    for lock in directory.glob("*/lock"):
        with contextlib.suppress(FileNotFoundError):  # it was released meanwhile
            made = os.stat(lock)
            found[lock] = (made.st_ino, made.st_ctime_ns)
    held = set(_open_files(proc)) if found else set()
    return {lock: made for lock, made in found.items() if os.path.realpath(lock) not in held}


def remove_lock(lock: Path) -> bool:
    """Removes a lock that was left beside an operator that is there, once it is old enough; whether it is gone. For
    directories of this machine.
    """
    operator = lock.parent
    if not (operator / f"{operator.name}.so").is_file():
        return False
    fd = os.open(operator, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # whoever comes next finds it gone, or a new one that is held
        while lock in left_locks(operator.parent):
            try:
                found = os.lstat(lock)
            except FileNotFoundError:
                break
            if found.st_uid != os.geteuid():
                return False
            wait_secs = _sure_secs() - abs(time.time() - found.st_mtime)
            if wait_secs <= 0:
                lock.unlink(missing_ok=True)
            else:
                time.sleep(min(wait_secs, 0.2))
    finally:
        os.close(fd)
    return True


def _sure_secs() -> float:
    try:
        sees_all = os.readlink("/proc/self/ns/pid") == _FIRST_PROCESSES
    except OSError:
        sees_all = False
    return _SURE_SECS if sees_all else _SURE_SECS_IN_CONTAINER


def _open_files(proc: Path) -> Iterator[str]:
    for process in proc.glob("[0-9]*"):
        try:
            links = [process / "fd" / name for name in os.listdir(process / "fd")]
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        for link in links:
            try:
                yield os.readlink(link)
            except OSError:  # it was closed
                continue


def told_of_locks(locks: list[Path]) -> str:
    """One line on locks that were left, with the command that removes them."""
    files = " ".join(str(lock) for lock in locks)
    return (
        f"a build of DeepSpeed's operators was killed and left its lock; every start waits for it without end. If no "
        f"other machine builds there now: rm {files}"
    )


def _builders(optimizer: str) -> list[object]:
    """The builders of what a run with the block loads: its optimizer's operator, and a CPU's collectives."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    names = [_OWN_BUILDERS.get(optimizer.lower(), "CPUAdamBuilder")]
    if accelerator.device_name() == "cpu":
        names.append("ShareMemCommBuilder")
    builders = [accelerator.create_op_builder(name) for name in names]
    return [builder for builder in builders if builder is not None and _is_built_here(builder)]


def _is_built_here(builder: object) -> bool:
    """Not compiled with DeepSpeed itself, and known to this version."""
    from deepspeed.git_version_info import installed_ops

    name = getattr(builder, "name", "")
    return type(builder).__name__ != "NotImplementedBuilder" and not installed_ops.get(name, False)


def operators_to_compile(optimizer: str) -> list[str]:
    """Names of the operators that a run with this optimizer would compile at its start."""
    names = [str(getattr(builder, "name", "")) for builder in _builders(optimizer)]
    directory = build_directory()
    return [name for name in names if not (directory / name / f"{name}.so").is_file()]


def compile_operators(optimizer: str) -> Iterator[str]:
    """Compiles and loads what a run with this optimizer loads, one after the other; yields each name before."""
    for builder in _builders(optimizer):
        yield str(getattr(builder, "name", ""))
        builder.load(verbose=False)  # type: ignore[attr-defined]
