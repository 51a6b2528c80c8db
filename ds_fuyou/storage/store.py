# SPDX-License-Identifier: Apache-2.0
"""The slot store: which extents of which files hold region R, slot S, and what was committed last.

It owns directories, locks, files, layout, manifest and commit record, and moves no bulk bytes: the I/O engine
does. A writer fills spare slots, then :meth:`SlotStore.commit` makes the data durable and flips the slots by
one small record. A crash at any instant leaves the last record, and with two slots the data it names.

The record has two entries, this commit's and the one's before. The older one is whole until the writer fills spare
slots again: one who does that only when every rank has made the newer commit leaves, at any instant, a commit that is
whole on all of them.
"""

from __future__ import annotations

import bisect
import errno
import logging
import os
import shlex
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_fuyou.errors import FuyouChecksumError, FuyouStateError, FuyouStorageError
from ds_fuyou.storage import ending, lifetime
from ds_fuyou.storage.directory import DATA_NAME, LOCK_NAME
from ds_fuyou.storage.growing import DataUnknownError, ManifestUnknownError, Vacant, grown, manifest_on_disk, shrunk
from ds_fuyou.storage.layout import Piece, RegionLayout, SlotChoice, choose_num_slots
from ds_fuyou.storage.probe import Probe, probe_path
from ds_fuyou.storage.records import (
    COMMIT_NAME,
    CONTENTS_NAME,
    ENGINE_NAME,
    MANIFEST_NAME,
    Manifest,
    NotDurableError,
    read_record,
    temporary_name,
    typed,
    well_formed,
    write_record,
)
from ds_fuyou.storage.store_files import (
    CreateOptions,
    StoreFiles,
    create_files,
    open_files,
    read_directory_manifest,
    told_to_keep,
)
from ds_fuyou.storage.types import DIRECTORY_FLAGS, PAGE_BYTES, CommitRecord, Extent, JsonValue, RegionSpec, RunIdentity

__all__ = [
    "CommitRecord",
    "Extent",
    "JsonValue",
    "RegionSpec",
    "RunIdentity",
    "SlotChoice",
    "SlotStore",
    "choose_num_slots",
    "commits_in",
    "contents_in",
]

logger = logging.getLogger("ds_fuyou")
_FRESH_SECS = 3600.0  # between two refreshments of the times of files


class SlotStore:
    """The open store of one rank. Thread-safe; :meth:`close` only after all I/O on its extents has ended.

    Every method but :meth:`close` and :meth:`paths_of_fd` raises :class:`FuyouStateError` once it is closed,
    and in a forked child, where it counts as closed.
    """

    def __init__(
        self, files: StoreFiles, keep: bool, commits: Sequence[CommitRecord] = (), *, recoverable: bool = False
    ) -> None:
        self._files, self._keep, self._commits = files, keep, tuple(commits)
        self._knows_record = True
        self._recoverable = recoverable
        self._because = ""
        self._is_as_found = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._failure = ""
        self._lost: set[tuple[Path, str]] = set()
        self._fresh_until = 0.0
        self._described_by: set[str] = set()
        self._regions: dict[str, RegionSpec] = {}
        self._paths = {file.fd: file.path for file in files.files}
        self._vacant: Vacant = {}
        self._extents: dict[tuple[str, int], tuple[Extent, ...]] = {}
        self._begins: dict[tuple[str, int], list[int]] = {}
        for region in files.manifest.layout.regions:
            self._add_region(region)

    def _add_region(self, region: RegionLayout) -> None:
        for slot, pieces in enumerate(region.slots):
            self._add_slot((region.spec.name, slot), pieces)
        self._regions[region.spec.name] = region.spec

    def _add_slot(self, key: tuple[str, int], pieces: Sequence[Piece]) -> None:
        begins, at = [], 0
        for piece in pieces:
            begins.append(at)
            at += piece.num_bytes
        self._begins[key] = begins
        self._extents[key] = tuple(Extent(self._files.files[p.path].fd, p.offset, p.num_bytes) for p in pieces)

    @classmethod
    def create(
        cls,
        paths: Sequence[Path],
        regions: Sequence[RegionSpec],
        identity: RunIdentity,
        *,
        weights: Sequence[float] | None = None,
        budget_bytes: int | None = None,
        keep: bool = False,
        direct: bool | None = None,
        checksum: bool = True,
        recoverable: bool = False,
        probe: Probe = probe_path,
    ) -> SlotStore:
        """Allocates everything in ``PATH/ds_fuyou/<run_id>-rank<r>/`` of every path, or raises and leaves
        nothing.

        Args:
            paths: existing directories, best one a device.
            weights: relative bandwidth of the paths; equal when None.
            budget_bytes: most bytes on storage; None for no limit but the free space.
            keep: state stays when the store is closed.
            direct: True needs O_DIRECT on every path, False does without, None takes what works.
            checksum: recorded for whoever writes chunk data; manifest and record are always checksummed.
            recoverable: what is committed is enough to go on from: it stays where the process ends other than cleanly.
            probe: looks at a path; tests give their own.

        Raises:
            FuyouConfigError: no region, a name or path twice, bad weights, or more bytes than the budget.
            FuyouStorageError: a path is missing, no directory, a symbolic link, read-only or not writable;
                too little space (needed and free bytes are named); no O_DIRECT where it was asked for.
            FuyouStateError: a directory of this run_id and rank exists.
        """
        lifetime.install()
        options = CreateOptions(weights, budget_bytes, keep, direct, checksum, probe)
        files = create_files(paths, regions, identity, options)
        store = cls(files, keep, recoverable=recoverable)
        lifetime.register_store(store)
        return store

    @classmethod
    def open(cls, directories: Sequence[Path], identity: RunIdentity | None) -> SlotStore:
        """Takes over state that was kept or left by a crash: all directories of one rank, in any order.

        It stays when the store is closed, unless ``close(remove=True)`` or after :meth:`adopt`. The run_id of
        ``identity`` is not compared; None skips the comparison.

        Raises:
            FuyouStateError: a process holds it, or it is of another model, rank or world size.
            FuyouStorageError: a directory or file is missing, changed in size or no state of this package.
            FuyouChecksumError: manifest or commit record is torn or was altered.
        """
        lifetime.install()
        files = open_files(directories, identity)
        try:
            run = files.runs[0]
            store = cls(files, True, _read_commits(run.fd, run.path, files.manifest))
        except BaseException:
            for file, run in zip(files.files, files.runs, strict=True):
                os.close(file.fd)
                run.release()
            raise
        lifetime.register_store(store)
        return store

    @property
    def directories(self) -> tuple[Path, ...]:
        """The run's directory in every path; together they are what :meth:`open` takes."""
        return tuple(run.path for run in self._files.runs)

    @property
    def record_bytes(self) -> int:
        """Allocated on storage for manifests, locks and the commit record: what is there beside the slots."""
        small = (entry for path in self.directories for entry in os.scandir(path) if entry.name != DATA_NAME)
        return sum(entry.stat().st_blocks * 512 for entry in small)

    @property
    def total_bytes(self) -> int:
        """Bytes of all regions, on all paths."""
        return self._files.manifest.layout.total_bytes

    @property
    def path_bytes(self) -> tuple[int, ...]:
        """Size of the data file on each path."""
        return self._files.manifest.layout.file_bytes

    @property
    def direct(self) -> bool:
        """Whether all files are open with O_DIRECT."""
        return not any(file.buffered_because for file in self._files.files)

    @property
    def keep(self) -> bool:
        """Whether the state stays when the store is closed: it was told to keep it, or the end is no clean one and
        there is something to recover: a step of this run.
        """
        return self._keep or bool(self._why_kept())

    def adopt(self, *, keep: bool) -> None:
        """What :meth:`open` took over is this run's from now on: it stays as if the run had created it, also after a
        kill, when others look at it; and until the run commits something of its own it stays in any case.

        Raises:
            FuyouStorageError: that cannot be written. A disk that is full is told and changes nothing for this run.
        """
        with self._lock:
            try:
                self._files = told_to_keep(self._files, keep)
            except FuyouStorageError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                logger.warning("%s: after a kill keep_state is what the run before said", error)
            self._keep, self._recoverable, self._is_as_found = keep, True, True

    def keep_because(self, why: str) -> None:
        """The run has failed: the state stays when the store is closed, if there is something to recover."""
        self._because = self._because or why

    @property
    def has_failed(self) -> bool:
        """The run has, or a commit."""
        return bool(self._because or self._failure)

    def _why_kept(self) -> str:
        last = self._newest
        if last is None or last.lacks_states or not last.intact or last.step == 0:
            return ""
        is_whole = self._recoverable and not self._lost
        if not is_whole:
            return ""
        unclean = self._because or self._failure or ending.unclean_end()
        return unclean or ("the run made no step" if self._is_as_found else "")

    def _tell_kept(self, why: str) -> None:
        run, identity = self._files.runs[0], self._files.manifest.identity
        parent, mine = shlex.quote(str(run.path.parent)), shlex.quote(run.path.name)
        every = mine if identity.world_size == 1 else f"{shlex.quote(identity.run_id)}-rank*"
        logger.warning(
            '%s: the state of the last step stays in %s. A run with "resume": "auto" in its fuyou block goes on '
            "from it (but for the Trainer's). A checkpoint of it: fuyou recover %s/%s --checkpoint DIR, for the "
            "Trainer OUTPUT_DIR/checkpoint-N --like an older one; it is removed with: fuyou clean %s",
            why,
            run.path,
            parent,
            every,
            " ".join(shlex.quote(str(each.path.parent.parent)) for each in self._files.runs),
        )

    @property
    def checksum(self) -> bool:
        """Whether chunk data is meant to carry checksums."""
        return self._files.manifest.checksum

    @property
    def started(self) -> float:
        """When it was created: seconds since the epoch."""
        return self._files.manifest.started

    @property
    def regions(self) -> Mapping[str, RegionSpec]:
        """All regions by name."""
        return {region.spec.name: region.spec for region in self._files.manifest.layout.regions}

    def paths_of_fd(self, fd: int) -> Path:
        """The data file behind a descriptor, also after closing; for error messages."""
        if fd not in self._paths:
            raise FuyouStateError(f"descriptor {fd} is none of this store's, which has {sorted(self._paths)}")
        return self._paths[fd]

    def extents(self, region: str, slot: int) -> tuple[Extent, ...]:
        """Where the slot lies, in logical order; together the region's ``num_bytes``. ValueError if it is
        unknown.
        """
        self._check_open()
        return self._extents[self._key(region, slot)]

    def range_extents(self, region: str, slot: int, begin: int, end: int) -> tuple[Extent, ...]:
        """Where bytes [begin, end) of the slot lie, in logical order.

        Raises ValueError unless both are multiples of 4096 and lie within the region.
        """
        self._check_open()
        key = self._key(region, slot)
        num_bytes = self._regions[region].num_bytes
        if not 0 <= begin <= end <= num_bytes or begin % PAGE_BYTES or end % PAGE_BYTES:
            raise ValueError(
                f"a range of {region} must be multiples of {PAGE_BYTES} in [0, {num_bytes}], found [{begin}, {end})"
            )
        begins, whole = self._begins[key], self._extents[key]
        found = []
        index = bisect.bisect_right(begins, begin) - 1
        while begin < end:
            extent, skip = whole[index], begin - begins[index]
            size = min(extent.num_bytes - skip, end - begin)
            found.append(Extent(extent.fd, extent.offset + skip, size))
            begin += size
            index += 1
        return tuple(found)

    def reserve(self, regions: Sequence[RegionSpec], budget_bytes: int | None = None) -> None:
        """Adds regions, durably, all or none. See [Note: the order of growing and shrinking] in growing.py.

        ``budget_bytes``: the most for all regions.

        Raises:
            FuyouStorageError: no room, or it could not be made durable; nothing changed. Where that was a data file,
                nothing more can be committed.
            ValueError: there is a region of this name.
        """
        with self._lock:
            self._check_open()
            self._follow_layout()
            twice = sorted(region.name for region in regions if region.name in self._regions)
            if twice:
                raise ValueError(f"regions must be new, these are there: {', '.join(twice[:5])}")
            with self._refusing_commits():
                self._files = grown(self._files, regions, self._vacant, budget_bytes)
            self._follow_layout()

    def release(self, names: Iterable[str]) -> None:
        """Gives regions back, durably, and their blocks to the filesystem; no commit may name them, nor I/O be in
        flight there.

        Raises:
            FuyouStorageError: it could not be made durable; nothing changed.
        """
        with self._lock:
            self._check_open()
            self._follow_layout()
            gone = {name for name in names if name in self._regions}
            if not gone:
                return
            with self._refusing_commits():
                self._files = shrunk(self._files, gone, self._vacant)
            self._follow_layout()

    def _follow_layout(self) -> None:
        """What is known by region is that of the manifest's, also where Ctrl-C came between the two."""
        there = {region.spec.name: region for region in self._files.manifest.layout.regions}
        for name in self._regions.keys() - there:
            for slot in range(self._regions[name].num_slots):
                for known in (self._extents, self._begins):
                    known.pop((name, slot), None)
            del self._regions[name]
        for name in there.keys() - self._regions:
            self._add_region(there[name])

    @contextmanager
    def _refusing_commits(self) -> Iterator[None]:
        """Once it is not known what a crash would find. After Ctrl-C that is looked up."""
        try:
            yield
        except (DataUnknownError, ManifestUnknownError) as error:
            self._failure = str(error)
            raise
        except (KeyboardInterrupt, SystemExit):
            self._vacant.clear()  # some places may be taken
            try:
                self._files = manifest_on_disk(self._files)
            except FuyouStorageError as error:
                self._failure = str(error)
            self._follow_layout()
            raise

    def commit(self, step: int, slots: Mapping[str, int], meta: Mapping[str, JsonValue]) -> None:
        """Makes all data durable, then records ``slots`` as the state of ``step`` in one atomic step.

        Names in ``slots`` are regions, or names of the caller's own for what it keeps in several regions.

        Raises:
            FuyouStorageError: data or record could not be made durable; later commits are refused.
            FuyouStateError: closed, or an earlier commit failed.
            ValueError: a slot that its region does not have, or a negative step.
        """
        self._check_slots(step, slots)
        with self._lock:
            self._check_open()
            self.sync_data()
            self._look_after_files()
            new = CommitRecord(step, dict(slots), dict(meta), _is_intact(slots, self._regions))
            older = [old for old in self._commits[:1] if old.step < step]
            if new.lacks_states or any(old.lacks_states for old in older):
                older = []  # what the older one names is not, or will not be, where it says
            self._write_commits((new, *older))
            self._is_as_found = False

    def _write_commits(self, commits: tuple[CommitRecord, ...]) -> None:
        entries: list[JsonValue] = [{"step": one.step, "slots": one.slots, "meta": one.meta} for one in commits]
        payload: dict[str, JsonValue] = {"store_id": self._files.manifest.store_id, "entries": entries}
        known, self._knows_record = self._knows_record, False  # Ctrl-C may come when the record has its name
        try:
            self._record(COMMIT_NAME, payload, keeps_room=True)
        except FuyouStorageError as error:
            self._failure = str(error)
            if isinstance(error, NotDurableError):
                self._commits = commits  # what the next run finds, unless the power goes
            else:
                self._knows_record = known
            raise
        self._commits = commits
        self._knows_record = True

    def go_back_to(self, commit: CommitRecord) -> None:
        """Makes one of :meth:`commits` the only one, durably: the slots of a newer one may be filled again.

        Raises:
            FuyouStorageError: it could not be made durable; nothing more can be committed.
        """
        with self._lock:
            self._check_open()
            if commit not in self._commits:
                raise ValueError(f"commit {commit.step} is none of this store's")
            self._write_commits((commit,))

    def amend(self, meta: Mapping[str, JsonValue]) -> None:
        """Replaces parts of what :meth:`commits` say, durably.

        Raises:
            FuyouStorageError: it could not be made durable; nothing more can be committed.
        """
        with self._lock:
            self._check_open()
            self._write_commits(tuple(replace(commit, meta={**commit.meta, **meta}) for commit in self._commits))

    def withdraw(self) -> None:
        """Takes all commits back, durably: slots that they name are about to be overwritten.

        Raises:
            FuyouStorageError: nothing changed, or (when only the directory's fsync failed) it may not be durable.
        """
        with self._lock:
            self._check_open()
            self._write_commits(())

    def describe(self, contents: Mapping[str, JsonValue]) -> None:
        """Leaves a description of what the regions hold, for :meth:`contents` of whoever opens the state later.

        Raises:
            FuyouStorageError: it could not be made durable.
        """
        self._describe(CONTENTS_NAME, contents)

    def describe_engine(self, outline: Mapping[str, JsonValue]) -> None:
        """As :meth:`describe`: what a checkpoint says of the engine beside its states, for :meth:`engine_outline`."""
        self._describe(ENGINE_NAME, outline)

    def _describe(self, name: str, what: Mapping[str, JsonValue]) -> None:
        self._check_open()
        self._record(name, what)
        self._described_by.add(name)

    def _record(self, name: str, payload: Mapping[str, JsonValue], *, keeps_room: bool = False) -> None:
        """See :func:`write_record`. Not where somebody deletes the whole directory, now or before, as
        :meth:`_look_after_files` tells: what goes on has its files open.
        """
        run = self._files.runs[0]
        for tries_left in (2, 1, 0):  # whoever deletes may take what was written before it has its name
            try:
                write_record(run.fd, run.path, name, payload, keeps_room=keeps_room)
                return
            except FuyouStorageError as error:
                if not run.is_there():
                    return
                if error.errno != errno.ENOENT or not tries_left:
                    raise

    def contents(self) -> dict[str, Any]:
        """What :meth:`describe` left.

        Raises:
            FuyouStorageError: nothing, or it cannot be read.
            FuyouChecksumError: it is torn or was altered.
        """
        found = self._described(CONTENTS_NAME)
        if found is None:
            message = "nothing says what the state holds: the run ended while it was made"
            raise FuyouStorageError(errno.ENOENT, message, str(self._files.runs[0].path / CONTENTS_NAME))
        return found

    def engine_outline(self) -> dict[str, Any] | None:
        """What :meth:`describe_engine` left, None if nothing; raises as :meth:`contents`."""
        return self._described(ENGINE_NAME)

    def _described(self, name: str) -> dict[str, Any] | None:
        self._check_open()
        run = self._files.runs[0]
        found = read_record(run.fd, run.path, name)
        if found is not None:
            self._described_by.add(name)
        return found

    def last_commit(self) -> CommitRecord | None:
        """What :meth:`commit` recorded last, in this process or before; None when there is nothing, or it was
        withdrawn.
        """
        self._check_open()
        return self._newest

    @property
    def _newest(self) -> CommitRecord | None:
        """As :meth:`last_commit`, also of a closed store."""
        return self._commits[0] if self._commits else None

    def commits(self) -> tuple[CommitRecord, ...]:
        """The last commit and the one before it, as far as they stand. The older one's slots may be being filled."""
        self._check_open()
        return self._commits

    @property
    def knows_record(self) -> bool:
        """Whether :meth:`commits` is what the record says, durably. Not so when its writing was interrupted or may not
        be durable, until the next one is written. Waits while one is.
        """
        with self._lock:
            return self._knows_record

    def close(self, remove: bool | None = None) -> None:
        """Closes the files and removes them with their directory, or lets them stay. Idempotent.

        ``remove`` None removes unless the state is kept, and tells how to go on from a state that stays although it was
        not told to. What cannot be removed is logged. Does nothing to
        the files in a forked child.
        """
        if os.getpid() != self._pid:
            self.abandon()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        why = self._why_kept() if remove is None and not self._keep else ""
        for file in self._files.files:
            os.close(file.fd)
        interrupts: list[BaseException] = []
        goes = remove if remove is not None else not (self._keep or why)
        if goes:  # first of all: directories without it are no state whose first disk is gone
            for name in (temporary_name(COMMIT_NAME), COMMIT_NAME):
                with suppress(OSError):
                    os.unlink(name, dir_fd=self._files.runs[0].fd)
        for run in reversed(self._files.runs):
            try:
                if goes:
                    run.discard()
                else:
                    run.release()
            except BaseException as error:  # Ctrl-C or SIGTERM: the other directories go first
                interrupts.append(error)
        lifetime.forget_store(self)
        if why:
            self._tell_kept(why)
        if interrupts:
            raise interrupts[0]

    def abandon(self) -> None:
        """In a forked child: closes its copies of the descriptors; files and locks stay the parent's."""
        if self._closed:
            return
        self._closed = True
        self._lock = threading.Lock()  # a thread that is not in the child may have held it
        for file in self._files.files:
            os.close(file.fd)
        for run in self._files.runs:
            run.abandon()

    @property
    def may_commit(self) -> bool:
        """False after a failure behind which nothing more can be committed."""
        return not self._failure

    def require_commits(self) -> None:
        """Raises FuyouStateError where :attr:`may_commit` is false."""
        if self._failure:
            raise FuyouStateError(f"nothing more can be committed after a failure: {self._failure}")

    def sync_data(self) -> None:
        """All that was written to the files is durable. Raises FuyouStorageError: then nothing more is committed."""
        self.require_commits()
        for file in self._files.files:
            try:
                os.fdatasync(file.fd)
            except OSError as error:
                message = f"making data durable failed{self._what_stands()}"
                failure = FuyouStorageError(error.errno or errno.EIO, message, str(file.path))
                self._failure = str(failure)
                raise failure from error

    def _look_after_files(self) -> None:
        """Clean-ups by age take files that nobody touches: their times are kept fresh, and what is gone is told."""
        is_due = time.monotonic() >= self._fresh_until
        for run, file in zip(self._files.runs, self._files.files, strict=True):
            names = [
                MANIFEST_NAME,
                LOCK_NAME,
                DATA_NAME,
                *(sorted(self._described_by) if run is self._files.runs[0] else ()),
            ]
            lost = [name for name in run.missing(names, file.fd, refresh=is_due) if (run.path, name) not in self._lost]
            self._lost.update((run.path, name) for name in lost)
            if lost:
                logger.error(
                    "%s: somebody deleted %s. Training goes on, but no run can go on from these state files, and no "
                    "weights can be recovered: save a checkpoint. Clean-ups of old files must leave out ds_fuyou",
                    run.path,
                    " and ".join(lost),
                )
        if is_due:
            self._fresh_until = time.monotonic() + _FRESH_SECS

    def _what_stands(self) -> str:
        """For messages: the committed state, where one is on storage and nothing was written over it."""
        last = self._newest
        if last is None or not last.intact:
            return ""
        return f"; the state of commit {last.step} was not overwritten"

    def _check_open(self) -> None:
        if self._closed:
            raise FuyouStateError(f"the store in {self._files.runs[0].path} must be open; it is closed in this process")

    def _key(self, region: str, slot: int) -> tuple[str, int]:
        if (region, slot) not in self._extents:
            known = self._regions.get(region)
            found = f"it has {known.num_slots} slots" if known else f"it is none of the {len(self._regions)} regions"
            raise ValueError(f"slot {slot} of region {region} must exist; {found}")
        return region, slot

    def _check_slots(self, step: int, slots: Mapping[str, int]) -> None:
        for name, slot in slots.items():
            if not 0 <= slot < _num_slots(name, self._regions):
                raise ValueError(f"the slot of {name} must exist, found {slot}")
        if step < 0:
            raise ValueError(f"the step of a commit must not be negative, found {step}")


def commits_in(directory: Path) -> list[CommitRecord]:
    """Of a store's first directory, which nobody need hold: what :meth:`SlotStore.commits` would give.

    Raises:
        OSError: it cannot be read, is no state of this package, torn, or of another store.
    """
    manifest = read_directory_manifest(directory)
    fd = os.open(directory, DIRECTORY_FLAGS)
    try:
        return _read_commits(fd, directory, manifest)
    finally:
        os.close(fd)


def contents_in(directory: Path) -> dict[str, Any] | None:
    """As :func:`commits_in`: what :meth:`SlotStore.contents` would give; None if its run ended before that."""
    fd = os.open(directory, DIRECTORY_FLAGS)
    try:
        return read_record(fd, directory, CONTENTS_NAME)
    finally:
        os.close(fd)


def _read_commits(dir_fd: int, directory: Path, manifest: Manifest) -> list[CommitRecord]:
    """What the record says, newest first. One of format 1 has one entry, which is the payload itself."""
    payload = read_record(dir_fd, directory, COMMIT_NAME)
    if payload is None:
        _require_none_before(dir_fd, directory)
        return []
    with well_formed(directory / COMMIT_NAME):
        store_id = typed(payload["store_id"], str)
        regions = {region.spec.name: region.spec for region in manifest.layout.regions}
        commits = [_commit_of(entry, regions) for entry in typed(payload.get("entries", [payload]), list)]
    if store_id != manifest.store_id:
        message = f"{COMMIT_NAME} is of another store than the manifest; start again from the last checkpoint"
        raise FuyouChecksumError(errno.EBADMSG, message, str(directory / COMMIT_NAME))
    return commits


def _require_none_before(dir_fd: int, directory: Path) -> None:
    """Without a record no step was made: unless the one before lies beside it, then somebody deleted the last one."""
    try:
        before = read_record(dir_fd, directory, COMMIT_NAME, is_before=True)
    except FuyouStorageError:
        return  # room for the first record, or a part of it
    entries = before.get("entries") if before else None
    if isinstance(entries, list) and any(isinstance(entry, dict) and entry.get("step") for entry in entries):
        message = (
            f"{COMMIT_NAME} is missing, and the record of an earlier step is there; start from the last checkpoint"
        )
        raise FuyouStorageError(errno.ENOENT, message, str(directory / COMMIT_NAME))


def _commit_of(entry: Mapping[str, Any], regions: Mapping[str, RegionSpec]) -> CommitRecord:
    step, slots, meta = typed(entry["step"], int), typed(entry["slots"], dict), typed(entry["meta"], dict)
    for name, slot in slots.items():
        if not 0 <= typed(slot, int) < _num_slots(name, regions):
            raise ValueError(f"{name[:60]} has no slot {slot}")
    if step < 0:
        raise ValueError(f"step {step}")
    return CommitRecord(step, slots, meta, _is_intact(slots, regions))


def _is_intact(slots: Mapping[str, int], regions: Mapping[str, RegionSpec]) -> bool:
    """Whether no later step that is not committed writes over them."""
    return all(_num_slots(name, regions) >= 2 for name in slots)


def _num_slots(name: str, regions: Mapping[str, RegionSpec]) -> int:
    """Names that are no region have as many as the region with most."""
    return regions[name].num_slots if name in regions else max((r.num_slots for r in regions.values()), default=2)
