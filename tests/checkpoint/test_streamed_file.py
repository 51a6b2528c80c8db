# SPDX-License-Identifier: Apache-2.0
"""A streamed file holds what torch.save would have written, without the tensors in memory."""

from __future__ import annotations

import errno
import io
import mmap
import os
import threading
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from ds_fuyou.checkpoint import streamed_file
from ds_fuyou.checkpoint.streamed_file import StandIns, lay_out, save
from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.storage.types import PAGE_BYTES


def load(path: Path):
    return torch.load(path, weights_only=False, mmap=True, map_location="cpu")


class Holder:
    """What a script may put into client_state."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


def flats() -> tuple[StandIns, list[torch.Tensor], list[torch.Tensor]]:
    """Two stand-ins that one pass fills in turns, and their values."""
    wanted = [torch.randn(1000), torch.randn(1000).to(torch.bfloat16)]
    stand_ins = StandIns()

    def pieces():
        for begin in range(0, 1000, 300):
            for which, values in enumerate(wanted):
                yield which, begin, values[begin : begin + 300]

    return stand_ins, wanted, stand_ins.add_together([((10, 100), torch.float32), ((1000,), torch.bfloat16)], pieces)


def test_equals_torch_save(tmp_path: Path) -> None:
    stand_ins, wanted, (first, second) = flats()
    shared = torch.arange(12.0)
    tree = {
        "a": first,
        "list": [shared[2:5], {"deep": (second, shared)}],
        "empty": torch.empty(0),
        "flags": torch.tensor([True, False]),
        "ordered": OrderedDict(x=torch.randn(3, 4).t()),
        "other": {"step": 3, "name": "x"},
    }
    save(tree, tmp_path / "file.pt", stand_ins)
    loaded = load(tmp_path / "file.pt")
    assert torch.equal(loaded["a"], wanted[0].view(10, 100))
    assert torch.equal(loaded["list"][1]["deep"][0], wanted[1])
    assert torch.equal(loaded["list"][0], shared[2:5])
    assert loaded["list"][0].untyped_storage().data_ptr() == loaded["list"][1]["deep"][1].untyped_storage().data_ptr()
    assert torch.equal(loaded["ordered"]["x"], tree["ordered"]["x"])
    assert torch.equal(loaded["flags"], tree["flags"])
    assert loaded["empty"].numel() == 0
    assert loaded["other"] == tree["other"]
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None, "a checksum is wrong"


def test_tensors_hidden_in_objects_are_saved_too(tmp_path: Path) -> None:
    """Also where the same tensor is seen again, and in another order, outside of the object."""
    stand_ins, wanted, (first, second) = flats()
    x, y = torch.full((5,), 7.0), torch.full((5,), 8.0)
    tree = {"client": Holder(x), "a": first, "y": y, "x": x, "b": second, "other": Holder(torch.full((5,), 9.0))}
    save(tree, tmp_path / "file.pt", stand_ins)
    loaded = load(tmp_path / "file.pt")
    assert torch.equal(loaded["a"], wanted[0].view(10, 100))
    assert torch.equal(loaded["b"], wanted[1])
    for values, name in ((loaded["x"], "x"), (loaded["client"].values, "x"), (loaded["y"], "y")):
        assert torch.equal(values, tree[name]), name
    assert torch.equal(loaded["other"].values, torch.full((5,), 9.0))


def test_what_cannot_be_laid_out_is_saved_from_memory(tmp_path: Path) -> None:
    stand_ins, wanted, (first, second) = flats()
    sparse = torch.eye(4).to_sparse()
    with torch.device("meta"):  # a script's default device is not that of stand-ins
        third = stand_ins.add((3,), torch.float32, lambda: iter([(0, torch.ones(3, device="cpu"))]))
    save({"a": first, "b": second, "c": third, "sparse": sparse}, tmp_path / "file.pt", stand_ins)
    loaded = load(tmp_path / "file.pt")
    assert torch.equal(loaded["a"], wanted[0].view(10, 100))
    assert torch.equal(loaded["c"], torch.ones(3))
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(4))


@pytest.mark.parametrize("has_stand_ins", [True, False])
def test_a_full_disk_is_told_and_nothing_is_taken_into_memory(has_stand_ins: bool) -> None:
    stand_ins, asked = StandIns(), []
    tree = {"a": stand_ins.add((1000,), torch.float32, lambda: asked.append(1) or iter([(0, torch.ones(1000))]))}
    with pytest.raises(FuyouStorageError, match=r"No space left on device.*/dev/full") as told:
        save(tree if has_stand_ins else {"a": torch.ones(1000)}, Path("/dev/full"), stand_ins)
    assert told.value.errno == errno.ENOSPC
    assert not asked


def test_only_the_file_that_holds_a_stand_in_reads_its_source(tmp_path: Path) -> None:
    stand_ins = StandIns()
    asked: list[str] = []

    def pieces(name: str):
        asked.append(name)
        return iter([(0, torch.ones(4))])

    first = stand_ins.add((4,), torch.float32, lambda: pieces("first"))
    second = stand_ins.add((4,), torch.float32, lambda: pieces("second"))
    save({"x": first}, tmp_path / "one.pt", stand_ins)
    assert torch.equal(load(tmp_path / "one.pt")["x"], torch.ones(4))
    assert asked == ["first"]
    save({"x": torch.zeros(2)}, tmp_path / "none.pt", stand_ins)
    assert asked == ["first"]
    assert stand_ins.owns(second.untyped_storage())
    assert not stand_ins.owns(torch.zeros(2).untyped_storage())


@pytest.mark.parametrize(
    "given",
    [
        [(0, torch.ones(3))],  # too few
        [(0, torch.ones(5))],  # too many
        [(1, torch.ones(3))],  # a gap
        [(0, torch.ones(2)), (0, torch.ones(2))],  # twice
    ],
)
def test_a_source_that_gives_something_else_is_an_error(given: list, tmp_path: Path) -> None:
    stand_ins = StandIns()
    tensor = stand_ins.add((4,), torch.float32, lambda: iter(given))
    with pytest.raises(FuyouStateError):
        save({"x": tensor}, tmp_path / "file.pt", stand_ins)


@pytest.mark.parametrize(("offset", "num_tried"), [(64, 0), (0, 1)])
def test_laying_out_waits_for_no_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, num_tried: int
) -> None:
    """A try to pass the cache by first flushes what was just written: behind all that training writes. It is made for
    what begins at a page of memory alone, which would pass it by.
    """
    tried: list[int] = []

    def enable_direct(fd: int) -> str:
        tried.append(fd)
        return "refused"

    monkeypatch.setattr(streamed_file, "enable_direct", enable_direct)
    stand_ins = StandIns()

    def pieces():
        return iter([(0, 0, torch.ones(5000))])

    (later,) = stand_ins.add_together([((5000,), torch.float32)], pieces, later=True)
    there = torch.frombuffer(mmap.mmap(-1, 4 * PAGE_BYTES), dtype=torch.int64, offset=offset)
    there.copy_(torch.arange(len(there)))
    tree = {"later": later, "there": there, "small": torch.ones(3)}
    file = lay_out(tree, tmp_path / "file.pt", stand_ins)
    file.fill_now()
    assert len(tried) == num_tried
    file.fill_rest(lambda: None)
    assert len(tried) == num_tried + 1
    loaded = load(tmp_path / "file.pt")
    assert torch.equal(loaded["later"], torch.ones(5000))
    assert torch.equal(loaded["there"], tree["there"])


class FailingDisk(io.FileIO):
    def readinto(self, buffer: object) -> int:
        raise OSError(errno.EREMOTEIO, "the disk")


class FailingAtOnce(io.FileIO):
    """The end of a file is read in one call of another name."""

    def readall(self) -> bytes:
        raise OSError(errno.EREMOTEIO, "the disk")


class EmptyDisk(io.FileIO):
    def readinto(self, buffer: object) -> int:
        return 0


@pytest.mark.parametrize("disk", [FailingDisk, FailingAtOnce, EmptyDisk])
@pytest.mark.parametrize("which", ["_holes", "_write_checksums"])
def test_a_disk_that_fails_to_read_back_is_no_other_kind_of_file(
    which: str, disk: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zipfile says "not a zip file" whatever the disk says."""
    path, (stand_ins, _, stand_for) = tmp_path / "file.pt", flats()
    laid_out = lay_out(stand_for, path, stand_ins)
    monkeypatch.setattr(streamed_file, "_Sheet", type("Sheet", (streamed_file._Sheet, disk), {}))
    with pytest.raises(FuyouStorageError, match="reading a checkpoint back") as caught:
        getattr(streamed_file, which)(*[path, *([laid_out._holes.values()] if which == "_write_checksums" else [])])
    assert caught.value.errno == (errno.EIO if disk is EmptyDisk else errno.EREMOTEIO)
    assert caught.value.filename == str(path)
    monkeypatch.undo()
    laid_out.fill_now()
    laid_out.fill_rest(lambda: None)
    assert load(path)[0].numel() == 1000


def test_short_writes_of_a_checksum_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins, wanted, stand_for = flats()
    whole = os.pwrite
    monkeypatch.setattr(streamed_file.os, "pwrite", lambda fd, data, at: whole(fd, memoryview(data)[:1], at))
    save(stand_for, tmp_path / "file.pt", stand_ins)
    monkeypatch.undo()
    assert torch.equal(load(tmp_path / "file.pt")[1], wanted[1])
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None


@pytest.mark.timeout(30)
def test_a_disk_that_takes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins, _, stand_for = flats()
    monkeypatch.setattr(streamed_file.os, "pwrite", lambda *_: 0)
    with pytest.raises(FuyouStorageError, match="writing a checkpoint failed") as caught:
        save(stand_for, tmp_path / "file.pt", stand_ins)
    assert caught.value.errno == errno.EIO


def test_a_thread_that_is_refused_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stand_ins, _, tensors = flats()
    monkeypatch.setattr(threading.Thread, "start", refused)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FuyouStateError, match="refuses another thread"):
        save(tensors, tmp_path / "file.pt", stand_ins)
    assert os.listdir("/proc/self/fd") == before
