# SPDX-License-Identifier: Apache-2.0
"""Facts about a swap path: free bytes, filesystem, device, and whether O_DIRECT works there."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.types import DIRECTORY_FLAGS, PAGE_BYTES

__all__ = [
    "LOCAL_FILESYSTEMS",
    "SHARING_FILESYSTEMS",
    "PathFacts",
    "Probe",
    "enable_direct",
    "filesystem_of",
    "filesystem_type",
    "may_be_shared",
    "open_path",
    "probe_path",
    "shares_blocks",
]

_OF_DISKS = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "reiserfs", "ubifs", "xfs", "zfs"}
_OF_OTHER_SYSTEMS = {"exfat", "fuseblk", "ntfs3", "vfat"}
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
LOCAL_FILESYSTEMS = _MEMORY_FILESYSTEMS | _OF_DISKS | _OF_OTHER_SYSTEMS | {"aufs", "overlay"}
"""Of one machine: locks are seen by all who use it. On any other one a lock may be this machine's alone."""
SHARING_FILESYSTEMS = frozenset({"xfs", "btrfs"})  # files can share blocks


@dataclass(frozen=True)
class PathFacts:
    """What a path offers now.

    Attributes:
        free_bytes: what an unprivileged user may still allocate.
        filesystem: type as the kernel names it ("ext4", "xfs", ...), "unknown" where /proc does not tell.
        is_tmpfs: files live in host memory.
        supports_direct: reads with O_DIRECT of 4096 bytes at a multiple of 4096 work.
        device: "major:minor"; paths on one device share their free bytes.
    """

    free_bytes: int
    filesystem: str
    is_tmpfs: bool
    supports_direct: bool
    device: str


Probe: TypeAlias = Callable[[Path], PathFacts]


def probe_path(path: Path) -> PathFacts:
    """Looks at an existing directory; leaves nothing in it.

    Raises:
        FuyouStorageError: the path is missing, no directory, a symbolic link, read-only or not writable.
    """
    path_fd = open_path(path)
    try:
        space = os.fstatvfs(path_fd)
        filesystem = filesystem_type(path_fd)
        device = os.fstat(path_fd).st_dev
        in_memory = filesystem in _MEMORY_FILESYSTEMS
        direct = _probe_direct(path_fd, path)
        return PathFacts(
            free_bytes=space.f_bavail * space.f_frsize,
            filesystem=filesystem,
            is_tmpfs=in_memory,
            supports_direct=direct and not in_memory,
            device=f"{os.major(device)}:{os.minor(device)}",
        )
    finally:
        os.close(path_fd)


def shares_blocks(paths: Iterable[Path]) -> bool:
    """Whether files in each of these directories can share blocks; not if there is none."""
    found = {probe_path(path).filesystem for path in paths}
    return bool(found) and found <= SHARING_FILESYSTEMS


def open_path(path: Path) -> int:
    """Descriptor of the directory ``path``, which must exist and be no symbolic link itself.

    Raises:
        FuyouStorageError: naming the path, what it is, and what to do.
    """
    try:
        return os.open(path, DIRECTORY_FLAGS)
    except OSError as error:
        number = error.errno or errno.EIO
        if os.path.islink(path):
            number = errno.ELOOP
            advice = f"it is a symbolic link; name its target {os.path.realpath(path)} instead"
        elif number == errno.ENOENT:
            advice = f"it does not exist; create it (mkdir -p {path}) or name another path"
        elif number == errno.ENOTDIR:
            advice = "it is not a directory; name a directory on the storage device"
        else:
            advice = "it cannot be opened; change its permissions or name another path"
        raise FuyouStorageError(number, f"nvme_path must be an existing directory: {advice}", str(path)) from error


def enable_direct(fd: int) -> str:
    """Switches O_DIRECT on for a readable file of at least 4096 bytes; returns why it could not, "" when it
    is on.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        return f"the filesystem refuses O_DIRECT ({os.strerror(error.errno or 0)})"
    try:
        # Some filesystems accept the flag and refuse the transfer; an anonymous map is page-aligned.
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(fd, [page], 0)
    except OSError as error:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return f"direct reads of {PAGE_BYTES} bytes fail ({os.strerror(error.errno or 0)})"
    return ""


def _probe_direct(path_fd: int, path: Path) -> bool:
    """Also the test that the path is writable."""
    try:
        fd = _open_unnamed(path_fd, path)
    except FuyouStorageError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _reads_directly(path)  # not even a name fits: what is there tells as well
    try:
        try:
            os.ftruncate(fd, PAGE_BYTES)
        except OSError:
            return False
        return not enable_direct(fd)
    finally:
        os.close(fd)


def _reads_directly(path: Path) -> bool:
    """By a file of at least a page in a directory below; False where there is none."""
    for file in path.glob("*/*"):
        try:
            fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and status.st_size >= PAGE_BYTES:
                return not enable_direct(fd)
        finally:
            os.close(fd)
    return False


def _open_unnamed(path_fd: int, path: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        try:
            return os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=path_fd)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
        name = f".ds_fuyou-probe-{secrets.token_hex(8)}"
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=path_fd)
        os.unlink(name, dir_fd=path_fd)
        return fd
    except OSError as error:
        message = f"nvme_path must be writable by user {os.geteuid()}; change its owner or mount or name another"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            message = "no file can be opened in nvme_path; raise the limit of open files (ulimit -n)"
        raise FuyouStorageError(error.errno or errno.EIO, message, str(path)) from error


def filesystem_type(fd: int) -> str:
    """By the mount id of the descriptor, which is right where device numbers are not (overlayfs, btrfs)."""
    try:
        info = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="utf-8")
        mount_id = next(line.split()[1] for line in info.splitlines() if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                if line.split(" ", 1)[0] == mount_id:
                    return line.split(" - ", 1)[1].split()[0]
    except (OSError, StopIteration, IndexError):
        return "unknown"
    return "unknown"


def filesystem_of(directory: Path) -> str:
    """As :func:`filesystem_type`, of a directory."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return filesystem_type(fd)
    finally:
        os.close(fd)


def may_be_shared(directory: Path) -> bool:
    """Whether another machine may use it, too."""
    return filesystem_of(directory) not in LOCAL_FILESYSTEMS
