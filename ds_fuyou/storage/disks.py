# SPDX-License-Identifier: Apache-2.0
"""Which disks of this machine could hold state, and where on them this user may write."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.probe import LOCAL_FILESYSTEMS, PathFacts, probe_path

__all__ = [
    "DIRECTORY_NAME",
    "VIRTUAL",
    "Disk",
    "DiskKind",
    "disk_kind",
    "drives_of",
    "find_disks",
    "mount_points",
    "read_fact",
]

DIRECTORY_NAME = "fuyou_swap"
VIRTUAL = ("vd", "xvd")  # these say that they rotate, whatever is behind them


class DiskKind(IntEnum):
    """From the one that is wanted first to the last."""

    NVME = 0
    SSD = 1  # or what cannot be told: a virtual disk, or a file system over several
    ROTATING = 2

    def __str__(self) -> str:
        return ("NVMe", "no NVMe, not rotating", "a rotating disk")[self]


@dataclass(frozen=True)
class Disk:
    """A directory that this user may write, the first one found on its device."""

    directory: Path
    kind: DiskKind
    facts: PathFacts


def find_disks(root: Path = Path("/"), others: Sequence[Path] = ()) -> list[Disk]:
    """Local disks, the best kind first, in it the one with most room. ``root`` stands before /proc and /sys; ``others``
    are looked at where a mount point itself is not writable: the working and the home directory, unless told.
    """
    found: dict[str, Disk] = {}
    for directory in (*mount_points(root), *(others or (Path.cwd(), Path(os.path.expanduser("~"))))):
        if not os.access(directory, os.W_OK | os.X_OK) or directory == Path("/"):
            continue
        try:
            facts = probe_path(directory.resolve())
        except FuyouStorageError:
            continue
        if not facts.is_tmpfs and facts.filesystem in LOCAL_FILESYSTEMS:
            found.setdefault(facts.device, Disk(directory.resolve(), disk_kind(facts.device, root), facts))
    return sorted(found.values(), key=lambda disk: (disk.kind, -disk.facts.free_bytes))


def mount_points(root: Path = Path("/")) -> Iterator[Path]:
    """Where disks are mounted for writing, by the kernel's list; not those that the system itself starts from."""
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        mount, options = before.split()[4:6]
        source = after.split()[1]
        mount = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), mount)
        local = source.startswith("/dev/") and "rw" in options.split(",") and not mount.startswith("/boot")
        if local and os.path.isdir(mount):  # a container's files such as /etc/hosts are mounts of their own
            yield Path(mount)


def disk_kind(device: str, root: Path = Path("/")) -> DiskKind:
    """Of "major:minor"; the slowest of those that a mapped device or an array lies on."""
    try:
        return max(_kind(drive) for drive in drives_of(device, root))
    except OSError:
        return DiskKind.SSD


def drives_of(device: str, root: Path = Path("/")) -> list[Path]:
    """The whole drives behind "major:minor", as folders of /sys; those that a mapped device or an array lies on.

    Raises:
        OSError: the kernel does not tell.
    """
    folder = (root / "sys/dev/block" / device).resolve(strict=True)
    slaves = sorted((folder / "slaves").iterdir()) if (folder / "slaves").is_dir() else []
    if slaves:
        return [drive for part in slaves for drive in drives_of(read_fact(part / "dev"), root)]
    return [folder if (folder / "queue").is_dir() else folder.parent]


def read_fact(file: Path) -> str:
    """One line of /sys."""
    return file.read_text(encoding="ascii", errors="replace").strip()


def _kind(drive: Path) -> DiskKind:
    if drive.name.startswith("nvme"):
        return DiskKind.NVME
    if drive.name.startswith(VIRTUAL):
        return DiskKind.SSD
    return DiskKind.ROTATING if read_fact(drive / "queue/rotational") == "1" else DiskKind.SSD
