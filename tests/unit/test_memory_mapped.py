# SPDX-License-Identifier: Apache-2.0
"""Tensors in a mapped file: the values that were given, in memory that the system can take back."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.memory_mapped import MappedTensors

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.complex64)


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) * 1024


def test_values_are_those_that_were_given_and_outlive_the_room(tmp_path: Path) -> None:
    given = [(torch.randn(3, number + 1) * 9).to(dtype) for number, dtype in enumerate(DTYPES)]
    given += [torch.tensor(7), torch.arange(12).view(3, 4).T, torch.empty(0, 3)]
    gc.collect()
    before = num_fds()
    room = MappedTensors(tmp_path, MappedTensors.size_of(sum(each.nbytes for each in given), len(given)))
    kept = [room.keep(each) for each in given]
    room.close()
    room.close()
    for ours, theirs in zip(kept, given, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    kept[0].zero_()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(kept[1:], given[1:], strict=True))
    assert len({each.untyped_storage().data_ptr() for each in kept}) == len(kept)
    assert not list(tmp_path.iterdir())
    del kept, ours, room
    gc.collect()
    assert num_fds() == before


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_of_what_is_no_plain_tensor_nothing_is_taken(tmp_path: Path) -> None:
    class Named(torch.Tensor):
        pass

    room = MappedTensors(tmp_path, 1 << 20)
    others = [torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.qint8), torch.randn(4).as_subclass(Named)]
    others += [torch.randn(4, 4).to_sparse(), torch.empty(4, device="meta")]
    assert all(room.keep(other) is other for other in others)
    for lazy in (torch.randn(4, dtype=torch.complex64).conj(), torch.randn(4, dtype=torch.complex64).conj().imag):
        kept = room.keep(lazy)
        assert kept is not lazy
        assert torch.equal(kept, lazy)
    room.close()


def test_they_take_no_memory_that_the_system_could_not_take_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_fuyou.storage.memory_mapped._SYNC_BYTES", 8 << 20)
    values = torch.arange(16 << 20, dtype=torch.int32)
    room = MappedTensors(tmp_path, MappedTensors.size_of(2 * values.nbytes, 2))
    before = anonymous_bytes()
    kept = [room.keep(values) for _ in range(2)]
    room.close()
    assert all(torch.equal(each, values) for each in kept)
    assert anonymous_bytes() - before < values.nbytes // 4


def test_more_than_was_foretold_stays_where_it_is(tmp_path: Path) -> None:
    room = MappedTensors(tmp_path, 4096)
    kept = room.keep(torch.arange(500))
    more = torch.arange(500)
    assert room.keep(more) is more
    assert torch.equal(room.keep(torch.arange(3)), torch.arange(3))
    room.close()
    assert torch.equal(kept, torch.arange(500))


def test_a_directory_that_is_missing_and_a_disk_that_is_full_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = num_fds()
    with pytest.raises(FuyouStorageError, match="must exist and be writable"):
        MappedTensors(tmp_path / "missing", 4096)
    with pytest.raises(OSError, match=r"No space left|too large"):
        MappedTensors(tmp_path, 1 << 60)
    assert num_fds() == before

    def fails(fd: int) -> None:
        raise OSError(5, "the disk failed")

    room = MappedTensors(tmp_path, 4096)
    room.keep(torch.arange(4))
    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(OSError, match="the disk failed"):
        room.close()
    del room
    assert num_fds() == before
