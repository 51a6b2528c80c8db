# SPDX-License-Identifier: Apache-2.0
"""The one data file a run has in a path: its blocks are allocated, and it is opened with O_DIRECT where that works."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.libc import libc
from ds_fuyou.storage.directory import DATA_NAME, RunDirectory
from ds_fuyou.storage.probe import enable_direct

__all__ = [
    "NO_FALLOCATE",
    "DataFile",
    "SyncError",
    "allocate_blocks",
    "create_data_file",
    "free_blocks",
    "open_data_file",
    "preallocate",
    "sync_errors",
    "what_gives_room",
]

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_ZERO_BYTES = 1024 * 1024
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def what_gives_room(error: OSError) -> str:
    """For the message: what to do where blocks cannot be allocated."""
    if error.errno == errno.EFBIG:
        return "raise the limit of a file's size (ulimit -f), or name an nvme_path whose file system has larger files"
    return "free space or name another nvme_path"


class SyncError(OSError):
    """A file's data may not be durable, whoever wrote it. The kernel says so once: the next fsync(2) may succeed."""


@dataclass(frozen=True)
class DataFile:
    """An open data file; ``buffered_because`` says why it is not open with O_DIRECT, "" when it is."""

    fd: int
    path: Path
    num_bytes: int
    buffered_because: str


def create_data_file(run: RunDirectory, num_bytes: int, direct: bool | None, buffered_because: str) -> DataFile:
    """Creates the file (0600) with all its blocks allocated.

    Args:
        direct: True asks for O_DIRECT, False for buffered I/O, None takes what works.
        buffered_because: known reason against O_DIRECT, "" when there is none.

    Raises:
        FuyouStorageError: no space (ENOSPC, EDQUOT, EFBIG), or ``direct`` is True and O_DIRECT does not work.
            The file is left to the caller, who removes the directory.
    """
    path = run.path / DATA_NAME
    try:
        fd = os.open(DATA_NAME, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=run.fd)
    except OSError as error:
        raise FuyouStorageError(error.errno or errno.EIO, "the data file cannot be created", str(path)) from error
    try:
        try:
            preallocate(fd, num_bytes)
        except OSError as error:
            message = f"{num_bytes} bytes cannot be allocated; {what_gives_room(error)}"
            raise FuyouStorageError(error.errno or errno.EIO, message, str(path)) from error
        return DataFile(fd, path, num_bytes, _choose_direct(fd, path, direct, buffered_because))
    except BaseException:
        os.close(fd)
        raise


def open_data_file(run: RunDirectory, num_bytes: int, buffered_because: str) -> DataFile:
    """Opens the file of an earlier run. It may be longer than the manifest says: a run that ended while it grew.

    Raises:
        FuyouStorageError: it is missing, a symbolic link, not a plain file, or shorter than ``num_bytes``.
    """
    path = run.path / DATA_NAME
    try:
        fd = os.open(DATA_NAME, _FLAGS | os.O_NONBLOCK, dir_fd=run.fd)
    except OSError as error:
        message = "the data file must be there and be a plain file; start again from the last checkpoint"
        raise FuyouStorageError(error.errno or errno.EIO, message, str(path)) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size < num_bytes:
            message = f"the data file must be {num_bytes} bytes as the manifest says, found {found.st_size}"
            raise FuyouStorageError(errno.EINVAL, f"{message}; start again from the last checkpoint", str(path))
        os.set_blocking(fd, True)
        return DataFile(fd, path, num_bytes, _choose_direct(fd, path, None, buffered_because))
    except BaseException:
        os.close(fd)
        raise


@contextlib.contextmanager
def sync_errors() -> Iterator[None]:
    """Around fsync(2) or fdatasync(2): what they raise is a SyncError."""
    try:
        yield
    except OSError as error:
        raise SyncError(error.errno, error.strerror) from error


def preallocate(fd: int, num_bytes: int, offset: int = 0) -> None:
    """Allocates the blocks of ``num_bytes`` from ``offset`` on; writes zeros where the filesystem cannot otherwise.
    Of a file that was to grow, and did not, nothing is kept: ext4 allocates all that is free before it says that there
    is not enough.

    Raises:
        SyncError: zeros were written, and fsync(2) failed.
        OSError: there is no room.
    """
    if num_bytes == 0:
        return
    before = os.fstat(fd).st_size
    try:
        _allocate(fd, num_bytes, offset)
    except OSError:
        if offset >= before:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, before)
        raise


def _allocate(fd: int, num_bytes: int, offset: int) -> None:
    try:
        allocate_blocks(fd, num_bytes, offset)
        return
    except OSError as error:
        if error.errno not in NO_FALLOCATE:
            raise
    zeros = memoryview(mmap.mmap(-1, _ZERO_BYTES))  # at a page: the file may be open with O_DIRECT
    end = offset + num_bytes
    while offset < end:
        offset += os.pwrite(fd, zeros[: end - offset], offset)
    with sync_errors():
        os.fsync(fd)


def allocate_blocks(fd: int, num_bytes: int, offset: int = 0) -> None:
    """fallocate(2) itself: the C library's posix_fallocate would emulate it by a write to every block, in silence."""
    _fallocate(fd, 0, offset, num_bytes)


def free_blocks(fd: int, num_bytes: int, offset: int) -> None:
    """Gives these blocks back to the filesystem; the file keeps its size, and zeros are read there."""
    _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, num_bytes)


def _fallocate(fd: int, mode: int, offset: int, num_bytes: int) -> None:
    while libc().fallocate(ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(num_bytes)):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def _choose_direct(fd: int, path: Path, direct: bool | None, buffered_because: str) -> str:
    if direct is False:
        return "buffered I/O was asked for"
    reason = buffered_because or enable_direct(fd)
    if reason and direct:
        message = f"O_DIRECT was asked for and must work: {reason}; name another nvme_path or do without"
        raise FuyouStorageError(errno.EINVAL, message, str(path))
    return reason
