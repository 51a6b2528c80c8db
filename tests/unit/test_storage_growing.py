# SPDX-License-Identifier: Apache-2.0
"""A store that grows and shrinks while it is in use: what lies where, what is given back, and what a kill leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.storage import data_file, growing
from ds_fuyou.storage.layout import UNIT_BYTES
from ds_fuyou.storage.store import RegionSpec, RunIdentity, SlotStore

PAGE = 4096
IDENTITY = RunIdentity("model", 0, 1, "run")
FIRST = [RegionSpec("a", 3 * UNIT_BYTES, 2), RegionSpec("b", 5 * PAGE, 1)]
MORE = [RegionSpec("c", 2 * UNIT_BYTES + PAGE, 2), RegionSpec("d", 7 * PAGE, 1)]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "one", tmp_path / "two"]
    for path in found:
        path.mkdir()
    return found


@pytest.fixture
def store(paths: list[Path]) -> Iterator[SlotStore]:
    made = SlotStore.create(paths, FIRST, IDENTITY, direct=False)
    yield made
    made.close(remove=True)


def write(store: SlotStore, name: str, byte: int) -> None:
    for slot in range(store.regions[name].num_slots):
        for extent in store.extents(name, slot):
            with store.paths_of_fd(extent.fd).open("r+b") as file:  # the store's own may be open with O_DIRECT
                file.seek(extent.offset)
                file.write(bytes([byte + slot]) * extent.num_bytes)


def holds(store: SlotStore, name: str, byte: int) -> bool:
    for slot in range(store.regions[name].num_slots):
        for extent in store.extents(name, slot):
            with store.paths_of_fd(extent.fd).open("rb") as file:
                file.seek(extent.offset)
                if set(file.read(extent.num_bytes)) != {byte + slot}:
                    return False
    return True


def taken(store: SlotStore) -> int:
    """In units of 1 MiB: the file system keeps a few blocks for itself."""
    return sum((path / "data").stat().st_blocks * 512 for path in store.directories) + PAGE >> 20


def test_what_comes_touches_nothing_that_is_there_and_is_found_by_whoever_opens_it(store: SlotStore) -> None:
    write(store, "a", 1)
    write(store, "b", 11)
    before = store.total_bytes
    store.reserve(MORE)
    assert store.total_bytes == before + 2 * (2 * UNIT_BYTES + PAGE) + 7 * PAGE
    assert taken(store) == store.total_bytes >> 20
    write(store, "c", 21)
    write(store, "d", 31)
    for name, byte in (("a", 1), ("b", 11), ("c", 21), ("d", 31)):
        assert holds(store, name, byte), name
    store.commit(1, {"a": 0, "c": 1}, {})
    directories = store.directories
    store.close(remove=False)
    again = SlotStore.open(directories, IDENTITY)
    assert set(again.regions) == {"a", "b", "c", "d"}
    for name, byte in (("a", 1), ("b", 11), ("c", 21), ("d", 31)):
        assert holds(again, name, byte), name
    again.close(remove=True)


def test_what_goes_gives_its_blocks_back_and_its_place_to_the_next_of_its_size(store: SlotStore) -> None:
    store.reserve(MORE)
    for name, byte in (("a", 1), ("b", 11), ("d", 31)):
        write(store, name, byte)
    sizes = [(path / "data").stat().st_size for path in store.directories]
    store.release(["a", "c"])
    assert store.total_bytes == 12 * PAGE
    assert taken(store) == 0
    with pytest.raises(ValueError, match="none of the 2 regions"):
        store.extents("a", 0)
    store.reserve([RegionSpec("e", 3 * UNIT_BYTES, 2), RegionSpec("f", 2 * UNIT_BYTES + PAGE, 2)])
    assert [(path / "data").stat().st_size for path in store.directories] == sizes
    assert taken(store) == store.total_bytes >> 20
    write(store, "e", 41)
    for name, byte in (("b", 11), ("d", 31), ("e", 41)):
        assert holds(store, name, byte), name
    store.release(list(store.regions))
    assert (store.total_bytes, taken(store)) == (0, 0)


@pytest.mark.parametrize("broken", ["preallocate", "write_manifest"])
def test_what_finds_no_room_leaves_everything_as_it_was(
    broken: str, store: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.reserve(MORE)
    store.release(["c"])
    write(store, "a", 1)
    before = dict(store.regions), store.total_bytes, taken(store)
    sizes = [(path / "data").stat().st_size for path in store.directories]
    original, calls = getattr(growing, broken), []

    def refuse(*arguments: object) -> None:
        calls.append(arguments)
        if broken == "preallocate" and len(calls) < 3:
            original(*arguments)
            return
        raise (
            FuyouStorageError(errno.ENOSPC, "no room") if broken != "preallocate" else OSError(errno.ENOSPC, "no room")
        )

    wanted = [RegionSpec("e", 2 * UNIT_BYTES + PAGE, 2), RegionSpec("f", 4 * UNIT_BYTES, 2)]
    with monkeypatch.context() as full:
        full.setattr(growing, broken, refuse)
        with pytest.raises(FuyouStorageError) as caught:
            store.reserve(wanted)
    assert caught.value.errno == errno.ENOSPC
    assert (dict(store.regions), store.total_bytes, taken(store)) == before
    assert [(path / "data").stat().st_size for path in store.directories] == sizes
    assert holds(store, "a", 1)
    store.reserve(wanted)
    write(store, "e", 41)
    write(store, "f", 51)
    assert holds(store, "a", 1)
    assert holds(store, "e", 41)


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_data_that_may_be_lost_while_a_file_grows_is_committed_by_nobody(
    call: str, store: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells an error of writing back once: the commit's own call succeeds."""
    store.commit(1, {"a": 0}, {})
    write(store, "a", 1)
    before = dict(store.regions), store.total_bytes
    original, failures = getattr(os, call), [OSError(errno.EIO, os.strerror(errno.EIO))]

    def fail_once(fd: int) -> None:
        if failures:
            raise failures.pop()
        original(fd)

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no fallocate")

    if call == "fsync":
        monkeypatch.setattr(data_file, "allocate_blocks", refuse)
    monkeypatch.setattr(os, call, fail_once)
    with pytest.raises(FuyouStorageError, match="making data durable failed") as caught:
        store.reserve(MORE)
    assert caught.value.errno == errno.EIO
    assert not failures
    assert (dict(store.regions), store.total_bytes) == before
    with pytest.raises(FuyouStateError, match="nothing more can be committed"):
        store.commit(2, {"a": 1}, {})
    assert [commit.step for commit in store.commits()] == [1]


def test_files_that_grew_without_a_manifest_are_opened_as_it_says(paths: list[Path]) -> None:
    store = SlotStore.create(paths, FIRST, IDENTITY, direct=False)
    write(store, "a", 1)
    directories = store.directories
    store.close(remove=False)
    for directory in directories:
        with (directory / "data").open("ab") as file:
            file.write(bytes(3 * PAGE))
    again = SlotStore.open(directories, IDENTITY)
    assert holds(again, "a", 1)
    again.reserve(MORE)
    write(again, "c", 21)
    assert holds(again, "a", 1)
    assert holds(again, "c", 21)
    again.close(remove=True)


def cut_short(
    signals: pytest.MonkeyPatch, owner: Any = growing, name: str = "write_manifest", *, is_written: bool
) -> None:
    """Ctrl-C comes before a call, or behind what it writes."""
    original = getattr(owner, name)

    def interrupted(*arguments: Any) -> None:
        if is_written:
            original(*arguments)
        raise KeyboardInterrupt

    signals.setattr(owner, name, interrupted)


@pytest.mark.parametrize("moment", ["before the manifest", "behind it", "behind the store's own note"])
def test_ctrl_c_while_it_grows_leaves_a_store_that_works_and_can_be_opened(
    moment: str, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SlotStore.create(paths, FIRST, IDENTITY, direct=False)
    write(store, "a", 1)
    store.commit(1, {"a": 0}, {})
    with monkeypatch.context() as signals:
        if moment == "behind the store's own note":
            cut_short(signals, SlotStore, "_add_region", is_written=False)
        else:
            cut_short(signals, is_written=moment == "behind it")
        with pytest.raises(KeyboardInterrupt):
            store.reserve(MORE)
    store.reserve([region for region in MORE if region.name not in store.regions])
    write(store, "c", 21)
    store.commit(2, {"a": 1, "c": 0}, {})
    directories = store.directories
    store.close(remove=False)
    again = SlotStore.open(directories, IDENTITY)
    assert set(again.regions) == {"a", "b", "c", "d"}
    assert holds(again, "a", 1)
    assert holds(again, "c", 21)
    again.close(remove=True)


@pytest.mark.parametrize("is_durable", [False, True])
def test_ctrl_c_while_it_grows_and_the_end_of_the_run_leave_what_can_be_opened(
    is_durable: bool, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SlotStore.create(paths, FIRST, IDENTITY, direct=False)
    write(store, "a", 1)
    store.commit(1, {"a": 0}, {})
    cut_short(monkeypatch, is_written=is_durable)
    with pytest.raises(KeyboardInterrupt):
        store.reserve(MORE)
    directories = store.directories
    store.close(remove=False)
    again = SlotStore.open(directories, IDENTITY)
    assert again.commits()[0].step == 1
    assert holds(again, "a", 1)
    again.close(remove=True)


@pytest.mark.parametrize("change", ["reserve", "release"])
def test_ctrl_c_and_then_a_disk_that_is_full(change: str, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a change that was cut short wrote to the manifest the next one knows, which takes back its own alone."""
    store = SlotStore.create(paths, [*FIRST, *MORE[1:]] if change == "release" else FIRST, IDENTITY, direct=False)
    write(store, "a", 1)
    store.commit(1, {"a": 0}, {})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as signals:
        cut_short(signals, is_written=True)
        with pytest.raises(KeyboardInterrupt):
            store.reserve(MORE) if change == "reserve" else store.release(["d"])
    assert set(store.regions) == ({"a", "b", "c", "d"} if change == "reserve" else {"a", "b"})
    with monkeypatch.context() as scarce:
        scarce.setattr(growing, "preallocate", full)
        with pytest.raises(FuyouStorageError, match="cannot be allocated"):
            store.reserve([RegionSpec("e", 9 * PAGE, 1)])
    store.commit(2, {"a": 1}, {})
    directories = store.directories
    store.close(remove=False)
    again = SlotStore.open(directories, IDENTITY)
    assert again.commits()[0].step == 2
    assert holds(again, "a", 1)
    again.close(remove=True)


def test_nothing_to_give_back_writes_nothing(store: SlotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(growing, "write_manifest")
    store.release(["none", "of these"])
    assert set(store.regions) == {"a", "b"}


def test_a_region_comes_once_and_within_the_budget(store: SlotStore) -> None:
    with pytest.raises(ValueError, match="these are there: a"):
        store.reserve([FIRST[0]])
    with pytest.raises(FuyouStorageError, match="which may be used: nvme_budget_bytes"):
        store.reserve(MORE, budget_bytes=store.total_bytes + PAGE)
    store.reserve(MORE, budget_bytes=store.total_bytes + sum(one.num_bytes * one.num_slots for one in MORE))


@pytest.mark.parametrize("can_be_undone", [True, False])
@pytest.mark.parametrize("change", ["reserve", "release"])
def test_a_manifest_that_may_not_be_durable_is_put_back_or_ends_the_commits(
    change: str, can_be_undone: bool, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory cannot be synced: its new manifest is there, and may be there after a power cut."""
    store = SlotStore.create(paths, FIRST, IDENTITY, direct=False)
    write(store, "a", 1)
    write(store, "b", 11)
    store.commit(1, {"a": 0, "b": 0}, {})
    names, is_directory, num_left = set(store.regions), os.path.isdir, [1 if can_be_undone else 2]
    original = os.fsync

    def fsync(fd: int) -> None:
        if is_directory(f"/proc/self/fd/{fd}") and num_left[0]:
            num_left[0] -= 1
            raise OSError(errno.EIO, "the disk is faulty")
        original(fd)

    with monkeypatch.context() as faulty:
        faulty.setattr(os, "fsync", fsync)
        with pytest.raises(FuyouStorageError, match="after a power cut") as caught:
            store.reserve(MORE) if change == "reserve" else store.release(["a"])
    assert caught.value.errno == errno.EIO
    assert set(store.regions) == names
    assert holds(store, "a", 1)
    if can_be_undone:
        store.commit(2, {"a": 1, "b": 0}, {})
    else:
        with pytest.raises(FuyouStateError, match="nothing more can be committed"):
            store.commit(2, {"a": 1, "b": 0}, {})
    directories = store.directories
    store.close(remove=False)
    again = SlotStore.open(directories, IDENTITY)  # whatever the manifest says, it is there
    assert again.commits()[0].step == (2 if can_be_undone else 1)
    if can_be_undone:
        assert set(again.regions) == names
        assert holds(again, "a", 1)
    assert holds(again, "b", 11)
    again.close(remove=True)
