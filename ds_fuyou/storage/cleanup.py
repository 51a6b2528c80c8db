# SPDX-License-Identifier: Apache-2.0
"""State that dead runs left behind: finding, reporting and, on the user's word only, removing it.

[Note: what a run cleans]
With ``on_stale: clean`` a run that does not resume removes, of its own user, what no process holds or can be using,
what was not kept on purpose, and what is of its own model: an experiment beside it in the same directory is not. On a
file system that machines share, locks and processes of others may not be seen: state that another machine made stays.
Where runs resume, that may be what another start goes on from; but a run that dies before its first step, again and
again, must not fill the disk. Then what holds nothing to go on from is removed (:func:`lost_state`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.storage.directory import (
    LOCK_NAME,
    ROOT_NAME,
    RunDirectory,
    StateRoot,
    foreign_names,
    is_ours,
    is_run_name,
)
from ds_fuyou.storage.probe import may_be_shared
from ds_fuyou.storage.records import Manifest, ProcessMark, read_manifest
from ds_fuyou.storage.store import CommitRecord, commits_in
from ds_fuyou.storage.store_files import read_directory_manifest
from ds_fuyou.storage.types import DIRECTORY_FLAGS

__all__ = [
    "StateDirectory",
    "find_state",
    "holds_steps",
    "is_fault",
    "lost_state",
    "remove_state",
    "settle_stale",
    "stale_bytes",
    "state_of_others",
    "what_it_holds",
]

_OF_WHAT_IS_THERE = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENXIO,
        errno.EACCES,
        errno.EPERM,
        errno.EINVAL,
        errno.EBADMSG,
    }
)


@dataclass(frozen=True)
class StateDirectory:
    """One run's directory in one path.

    Attributes:
        alive: its lock is held, or the process that made it still runs.
        closed_here: that process is this one, and does not use it any more: an engine that failed, or was kept.
        num_bytes: bytes it takes on the device.
        started: seconds since the epoch.
        model_fingerprint: empty when the manifest is missing or unreadable.
        kept: its run was told to let the state stay.
        host: machine on which it was made; empty as the fingerprint.
        world_size: ranks of its run; 0 where the fingerprint is empty.
    """

    path: Path
    alive: bool
    run_id: str
    rank: int
    num_bytes: int
    started: float
    model_fingerprint: str
    kept: bool
    host: str = ""
    closed_here: bool = False
    world_size: int = 0

    @property
    def is_of_here(self) -> bool:
        """Whether no process of another machine can be using it."""
        return self.host in ("", os.uname().nodename) or not may_be_shared(self.path)

    @property
    def why_not(self) -> str:
        """Why it must stay; empty if it may go."""
        if self.alive:
            return "in use by a running process, left alone"
        if not self.is_of_here:
            return f"made on {self.host}, whose processes nobody sees from here, left alone"
        return ""


def find_state(path: str | Path) -> list[StateDirectory]:
    """The state directories of this user in one nvme_path, by name. Waits while another process creates one.

    Raises:
        FuyouStorageError: the path is missing, no directory or a symbolic link; or the device failed, so that nobody
            can say what is there.
    """
    root = StateRoot.open(Path(path), create=False)
    if root is None:
        return []
    try:
        return [state for name in sorted(os.listdir(root.fd)) if (state := _inspect(root, name)) is not None]
    finally:
        root.close(drop_if_empty=False)


def state_of_others(path: Path) -> dict[Path, int]:
    """Runs' directories of other users in one nvme_path, by name, and who they are: all that can be said of them."""
    found = {}
    with contextlib.suppress(OSError):
        for each in sorted(path.glob(f"{ROOT_NAME}/*-rank*")):
            with contextlib.suppress(OSError):  # their runs begin and end meanwhile
                if is_run_name(each.name) and (owner := each.lstat().st_uid) != os.geteuid():
                    found[each] = owner
    return found


def remove_state(state: StateDirectory) -> None:
    """Removes a state directory that no process uses; one that is gone already is no error.

    Raises:
        FuyouStateError: a running process uses it.
        FuyouStorageError: it is not recognisably this package's and this user's, or cannot be removed. What
            is not recognised is refused before anything is deleted.
    """
    path = state.path
    root = StateRoot.open(path.parent.parent, create=False) if path.parent.parent.is_dir() else None
    if root is None:
        return
    run: RunDirectory | None = None
    try:
        if path.parent != root.path or not is_run_name(path.name):
            raise FuyouStorageError(errno.EINVAL, "it must be a state directory; remove it by hand", str(path))
        if not os.path.lexists(path):
            return
        _check_removable(root, path)
        run = RunDirectory.reopen(root, path.name, make_lock=True)
    finally:
        if run is None:
            root.close(drop_if_empty=True)
    run.remove()


def lost_state(paths: Sequence[Path]) -> set[Path]:
    """Directories of dead runs that hold nothing to go on from or to recover. Skips paths in error."""
    found: set[Path] = set()
    for path in paths:
        with contextlib.suppress(OSError):
            found.update(state.path for state in find_state(path) if not state.alive and _is_lost(state))
    return found


def settle_stale(
    paths: Sequence[Path], logger: logging.Logger, clean: str = "", only: Collection[Path] | None = None
) -> None:
    """Names state of dead runs and the command that removes it, or removes what is of the model with the fingerprint
    ``clean``; see [Note: what a run cleans]. Skips paths in error. ``only``: what else stays, whatever it is.
    """
    for path in reversed(paths):  # what holds the record goes last: the rest without it looks like a disk that is gone
        with contextlib.suppress(OSError):
            for state in find_state(path):
                if state.alive:
                    continue
                if clean and _may_clean(state, clean) and (only is None or state.path in only):
                    try:
                        remove_state(state)
                        logger.info("%s: %.1f MiB removed (on_stale)", state.path, state.num_bytes / 2**20)
                        continue
                    except (FuyouStateError, FuyouStorageError) as error:
                        logger.warning("%s", error)
                _report(state, Path(path), logger)


def stale_bytes(paths: Sequence[Path]) -> int:
    """What state of dead runs takes in these paths, kept state included; 0 for paths in error."""
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += sum(state.num_bytes for state in find_state(path) if not state.alive)
    return total


def _may_clean(state: StateDirectory, fingerprint: str) -> bool:
    return not state.kept and state.model_fingerprint == fingerprint and state.is_of_here


def _is_lost(state: StateDirectory) -> bool:
    """It holds nothing to go on from or to recover: no step was made, or its states were in host memory, or being
    replaced. What is not readable may hold something.
    """
    commits = _commits_of(state)
    return commits is not None and _are_lost(commits)


def holds_steps(state: StateDirectory) -> bool:
    """A run may go on from what it holds, or could if it were readable; not so with one slot, where a step is written
    over the one before.
    """
    commits = _commits_of(state)
    return commits is None or _are_whole(commits)


def what_it_holds(state: StateDirectory) -> str:
    """In words, where that is a step that would be lost with it; else empty."""
    commits = _commits_of(state)
    if commits is None or not _are_whole(commits):
        return ""
    return "it holds a step, of which fuyou recover makes a checkpoint"


def _commits_of(state: StateDirectory) -> list[CommitRecord] | None:
    """None if they cannot be read."""
    if not state.model_fingerprint:
        return None
    try:
        return commits_in(Path(read_directory_manifest(state.path).directories[0]))
    except OSError:
        return None


def _are_whole(commits: Sequence[CommitRecord]) -> bool:
    return not _are_lost(commits) and commits[0].intact


def _are_lost(commits: Sequence[CommitRecord]) -> bool:
    newest = commits[0] if commits else None
    return newest is None or newest.lacks_states or (newest.step == 0 and newest.meta.get("training") is None)


def _report(state: StateDirectory, path: Path, logger: logging.Logger) -> None:
    level, what = (logging.INFO, "kept by") if state.kept else (logging.WARNING, "left by the dead run")
    logger.log(
        level,
        "%s: %.1f MiB %s %s (rank %d, started %s)%s; remove with: fuyou clean %s",
        state.path,
        state.num_bytes / 2**20,
        what,
        state.run_id,
        state.rank,
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started)),
        f"; {holds}" if (holds := what_it_holds(state)) else "",
        shlex.quote(str(path)),
    )


def _inspect(root: StateRoot, name: str) -> StateDirectory | None:
    """None for what is not a state directory of this user. The root is locked, so nothing is half-made."""
    if not is_run_name(name):
        return None
    try:
        fd = os.open(name, DIRECTORY_FLAGS, dir_fd=root.fd)
    except OSError as error:
        if is_fault(error):
            message = "the state directory cannot be opened; check the device"
            raise FuyouStorageError(error.errno or errno.EIO, message, str(root.path / name)) from error
        return None
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            return None
        manifest = _manifest_or_none(fd, root.path / name)
        run_id, _, rank = name.rpartition("-rank")
        locked = _is_locked(fd)
        return StateDirectory(
            path=root.path / name,
            alive=locked or (manifest is not None and manifest.process.is_alive()),
            run_id=run_id,
            rank=int(rank),
            num_bytes=_allocated_bytes(fd),
            started=manifest.started if manifest is not None else found.st_mtime,
            model_fingerprint=manifest.identity.model_fingerprint if manifest is not None else "",
            kept=manifest is not None and manifest.keep,
            host=manifest.process.host if manifest is not None else "",
            closed_here=not locked and manifest is not None and manifest.process == ProcessMark.of_this_process(),
            world_size=manifest.identity.world_size if manifest is not None else 0,
        )
    finally:
        os.close(fd)


def _check_removable(root: StateRoot, path: Path) -> None:
    state = _inspect(root, path.name)
    if state is None:
        message = "it must be a directory of this user and no symbolic link; remove it by hand"
        raise FuyouStorageError(errno.EPERM, message, str(path))
    if state.alive:
        raise FuyouStateError(f"{path} is in use by a running process; wait for its end or stop it")
    fd = os.open(path.name, DIRECTORY_FLAGS, dir_fd=root.fd)
    try:
        foreign, recognised = foreign_names(fd), is_ours(fd)
    finally:
        os.close(fd)
    if not recognised:
        message = "neither a manifest nor the lock says that a run made it; remove it by hand"
        raise FuyouStorageError(errno.EPERM, message, str(path))
    if foreign:
        message = f"it must hold only state files, found also: {', '.join(foreign)}; move that away"
        raise FuyouStorageError(errno.ENOTEMPTY, message, str(path))


def _manifest_or_none(fd: int, path: Path) -> Manifest | None:
    try:
        return read_manifest(fd, path)
    except FuyouStorageError as error:
        if is_fault(error):
            raise
        return None


def is_fault(error: BaseException) -> bool:
    """Whether the machine failed. Otherwise what is there is none of ours, another user's, or was altered."""
    return isinstance(error, OSError) and error.errno not in _OF_WHAT_IS_THERE


def _is_locked(run_fd: int) -> bool:
    try:
        fd = os.open(LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=run_fd)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def _allocated_bytes(run_fd: int) -> int:
    with os.scandir(run_fd) as entries:
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
