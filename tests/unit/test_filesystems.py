# SPDX-License-Identifier: Apache-2.0
"""The slot store on other filesystems, in loop files: what docs/filesystems.md says. Those this machine can mount."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.profiling.lane_rates import probe_storage
from ds_fuyou.storage.data_file import preallocate
from ds_fuyou.storage.directory import StateRoot
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.store import RegionSpec, RunIdentity, SlotStore
from ds_fuyou.storage.swap_space import GROWTH_BYTES, SwapSpace
from ds_fuyou.storage.types import PAGE_BYTES

LOOP_BYTES = 512 << 20
DIRECT = {"ext2", "ext4", "xfs", "btrfs", "overlay"}
"""Where files are reached by O_DIRECT."""

MAKE = {
    "ext2": ["mkfs.ext2", "-q"],
    "ext4": ["mkfs.ext4", "-q"],
    "xfs": ["mkfs.xfs", "-q"],
    "btrfs": ["mkfs.btrfs", "-q"],
}


def can_mount() -> bool:
    """Root, with loop devices and the right to mount."""
    return os.geteuid() == 0 and os.path.exists("/dev/loop-control") and shutil.which("mount") is not None


def available() -> list[str]:
    """tmpfs is on every Linux; the others need tools and rights."""
    made = [name for name, command in MAKE.items() if shutil.which(command[0])]
    return ["tmpfs", *(["overlay", *made] if can_mount() else [])]


def mount(kind: str, root: Path) -> Path:
    """Mounts an empty filesystem of a kind below ``root``."""
    target = root / "mounted"
    target.mkdir(parents=True)
    if kind == "overlay":
        layers = {name: root / name for name in ("lower", "upper", "work")}
        for layer in layers.values():
            layer.mkdir()
        options = ",".join(f"{name}dir={path}" for name, path in layers.items())
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, target], check=True)
    else:
        image = root / "image"
        with image.open("wb") as file:
            file.truncate(LOOP_BYTES)
        subprocess.run([*MAKE[kind], image], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["mount", "-o", "loop", image, target], check=True)
    return target


@pytest.fixture(params=available())
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    if request.param == "tmpfs":
        target = Path("/dev/shm") / f"slots-test-{os.getpid()}"  # not like what a run must not leave there
        target.mkdir()
        yield "tmpfs", target
        shutil.rmtree(target)
        return
    target = mount(request.param, tmp_path / "fs")
    yield request.param, target
    subprocess.run(["umount", target], check=True)


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_store_is_written_committed_and_read_again(place: tuple[str, Path], engine: str) -> None:
    kind, target = place
    identity = RunIdentity("test", 0, 1, f"run-{engine}")
    regions = [RegionSpec("state", 1 << 20, 2)]
    store = SlotStore.create([target], regions, identity, budget_bytes=None, keep=True)
    lane = IoLane(IoSettings(engine=engine), store.paths_of_fd)
    values = aligned_tensor(1 << 20)
    values.copy_(torch.arange(1 << 20).to(torch.uint8))
    lane.write(store.extents("state", 1), values, "writing").wait()
    store.commit(1, {"state": 1}, {})
    lane.close()
    directories = store.directories
    assert store.direct is (kind in DIRECT), "what docs/filesystems.md says"
    store.close()
    again = SlotStore.open(directories, identity)
    lane = IoLane(IoSettings(engine=engine), again.paths_of_fd)
    found = aligned_tensor(1 << 20)
    commit = again.last_commit()
    assert commit is not None
    lane.read(again.extents("state", commit.slots["state"]), found, "reading").wait()
    lane.close()
    again.close(remove=True)
    assert torch.equal(found, values)
    assert [path for path in target.glob("**/*") if path.is_file()] == []


def test_activations_are_swapped_and_storage_is_measured(place: tuple[str, Path]) -> None:
    """Where blocks cannot be allocated without writing, too."""
    _, target = place
    num_bytes = 1 << 20
    budget = num_bytes + 8192 + 100  # no whole pages
    space = SwapSpace([target], budget=lambda: budget)
    lane = IoLane(IoSettings(), space.path_of)
    values, found = aligned_tensor(num_bytes), aligned_tensor(num_bytes)
    values.copy_(torch.arange(num_bytes).to(torch.uint8))
    leases = [space.lease(num_bytes), space.lease(8192)]
    lane.write([leases[0].extent], values, "writing").wait()
    lane.read([leases[0].extent], found, "reading").wait()
    assert torch.equal(found, values)
    assert space.num_bytes == num_bytes + 8192
    assert probe_storage(lane, [target], num_bytes, num_bytes // 4).read > 0
    lane.close()
    space.close()
    assert list(target.glob("ds_fuyou*")) == []


@pytest.mark.skipif(len(available()) < 2, reason="needs a file system of its own")
@pytest.mark.parametrize("kind", [name for name in available() if name in MAKE])
def test_what_a_file_did_not_get_stays_free(kind: str, tmp_path: Path) -> None:
    """Files for activations and parked values grow in large steps, or in small ones where the disk is too full."""
    target = mount(kind, tmp_path / "fs")

    def num_free() -> int:
        facts = os.statvfs(target)
        return facts.f_bfree * facts.f_frsize  # root may have all of it

    try:
        with (target / "others").open("wb") as file:
            preallocate(file.fileno(), num_free() - (40 << 20))
        before = num_free()
        assert before < GROWTH_BYTES
        space = SwapSpace([target])
        space.lease(PAGE_BYTES)
        assert before - num_free() < 1 << 20
        with pytest.raises(FuyouStorageError, match="storage needs"):
            space.lease(GROWTH_BYTES)
        assert before - num_free() < 1 << 20
        (target / "of somebody else").mkdir()
        space.close()
    finally:
        subprocess.run(["umount", target], check=True)


@pytest.mark.skipif(not can_mount(), reason="needs root and the right to mount")
@pytest.mark.parametrize("kind", ["tmpfs", *(name for name in ("ext4", "xfs") if name in available())])
def test_a_disk_that_others_have_filled_does_not_stop_commits(kind: str, tmp_path: Path) -> None:
    """Btrfs never writes in place, so there nothing can be promised."""
    if kind == "tmpfs":
        target = tmp_path / "mounted"
        target.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", target], check=True)
    else:
        target = mount(kind, tmp_path / "fs")
    try:
        store = SlotStore.create([target], [RegionSpec("state", 1 << 20, 2)], RunIdentity("test", 0, 1, "run"))
        said = {"state": "x" * 9000}
        store.commit(1, {"state": 0}, said)
        fill(target)
        for step in range(2, 40):
            store.commit(step, {"state": step % 2}, {**said, "step": step})
        store.withdraw()
        store.commit(40, {"state": 0}, said)
        store.close(remove=False)
        again = SlotStore.open(store.directories, None)
        assert [commit.step for commit in again.commits()] == [40]
        again.close(remove=True)
    finally:
        subprocess.run(["umount", target], check=True)


@pytest.mark.skipif(not can_mount(), reason="needs root and the right to mount")
def test_a_disk_without_room_for_a_directory_is_told_as_that(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs", tmp_path], check=True)
    try:
        with pytest.raises(FuyouStorageError, match="the disk has no room for a directory; free space") as caught:
            StateRoot.open(tmp_path, create=True)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert caught.value.errno == errno.ENOSPC


def append(path: Path, num_bytes: int) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * num_bytes)
            os.fsync(file.fileno())


def fill(path: Path) -> None:
    """Until not one more block can be had."""
    for number, size in enumerate((1 << 20, 4096, 1)):
        with pytest.raises(OSError, match="No space"):
            append(path / f"others{number}", size)
    with pytest.raises(OSError, match="No space"):  # not for a file of its own, either
        (path / "more").write_bytes(b"x" * 8192)
