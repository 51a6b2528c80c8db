# SPDX-License-Identifier: Apache-2.0
"""Free host memory under control groups of both versions, in trees made for the test."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_fuyou.errors import FuyouMemoryError
from ds_fuyou.host import memory
from ds_fuyou.host.available_memory import (
    MemoryLimit,
    available_host_bytes,
    copied_later_bytes,
    memory_limits,
    total_host_bytes,
)
from ds_fuyou.host.memory import PAGE_BYTES, HostPool, aligned_tensor, bring_in_pages, resident_bytes

MIB, GIB = 1 << 20, 1 << 30


def tree(root: Path, available: int, cgroup: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {2 * available // 1024} kB\nMemAvailable:   {available // 1024} kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)


def group(folder: Path, names: Names, limit: str, used: int, cache: int, active: int = 0, mapped: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    numbers = zip(names[2:], (cache, active, mapped), strict=True)
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in [("anon", 5), *numbers]))


Names = tuple[str, str, str, str, str]
V2 = ("memory.max", "memory.current", "inactive_file", "active_file", "file_mapped")
V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    "total_active_file",
    "total_mapped_file",
)


def test_without_groups_the_kernels_estimate_holds(tmp_path: Path) -> None:
    tree(tmp_path, 8 * GIB, "0::/user.slice\n")
    assert available_host_bytes(tmp_path) == 8 * GIB
    assert total_host_bytes(tmp_path) == 16 * GIB


def test_the_tightest_parent_holds_and_its_cache_counts_as_free(tmp_path: Path) -> None:
    tree(tmp_path, 8 * GIB, "0::/job/task\n")
    group(tmp_path / "sys/fs/cgroup/job/task", V2, "max", GIB, 0)
    group(tmp_path / "sys/fs/cgroup/job", V2, str(6 * GIB), 5 * GIB, 2 * GIB)
    assert available_host_bytes(tmp_path) == 3 * GIB
    assert total_host_bytes(tmp_path) == 6 * GIB


@pytest.mark.parametrize(("most", "high", "left"), [("max", 6, 3), (8, 6, 3), (6, 8, 3), (6, "max", 3)])
def test_above_the_bound_that_slows_nothing_is_free(
    most: int | str, high: int | str, left: int, tmp_path: Path
) -> None:
    """``memory.high``: who goes above it is not killed, and waits for memory to be taken back."""
    tree(tmp_path, 8 * GIB, "0::/job\n")
    limit, bound = (str(value * GIB) if isinstance(value, int) else value for value in (most, high))
    group(tmp_path / "sys/fs/cgroup/job", V2, limit, 5 * GIB, 2 * GIB)
    (tmp_path / "sys/fs/cgroup/job/memory.high").write_text(f"{bound}\n")
    assert available_host_bytes(tmp_path) == left * GIB


def test_limits_are_named_alike_wherever_they_are_seen(tmp_path: Path) -> None:
    """A container sees its own group as the root of all."""
    tree(tmp_path, 8 * GIB, "0::/job/task\n")
    root = tmp_path / "sys/fs/cgroup"
    group(root / "job", V2, str(6 * GIB), 0, 0)
    group(root / "job/task", V2, str(5 * GIB), GIB, 0)
    job, task = os.stat(root / "job"), os.stat(root / "job/task")
    own = MemoryLimit((task.st_dev, task.st_ino), 5 * GIB, 4 * GIB)
    machine = MemoryLimit(None, 16 * GIB, 8 * GIB)
    assert memory_limits(tmp_path) == [own, MemoryLimit((job.st_dev, job.st_ino), 6 * GIB, 6 * GIB), machine]
    inside = tmp_path / "inside"
    tree(inside, 8 * GIB, "0::/\n")
    (inside / "sys/fs").mkdir(parents=True)
    (inside / "sys/fs/cgroup").symlink_to(root / "job/task")
    assert memory_limits(inside) == [own, machine]
    (inside / "proc/meminfo").write_text(f"MemTotal: {5 * GIB // 1024} kB\nMemAvailable: {2 * GIB // 1024} kB\n")
    assert memory_limits(inside) == [own], "what /proc shows is the group's"


@pytest.mark.parametrize(("with_cpu", "left"), [("0-1", 5), ("0-1,8", 8), ("0", 2)])
def test_nodes_without_a_cpu_hold_no_host_memory(with_cpu: str, left: int, tmp_path: Path) -> None:
    """As the memory of a GPU that is a node of its own (GH200), which the kernel counts as free."""
    tree(tmp_path, 8 * GIB, "")
    for node in (0, 1, 8):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        text = f"Node {node} MemTotal: {9 * GIB // 1024} kB\nNode {node} MemFree: {3 * GIB // 1024} kB\n"
        (folder / "meminfo").write_text(text)
    (folder.parent / "has_memory").write_text("0-1,8\n")
    (folder.parent / "has_cpu").write_text(f"{with_cpu}\n")
    assert available_host_bytes(tmp_path) == left * GIB


@pytest.mark.parametrize(("limit", "left"), [(4 * GIB, 2 * GIB), ((1 << 63) - 4096, 8 * GIB)])
def test_version_one(limit: int, left: int, tmp_path: Path) -> None:
    tree(tmp_path, 8 * GIB, "5:cpu,cpuacct:/x\n4:memory:/job\n")
    group(tmp_path / "sys/fs/cgroup/memory/job", V1, str(limit), 3 * GIB, GIB)
    assert available_host_bytes(tmp_path) == left


@pytest.mark.parametrize(("root", "names"), [("sys/fs/cgroup", V2), ("sys/fs/cgroup/memory", V1)])
def test_cache_that_was_read_twice_is_free_too_but_what_is_mapped_of_it(
    root: str, names: Names, tmp_path: Path
) -> None:
    """A data set, or a checkpoint of the last run: with all of it in use nothing would be left to plan with."""
    tree(tmp_path, 60 * GIB, "0::/job\n" if names is V2 else "4:memory:/job\n")
    for active, mapped, left in ((40, 0, 44), (40, 3, 41), (0, 3, 4), (2, 3, 4)):
        group(tmp_path / root / "job", names, str(64 * GIB), 60 * GIB, 0, active * GIB, mapped * GIB)
        assert available_host_bytes(tmp_path) == left * GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    tree(tmp_path, 8 * GIB, "0::/\n")
    group(tmp_path / "sys/fs/cgroup", V2, str(GIB), 2 * GIB, 0)
    assert available_host_bytes(tmp_path) == 0


FORKED = """
import gc, os, sys
from ds_fuyou.host.available_memory import copied_later_bytes
heap, alone = [[number] for number in range(500_000)], copied_later_bytes()
values = bytearray(b"x" * int(sys.argv[1]))
if child := os.fork():
    os.waitpid(child, 0)
else:
    before = copied_later_bytes()
    gc.collect()
    print(alone, before, copied_later_bytes(), flush=True)
    os._exit(0)
"""


def test_what_a_forked_process_shares_it_will_copy() -> None:
    def said(num_bytes: int) -> tuple[int, ...]:
        command = [sys.executable, "-c", FORKED, str(num_bytes)]
        return tuple(map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()))

    lists = 500_000 * sys.getsizeof([0])
    alone, before, after = said(0)
    assert alone < MIB
    assert before > lists
    assert before - after > lists // 2  # the collection has copied these
    assert said(512 * MIB)[1] < 256 * MIB  # what is no object Python does not look into


def test_where_nothing_tells_what_is_shared_nothing_is(tmp_path: Path) -> None:
    assert copied_later_bytes(tmp_path) == 0


@pytest.mark.parametrize("make", [aligned_tensor, HostPool])
def test_memory_that_the_system_refuses_is_named_in_bytes(make: Callable[[int], object]) -> None:
    with pytest.raises(FuyouMemoryError, match=rf"{1 << 60} bytes of host memory .* fuyou.dram_budget_bytes"):
        make(1 << 60)


def test_this_machine() -> None:
    assert available_host_bytes() > 0


def test_a_kernel_without_huge_pages_gives_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: object, num_bytes: object, advice: int) -> int:
        return -1

    class Mapping(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(memory, "libc", lambda: SimpleNamespace(madvise=refuse))
    monkeypatch.setattr(memory.mmap, "mmap", Mapping)
    assert not aligned_tensor(16 * MIB).any()


def test_pages_are_brought_in_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, whatever the number of threads makes of the length, and what was written stays."""
    monkeypatch.setattr(memory, "_BROUGHT_IN_BYTES", 1 << 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    tensor = aligned_tensor(50 * MIB + PAGE_BYTES)
    tensor[: 1 << 20] = 7
    before = resident_bytes()
    bring_in_pages(tensor.data_ptr(), tensor.nbytes)
    assert resident_bytes() - before >= 46 * MIB  # a huge page or two were there
    assert tensor[: 1 << 20].eq(7).all()
    assert not tensor[1 << 20 :].any()


def test_pages_of_neighbours_stay_whatever_the_systems_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have 64 KiB, and the system rounds up what it is given."""
    values = aligned_tensor(32 * PAGE_BYTES)
    values.fill_(1)
    begin = -values.data_ptr() % (4 * PAGE_BYTES)  # of such a page
    monkeypatch.setattr(memory.mmap, "PAGESIZE", 4 * PAGE_BYTES)
    memory.give_back_pages(values[begin : begin + 4 * PAGE_BYTES])
    memory.give_back_pages(values[begin + 5 * PAGE_BYTES : begin + 14 * PAGE_BYTES])
    memory.give_back_pages(values[begin + 17 * PAGE_BYTES : begin + 18 * PAGE_BYTES])
    left = values[begin : begin + 20 * PAGE_BYTES].view(-1, PAGE_BYTES)[:, 0].bool().tolist()
    assert left == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 8
