# SPDX-License-Identifier: Apache-2.0
"""The slot store: what it makes, answers and refuses, and that refusing leaves nothing behind."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import random
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.errors import FuyouChecksumError, FuyouConfigError, FuyouStateError, FuyouStorageError
from ds_fuyou.storage import data_file, records
from ds_fuyou.storage.cleanup import find_state, holds_steps
from ds_fuyou.storage.store import RegionSpec, SlotStore
from tests.unit.storage_support import PAGE, UNIT, all_files, fake_disks, identity, read_slot, write_slot

REGIONS = [RegionSpec("big", 3 * UNIT + 5 * PAGE, 2), RegionSpec("small", PAGE, 1)]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for path in found:
        path.mkdir()
    return found


@pytest.fixture
def store(paths: list[Path]) -> Iterator[SlotStore]:
    made = SlotStore.create(paths, REGIONS, identity(), keep=True)
    yield made
    made.close(remove=True)


def test_files_are_private_allocated_and_where_they_should_be(store: SlotStore, paths: list[Path]) -> None:
    assert store.directories == tuple(path / "ds_fuyou" / "run-rank0" for path in paths)
    assert store.total_bytes == sum(r.num_bytes * r.num_slots for r in REGIONS)
    allocated = 0
    for directory in store.directories:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for file in directory.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        allocated += (directory / "data").stat().st_blocks * 512
    assert allocated >= store.total_bytes


def test_descriptors_do_not_survive_exec_and_say_whether_they_are_direct(store: SlotStore) -> None:
    for extent in store.extents("big", 0):
        assert fcntl.fcntl(extent.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert bool(fcntl.fcntl(extent.fd, fcntl.F_GETFL) & os.O_DIRECT) == store.direct
        assert store.paths_of_fd(extent.fd).name == "data"


def test_slots_hold_what_was_written_to_them_and_nothing_else(store: SlotStore) -> None:
    slots = [("big", 0), ("big", 1), ("small", 0)]
    for value, (region, slot) in enumerate(slots, start=1):
        write_slot(store, region, slot, value)
    for value, (region, slot) in enumerate(slots, start=1):
        assert set(read_slot(store, region, slot)) == {value}


def test_a_range_is_the_same_bytes_as_the_slice_of_the_whole(store: SlotStore) -> None:
    def pages(extents: object) -> list[tuple[int, int]]:
        return [(e.fd, at) for e in extents for at in range(e.offset, e.offset + e.num_bytes, PAGE)]  # type: ignore[attr-defined]

    whole = pages(store.extents("big", 1))
    draw = random.Random(3)
    for _ in range(200):
        begin, end = sorted(draw.randint(0, len(whole)) for _ in range(2))
        assert pages(store.range_extents("big", 1, begin * PAGE, end * PAGE)) == whole[begin:end]


@pytest.mark.parametrize(("begin", "end"), [(1, PAGE), (0, PAGE + 1), (-PAGE, PAGE), (PAGE, 0), (0, 2 * PAGE)])
def test_a_range_outside_the_region_or_not_of_pages_is_refused(store: SlotStore, begin: int, end: int) -> None:
    with pytest.raises(ValueError, match=r"a range of small must be multiples of 4096 in \[0, 4096\]"):
        store.range_extents("small", 0, begin, end)


@pytest.mark.parametrize(("region", "slot", "found"), [("none", 0, "none of the 2"), ("small", 1, "it has 1 slots")])
def test_an_unknown_slot_is_refused(store: SlotStore, region: str, slot: int, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        store.extents(region, slot)


def test_paths_of_a_foreign_descriptor_are_refused(store: SlotStore) -> None:
    with pytest.raises(FuyouStateError, match="descriptor 99999"):
        store.paths_of_fd(99999)


def test_closing_removes_everything_and_twice_is_once(paths: list[Path]) -> None:
    store = SlotStore.create(paths, REGIONS, identity())
    fd = store.extents("small", 0)[0].fd
    store.close()
    store.close()
    assert all_files(paths[0]) == []
    assert all_files(paths[1]) == []
    assert store.paths_of_fd(fd).name == "data"
    for call in (
        store.last_commit,
        store.commits,
        lambda: store.extents("big", 0),
        lambda: store.commit(0, {}, {}),
        store.withdraw,
    ):
        with pytest.raises(FuyouStateError, match="closed"):
            call()


def test_closing_leaves_foreign_files_and_says_so(paths: list[Path], told: Callable[[], str]) -> None:
    store = SlotStore.create(paths[:1], REGIONS, identity())
    (store.directories[0] / "notes.txt").write_text("mine")
    store.close()
    assert all_files(paths[0]) == ["ds_fuyou", "ds_fuyou/run-rank0", "ds_fuyou/run-rank0/notes.txt"]
    assert "notes.txt" in told()


def test_two_ranks_and_two_runs_share_a_path(paths: list[Path]) -> None:
    stores = [SlotStore.create(paths, REGIONS, identity("one", rank, 2)) for rank in (0, 1)]
    stores.append(SlotStore.create(paths, REGIONS, identity("two")))
    for value, store in enumerate(stores, start=1):
        write_slot(store, "big", 0, value)
    stores[0].close()
    for value, store in list(enumerate(stores, start=1))[1:]:
        assert set(read_slot(store, "big", 0)) == {value}
        store.close()
    assert all_files(paths[0]) == []


def test_a_run_id_in_use_is_refused_and_the_first_run_is_untouched(store: SlotStore, paths: list[Path]) -> None:
    write_slot(store, "small", 0, 7)
    before = all_files(paths[0]), all_files(paths[1])
    with pytest.raises(FuyouStateError, match="must not exist yet"):
        SlotStore.create(paths, REGIONS, identity())
    assert (all_files(paths[0]), all_files(paths[1])) == before
    assert set(read_slot(store, "small", 0)) == {7}


def _missing(path: Path) -> None:
    path.rmdir()


def _file(path: Path) -> None:
    path.rmdir()
    path.write_text("")


def _link(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to(path.with_name("target"))


def _link_inside(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    (path / "ds_fuyou").symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(
    ("spoil", "number", "text"),
    [
        (_missing, errno.ENOENT, "it does not exist; create it .mkdir -p"),
        (_file, errno.ENOTDIR, "it is not a directory"),
        (_link, errno.ELOOP, "symbolic link; name its target .*target"),
        (_link_inside, errno.ENOTDIR, "it must be a directory this user can write"),
    ],
)
def test_a_bad_path_is_named_and_the_good_one_stays_empty(
    paths: list[Path], spoil: Callable[[Path], None], number: int, text: str
) -> None:
    spoil(paths[1])
    with pytest.raises(FuyouStorageError, match=text) as caught:
        SlotStore.create(paths, REGIONS, identity())
    assert caught.value.errno == number
    assert str(paths[1]) in str(caught.value)
    assert all_files(paths[0]) == []


def test_an_unwritable_path_is_an_error(paths: list[Path], run_python: Callable[..., object]) -> None:
    """In a process of a user that is not root, whom permissions do not stop."""
    paths[0].chmod(0o555)
    code = f"""
import os, sys
from pathlib import Path
fd = os.open({str(paths[0])!r}, os.O_RDONLY)
import ds_fuyou.storage.store as s
from ds_fuyou.errors import FuyouStorageError
os.fchdir(fd)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    s.probe_path(Path('.'))
except FuyouStorageError as error:
    sys.exit(str(error))
"""
    done = run_python(code)
    paths[0].chmod(0o755)
    assert "nvme_path must be writable by user" in done.stderr  # type: ignore[attr-defined]
    assert "Permission denied" in done.stderr  # type: ignore[attr-defined]
    assert all_files(paths[0]) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may become another user")
@pytest.mark.parametrize("user", [0, 65534])
def test_whose_directory_it_is_and_how_to_share_it_is_told(user: int, run_python: Callable[..., object]) -> None:
    with tempfile.TemporaryDirectory() as path:  # below tmp_path nobody else could look
        os.chmod(path, 0o1777)
        os.mkdir(f"{path}/ds_fuyou", 0o700)
        os.chown(f"{path}/ds_fuyou", 12345, 12345)
        code = f"""
import os, sys
from pathlib import Path
from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.directory import StateRoot
os.setgroups([]); os.setgid({user}); os.setuid({user})
try:
    StateRoot.open(Path({path!r}), create=True)
except FuyouStorageError as error:
    sys.exit(str(error))
"""
        done = run_python(code)
    told = done.stderr  # type: ignore[attr-defined]
    assert f"it is user 12345's, who may train in it, and this is user {user}" in told
    assert "mkdir -m 1777" in told


def test_a_read_only_filesystem_is_an_error(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def open_read_only(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_read_only)
    with pytest.raises(FuyouStorageError, match=r"must be writable.*Read-only file system"):
        SlotStore.create(paths, REGIONS, identity())
    assert all_files(paths[0]) == []


def test_too_little_space_names_needed_and_free(paths: list[Path]) -> None:
    probe = fake_disks({paths[0]: UNIT, paths[1]: 18 * 1024 * 1024})
    total = sum(r.num_bytes * r.num_slots for r in REGIONS)
    with pytest.raises(FuyouStorageError, match=rf"needs {total} bytes.*{paths[0]}: {UNIT} free") as caught:
        SlotStore.create(paths, REGIONS, identity(), probe=probe)
    assert caught.value.errno == errno.ENOSPC
    assert all_files(paths[0]) == []
    assert all_files(paths[1]) == []


def test_a_path_short_of_space_gets_what_it_can_hold(paths: list[Path]) -> None:
    probe = fake_disks({paths[0]: 16 * 1024 * 1024 + 2 * PAGE, paths[1]: 10**12})
    store = SlotStore.create(paths, REGIONS, identity(), probe=probe)
    assert (store.directories[0] / "data").stat().st_size <= 2 * PAGE
    for slot in (0, 1):
        write_slot(store, "big", slot, slot)
        assert set(read_slot(store, "big", slot)) == {slot}
    store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_failed_preallocation_removes_what_it_made(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    calls: list[int] = []

    def allocate(fd: int, num_bytes: int, offset: int) -> None:
        calls.append(num_bytes)
        if len(calls) == 2:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(data_file, "allocate_blocks", allocate)
    says = "cannot be allocated; .*ulimit -f" if number == errno.EFBIG else "preallocation failed: .*free"
    with pytest.raises(FuyouStorageError, match=says) as caught:
        SlotStore.create(paths, REGIONS, identity())
    assert caught.value.errno == number
    assert str(caught.value.filename).endswith("/data")
    for path, needed in zip(paths, calls, strict=True):
        assert number == errno.EFBIG or f"{path} needs {needed} bytes" in str(caught.value)
        assert all_files(path) == []


def test_zeros_are_written_where_the_filesystem_cannot_allocate(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, num_bytes: int, offset: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(data_file, "allocate_blocks", refuse)
    store = SlotStore.create(paths[:1], REGIONS, identity())
    assert (store.directories[0] / "data").stat().st_blocks * 512 >= store.total_bytes
    assert set(read_slot(store, "big", 1)) == {0}
    store.close()


def test_a_budget_below_the_need_is_a_configuration_error(paths: list[Path]) -> None:
    total = sum(r.num_bytes * r.num_slots for r in REGIONS)
    with pytest.raises(FuyouConfigError, match=rf"needs {total} bytes.*nvme_budget_bytes is {total - 1}"):
        SlotStore.create(paths, REGIONS, identity(), budget_bytes=total - 1)
    assert all_files(paths[0]) == []
    SlotStore.create(paths, REGIONS, identity(), budget_bytes=total).close()


def test_wrong_lists_are_configuration_errors(paths: list[Path]) -> None:
    with pytest.raises(FuyouConfigError, match="must not be empty"):
        SlotStore.create([], REGIONS, identity())
    with pytest.raises(FuyouConfigError, match="must not be empty"):
        SlotStore.create(paths, [], identity())
    with pytest.raises(FuyouConfigError, match="one weight a path, found 1 for 2"):
        SlotStore.create(paths, REGIONS, identity(), weights=[1.0])
    with pytest.raises(FuyouConfigError, match="found twice: small"):
        SlotStore.create(paths, [*REGIONS, REGIONS[1]], identity())
    with pytest.raises(FuyouConfigError, match="every directory once"):
        SlotStore.create([paths[0], paths[0] / ".." / "nvme0"], REGIONS, identity())
    with pytest.raises(FuyouConfigError, match="positive and finite"):
        SlotStore.create(paths, REGIONS, identity(), weights=[1.0, 0.0])
    assert all_files(paths[0]) == []


def test_shares_that_cannot_be_kept_are_told(tmp_path: Path, told: Callable[[], str]) -> None:
    paths = [tmp_path / name for name in ("large", "small")]
    for path in paths:
        path.mkdir()
    room = {paths[0]: 10**9, paths[1]: 20 * 2**20}  # of the small one 4 MiB can be used, the reserve is less than that
    regions = [RegionSpec("r", 32 * 2**20, 1)]
    store = SlotStore.create(paths, regions, identity(), weights=[1.0, 3.0], probe=fake_disks(room))
    assert f"{paths[1]} takes 4194304 bytes of the state instead of 25165824" in told()
    store.close()
    before = told()
    SlotStore.create(paths, regions, identity(), probe=fake_disks(dict.fromkeys(paths, 10**9))).close()
    assert told() == before


def test_buffered_io_is_used_and_said_where_direct_does_not_work(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, told: Callable[[], str]
) -> None:
    monkeypatch.setattr(data_file, "enable_direct", lambda fd: "no luck today")
    store = SlotStore.create(paths, REGIONS, identity())
    assert not store.direct
    store.close()
    assert "not opened with O_DIRECT: no luck today" in told()
    with pytest.raises(FuyouStorageError, match="must work: no luck today"):
        SlotStore.create(paths, REGIONS, identity(), direct=True)
    assert all_files(paths[0]) == []


def test_direct_can_be_declined(paths: list[Path]) -> None:
    store = SlotStore.create(paths, REGIONS, identity(), direct=False)
    assert not store.direct
    assert not fcntl.fcntl(store.extents("big", 0)[0].fd, fcntl.F_GETFL) & os.O_DIRECT
    store.close()


def test_memory_filesystems_work_and_are_warned_of(paths: list[Path], told: Callable[[], str]) -> None:
    probe = fake_disks(dict.fromkeys(paths, 10**12), filesystem="tmpfs", is_tmpfs=True)
    store = SlotStore.create(paths, REGIONS, identity(), probe=probe)
    assert not store.direct
    store.close()
    assert f"{paths[0]} is on tmpfs: the state takes host memory" in told()
    assert "network" not in told()


def test_network_filesystems_are_warned_of(paths: list[Path], told: Callable[[], str]) -> None:
    probe = fake_disks(dict.fromkeys(paths, 10**12), filesystem="nfs4")
    SlotStore.create(paths, REGIONS, identity(), probe=probe).close()
    assert f"{paths[0]} is on a network file system, or an unknown one (nfs4)" in told()


def test_the_last_commit_is_what_was_committed_last(store: SlotStore) -> None:
    assert store.last_commit() is None
    store.commit(4, {"big": 1}, {"loss_scale": 0.1 + 0.2, "names": ["é", None]})
    store.commit(5, {"big": 0}, {"loss_scale": 0.1 + 0.2, "names": ["é", None]})
    record = store.last_commit()
    assert record is not None
    assert (record.step, dict(record.slots), record.intact) == (5, {"big": 0}, True)
    assert dict(record.meta) == {"loss_scale": 0.1 + 0.2, "names": ["é", None]}


def steps_of(store: SlotStore) -> list[int]:
    return [commit.step for commit in store.commits()]


def test_the_record_keeps_the_commit_before(store: SlotStore) -> None:
    for step in (4, 5, 6):
        store.commit(step, {"big": step % 2}, {"edition": 0, "optimizer_step": step + 100})
    store.close()
    again = SlotStore.open(store.directories, None)
    assert [commit.key for commit in again.commits()] == [(6, 0, 106), (5, 0, 105)]
    newer, older = again.commits()
    assert (newer.slots["big"], older.slots["big"]) == (0, 1)
    again.go_back_to(older)
    assert again.last_commit() == older
    with pytest.raises(ValueError, match="commit 6 is none of this store's"):
        again.go_back_to(newer)
    again.close()
    last = SlotStore.open(store.directories, None)
    assert steps_of(last) == [5], "it was durable"
    last.commit(6, {"big": 0}, {})
    assert steps_of(last) == [6, 5]
    last.commit(6, {"big": 0}, {})
    assert steps_of(last) == [6], "states of a step were replaced: what it was before is none any more"
    last.withdraw()
    assert last.commits() == ()
    last.close(remove=True)


def test_a_record_of_the_first_format_is_one_commit(store: SlotStore) -> None:
    store.commit(1, {"big": 1}, {})
    directory = store.directories[0]
    store_id = json.loads((directory / "commit.json").read_bytes().partition(b"\n")[2])["store_id"]
    old = {"store_id": store_id, "step": 3, "slots": {"big": 1}, "meta": {"optimizer_step": 8, "state_sums": ""}}
    body = json.dumps(old).encode()
    header = f"ds_fuyou commit.json 1 {hashlib.sha256(body).hexdigest()} {len(body)}\n".encode()
    (directory / "commit.json").write_bytes(header + body)
    store.close()
    again = SlotStore.open(store.directories, None)
    assert [commit.key for commit in again.commits()] == [(3, 0, 8)]
    again.commit(4, {"big": 0}, {})
    assert steps_of(again) == [4, 3]
    again.close(remove=True)


def test_a_record_of_one_slot_is_not_intact(store: SlotStore) -> None:
    store.commit(1, {"big": 0, "small": 0}, {})
    record = store.last_commit()
    assert record is not None
    assert not record.intact


@pytest.mark.parametrize(("step", "slots"), [(1, {"small": 1}), (1, {"big": 2}), (1, {"chunk": -1}), (-1, {})])
def test_a_commit_of_what_does_not_exist_is_refused(store: SlotStore, step: int, slots: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"slot of|step of"):
        store.commit(step, slots, {})
    assert store.last_commit() is None


def test_after_data_failed_to_become_durable_nothing_is_committed(
    store: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(1, {"big": 0}, {})

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(FuyouStorageError, match="the state of commit 1 was not overwritten") as caught:
            store.commit(2, {"big": 1}, {})
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(store.directories[0] / "data")
    with pytest.raises(FuyouStateError, match="nothing more can be committed after a failure"):
        store.commit(3, {"big": 1}, {})
    record = store.last_commit()
    assert record is not None
    assert record.step == 1


def test_a_record_that_cannot_be_written_leaves_the_one_before(
    store: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(1, {"big": 0}, {})

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(FuyouStorageError, match=r"writing commit.json failed.*No space"):
            store.commit(2, {"big": 1}, {})
    store.close(remove=False)
    again = SlotStore.open(store.directories, None)
    record = again.last_commit()
    again.close(remove=True)
    assert record is not None
    assert record.step == 1


def test_after_a_record_that_may_not_be_durable_an_end_goes_by_what_it_says(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, told: Callable[[], str]
) -> None:
    """The next run finds it, unless the power goes: state that it calls lacking is not said to be gone on from."""
    fsync = os.fsync

    def fail(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    for run_id, meta, stays in (("lacking", {"states_in_memory": 1}, False), ("whole", {}, True)):
        store = SlotStore.create(paths, REGIONS, identity(run_id), recoverable=True)
        store.commit(1, {"big": 0}, {})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(FuyouStorageError, match="after a power cut it may say what it said before"):
                store.commit(2, {"big": 1}, meta)
        store.keep_because("the run failed")
        store.close()
        assert store.directories[0].exists() == stays
        assert ("the state of the last step stays" in told()) == stays
    again = SlotStore.open(store.directories, None)
    record = again.last_commit()
    again.close(remove=True)
    assert record is not None
    assert record.step == 2


def test_open_takes_over_kept_state(paths: list[Path]) -> None:
    first = SlotStore.create(paths, REGIONS, identity("first"), keep=True, weights=[2.0, 1.0])
    write_slot(first, "big", 1, 9)
    first.commit(3, {"big": 1}, {"note": "kept"})
    layout = [(first.paths_of_fd(e.fd), e.offset, e.num_bytes) for e in first.extents("big", 1)]
    first.close()
    again = SlotStore.open(tuple(reversed(first.directories)), identity("second"))
    assert [(again.paths_of_fd(e.fd), e.offset, e.num_bytes) for e in again.extents("big", 1)] == layout
    assert again.directories == first.directories
    record = again.last_commit()
    assert record is not None
    assert record.step == 3
    assert set(read_slot(again, "big", 1)) == {9}
    again.commit(4, {"big": 1}, {})
    for _ in range(2):
        again.withdraw()
    again.close()
    assert (first.directories[0] / "data").exists()
    last = SlotStore.open(first.directories, None)
    assert last.last_commit() is None, "it was withdrawn"
    last.close(remove=True)
    assert all_files(paths[0]) == []


@pytest.fixture
def kept(paths: list[Path]) -> tuple[Path, ...]:
    store = SlotStore.create(paths, REGIONS, identity("kept", 1, 2), keep=True)
    store.commit(1, {"big": 0}, {})
    store.close()
    return store.directories


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (identity("kept", 1, 2, "other"), "model_fingerprint model instead of other"),
        (identity("kept", 1, 4), "world_size 2 instead of 4"),
        (identity("kept", 0, 2), "rank 1 instead of 0"),
    ],
)
def test_open_refuses_the_state_of_another_run(kept: tuple[Path, ...], other: object, text: str) -> None:
    with pytest.raises(FuyouStateError, match=text):
        SlotStore.open(kept, other)  # type: ignore[arg-type]
    SlotStore.open(kept, identity("x", 1, 2)).close()  # the locks are free again


def test_open_refuses_a_store_in_use(kept: tuple[Path, ...]) -> None:
    holder = SlotStore.open(kept, None)
    with pytest.raises(FuyouStateError, match="in use by a running process"):
        SlotStore.open(kept, None)
    holder.close()


def test_open_names_missing_directories(kept: tuple[Path, ...], paths: list[Path]) -> None:
    with pytest.raises(FuyouStorageError, match=f"all 2 directories.*missing: {kept[1]}"):
        SlotStore.open(kept[:1], None)
    other = SlotStore.create(paths, REGIONS, identity("other"), keep=True)
    other.close()
    with pytest.raises(FuyouStorageError, match="must be of one run"):
        SlotStore.open([kept[0], other.directories[1]], None)
    with pytest.raises(FuyouConfigError, match="at least one"):
        SlotStore.open([], None)
    with pytest.raises(FuyouStorageError, match="must be PATH/ds_fuyou/RUN-rankN"):
        SlotStore.open([paths[0]], None)
    with pytest.raises(FuyouStorageError, match="must be the state directory of a run"):
        SlotStore.open([paths[0] / "ds_fuyou" / "none-rank0"], None)


@pytest.mark.parametrize("name", ["data", "lock", "manifest.json", "commit.json"])
def test_open_refuses_links_in_place_of_files(kept: tuple[Path, ...], tmp_path: Path, name: str) -> None:
    (kept[0] / name).rename(tmp_path / "moved")
    (kept[0] / name).symlink_to(tmp_path / "moved")
    with pytest.raises(FuyouStorageError) as caught:
        SlotStore.open(kept, None)
    assert caught.value.errno == errno.ELOOP


def test_open_refuses_a_linked_directory(kept: tuple[Path, ...]) -> None:
    kept[0].rename(kept[0].parent / "real")
    kept[0].symlink_to("real")
    with pytest.raises(FuyouStorageError, match="no symbolic link"):
        SlotStore.open(kept, None)


def test_open_refuses_data_of_another_size(kept: tuple[Path, ...]) -> None:
    os.truncate(kept[1] / "data", PAGE)
    with pytest.raises(FuyouStorageError, match=f"must be .* bytes as the manifest says, found {PAGE}"):
        SlotStore.open(kept, None)


def test_open_without_a_manifest_says_how_to_get_rid_of_it(kept: tuple[Path, ...]) -> None:
    (kept[0] / "manifest.json").unlink()
    with pytest.raises(FuyouStorageError, match=r"no manifest.*fuyou clean"):
        SlotStore.open(kept, None)


@pytest.mark.parametrize("name", ["manifest.json", "commit.json"])
@pytest.mark.parametrize("seed", range(12))
def test_a_torn_or_altered_record_is_never_believed(kept: tuple[Path, ...], name: str, seed: int) -> None:
    file = kept[0] / name
    content = bytearray(file.read_bytes())
    draw = random.Random(seed)
    if seed % 3 == 0:
        del content[draw.randrange(len(content)) :]
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    with pytest.raises(FuyouStorageError, match=f"{name} (is torn|must be of format)"):
        SlotStore.open(kept, None)


def test_a_temporary_record_is_ignored(kept: tuple[Path, ...]) -> None:
    (kept[0] / "commit.json.tmp").write_bytes(b"half a rec")
    store = SlotStore.open(kept, None)
    record = store.last_commit()
    assert record is not None
    assert record.step == 1
    store.commit(2, {"big": 1}, {})
    store.close()


def test_a_record_that_somebody_deleted_is_no_run_without_steps(paths: list[Path]) -> None:
    store = SlotStore.create(paths, REGIONS, identity(), keep=True)
    store.commit(1, {"big": 0}, {})
    store.commit(2, {"big": 1}, {})
    store.close()
    (store.directories[0] / "commit.json").unlink()
    with pytest.raises(FuyouStorageError, match=r"commit.json is missing"):
        SlotStore.open(store.directories, None)
    (state,) = find_state(paths[0])
    assert holds_steps(state), "a run must not begin anew beside it"


def test_a_record_of_another_store_is_refused(kept: tuple[Path, ...], paths: list[Path]) -> None:
    other = SlotStore.create(paths, REGIONS, identity("other"), keep=True)
    other.commit(7, {"big": 1}, {})
    other.close()
    (other.directories[0] / "commit.json").rename(kept[0] / "commit.json")
    with pytest.raises(FuyouChecksumError, match="of another store"):
        SlotStore.open(kept, None)


def test_descriptors_are_given_back(paths: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    before = set(os.listdir("/proc/self/fd"))
    for number in range(3):
        SlotStore.create(paths, REGIONS, identity(f"r{number}")).close()
        with pytest.raises(FuyouConfigError):
            SlotStore.create(paths, REGIONS, identity(f"r{number}"), weights=[1.0, 0.0])
    kept = SlotStore.create(paths, REGIONS, identity("kept"), keep=True)
    kept.close()
    with pytest.raises(FuyouStateError):
        SlotStore.open(kept.directories, identity(model="other"))
    SlotStore.open(kept.directories, None).close(remove=True)
    assert set(os.listdir("/proc/self/fd")) == before


def test_data_is_durable_before_the_record_appears(store: SlotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("fdatasync", "fsync", "rename"):
        real = getattr(os, name)

        def call(*args: object, _name: str = name, _real: Callable[..., None] = real, **kwargs: object) -> None:
            order.append(_name)
            _real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)
    store.commit(1, {"big": 0}, {})
    assert order == ["fdatasync", "fdatasync", "fsync", "rename", "fsync", "fsync"], "the last one: room for the next"
    order.clear()
    store.commit(2, {"big": 1}, {})
    assert order == ["fdatasync", "fdatasync", "fsync", "fsync"], "and in between two names were exchanged"


@pytest.mark.parametrize("name", ["commit.json", "contents.json", "manifest.json"])
def test_a_record_that_is_no_plain_file_is_refused_at_once(paths: list[Path], name: str) -> None:
    """A FIFO would be waited for, with the locks held that all other starts wait for."""
    store = SlotStore.create(paths, REGIONS, identity(), keep=True)
    store.describe({})
    store.commit(1, {"big": 0}, {})
    store.close()
    directory = store.directories[0]
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(FuyouStorageError, match=rf"reading {name} failed: it must be a plain file"):
        SlotStore.open(store.directories, identity()).contents()


@pytest.mark.parametrize("name", ["commit.json.tmp", "contents.json.tmp"])
def test_a_record_is_not_written_to_what_is_no_plain_file(paths: list[Path], name: str) -> None:
    store = SlotStore.create(paths, REGIONS, identity(), keep=True)
    os.mkfifo(store.directories[0] / name)
    with pytest.raises(FuyouStorageError, match=r"writing \w+.json failed; what it said before stands"):
        store.commit(1, {"big": 0}, {}) if name.startswith("commit") else store.describe({})
    store.close(remove=True)


def test_what_lies_there_instead_of_a_record_may_be_larger_than_memory(paths: list[Path]) -> None:
    store = SlotStore.create(paths, REGIONS, identity(), keep=True)
    store.commit(1, {"big": 0}, {})
    store.close()
    os.truncate(store.directories[0] / "commit.json", 1 << 42)
    with pytest.raises(FuyouStorageError, match=r"commit.json is torn"):
        SlotStore.open(store.directories, identity())


def test_a_record_too_deep_to_be_read_is_refused(paths: list[Path]) -> None:
    store = SlotStore.create(paths, REGIONS, identity(), keep=True)
    store.close()
    body = b"[" * 200_000
    header = f"ds_fuyou commit.json 1 {hashlib.sha256(body).hexdigest()} {len(body)}\n".encode()
    (store.directories[0] / "commit.json").write_bytes(header + body)
    with pytest.raises(FuyouStorageError, match="cannot be read as JSON"):
        SlotStore.open(store.directories, identity())


def test_a_record_is_written_over_the_one_before_it(paths: list[Path]) -> None:
    """In blocks that it has: others may fill the disk."""
    store = SlotStore.create(paths, REGIONS, identity())
    directory = store.directories[0]
    files = [directory / "commit.json", directory / "commit.json.tmp"]
    store.commit(1, {"big": 0}, {"note": "x" * 1000})
    first = [(file.stat().st_ino, file.stat().st_size, file.stat().st_blocks) for file in files]
    assert first[0][1:] == first[1][1:]
    for step in range(2, 7):
        store.commit(step, {"big": step % 2}, {"note": "x" * 20000})
        found = [(file.stat().st_ino, file.stat().st_size, file.stat().st_blocks) for file in files]
        assert found == (first if step % 2 else first[::-1])
    store.commit(7, {"big": 0}, {"note": "x" * 300_000})
    assert files[0].stat().st_size > first[0][1]
    for step in range(8, 11):
        store.commit(step, {"big": 0}, {})
    assert files[0].stat().st_size < 300_000, "what a large record took is given back"
    for step in range(11, 15):
        store.commit(step, {"big": 0}, {"note": "x" * 600_000})
    large = sorted((file.stat().st_ino, file.stat().st_blocks) for file in files)
    store.withdraw()
    store.commit(15, {"big": 0}, {"note": "x" * 600_000})
    assert sorted((file.stat().st_ino, file.stat().st_blocks) for file in files) == large
    store.withdraw()
    assert steps_of(store) == []
    store.close(remove=False)
    again = SlotStore.open(store.directories, None)
    assert again.commits() == ()
    again.close(remove=True)


def test_without_an_exchange_of_names_records_are_replaced(store: SlotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_fuyou.storage.records._exchange", lambda *_: False)
    for step in range(1, 4):
        store.commit(step, {"big": 0}, {})
        assert (store.directories[0] / "commit.json.tmp").stat().st_blocks > 0
    store.close(remove=False)
    again = SlotStore.open(store.directories, None)
    assert steps_of(again) == [3, 2]
    again.close(remove=True)


def test_what_a_commit_says_is_replaced_durably(store: SlotStore) -> None:
    store.commit(1, {"big": 0}, {"a": 1, "b": 2})
    store.commit(2, {"big": 1}, {"a": 3, "b": 4})
    store.amend({"b": 0})
    store.close(remove=False)
    again = SlotStore.open(store.directories, None)
    assert [dict(commit.meta) for commit in again.commits()] == [{"a": 3, "b": 0}, {"a": 1, "b": 0}]
    again.close(remove=True)


@pytest.mark.parametrize("name", ["data", "lock", "manifest.json", "contents.json"])
def test_files_that_somebody_deleted_are_told_once(
    name: str, paths: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    store = SlotStore.create(paths, REGIONS, identity(), keep=True, recoverable=True)
    store.describe({})
    store.commit(1, {"big": 0}, {})
    (store.directories[0] / name).unlink()
    for step in (2, 3):
        store.commit(step, {"big": 0}, {})
    told = [record.getMessage() for record in caplog.records if "somebody deleted" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"{store.directories[0]}: somebody deleted {name}. Training goes on")
    store.close(remove=True)


def test_a_directory_that_somebody_deleted_ends_no_training(
    paths: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    store = SlotStore.create(paths, REGIONS, identity(), keep=True, recoverable=True)
    store.describe({})
    store.commit(1, {"big": 0}, {})
    shutil.rmtree(store.directories[0])
    for step in (2, 3):
        store.commit(step, {"big": 0}, {})
        store.amend({"a": step})
    store.withdraw()
    store.describe({"more": 1})
    told = [record.getMessage() for record in caplog.records if "somebody deleted" in record.getMessage()]
    assert len(told) == 1
    assert "Training goes on" in told[0]
    store.close(remove=True)
    assert not any(path.exists() for path in store.directories)


@pytest.mark.parametrize("takes", ["all", "what is written"])
@pytest.mark.parametrize("call", ["open", "rename", "fsync"])
def test_a_directory_that_is_deleted_beside_a_commit_ends_no_training(
    call: str, takes: str, paths: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever deletes it is behind the look at it, before or after the new record has its name."""
    store = SlotStore.create(paths, REGIONS, identity(), keep=True, recoverable=True)
    store.commit(1, {"big": 0}, {})
    original, is_deleted = getattr(os, call), []

    def deleting(*args: Any, **options: Any) -> Any:
        if not is_deleted and (call != "open" or "commit.json.tmp" in args):
            is_deleted.append(True)
            (store.directories[0] / "commit.json.tmp").unlink(missing_ok=True)
            if takes == "all":
                shutil.rmtree(store.directories[0])
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, deleting)
        patch.setattr(records, "_exchange", lambda *_: False)
        store.commit(2, {"big": 0}, {})
    assert is_deleted
    store.commit(3, {"big": 0}, {})
    assert any("somebody deleted" in record.getMessage() for record in caplog.records) == (takes == "all")
    assert [commit.step for commit in store.commits()] == [3, 2]
    store.close(remove=True)


def test_times_of_files_are_kept_fresh(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Clean-ups of scratch directories go by age."""
    store = SlotStore.create(paths, REGIONS, identity())
    store.describe({})
    store.commit(1, {"big": 0}, {})
    files = [file for directory in store.directories for file in directory.iterdir()]
    assert len(files) == 3 * len(paths) + 3
    for file in files:
        os.utime(file, (1000, 1000))
    store.commit(2, {"big": 0}, {})
    lock = store.directories[0] / "lock"
    assert lock.stat().st_mtime == 1000, "not in every step"
    monkeypatch.setattr(store, "_fresh_until", 0.0)
    store.commit(3, {"big": 0}, {})
    assert min(file.stat().st_mtime for file in files) > 1e9
    store.close()
