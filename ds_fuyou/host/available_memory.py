# SPDX-License-Identifier: Apache-2.0
"""How much host memory this process may still take: the kernel's estimate, capped by its control groups.

Page cache counts as used by a group although the kernel takes it back before it kills anybody, so it is added to what
is free, but for as much of the pages in active use as is mapped: programs that run among them. Groups of version 1 and
2 are read, from the process's own group up to the root: the tightest limit holds.

A process that was forked shares memory with the one it came from until it writes to it, and Python writes to every
object that it looks at. What that may take is taken later, and a garbage collection takes much of it at once (116 MiB
where torch, DeepSpeed and transformers had been imported before the fork): what is planned leaves room for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = [
    "AUTO_TENTHS",
    "MemoryLimit",
    "auto_tenths",
    "available_host_bytes",
    "copied_later_bytes",
    "memory_limits",
    "total_host_bytes",
]

AUTO_TENTHS = 8
"""Of what is free when a run starts, that ``dram_budget_bytes: auto`` takes."""

_UNLIMITED = 1 << 60  # version 1 writes a huge number for "no limit"
_MAPPED = {"": "file_mapped", "total_": "mapped_file"}  # each version's name for it
_BLOCK_BYTES = 128  # of Python's heap, with what lies around it; a collection was seen to copy 66 for each


@dataclass(frozen=True)
class MemoryLimit:
    """Of host memory that some processes share.

    Attributes:
        holder: names the control group, the same for every process in it, whatever its container calls it. None: the
            machine.
        num_bytes: of all processes together.
        free_bytes: what they may still take.
    """

    holder: tuple[int, int] | None
    num_bytes: int
    free_bytes: int


def auto_tenths(*, is_unified: bool) -> int:
    """:data:`AUTO_TENTHS`, half of them where device and host share one memory."""
    return AUTO_TENTHS // 2 if is_unified else AUTO_TENTHS


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """All that hold for this process. ``root`` stands before /proc and /sys."""
    groups, machine = [*_groups(root)], _machine(root)
    if any(group.num_bytes == machine.num_bytes for group in groups):  # a container's /proc shows its group (LXCFS)
        return groups
    return [*groups, machine]


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be had without swapping."""
    return max(0, min(limit.free_bytes for limit in memory_limits(root)))


def total_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process could have if nobody else had any."""
    return min(limit.num_bytes for limit in memory_limits(root))


def copied_later_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process shares with another one and will copy when it writes to them: at most what Python's heap
    has. Tensors are written to by whoever means to. 0 in a process that was not forked.
    """
    shared = of_mapping = 0
    try:
        lines = (root / "proc/self/smaps").read_bytes().splitlines()
    except OSError:  # not every system has it
        return 0
    for line in lines:
        name, _, value = line.partition(b":")
        if name == b"Size":  # the first one of a mapping
            of_mapping = 0
        elif name in (b"Shared_Clean", b"Shared_Dirty"):
            of_mapping += int(value.split()[0])
        elif name == b"Anonymous":
            shared += min(of_mapping, int(value.split()[0]))
    return min(1024 * shared, _BLOCK_BYTES * sys.getallocatedblocks())


def _machine(root: Path) -> MemoryLimit:
    """What is free on nodes without a CPU is no host memory: a GPU's own (GH200), mostly."""
    total, available = _fields(root / "proc/meminfo", "MemTotal", "MemAvailable")
    nodes = root / "sys/devices/system/node"
    with contextlib.suppress(OSError, ValueError):
        of_others = _numbers(nodes / "has_memory") - _numbers(nodes / "has_cpu")
        available -= sum(_fields(nodes / f"node{node}/meminfo", "MemFree")[0] for node in of_others)
    return MemoryLimit(None, total, max(0, available))


def _fields(file: Path, *names: str) -> list[int]:
    """Bytes, of lines such as "MemFree: 12 kB" or "Node 1 MemFree: 12 kB"."""
    lines = (line.split(":", 1) for line in file.read_text(encoding="ascii").splitlines())
    found = {name.split()[-1]: value for name, value in lines}
    return [int(found[name].split()[0]) * 1024 for name in names]


def _numbers(file: Path) -> set[int]:
    """Of a list such as "0-1,8"."""
    ranges = (part.partition("-") for part in file.read_text(encoding="ascii").strip().split(",") if part)
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def _groups(root: Path) -> Iterator[MemoryLimit]:
    """Of every control group that this process is in."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            mount, usage_file, of_all = "sys/fs/cgroup", "memory.current", ""
            limits = ["memory.max", "memory.high"]  # above the second one it becomes slow
        elif "memory" in controllers.split(","):
            mount, usage_file, of_all = "sys/fs/cgroup/memory", "memory.usage_in_bytes", "total_"
            limits = ["memory.limit_in_bytes"]
        else:
            continue
        group = PurePosixPath(name)
        for parent in (group, *group.parents):
            found = _limited(root / mount / str(parent).lstrip("/"), limits, usage_file, of_all)
            if found is not None:
                yield found


def _limited(folder: Path, limits: Sequence[str], usage_file: str, of_all: str) -> MemoryLimit | None:
    """The least of some limits; None where the group sets none or is not visible (inside a container, say).
    ``of_all``: before the names of numbers that count groups inside of it, too.
    """
    try:
        texts = [(folder / name).read_text(encoding="ascii").strip() for name in limits if (folder / name).exists()]
        used = int((folder / usage_file).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        named = folder.stat()
    except OSError:
        return None
    limit = min((int(text) for text in texts if text != "max"), default=_UNLIMITED)
    if limit >= _UNLIMITED:
        return None
    numbers = {name: int(value) for name, value in (line.split() for line in stat)}
    names = ("inactive_file", "active_file", _MAPPED[of_all])
    inactive, active, mapped = (numbers.get(of_all + name, 0) for name in names)
    free = limit - used + inactive + max(0, active - mapped)  # file pages are taken back
    return MemoryLimit((named.st_dev, named.st_ino), limit, free)
