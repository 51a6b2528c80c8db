# SPDX-License-Identifier: Apache-2.0
"""State of dead runs is found, named and removed on request; state in use, and what is not ours, never."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_fuyou.cli import main
from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.log import get_logger
from ds_fuyou.storage import cleanup, probe
from ds_fuyou.storage.cleanup import StateDirectory, find_state, remove_state, settle_stale, stale_bytes
from ds_fuyou.storage.records import MANIFEST_NAME, read_record, write_record
from ds_fuyou.storage.store import RegionSpec, SlotStore
from tests.harness.limits import HANG_SECS
from tests.unit.storage_support import PAGE, all_files, identity

REGIONS = [RegionSpec("r", 64 * PAGE, 2)]
HOLD = """
import sys, time
from pathlib import Path
from ds_fuyou.storage.store import *
store = SlotStore.create([Path(p) for p in sys.argv[2:]], [RegionSpec("r", 4096 * 64, 2)],
                         RunIdentity("model", 0, 1, sys.argv[1]))
store.commit(1, {"r": 0}, {})
print("ready", flush=True)
time.sleep(3600)
"""


def start_holder(run_id: str, *paths: Path) -> subprocess.Popen[str]:
    """A process that holds an open store in the paths, until it is killed."""
    arguments = [sys.executable, "-c", HOLD, run_id, *map(str, paths)]
    holder = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    return holder


def end(holder: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    holder.send_signal(number)
    holder.communicate(timeout=HANG_SECS)


@pytest.fixture
def dead(tmp_path: Path) -> StateDirectory:
    """What a killed run left in tmp_path."""
    end(start_holder("dead", tmp_path))
    (state,) = find_state(tmp_path)
    return state


def test_two_processes_in_one_path_and_the_killed_one_is_stale(tmp_path: Path) -> None:
    holders = [start_holder(run_id, tmp_path) for run_id in ("one", "two")]
    states = find_state(tmp_path)
    assert [(state.run_id, state.alive) for state in states] == [("one", True), ("two", True)]
    end(holders[0])
    one, two = find_state(tmp_path)
    assert (one.alive, two.alive) == (False, True)
    with pytest.raises(FuyouStateError, match="two-rank0 is in use by a running process"):
        remove_state(two)
    remove_state(one)
    assert [state.run_id for state in find_state(tmp_path)] == ["two"]
    end(holders[1], signal.SIGTERM)
    assert all_files(tmp_path) == []


def test_what_is_told_of_a_dead_run(dead: StateDirectory, tmp_path: Path) -> None:
    assert dead.path == tmp_path / "ds_fuyou" / "dead-rank0"
    assert (dead.rank, dead.model_fingerprint, dead.kept, dead.alive) == (0, "model", False, False)
    assert dead.num_bytes >= 2 * 64 * PAGE
    assert dead.started > 1.7e9


def test_state_left_by_a_crash_can_be_opened(dead: StateDirectory) -> None:
    store = SlotStore.open([dead.path], identity("other"))
    record = store.last_commit()
    store.close(remove=True)
    assert record is not None
    assert record.step == 1


def test_it_is_named_with_the_command_and_nothing_is_deleted(
    dead: StateDirectory, tmp_path: Path, told: Callable[[], str]
) -> None:
    before = all_files(tmp_path)
    settle_stale([tmp_path], get_logger())
    assert f"{dead.path}: " in told()
    assert "left by the dead run dead (rank 0" in told()
    assert f"it holds a step, of which fuyou recover makes a checkpoint; remove with: fuyou clean {tmp_path}" in told()
    assert all_files(tmp_path) == before
    assert stale_bytes([tmp_path, tmp_path / "missing"]) == dead.num_bytes


def test_what_would_be_lost_is_told_before_it_is_removed(
    dead: StateDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = HOLD.replace("sys.argv[1])", "sys.argv[1]), keep=True").replace("time.sleep(3600)", "")
    code = code.replace('store.commit(1, {"r": 0}, {})', "")
    subprocess.run([sys.executable, "-c", code, "empty", str(tmp_path)], check=True, timeout=HANG_SECS)
    assert main(["clean", "--dry-run", str(tmp_path)]) == 0
    held, empty = sorted(capsys.readouterr().out.splitlines()[:2])
    assert held.endswith("would be removed; it holds a step, of which fuyou recover makes a checkpoint")
    assert empty.endswith("would be removed")
    assert dead.path.exists()


@pytest.mark.parametrize("filesystem", ["nfs4", "gpfs", "virtiofs", "fuse.juicefs", "unknown"])
def test_of_dead_runs_that_of_the_same_model_is_removed_unless_it_was_kept(
    filesystem: str, dead: StateDirectory, tmp_path: Path, told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    SlotStore.create([tmp_path], REGIONS, identity("kept"), keep=True).close()
    living = SlotStore.create([tmp_path], REGIONS, identity("living"))
    settle_stale([tmp_path], get_logger(), clean="another")
    assert dead.path.exists()
    monkeypatch.setattr(probe, "filesystem_type", lambda fd: filesystem)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "uname", lambda: SimpleNamespace(nodename="elsewhere"))
        settle_stale([tmp_path], get_logger(), clean="model")
    assert dead.path.exists(), "its machine may still use it"
    settle_stale([tmp_path], get_logger(), clean="model")
    assert {path.name for path in (tmp_path / "ds_fuyou").iterdir()} == {"kept-rank0", "living-rank0"}
    assert f"{dead.path}: " in told()
    assert "removed (on_stale)" in told()
    living.close()


@pytest.mark.parametrize("keep", [False, True])
def test_whether_state_is_kept_is_what_the_run_says_that_goes_on_from_it(keep: bool, tmp_path: Path) -> None:
    """In every directory, and on the disk before anything else happens: the run may be killed."""
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.mkdir()
    SlotStore.create(paths, REGIONS, identity("kept"), keep=True).close()
    for then in (not keep, keep):
        store = SlotStore.open([path / "ds_fuyou" / "kept-rank0" for path in paths], None)
        store.adopt(keep=then)
        assert [find_state(path)[0].kept for path in paths] == [then, then]
        store.close(remove=False)
    assert [find_state(path)[0].kept for path in paths] == [keep, keep]


def test_kept_state_is_told_apart_and_paths_are_quoted(tmp_path: Path, told: Callable[[], str]) -> None:
    path = tmp_path / "my disk"
    path.mkdir()
    code = HOLD.replace("sys.argv[1])", "sys.argv[1]), keep=True").replace("time.sleep(3600)", "")
    subprocess.run([sys.executable, "-c", code, "kept", str(path)], check=True, timeout=HANG_SECS, capture_output=True)
    settle_stale([path, tmp_path / "missing"], get_logger())
    assert "kept by kept (rank 0" in told()
    assert f"fuyou clean '{path}'" in told()


def test_live_state_is_not_reported(tmp_path: Path, told: Callable[[], str]) -> None:
    store = SlotStore.create([tmp_path], REGIONS, identity())
    settle_stale([tmp_path], get_logger())
    store.close()
    assert "fuyou clean" not in told()


def test_a_pid_that_another_process_has_now_is_no_life(dead: StateDirectory, tmp_path: Path) -> None:
    from ds_fuyou.storage.records import ProcessMark

    mine = ProcessMark.of_this_process()
    assert mine.is_alive()
    assert not replace(mine, start_ticks=mine.start_ticks + 1).is_alive()
    assert not replace(mine, boot_id="before the reboot").is_alive()
    assert not replace(mine, pid=2**22 + 1).is_alive()


def test_removing_takes_all_of_it_and_twice_is_once(dead: StateDirectory, tmp_path: Path) -> None:
    remove_state(dead)
    assert all_files(tmp_path) == []
    remove_state(dead)


def test_the_path_itself_may_be_gone(dead: StateDirectory, tmp_path: Path) -> None:
    remove_state(replace(dead, path=tmp_path / "gone" / "ds_fuyou" / "dead-rank0"))
    assert dead.path.exists()


def test_foreign_files_are_refused_before_anything_is_deleted(dead: StateDirectory) -> None:
    (dead.path / "thesis.tex").write_text("do not lose")
    before = all_files(dead.path)
    with pytest.raises(FuyouStorageError, match=r"found also: thesis\.tex") as caught:
        remove_state(dead)
    assert caught.value.errno == errno.ENOTEMPTY
    assert all_files(dead.path) == before


def test_links_are_not_followed(dead: StateDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_text("precious")
    link = dead.path.parent / "link-rank0"
    link.symlink_to(elsewhere)
    assert [state.run_id for state in find_state(tmp_path)] == ["dead"]
    with pytest.raises(FuyouStorageError, match="no symbolic link"):
        remove_state(replace(dead, path=link))
    (dead.path / "data").unlink()
    (dead.path / "data").symlink_to(elsewhere / "data")
    with pytest.raises(FuyouStorageError, match="found also: data"):
        remove_state(dead)
    assert (elsewhere / "data").read_text() == "precious"


@pytest.mark.parametrize("name", ["results", "dead-rank", "dead-rank0.bak", ".dead-rank0"])
def test_other_names_are_not_ours(dead: StateDirectory, tmp_path: Path, name: str) -> None:
    foreign = dead.path.parent / name
    foreign.mkdir()
    assert [state.run_id for state in find_state(tmp_path)] == ["dead"]
    with pytest.raises(FuyouStorageError, match="must be a state directory"):
        remove_state(replace(dead, path=foreign))
    assert foreign.exists()


def test_a_directory_outside_the_root_is_refused(dead: StateDirectory, tmp_path: Path) -> None:
    outside = tmp_path / "other" / "dead-rank0"
    outside.mkdir(parents=True)
    with pytest.raises(FuyouStorageError, match="must be a state directory"):
        remove_state(replace(dead, path=outside))
    assert outside.exists()


@pytest.mark.parametrize("missing", [["manifest.json"], ["manifest.json", "data"], ["lock"], ["data", "lock"]])
def test_half_made_directories_are_found_and_removed(dead: StateDirectory, tmp_path: Path, missing: list[str]) -> None:
    for name in missing:
        (dead.path / name).unlink()
    (state,) = find_state(tmp_path)
    assert (state.run_id, state.rank, state.alive) == ("dead", 0, False)
    remove_state(state)
    assert all_files(tmp_path) == []


def test_an_altered_manifest_does_not_hide_the_directory(dead: StateDirectory, tmp_path: Path) -> None:
    (dead.path / "manifest.json").write_bytes(b"\xff nothing of sense")
    (state,) = find_state(tmp_path)
    assert state.model_fingerprint == ""
    remove_state(state)
    assert all_files(tmp_path) == []


def test_finding_in_an_empty_or_missing_path(tmp_path: Path) -> None:
    assert find_state(str(tmp_path)) == []
    assert all_files(tmp_path) == []
    with pytest.raises(FuyouStorageError, match="must be an existing directory"):
        find_state(tmp_path / "missing")


def test_the_root_of_several_users_stays(tmp_path: Path) -> None:
    root = tmp_path / "ds_fuyou"
    root.mkdir()
    os.chmod(root, 0o1777)
    for _ in range(2):
        SlotStore.create([tmp_path], REGIONS, identity()).close()
    found, lock = all_files(tmp_path)
    assert found == "ds_fuyou"
    assert lock.startswith(f"ds_fuyou/.lock-{os.geteuid()}-"), "for the next start of this user"


@pytest.mark.parametrize("names", [["data"], ["data", "lock"], ["data", "manifest.json", "lock"]])
def test_a_directory_that_no_run_made_stays(names: list[str], tmp_path: Path) -> None:
    """Somebody chose these names."""
    SlotStore.create([tmp_path], REGIONS, identity("one"), keep=True).close()
    mine = tmp_path / "ds_fuyou" / "mine-rank0"
    mine.mkdir()
    for name in names:
        (mine / name).write_bytes(b"my data")
    (state,) = [state for state in find_state(tmp_path) if state.path == mine]
    with pytest.raises(FuyouStorageError, match="neither a manifest nor the lock says that a run made it"):
        remove_state(state)
    assert sorted(file.name for file in mine.iterdir()) == sorted(names)


def test_an_empty_directory_of_a_start_that_was_killed_is_removed(tmp_path: Path) -> None:
    SlotStore.create([tmp_path], REGIONS, identity("one"), keep=True).close()
    for number, names in enumerate(([], ["lock"])):
        made = tmp_path / "ds_fuyou" / f"killed{number}-rank0"
        made.mkdir()
        for name in names:
            (made / name).touch()
        (state,) = [state for state in find_state(tmp_path) if state.path == made]
        remove_state(state)
        assert not made.exists()


@pytest.mark.parametrize("name", ["run directory", "manifest.json"])
def test_what_the_device_keeps_from_being_read_is_no_absence(
    name: str, dead: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on from state files must not begin anew because a disk failed for a moment."""
    broken = dead.path.name if name == "run directory" else name
    opened = os.open

    def fails(path: str, *rest: int, **named: int) -> int:
        if path == broken:
            raise OSError(errno.EIO, "the disk")
        return opened(path, *rest, **named)

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(FuyouStorageError, match="Input/output error") as told:
        find_state(dead.path.parent.parent)
    assert told.value.filename == str(dead.path if name == "run directory" else dead.path / name)
    settle_stale([dead.path.parent.parent], get_logger())  # a run that only begins goes on


def test_a_manifest_with_a_right_checksum_that_makes_no_sense_is_an_error_of_the_file(dead: StateDirectory) -> None:
    fd = os.open(dead.path, os.O_RDONLY)
    payload = read_record(fd, dead.path, MANIFEST_NAME)
    assert payload is not None
    piece = payload["regions"][0]["stripes"][0][0]
    wrong: dict[str, object] = {
        "regions": [{**payload["regions"][0], "stripes": [[[0, piece[1] + 2**40, piece[2]]]]}],
        "index": 3,
        "identity": {**payload["identity"], "rank": "0"},
        "started": 1e300,
        "keep": None,
        "file_bytes": [10**39],
    }
    for key, value in wrong.items():
        write_record(fd, dead.path, MANIFEST_NAME, {**payload, key: value})  # type: ignore[dict-item]
        with pytest.raises(FuyouStorageError, match=r"manifest.json is not of its format \(\w+: .*Invalid argument"):
            SlotStore.open([dead.path], identity())
    os.close(fd)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("host", ["elsewhere", os.uname().nodename])
def test_state_of_another_machine_on_a_shared_disk_stays(
    host: str, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are not seen from here, nor their locks on some file systems."""
    monkeypatch.setattr(cleanup, "may_be_shared", lambda path: is_shared)
    state = StateDirectory(Path("/nowhere"), False, "run", 0, 0, 0.0, "model", False, host)
    assert bool(state.why_not) == (host == "elsewhere" and is_shared)
