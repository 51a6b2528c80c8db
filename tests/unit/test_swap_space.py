# SPDX-License-Identifier: Apache-2.0
"""Leases of the anonymous files: over all paths in turn, returned by themselves, refused with numbers."""

from __future__ import annotations

import errno
import fcntl
import os
from collections import Counter
from pathlib import Path

import pytest

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage import swap_space
from ds_fuyou.storage.anonymous import open_anonymous
from ds_fuyou.storage.probe import probe_path
from ds_fuyou.storage.swap_space import GROWTH_BYTES, Lease, SwapSpace

MIB = 1024 * 1024


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("a", "b", "c")]
    for path in found:
        path.mkdir()
    return found


def by_path(leases: list[Lease]) -> Counter[int]:
    found: Counter[int] = Counter()
    for lease in leases:
        found[lease.path] += lease.extent.num_bytes
    return found


def test_pieces_of_one_tensor_lie_on_all_paths_from_the_first_on(paths: list[Path]) -> None:
    space = SwapSpace(paths)
    leases = space.leases(48 * MIB - 100, 8 * MIB)
    assert [lease.path for lease in leases] == [0, 1, 2, 0, 1, 2]
    assert [lease.extent.num_bytes for lease in leases] == [8 * MIB] * 6, "the last is rounded up to pages"
    assert len({(lease.extent.fd, lease.extent.offset) for lease in leases}) == 6
    again = space.leases(24 * MIB, 8 * MIB)
    assert by_path(again) == {0: 8 * MIB, 1: 8 * MIB, 2: 8 * MIB}
    assert space.num_bytes == 3 * GROWTH_BYTES
    space.close()


def test_small_leases_between_large_ones_keep_paths_alike_in_bytes(paths: list[Path]) -> None:
    space = SwapSpace(paths[:2])
    leases = [space.lease(8 * MIB if number % 2 else 4096) for number in range(40)]
    found = by_path(leases)
    assert abs(found[0] - found[1]) <= 8 * MIB
    space.close()


def test_paths_get_bytes_by_their_weight(paths: list[Path]) -> None:
    space = SwapSpace(paths, weights=[3.0, 1.0, 2.0])
    found = by_path(space.leases(120 * MIB, MIB))
    assert found == {0: 60 * MIB, 1: 20 * MIB, 2: 40 * MIB}
    assert space.size_for(120 * MIB) == space.num_bytes
    space.close()


def test_what_returned_is_used_again(paths: list[Path]) -> None:
    space = SwapSpace(paths[:2])
    for _ in range(20):
        leases = space.leases(64 * MIB, 8 * MIB)
        assert space.leased_bytes == 64 * MIB
        del leases
    assert space.leased_bytes == 0
    assert space.num_bytes == 2 * GROWTH_BYTES
    space.close()


def test_a_full_path_leaves_its_turn_to_the_others(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    space = SwapSpace(paths[:2])
    real, is_full = swap_space.preallocate, [True]

    def refuse(fd: int, num_bytes: int, offset: int) -> None:
        if is_full[0] and fd == space._fds[0]:
            raise OSError(errno.ENOSPC, "no space left on device")
        real(fd, num_bytes, offset)

    monkeypatch.setattr(swap_space, "preallocate", refuse)
    assert by_path(space.leases(128 * MIB, 8 * MIB)) == {1: 128 * MIB}
    is_full[0] = False
    found = by_path(space.leases(64 * MIB, 8 * MIB))
    assert found == {0: 32 * MIB, 1: 32 * MIB}, "it does not get all that comes after"
    space.close()


def test_what_is_refused_leaves_nothing_leased(paths: list[Path]) -> None:
    space = SwapSpace(paths[:2], budget=lambda: 32 * MIB, what="frozen parameters")
    with pytest.raises(FuyouStorageError, match="frozen parameters: storage needs 8388608 more bytes") as caught:
        space.leases(64 * MIB, 8 * MIB)
    assert caught.value.errno == errno.ENOSPC
    assert "recompute" not in str(caught.value)
    del caught
    assert space.leased_bytes == 0
    space.close()


def test_files_end_with_their_space_whatever_forked_children_have_open(paths: list[Path]) -> None:
    """A data loader's workers live long. What a child closes is its parent's."""
    space = SwapSpace(paths)
    lease = space.lease(MIB)
    kept = os.dup(lease.extent.fd)
    child = os.fork()
    if child == 0:
        space.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.fstat(kept).st_size >= MIB
    space.close()
    assert os.fstat(kept).st_size == 0
    os.close(kept)


@pytest.mark.parametrize("works", [True, False])
def test_nameless_files_are_direct_where_a_transfer_is(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disks with blocks of 16 KiB accept the flag, and refuse transfers of 4 KiB."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    facts = probe_path(tmp_path)
    if not works:
        monkeypatch.setattr(os, "preadv", refuse)
    fd = open_anonymous(tmp_path, "swap")
    try:
        assert bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT) == (works and facts.supports_direct)
        assert os.fstat(fd).st_size == 0
    finally:
        os.close(fd)
