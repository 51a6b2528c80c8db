# SPDX-License-Identifier: Apache-2.0
"""Which disks are found: by a /proc and /sys of the test's own, and on the machine that runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_fuyou.planner.presets import rated_writes
from ds_fuyou.storage.disks import DiskKind, disk_kind, find_disks, mount_points
from ds_fuyou.telemetry.wear import GUESSED_WRITES, Rating, rating_of


def block_device(root: Path, number: str, place: str, *, rotates: str = "", slaves: tuple[str, ...] = ()) -> None:
    """``/sys/dev/block/NUMBER`` of a device, as the kernel lays it out."""
    folder = root / "sys/devices" / place
    folder.mkdir(parents=True)
    (folder / "dev").write_text(f"{number}\n")
    if rotates:
        (folder / "queue").mkdir()
        (folder / "queue/rotational").write_text(f"{rotates}\n")
    for slave in slaves:
        (folder / "slaves" / slave).mkdir(parents=True)
        (folder / "slaves" / slave / "dev").write_text((root / "sys/devices" / slave / "dev").read_text())
    (root / "sys/dev/block").mkdir(parents=True, exist_ok=True)
    (root / "sys/dev/block" / number).symlink_to(folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    block_device(tmp_path, "259:0", "nvme0n1", rotates="0")
    block_device(tmp_path, "259:1", "nvme0n1/nvme0n1p1")
    block_device(tmp_path, "8:0", "sda", rotates="1")
    block_device(tmp_path, "8:1", "sda/sda1")
    block_device(tmp_path, "8:16", "sdb", rotates="0")
    block_device(tmp_path, "254:0", "vda", rotates="1")
    block_device(tmp_path, "253:0", "dm-0", rotates="0", slaves=("nvme0n1",))
    block_device(tmp_path, "9:0", "md0", rotates="0", slaves=("nvme0n1", "sda"))
    return tmp_path


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("259:0", DiskKind.NVME),
        ("259:1", DiskKind.NVME),
        ("8:0", DiskKind.ROTATING),
        ("8:1", DiskKind.ROTATING),
        ("8:16", DiskKind.SSD),
        ("254:0", DiskKind.SSD),
        ("253:0", DiskKind.NVME),
        ("9:0", DiskKind.ROTATING),
        ("0:44", DiskKind.SSD),
    ],
)
def test_kinds(device: str, kind: DiskKind, root: Path) -> None:
    assert disk_kind(device, root) is kind


def test_ratings_are_those_of_the_drives_behind_a_path(root: Path) -> None:
    for name, model, sectors in (("nvme0n1", "Samsung SSD 990 PRO 4TB", 8e9), ("sdb", "NONAME", 1e9)):
        folder = root / "sys/devices" / name
        (folder / "device").mkdir()
        (folder / "device/model").write_text(f"{model}   \n")
        (folder / "size").write_text(f"{sectors:.0f}\n")
    known = Rating(("Samsung SSD 990 PRO 4TB",), pytest.approx(1200e12 * 4.096e12 / 2e12), is_known=True)  # type: ignore[arg-type]
    for device in ("259:0", "259:1", "253:0", "9:0"):  # the array's other part rotates
        assert rating_of(device, rated_writes, root) == known
    guessed = rating_of("8:16", rated_writes, root)
    assert guessed == Rating(("NONAME",), 512e9 * GUESSED_WRITES, is_known=False)
    for device in ("8:1", "254:0", "0:44"):
        assert rating_of(device, rated_writes, root) is None


def test_mount_points_are_directories_on_devices(tmp_path: Path) -> None:
    for name in ("nv me", "read", "boot", "net"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    rows = [
        (str(tmp_path / "nv\\040me"), "rw,noatime", "ext4 /dev/nvme0n1p1"),
        (str(tmp_path / "read"), "ro", "ext4 /dev/sda1"),
        (str(tmp_path / "net"), "rw", "nfs4 server:/home"),
        (str(tmp_path / "file"), "rw", "ext4 /dev/sda1"),
        ("/boot", "rw", "ext4 /dev/sda1"),
    ]
    (tmp_path / "proc/self").mkdir(parents=True)
    text = "".join(f"27 1 254:0 / {mount} {options} shared:1 - {rest} rw\n" for mount, options, rest in rows)
    (tmp_path / "proc/self/mountinfo").write_text(text)
    assert list(mount_points(tmp_path)) == [tmp_path / "nv me"]
    assert list(mount_points(tmp_path / "none")) == []


def test_a_directory_counts_once_a_device_and_memory_never(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    found = find_disks(tmp_path, [tmp_path / "more", tmp_path, Path("/dev/shm"), tmp_path / "none"])
    assert [disk.directory for disk in found] == [tmp_path / "more"]
    assert found[0].facts.free_bytes > 0


def test_on_this_machine_every_disk_can_be_written() -> None:
    for disk in find_disks():
        probe = disk.directory / ".ds_fuyou-test"
        probe.touch()
        probe.unlink()
