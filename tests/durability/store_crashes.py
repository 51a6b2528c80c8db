# SPDX-License-Identifier: Apache-2.0
"""Crashes of the slot store alone: whatever a kill or a power cut leaves, the last commit is whole.

A *history* is what a run does to a store: it creates it, fills spare slots and commits, withdraws and writes in place,
closes and takes it over again, goes back to the commit before, grows and shrinks. Two ways to end it:

* :func:`kill_one`: a forked process makes it, in files that are there, and is killed at a random instant.
* :class:`PowerCuts`: it is made once, and every system call that changes files is noted. Then the files are built as a
  power cut after each of these calls may leave them, with none, some or all of what was not synced. Lost or torn are:
  of writes, any pages of 512 bytes since that file was synced; of names made, renamed and removed, any that came after
  a certain one since the directory was synced.

Nothing here needs torch, so a case takes milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import os
import random
import signal
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from ds_fuyou.errors import FuyouError
from ds_fuyou.storage import data_file, growing, records
from ds_fuyou.storage.store import RegionSpec, RunIdentity, SlotStore

SECTOR, PAGE = 512, 4096
IDENTITY = RunIdentity("model", 0, 1, "run")


@dataclass(frozen=True)
class Told:
    """What the history has told of itself. ``states``: (step, edition) that the last commit may be, when nothing is
    lost that was promised; None among them: no commit need stand. ``writing``: the slots that the older entry names
    may be half overwritten."""

    states: tuple[tuple[int, int] | None, ...] = (None,)
    writing: bool = True


class History:
    """Random, of ``num_actions`` commits and other things; ``tell`` is called before and after each."""

    def __init__(self, paths: list[Path], chance: random.Random, tell: Callable[[Told], None]) -> None:
        self.paths, self.chance, self.tell = paths, chance, tell
        self.regions = [RegionSpec(f"r{i}", PAGE * chance.randint(1, 3), 2) for i in range(chance.randint(1, 3))]
        self.num_made = len(self.regions)
        self.slots = {region.name: 0 for region in self.regions}
        self.state: tuple[int, int] | None = None
        self.step = self.edition = 0
        self.store: SlotStore | None = None

    def run(self, num_actions: int) -> None:
        self.store = SlotStore.create(self.paths, self.regions, IDENTITY, direct=False, keep=True)
        self.store.describe({"regions": len(self.regions)})
        for _ in range(num_actions):
            actions = [self.commit, self.replace, self.reopen, self.go_back, self.grow, self.shrink]
            self.chance.choices(actions, [8, 1, 1, 1, 1, 1])[0]()

    def commit(self) -> None:
        before = self.state
        self.step, self.edition = self.step + 1, 0
        self.tell(Told((before,)))
        for region in self.regions:
            self.slots[region.name] ^= 1
            self.fill(region, self.slots[region.name])
        self._commit_now(before)

    def _commit_now(self, before: tuple[int, int] | None) -> None:
        now = (self.step, self.edition)
        self.tell(Told((before, now)))
        self._store.commit(self.step, dict(self.slots), {"edition": self.edition})
        self.state = now
        self.tell(Told((now,), writing=False))

    def replace(self) -> None:
        """As loading a checkpoint does."""
        before = self.state
        self.tell(Told((before, None)))
        self._store.withdraw()
        self.state = None
        self.tell(Told((None,)))
        self.edition += 1
        for region in self.regions:
            self.fill(region, self.slots[region.name])
        self._commit_now(None)

    def reopen(self) -> None:
        directories = self._store.directories
        self._store.close()
        self.store = SlotStore.open(directories, IDENTITY)
        self.store.adopt(keep=True)

    def go_back(self) -> None:
        commits = self._store.commits()
        if len(commits) < 2:
            return
        older = commits[1]
        back = (older.step, int(str(older.meta["edition"])))
        self.tell(Told((self.state, back), writing=False))
        self._store.go_back_to(older)
        self.state, (self.step, self.edition) = back, back
        self.slots = {region.name: older.slots.get(region.name, 0) for region in self.regions}
        self.tell(Told((back,), writing=True))

    def grow(self) -> None:
        """No commit names the new region before the next one."""
        if len(self.regions) > 4:
            return
        region = RegionSpec(f"r{self.num_made}", PAGE * self.chance.randint(1, 3), 2)
        self.num_made += 1
        self._store.reserve([region])
        self.regions.append(region)
        self.slots[region.name] = 0

    def shrink(self) -> None:
        """A region goes when neither entry of the record names it any more."""
        if len(self.regions) < 2:
            return
        region = self.regions.pop(self.chance.randrange(len(self.regions)))
        del self.slots[region.name]
        for _ in range(2):
            self.commit()
        self._store.release([region.name])

    @property
    def _store(self) -> SlotStore:
        if self.store is None:
            raise RuntimeError("run() makes the store")
        return self.store

    def fill(self, region: RegionSpec, slot: int) -> None:
        at = 0
        for extent in self._store.extents(region.name, slot):
            data = b"".join(
                content(self.step, self.edition, region.name, at + page) for page in range(0, extent.num_bytes, PAGE)
            )
            with mmap.mmap(-1, extent.num_bytes) as memory:  # where the files were opened with O_DIRECT
                memory.write(data)
                os.pwrite(extent.fd, memory, extent.offset)
            at += extent.num_bytes


def content(step: int, edition: int, region: str, offset: int) -> bytes:
    """Of one page: every sector says what it is."""
    words = [struct.pack("<IIII", step, edition, int(region[1:]), offset + sector) for sector in range(0, PAGE, SECTOR)]
    return b"".join(word * (SECTOR // len(word)) for word in words)


def check(paths: list[Path], told: Told) -> str:
    """What is wrong with the files, empty if nothing is; they are closed, not removed."""
    directories = [path / "ds_fuyou" / IDENTITY.directory_name for path in paths]
    try:
        store = SlotStore.open(directories, IDENTITY)
    except FuyouError as error:
        return "" if told.states == (None,) or None in told.states else f"{told}: {error}"
    try:
        commits = store.commits()
        found = (commits[0].step, int(str(commits[0].meta["edition"]))) if commits else None
        if found not in told.states:
            return f"{told}: found {found}"
        for commit in commits if not told.writing else commits[:1]:
            wrong = _differs(store, commit.slots, commit.step, int(str(commit.meta["edition"])))
            if wrong:
                return f"{told}: commit {commit.step}: {wrong}"
        return ""
    finally:
        store.close(remove=False)


def _differs(store: SlotStore, slots: Any, step: int, edition: int) -> str:
    for region, slot in slots.items():
        at = 0
        for extent in store.extents(region, slot):
            with open(store.paths_of_fd(extent.fd), "rb") as file:
                file.seek(extent.offset)
                for _ in range(0, extent.num_bytes, PAGE):
                    if file.read(PAGE) != content(step, edition, region, at):
                        return f"{region} has other bytes at {at}"
                    at += PAGE
    return ""


# ---- kills --------------------------------------------------------------------------------------------------------

_TOLD = struct.Struct("<i?iiiiii")  # number of states, writing, and up to two states of (is there, step, edition)


def kill_one(root: Path, seed: int) -> str:
    """Forks, kills, looks; "" or what is wrong. ``root`` is empty before and after."""
    chance = random.Random(seed)
    paths = [root / name for name in "ab"[: chance.randint(1, 2)]]
    for path in paths:
        path.mkdir()
    with mmap.mmap(-1, PAGE) as shared:
        shared[: _TOLD.size * 2 + 4] = bytes(_TOLD.size * 2 + 4)
        pid = os.fork()
        if pid == 0:
            try:
                _live(paths, random.Random(seed + 1), shared)
            finally:
                os._exit(1)
        time.sleep(chance.random() ** 2 * 0.02)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        told = _unpack(shared)
    wrong = check(paths, told) if os.WIFSIGNALED(status) else "the writer ended by itself"
    if not wrong:
        _remove(root)
    return wrong


def _live(paths: list[Path], chance: random.Random, shared: mmap.mmap) -> None:
    """Two places in turn, and a number that says which one is whole: the kill may come between any two bytes."""
    number = 0

    def tell(told: Told) -> None:
        nonlocal number
        number += 1
        words = [word for state in (*told.states, None)[:2] for word in ((1, *state) if state else (0, 0, 0))]
        at = 4 + _TOLD.size * (number % 2)
        shared[at : at + _TOLD.size] = _TOLD.pack(len(told.states), told.writing, *words)
        shared[0:4] = struct.pack("<I", number)

    History(paths, chance, tell).run(1_000_000)


def _unpack(shared: mmap.mmap) -> Told:
    (number,) = struct.unpack("<I", shared[0:4])
    if number == 0:
        return Told()
    at = 4 + _TOLD.size * (number % 2)
    num_states, writing, *words = _TOLD.unpack(shared[at : at + _TOLD.size])
    states = [(words[i + 1], words[i + 2]) if words[i] else None for i in (0, 3)]
    return Told(tuple(states[:num_states]), writing)


# ---- power cuts ---------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """One system call that changed something. ``told``: what the history had told by then."""

    kind: str
    target: int
    told: Told
    offset: int = 0
    data: bytes = b""
    name: str = ""
    other: int = 0
    mode: int = 0


class Recorder:
    """Notes what ``os`` is asked to change below ``root`` while :meth:`recording`. Files and directories get numbers of
    their own: the kernel uses inodes again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[_Call] = []
        self.told = Told()
        self._numbers: dict[tuple[int, int], int] = {}
        self._next = 1
        self._real = {
            name: getattr(os, name)
            for name in (
                "open",
                "write",
                "pwrite",
                "fsync",
                "fdatasync",
                "rename",
                "unlink",
                "mkdir",
                "rmdir",
                "ftruncate",
            )
        }
        self._allocate, self._free = data_file.allocate_blocks, growing.free_blocks
        self._swap = getattr(records, "_exchange", None) or (lambda *_: False)

    def tell(self, told: Told) -> None:
        self.told = told

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self._numbers[_key(os.stat(self.root))] = 0
        for entry in self.root.iterdir():
            self._note("mkdir", 0, name=entry.name, other=self._new(os.stat(entry)), mode=0o755)
        self._note("sync", 0)
        with contextlib.ExitStack() as stack:
            for name in self._real:
                stack.enter_context(mock.patch.object(os, name, getattr(self, f"_{name}")))
            stack.enter_context(mock.patch.object(data_file, "allocate_blocks", self._allocate_blocks))
            stack.enter_context(mock.patch.object(growing, "free_blocks", self._free_blocks))
            stack.enter_context(mock.patch.object(records, "_exchange", self._exchange, create=True))
            yield

    def _note(self, kind: str, target: int | None, **rest: Any) -> None:
        if target is not None:
            self.calls.append(_Call(kind, target, self.told, **rest))

    def _new(self, found: os.stat_result) -> int:
        self._numbers[_key(found)] = self._next
        self._next += 1
        return self._next - 1

    def _of(self, fd: int) -> int | None:
        return self._numbers.get(_key(os.fstat(fd)))

    def _parent(self, name: Any, dir_fd: int | None) -> tuple[int | None, str]:
        path = Path(os.fsdecode(name))
        if dir_fd is not None and len(path.parts) == 1:
            return self._of(dir_fd), path.name
        parent = path.parent if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}") / path.parent
        return self._numbers.get(_key(os.stat(parent))), path.name

    def _open(self, name: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        is_new = flags & os.O_CREAT and not _exists(name, dir_fd)
        fd = self._real["open"](name, flags, mode, dir_fd=dir_fd)
        if is_new and flags & os.O_TMPFILE != os.O_TMPFILE:
            parent, last = self._parent(name, dir_fd)
            if parent is not None:
                self._note("create", parent, name=last, other=self._new(os.fstat(fd)), mode=mode)
        elif flags & os.O_TRUNC:
            self._note("truncate", self._of(fd))
        return int(fd)

    def _write(self, fd: int, data: Any) -> int:
        offset = os.lseek(fd, 0, os.SEEK_CUR) if self._of(fd) is not None else 0
        count = self._real["write"](fd, data)
        self._note("write", self._of(fd), offset=offset, data=bytes(data)[:count])
        return int(count)

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        count = self._real["pwrite"](fd, data, offset)
        self._note("write", self._of(fd), offset=offset, data=bytes(data)[:count])
        return int(count)

    def _fsync(self, fd: int) -> None:
        self._real["fsync"](fd)
        self._note("sync", self._of(fd))

    def _fdatasync(self, fd: int) -> None:
        self._real["fdatasync"](fd)
        self._note("sync", self._of(fd))

    def _ftruncate(self, fd: int, num_bytes: int) -> None:
        self._real["ftruncate"](fd, num_bytes)
        self._note("truncate", self._of(fd), offset=num_bytes)

    def _allocate_blocks(self, fd: int, num_bytes: int, offset: int = 0) -> None:
        self._allocate(fd, num_bytes, offset)
        self._note("extend", self._of(fd), offset=offset + num_bytes)

    def _free_blocks(self, fd: int, num_bytes: int, offset: int) -> None:
        self._free(fd, num_bytes, offset)
        self._note("write", self._of(fd), offset=offset, data=bytes(num_bytes))

    def _rename(self, old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        (source, name), (target, new_name) = self._parent(old, src_dir_fd), self._parent(new, dst_dir_fd)
        if source != target:
            raise NotImplementedError("names move within a directory here")
        self._real["rename"](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self._note("rename", source, name=name, data=new_name.encode())

    def _exchange(self, dir_fd: int, one: str, other: str) -> bool:
        exchanged = bool(self._swap(dir_fd, one, other))
        if exchanged:
            self._note("exchange", self._of(dir_fd), name=one, data=other.encode())
        return exchanged

    def _unlink(self, name: Any, *, dir_fd: int | None = None) -> None:
        parent, last = self._parent(name, dir_fd)
        self._real["unlink"](name, dir_fd=dir_fd)
        self._note("unlink", parent, name=last)

    def _rmdir(self, name: Any, *, dir_fd: int | None = None) -> None:
        parent, last = self._parent(name, dir_fd)
        self._real["rmdir"](name, dir_fd=dir_fd)
        self._note("unlink", parent, name=last)

    def _mkdir(self, name: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._real["mkdir"](name, mode, dir_fd=dir_fd)
        parent, last = self._parent(name, dir_fd)
        if parent is not None:
            self._note("mkdir", parent, name=last, other=self._new(os.stat(name, dir_fd=dir_fd)), mode=mode)


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _exists(name: Any, dir_fd: int | None) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return False
    return True


@dataclass
class _Disk:
    """What is there after a cut: bytes of files, names in directories, by number."""

    files: dict[int, bytearray] = field(default_factory=dict)
    names: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=lambda: {0: {}})
    modes: dict[int, int] = field(default_factory=dict)

    def apply(self, call: _Call, share: float, chance: random.Random) -> None:
        """``share``: of a write's sectors, those that reached the disk."""
        if call.kind in ("create", "mkdir"):
            self.names.setdefault(call.target, {})[call.name] = (call.other, call.kind == "mkdir")
            self.modes[call.other] = call.mode
        elif call.kind == "unlink":
            self.names.get(call.target, {}).pop(call.name, None)
        elif call.kind == "rename":
            names = self.names.get(call.target, {})
            if call.name in names:
                names[call.data.decode()] = names.pop(call.name)
        elif call.kind == "exchange":
            names, other = self.names.get(call.target, {}), call.data.decode()
            if call.name in names and other in names:
                names[call.name], names[other] = names[other], names[call.name]
        elif call.kind == "write":
            self._write(call, share, chance)
        elif call.kind in ("truncate", "extend") and (share == 1.0 or chance.random() < share):
            data = self.files.setdefault(call.target, bytearray())
            data.extend(bytes(max(0, call.offset - len(data))))
            if call.kind == "truncate":
                del data[call.offset :]

    def _write(self, call: _Call, share: float, chance: random.Random) -> None:
        data, begin, end = self.files.setdefault(call.target, bytearray()), call.offset, call.offset + len(call.data)
        if share == 1.0:
            data.extend(bytes(max(0, end - len(data))))
            data[begin:end] = call.data
            return
        for sector in range(begin // SECTOR, -(-end // SECTOR)) if share else ():
            if chance.random() < share:
                first, last = max(begin, sector * SECTOR), min(end, (sector + 1) * SECTOR)
                data.extend(bytes(max(0, last - len(data))))
                data[first:last] = call.data[first - begin : last - begin]

    def build(self, root: Path, number: int = 0) -> None:
        for name, (other, is_directory) in self.names.get(number, {}).items():
            if is_directory:
                (root / name).mkdir(mode=self.modes.get(other, 0o700))
                self.build(root / name, other)
            else:
                fd = os.open(root / name, os.O_WRONLY | os.O_CREAT, 0o600)
                try:
                    os.write(fd, self.files.get(other, b""))
                finally:
                    os.close(fd)


SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)  # the last is what a kill leaves
_OF_NAMES = ("create", "mkdir", "unlink", "rename", "exchange")


class PowerCuts:
    """One history, and every :meth:`cuts` of it."""

    def __init__(self, root: Path, seed: int, num_actions: int = 12) -> None:
        chance = random.Random(seed)
        self.paths = [root / name for name in "ab"[: chance.randint(1, 2)]]
        for path in self.paths:
            path.mkdir()
        self.names = [path.name for path in self.paths]
        self._recorder = Recorder(root)
        history = History(self.paths, chance, self._recorder.tell)
        with self._recorder.recording():
            history.run(num_actions)
        if history.store is not None:
            history.store.close(remove=False)
        self.calls = self._recorder.calls
        _remove(root)

    def cuts(self, root: Path, chance: random.Random) -> Iterator[str]:
        """After every call, each with every share of unsynced writes kept; "" or what is wrong. ``root`` is empty
        before and after, unless something is wrong.
        """
        for at in range(1, len(self.calls) + 1):
            told = self.calls[at].told if at < len(self.calls) else self._recorder.told
            for share in SHARES:
                self._left(at, share, chance).build(root)
                paths = [root / name for name in self.names]
                for path in paths:
                    path.mkdir(exist_ok=True)
                wrong = check(paths, told)
                if not wrong:
                    _remove(root)
                yield f"cut after {at} of {len(self.calls)}, {share} kept: {wrong}" if wrong else ""

    def _left(self, at: int, kept: float, chance: random.Random) -> _Disk:
        synced: dict[int, int] = {}
        for index, call in enumerate(self.calls[:at]):
            if call.kind == "sync":
                synced[call.target] = index
        names_until = {target: chance.randint(synced.get(target, -1), at) for target in {c.target for c in self.calls}}
        disk = _Disk()
        for index, call in enumerate(self.calls[:at]):
            is_durable = index < synced.get(call.target, -1)
            if call.kind not in _OF_NAMES:
                disk.apply(call, 1.0 if is_durable else kept, chance)
            elif is_durable or kept == 1.0 or index <= names_until[call.target]:
                disk.apply(call, 1.0, chance)
        return disk


def _remove(root: Path) -> None:
    """Everything below ``root``; faster than shutil.rmtree, which is most of a case."""
    for entry in os.scandir(root):
        if stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
            _remove(Path(entry.path))
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


def scratch() -> tempfile.TemporaryDirectory[str]:
    """In memory where there is room: what a disk does to unsynced writes is simulated, and a kill leaves them all."""
    return tempfile.TemporaryDirectory(
        prefix="fuyou-crash-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )


def sweep(seed: int, num_kills: int, num_cuts: int) -> tuple[dict[str, int], list[str]]:
    """Counts and what was wrong, at most ten of them. Cuts of one history after the other, each to its end if
    ``num_cuts`` reaches."""
    wrong: list[str] = []
    made = {"kills": 0, "power cuts": 0}
    logging.disable(logging.CRITICAL)
    try:
        with scratch() as directory:
            for number in range(seed, seed + num_kills):
                root = Path(directory) / "kill"
                root.mkdir(exist_ok=True)
                found = kill_one(root, number)
                made["kills"] += 1
                if found:
                    wrong.append(f"kill {number}: {found}")
                    root.rename(Path(directory) / f"kill{number}")
            number = seed
            while made["power cuts"] < num_cuts and len(wrong) < 10:
                root = Path(directory) / "cut"
                root.mkdir(exist_ok=True)
                history, chance = PowerCuts(root, number), random.Random(number)
                for found in itertools.islice(history.cuts(root, chance), num_cuts - made["power cuts"]):
                    made["power cuts"] += 1
                    if found:
                        wrong.append(f"power cut {number}: {found}")
                        root.rename(Path(directory) / f"cut{made['power cuts']}")
                        root.mkdir()
                number += 1
    finally:
        logging.disable(logging.NOTSET)
    return made, wrong
