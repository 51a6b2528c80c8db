# SPDX-License-Identifier: Apache-2.0
"""Parameters that no optimizer updates lie in pieces over all paths, and their room returns with them."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

from ds_fuyou.storage.parked import PIECE_BYTES, ParkedSpace


def paths_in(folder: Path, number: int) -> tuple[str, ...]:
    for index in range(number):
        (folder / str(index)).mkdir()
    return tuple(str(folder / str(index)) for index in range(number))


def test_large_values_lie_on_all_paths(tmp_path: Path) -> None:
    space = ParkedSpace.at(paths_in(tmp_path, 3), "auto", None)
    values = torch.arange(3 * PIECE_BYTES // 8 + 1)
    parked = space.park("a parameter", values)
    extents = parked.location().runs[0].extents
    assert len({extent.fd for extent in extents}) == 3
    assert max(extent.num_bytes for extent in extents) == PIECE_BYTES
    assert torch.equal(parked.location().read(parked.io), values)
    parked.write(values + 1)
    assert torch.equal(parked.location().read(parked.io), values + 1)
    space.rest()
    assert torch.equal(parked.location().read(parked.io), values + 1), "the engine is started again"


def test_one_space_serves_all_who_name_the_same_paths_and_goes_with_the_last_value(tmp_path: Path) -> None:
    paths = paths_in(tmp_path, 2)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    first = ParkedSpace.at(paths, "auto", None).park("one", torch.zeros(10))
    second = ParkedSpace.at(paths, "auto", None).park("two", torch.ones(10))
    assert first.space is second.space
    assert first.space.space.leased_bytes == 2 * 4096
    space = first.space.space
    del first
    gc.collect()
    assert space.leased_bytes == 4096
    assert torch.equal(second.location().read(second.io), torch.ones(10))
    del second, space
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
