# SPDX-License-Identifier: Apache-2.0
"""The directories and locks of the store when others hold, replace or forbid them."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage import directory, locks
from ds_fuyou.storage.cleanup import find_state, remove_state
from ds_fuyou.storage.directory import StateRoot
from ds_fuyou.storage.probe import PathFacts
from ds_fuyou.storage.store import RegionSpec, SlotStore
from tests.unit.storage_support import UNIT, all_files, identity

REGIONS = [RegionSpec("r", 2 * UNIT, 1)]
RESERVE = 16 * 1024 * 1024


def create(path: Path) -> SlotStore:
    return SlotStore.create([path], REGIONS, identity())


def hold_root(path: Path) -> int:
    """A descriptor that holds the root lock, as another process would."""
    (path / "ds_fuyou").mkdir(mode=0o700)
    fd = os.open(path / "ds_fuyou", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def refusing(real: Callable[..., object], number: int, refused: Callable[..., bool]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        if refused(*args):
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return call


def test_a_lock_that_stays_taken_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = hold_root(tmp_path)
    monkeypatch.setattr(directory, "_LOCK_LIMIT_SECS", 0.0)
    with pytest.raises(FuyouStorageError, match="the lock must be free within 0 s") as caught:
        SlotStore.create([tmp_path], REGIONS, identity(rank=1, world_size=2))
    os.close(fd)
    assert caught.value.errno == errno.EWOULDBLOCK
    assert all_files(tmp_path) == ["ds_fuyou"]


def of_several_users(path: Path) -> Path:
    root = path / "ds_fuyou"
    root.mkdir()
    root.chmod(0o1777)
    return root


def test_who_can_open_the_directory_of_several_users_holds_nobody_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user locks it for ever, and has taken a name like those of our locks."""
    root = of_several_users(tmp_path)
    planted = root / f".lock-{os.geteuid()}-0"
    planted.touch(0o644)
    held = [os.open(path, os.O_RDONLY) for path in (root, planted)]
    for fd in held:
        fcntl.flock(fd, fcntl.LOCK_EX)
    monkeypatch.setattr(directory, "_LOCK_LIMIT_SECS", 0.0)
    store = create(tmp_path)
    assert [state.path for state in find_state(tmp_path)] == list(store.directories)
    store.close()
    for fd in held:
        os.close(fd)
    assert not (root / identity().directory_name).exists()


@pytest.mark.parametrize("name", ["0", "z"])
def test_in_a_directory_of_several_users_ours_wait_for_each_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where two found no lock at once, and each made one: before or after the other by name."""
    root = of_several_users(tmp_path)
    monkeypatch.setattr(directory, "_LOCK_LIMIT_SECS", 0.0)
    first = StateRoot.open(tmp_path, create=False)
    assert first is not None
    (root / f".lock-{os.geteuid()}-{name}").touch(0o600)
    for _ in range(2):
        with pytest.raises(FuyouStorageError, match="the lock must be free"):
            StateRoot.open(tmp_path, create=False)
    first.unlock()
    second = StateRoot.open(tmp_path, create=False)
    assert second is not None
    for each in (first, second):
        each.close(drop_if_empty=True)
    assert root.exists()


def test_waiting_for_a_lock_is_told_and_ends_with_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[], str]
) -> None:
    fd = hold_root(tmp_path)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: fcntl.flock(fd, fcntl.LOCK_UN))
    monkeypatch.setattr(locks, "_TELL_SECS", 0.0)
    monkeypatch.setattr(locks, "time", clock)
    create(tmp_path).close()
    os.close(fd)
    assert f"waiting for the lock of {tmp_path / 'ds_fuyou'}, which another process holds" in told()


def test_a_root_replaced_while_waiting_is_locked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last run in a path removes the root that the next one waits for."""
    fd = hold_root(tmp_path)

    def replace(_: float) -> None:
        (tmp_path / "ds_fuyou").rmdir()
        fcntl.flock(fd, fcntl.LOCK_UN)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=replace)
    monkeypatch.setattr(locks, "time", clock)
    store = create(tmp_path)
    os.close(fd)
    assert (store.directories[0] / "data").exists()
    store.close()
    assert all_files(tmp_path) == []


def test_a_filesystem_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(fcntl.flock, errno.ENOLCK, lambda *_: True))
    with pytest.raises(FuyouStorageError, match="must support flock") as caught:
        create(tmp_path)
    assert caught.value.errno == errno.ENOLCK


def test_the_root_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "ds_fuyou"
    root.mkdir()
    if os.geteuid() == 0:
        os.chown(root, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(FuyouStorageError, match=r"it is user .* who may train in it.* name an nvme_path of your own"):
        create(tmp_path)
    assert all_files(tmp_path) == ["ds_fuyou"]


@pytest.mark.parametrize(
    ("name", "entry", "text"),
    [
        ("mkdir", "ds_fuyou", "must be a directory this user can write"),
        ("mkdir", "run-rank0", "the directory of the run cannot be created"),
        ("open", "lock", "must be the state directory of a run"),
        ("open", "data", "the data file cannot be created"),
        ("open", "manifest.json.tmp", "writing manifest.json failed"),
    ],
)
def test_whatever_cannot_be_made_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, entry: str, text: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, name, refusing(getattr(os, name), errno.EACCES, lambda path, *_: path == entry))
        with pytest.raises(FuyouStorageError, match=text) as caught:
            create(tmp_path)
    assert caught.value.errno == errno.EACCES
    assert all_files(tmp_path) == []


def test_a_directory_that_cannot_be_made_durable_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root_syncs = refusing(os.fsync, errno.EIO, lambda fd: os.readlink(f"/proc/self/fd/{fd}").endswith("ds_fuyou"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", root_syncs)
        with pytest.raises(FuyouStorageError, match="cannot be made durable"):
            create(tmp_path)
    assert all_files(tmp_path) == []


def test_files_are_looked_after_once_descriptors_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run does not end because its script has many files open just then."""

    def refuse(_: int) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    store = SlotStore.create([tmp_path], [RegionSpec("a", UNIT, 1)], identity(), direct=False)
    run, data = store._files.runs[0], store._files.files[0]
    os.utime(data.path, (1.0, 1.0))
    with monkeypatch.context() as scarce:
        scarce.setattr(os, "listdir", refuse)
        assert run.missing(["data", "none"], data.fd, refresh=True) == ["none"]
    assert data.path.stat().st_mtime == 1.0
    run.missing([], data.fd, refresh=True)
    assert data.path.stat().st_mtime > 1e9
    store.close(remove=True)


def test_what_cannot_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SlotStore.create([tmp_path], REGIONS, identity(), keep=True)
    store.close()
    (state,) = find_state(tmp_path)
    monkeypatch.setattr("ds_fuyou.storage.records.ProcessMark.is_alive", lambda _: False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refusing(os.rmdir, errno.EBUSY, lambda *_: True))
        with pytest.raises(FuyouStorageError, match="cannot be removed; remove it by hand") as caught:
            remove_state(state)
    assert caught.value.errno == errno.EBUSY


def test_state_of_a_live_process_is_not_removed_even_when_it_was_closed(tmp_path: Path) -> None:
    store = SlotStore.create([tmp_path], REGIONS, identity(), keep=True)
    store.close()
    (state,) = find_state(tmp_path)
    assert state.alive
    store = SlotStore.open(store.directories, None)
    store.close(remove=True)


def test_ranks_that_start_at_once_see_what_the_others_took(tmp_path: Path) -> None:
    """The small path holds one unit: whoever comes first takes it, and the others fit beside."""
    small, large = tmp_path / "small", tmp_path / "large"
    room = {small: RESERVE + UNIT, large: 10**12}
    for path in room:
        path.mkdir()

    def probe(path: Path) -> PathFacts:
        taken = sum(file.stat().st_size for file in path.rglob("data"))
        return PathFacts(room[path] - taken, "ext4", False, True, str(path))

    def start(rank: int) -> SlotStore:
        return SlotStore.create([small, large], REGIONS, identity("run", rank, 4), probe=probe)

    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(start, range(4)))
    sizes = sorted((store.directories[0] / "data").stat().st_size for store in stores)
    assert sizes == [0, 0, 0, UNIT]
    for store in stores:
        store.close()
    assert all_files(small) == []
