# SPDX-License-Identifier: Apache-2.0
"""The directories and locks of the store: ``PATH/ds_fuyou`` and, in it, one directory a run and rank.

[Note: two locks] The *root lock* is a flock on the directory ``ds_fuyou`` itself, or, where others can open that, on a
file of this user's in it (locks.py). It is held while a run directory is created, reopened, looked at or cleaned up; so
nobody sees, removes or counts free bytes beside a half-made one. The *run lock* is a flock on the file ``lock`` in the
run directory, held until the store is closed. Both vanish with their process, however it ends. Everything below PATH is
reached relative to open descriptors and without following symbolic links.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.storage.locks import lock_directory, try_lock
from ds_fuyou.storage.probe import open_path
from ds_fuyou.storage.records import COMMIT_NAME, CONTENTS_NAME, ENGINE_NAME, MANIFEST_NAME, temporary_name
from ds_fuyou.storage.types import DIRECTORY_FLAGS

__all__ = [
    "DATA_NAME",
    "LOCK_NAME",
    "ROOT_NAME",
    "RunDirectory",
    "StateRoot",
    "foreign_names",
    "is_ours",
    "is_run_name",
]

logger = logging.getLogger("ds_fuyou")

ROOT_NAME = "ds_fuyou"
DATA_NAME = "data"
LOCK_NAME = "lock"
_MARK = b"ds_fuyou"  # what the lock file holds, and manifests begin with
_TEMPORARY = tuple(map(temporary_name, (COMMIT_NAME, CONTENTS_NAME, ENGINE_NAME, MANIFEST_NAME)))
# In the order of removal: what is left of an interrupted removal is still recognised, and never looks
# committed.
_OUR_NAMES = (COMMIT_NAME, *_TEMPORARY, DATA_NAME, CONTENTS_NAME, ENGINE_NAME, MANIFEST_NAME, LOCK_NAME)
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}-rank\d{1,9}")
_LOCK_LIMIT_SECS = 600.0


def is_run_name(name: str) -> bool:
    """Whether a directory of this name in ``ds_fuyou`` can be a run's."""
    return _RUN_NAME.fullmatch(name) is not None


def foreign_names(run_fd: int) -> list[str]:
    """Entries of a run directory that this package did not make."""
    found = []
    with os.scandir(run_fd) as entries:
        for entry in entries:
            if entry.name not in _OUR_NAMES or not entry.is_file(follow_symlinks=False):
                found.append(entry.name)
    return sorted(found)


def _of_other_user(owner: int) -> str:
    return (
        f"it is user {owner}'s, who may train in it, and this is user {os.geteuid()}: name an nvme_path of your own, "
        "or have an administrator make it for all users once nothing is left in it (mkdir -m 1777)"
    )


def is_ours(run_fd: int) -> bool:
    """Whether a run directory was made by this package, not by somebody who chose the same names for files."""
    names = set(os.listdir(run_fd))
    return names <= {LOCK_NAME} or any(_begins_as_ours(run_fd, name) for name in (LOCK_NAME, MANIFEST_NAME))


def _begins_as_ours(run_fd: int, name: str) -> bool:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=run_fd)
    except OSError:
        return False
    try:
        return os.read(fd, len(_MARK)) == _MARK
    except OSError:
        return False
    finally:
        os.close(fd)


class StateRoot:
    """The directory ``ds_fuyou`` in one path, with the root lock held from :meth:`open` to :meth:`unlock`."""

    def __init__(self, path: Path, fd: int, locks: Sequence[int]) -> None:
        """``locks``: descriptors that hold the root lock."""
        self.path = path / ROOT_NAME
        self.fd, self._locks = fd, locks

    @classmethod
    def open(cls, path: Path, *, create: bool) -> StateRoot | None:
        """Opens and locks it; None when it does not exist and is not to be created.

        Raises:
            FuyouStorageError: the path or ``ds_fuyou`` in it is missing, a symbolic link, not writable,
                another user's, or its lock stays taken.
        """
        path = path.absolute()
        path_fd = open_path(path)
        try:
            while True:
                fd = cls._open_once(path, path_fd, create)
                if fd is None:
                    return None
                root, is_there = cls(path, fd, []), False
                try:
                    root._lock()
                    is_there = _is_entry(path_fd, ROOT_NAME, fd)
                    if is_there:
                        return root
                finally:
                    if not is_there:
                        root.abandon()
        finally:
            os.close(path_fd)

    def _lock(self) -> None:
        try:
            locks = lock_directory(self.fd, _LOCK_LIMIT_SECS, str(self.path))
        except FuyouStorageError:
            raise
        except OSError as error:
            message = "the directory must be one in which this user can make files; name another nvme_path"
            raise FuyouStorageError(error.errno or errno.EIO, message, str(self.path)) from error
        if locks is None:
            message = f"the lock must be free within {_LOCK_LIMIT_SECS:.0f} s; stop its holder"
            raise FuyouStorageError(errno.EWOULDBLOCK, message, str(self.path))
        self._locks = locks

    @staticmethod
    def _open_once(path: Path, path_fd: int, create: bool) -> int | None:
        where = str(path / ROOT_NAME)
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(ROOT_NAME, 0o700, dir_fd=path_fd)
            fd = os.open(ROOT_NAME, DIRECTORY_FLAGS, dir_fd=path_fd)
        except FileNotFoundError:
            if not create:
                return None
            raise FuyouStorageError(errno.ENOENT, "the nvme_path vanished; create it again", str(path)) from None
        except OSError as error:
            advice = "it must be a directory this user can write; remove it or name another nvme_path"
            if error.errno == errno.EACCES:
                with contextlib.suppress(OSError):
                    owner = os.stat(ROOT_NAME, dir_fd=path_fd, follow_symlinks=False).st_uid
                    advice = advice if owner == os.geteuid() else _of_other_user(owner)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                advice = "the disk has no room for a directory; free space, or name another nvme_path"
            raise FuyouStorageError(error.errno or errno.EIO, advice, where) from error
        owner = os.fstat(fd).st_uid
        if owner not in (os.geteuid(), 0):
            os.close(fd)
            raise FuyouStorageError(errno.EPERM, _of_other_user(owner), where)
        return fd

    def unlock(self) -> None:
        """Lets others create and remove directories here."""
        for fd in self._locks:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def abandon(self) -> None:
        """Closes the descriptors, and does nothing else."""
        for fd in {self.fd, *self._locks}:
            os.close(fd)

    def sync(self) -> None:
        """Makes the entries of ``ds_fuyou``, and ``ds_fuyou`` itself, survive a power cut.

        Raises:
            FuyouStorageError: they may not.
        """
        try:
            os.fsync(self.fd)
            path_fd = os.open("..", DIRECTORY_FLAGS, dir_fd=self.fd)
            try:
                os.fsync(path_fd)
            finally:
                os.close(path_fd)
        except OSError as error:
            message = "the state directory cannot be made durable; check the device or name another nvme_path"
            raise FuyouStorageError(error.errno or errno.EIO, message, str(self.path)) from error

    def close(self, *, drop_if_empty: bool) -> None:
        """Closes the descriptor; first removes ``ds_fuyou`` if asked, if it is empty and nobody uses it."""
        try:
            if drop_if_empty and try_lock(self.fd, 0.0, str(self.path)):
                self._drop()
        except OSError as error:
            logger.debug("%s stays: %s", self.path, error)
        finally:
            self.abandon()

    def _drop(self) -> None:
        own = os.fstat(self.fd)
        if own.st_uid != os.geteuid() or stat.S_IMODE(own.st_mode) != 0o700:
            return  # an administrator made it for several users
        path_fd = os.open("..", DIRECTORY_FLAGS, dir_fd=self.fd)
        try:
            if _is_entry(path_fd, ROOT_NAME, self.fd):
                os.rmdir(ROOT_NAME, dir_fd=path_fd)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            os.close(path_fd)


class RunDirectory:
    """One run's directory in one path, with the run lock held until :meth:`release` or :meth:`remove`.

    Owns the descriptor of its root, which the caller leaves to it.
    """

    def __init__(self, root: StateRoot, name: str, fd: int, lock_fd: int) -> None:
        self.root, self.name, self.fd, self._lock_fd = root, name, fd, lock_fd
        self.path = root.path / name

    @classmethod
    def create(cls, root: StateRoot, name: str) -> RunDirectory:
        """Makes the directory (0700) and its lock. The root must be locked.

        Raises:
            FuyouStateError: a directory of this name exists.
            FuyouStorageError: it cannot be made. Nothing is left behind.
        """
        path = root.path / name
        try:
            os.mkdir(name, 0o700, dir_fd=root.fd)
        except FileExistsError:
            raise FuyouStateError(f"{path} must not exist yet; give this run another run_id or remove it") from None
        except OSError as error:
            message = "the directory of the run cannot be created; nvme_path must be writable"
            raise FuyouStorageError(error.errno or errno.EIO, message, str(path)) from error
        try:
            return cls._attach(root, name, os.O_CREAT | os.O_EXCL)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(f"{name}/{LOCK_NAME}", dir_fd=root.fd)
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=root.fd)
            raise

    @classmethod
    def reopen(cls, root: StateRoot, name: str, *, make_lock: bool = False) -> RunDirectory:
        """Takes over a directory that no process holds. The root must be locked.

        ``make_lock`` is for cleaning up where a crash came between the directory and its lock file.

        Raises:
            FuyouStateError: a process holds it.
            FuyouStorageError: it is missing, has no lock file, is a symbolic link or another user's.
        """
        return cls._attach(root, name, os.O_CREAT if make_lock else 0)

    @classmethod
    def _attach(cls, root: StateRoot, name: str, lock_flags: int) -> RunDirectory:
        path = root.path / name
        opened: list[int] = []
        try:
            opened.append(os.open(name, DIRECTORY_FLAGS, dir_fd=root.fd))
            owner = os.fstat(opened[0]).st_uid
            if owner != os.geteuid():
                message = f"it must belong to user {os.geteuid()}, it is user {owner}'s"
                raise FuyouStorageError(errno.EPERM, message, str(path))
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | lock_flags
            opened.append(os.open(LOCK_NAME, flags, 0o600, dir_fd=opened[0]))
            if not try_lock(opened[1], 0.0, str(path)):
                raise FuyouStateError(f"{path} is in use by a running process; wait for its end or stop it")
            if lock_flags & os.O_EXCL:
                os.write(opened[1], _MARK)
        except BaseException as error:
            for fd in opened:
                os.close(fd)
            if isinstance(error, OSError) and not isinstance(error, FuyouStorageError):
                message = "it must be the state directory of a run, no symbolic link, and this user's"
                raise FuyouStorageError(error.errno or errno.EIO, message, str(path)) from error
            raise
        return cls(root, name, opened[0], opened[1])

    def missing(self, names: Sequence[str], data_fd: int, *, refresh: bool) -> list[str]:
        """Which of these files of the run are not there any more; ``refresh`` sets the times of all others to now.

        ``data_fd``: the open data file.
        """
        gone = []
        for name in names:
            try:
                found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                if name == DATA_NAME and not os.path.samestat(found, os.fstat(data_fd)):
                    gone.append(name)
            except FileNotFoundError:
                gone.append(name)
        if refresh:
            there: list[str] = []
            with contextlib.suppress(OSError):  # no descriptor is free now: an hour later one will be
                there = os.listdir(self.fd)
            for name in set(there).intersection(_OUR_NAMES):
                with contextlib.suppress(OSError):
                    os.utime(name, dir_fd=self.fd, follow_symlinks=False)
        return gone

    def is_there(self) -> bool:
        """Whether nobody deleted the directory."""
        try:
            return os.fstat(self.fd).st_nlink > 0
        except OSError as error:
            if error.errno != errno.ESTALE:  # a file system of the network
                raise
            return False

    def remove(self) -> None:
        """Deletes the files of this package and the directory, then lets go.

        Raises:
            FuyouStorageError: something stays, named with what is foreign in the directory.
        """
        try:
            self._delete()
        finally:
            self._close(drop_root=True)

    def discard(self) -> None:
        """As :meth:`remove`; what goes wrong is logged. Ctrl-C and SIGTERM are raised when it is done."""
        interrupt: BaseException | None = None
        try:
            while True:
                try:
                    self._delete()
                    break
                except OSError as error:
                    logger.warning("%s", error)
                    break
                except BaseException as error:
                    interrupt = error
        finally:
            self._close(drop_root=True)
        if interrupt is not None:
            raise interrupt

    def _delete(self) -> None:
        try:
            for name in _OUR_NAMES:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self.fd)
            if _is_entry(self.root.fd, self.name, self.fd):
                os.rmdir(self.name, dir_fd=self.root.fd)
        except OSError as error:
            left = ", ".join(foreign_names(self.fd)) or "nothing foreign"
            message = f"the state directory cannot be removed; remove it by hand. Found in it: {left}"
            raise FuyouStorageError(error.errno or errno.EIO, message, str(self.path)) from error

    def release(self) -> None:
        """Lets go of the directory and leaves it as it is."""
        self._close(drop_root=False)

    def abandon(self) -> None:
        """In a forked child: closes the descriptors. The parent's locks and files stay as they are."""
        self.root.abandon()
        for fd in (self.fd, self._lock_fd):
            os.close(fd)

    def _close(self, drop_root: bool) -> None:
        os.close(self._lock_fd)
        os.close(self.fd)
        self.root.close(drop_if_empty=drop_root)


def _is_entry(parent_fd: int, name: str, fd: int) -> bool:
    """Whether ``name`` in the parent still is the directory that ``fd`` has open."""
    try:
        entry = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(entry, os.fstat(fd))
