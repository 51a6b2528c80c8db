# SPDX-License-Identifier: Apache-2.0
"""Free host memory under control groups of both versions, in trees made for the test; memory that is given away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_fuyou.errors import FuyouMemoryError
from ds_fuyou.host.memory import PAGE_BYTES, GivenMemory, HostPool, aligned_tensor, resident_bytes
from ds_fuyou.planner.host_memory import available_host_bytes, total_host_bytes

GIB = 1 << 30


def tree(root: Path, available: int, cgroup: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {2 * available // 1024} kB\nMemAvailable:   {available // 1024} kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)


def group(folder: Path, names: tuple[str, str, str], limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


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


@pytest.mark.parametrize(("limit", "left"), [(4 * GIB, 2 * GIB), ((1 << 63) - 4096, 8 * GIB)])
def test_version_one(limit: int, left: int, tmp_path: Path) -> None:
    tree(tmp_path, 8 * GIB, "5:cpu,cpuacct:/x\n4:memory:/job\n")
    group(tmp_path / "sys/fs/cgroup/memory/job", V1, str(limit), 3 * GIB, GIB)
    assert available_host_bytes(tmp_path) == left


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    tree(tmp_path, 8 * GIB, "0::/\n")
    group(tmp_path / "sys/fs/cgroup", V2, str(GIB), 2 * GIB, 0)
    assert available_host_bytes(tmp_path) == 0


@pytest.mark.parametrize("make", [aligned_tensor, HostPool, lambda num_bytes: GivenMemory(num_bytes).take(num_bytes)])
def test_memory_that_the_system_refuses_is_named_in_bytes(make: Callable[[int], object]) -> None:
    with pytest.raises(
        FuyouMemoryError, match=rf"{str(1 << 60)[:10]}\d+ bytes of host memory .* fuyou.dram_budget_bytes"
    ):
        make(1 << 60)


def test_memory_that_is_given_away_is_cut_from_few_mappings() -> None:
    sizes = [PAGE_BYTES, 3 * PAGE_BYTES, 40 << 20, 5 << 20, 5 << 20, 7 * PAGE_BYTES]
    given = GivenMemory(sum(sizes))
    tensors = [given.take(size) for size in [*sizes, 2 * PAGE_BYTES]]  # more than was said
    assert all(tensor.data_ptr() % PAGE_BYTES == 0 for tensor in tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.numel() for tensor in tensors), "storages of their own"
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all(torch.equal(tensor, torch.full_like(tensor, number)) for number, tensor in enumerate(tensors))
    assert _asked_for_huge_pages(tensors[3].data_ptr())


def _asked_for_huge_pages(address: int) -> bool:
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (first := line.split()[0]):
            begin, end = (int(each, 16) for each in first.split("-"))
            is_here = begin <= address < end
        elif first == "VmFlags:" and is_here:
            return "hg" in line.split()
    return False


def test_memory_that_was_given_away_goes_back_with_its_last_tensor() -> None:
    before = resident_bytes()
    given = GivenMemory(64 << 20)
    tensors = [given.take(8 << 20) for _ in range(8)]
    for tensor in tensors:
        tensor.fill_(1)
    assert resident_bytes() - before > 60 << 20
    del given, tensors[1:], tensor
    assert resident_bytes() - before < 40 << 20, "the other mapping is gone"
    tensors.clear()
    assert resident_bytes() - before < 8 << 20


def test_this_machine() -> None:
    assert available_host_bytes() > 0
