# SPDX-License-Identifier: Apache-2.0
"""What the tests of the slot store share: paths, identities, page-aligned reads and writes, fake disks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

from ds_fuyou.storage.probe import PathFacts, Probe
from ds_fuyou.storage.store import RunIdentity, SlotStore

PAGE = 4096
UNIT = 4 * 1024 * 1024


def identity(run_id: str = "run", rank: int = 0, world_size: int = 1, model: str = "model") -> RunIdentity:
    return RunIdentity(model, rank, world_size, run_id)


def write_slot(store: SlotStore, region: str, slot: int, value: int) -> None:
    """Fills a slot with one byte value, page-aligned as O_DIRECT needs it."""
    for extent in store.extents(region, slot):
        with mmap.mmap(-1, extent.num_bytes) as page:
            page.write(bytes([value]) * extent.num_bytes)
            if os.pwrite(extent.fd, page, extent.offset) != extent.num_bytes:
                raise OSError("short write in a test")


def read_slot(store: SlotStore, region: str, slot: int) -> bytes:
    found = []
    for extent in store.extents(region, slot):
        with mmap.mmap(-1, extent.num_bytes) as page:
            if os.preadv(extent.fd, [page], extent.offset) != extent.num_bytes:
                raise OSError("short read in a test")
            found.append(bytes(page))
    return b"".join(found)


def fake_disks(free_bytes: Mapping[Path, int], device: str | None = None, **facts: object) -> Probe:
    """A probe that tells of these free bytes; each path is a device of its own unless one is named."""

    def probe(path: Path) -> PathFacts:
        values: dict[str, object] = {
            "filesystem": "ext4",
            "is_tmpfs": False,
            "supports_direct": True,
            **facts,
        }
        return PathFacts(free_bytes=free_bytes[path], device=device or str(path), **values)  # type: ignore[arg-type]

    return probe


def all_files(path: Path) -> list[str]:
    """Everything below a path, as relative names."""
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))
