# SPDX-License-Identifier: Apache-2.0
"""The files of a store: created all or nothing, or those of an earlier run opened."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ds_fuyou.errors import FuyouConfigError, FuyouStateError, FuyouStorageError
from ds_fuyou.storage.data_file import DataFile, create_data_file, open_data_file
from ds_fuyou.storage.directory import ROOT_NAME, RunDirectory, StateRoot, is_run_name
from ds_fuyou.storage.layout import (
    RESERVE_BYTES,
    RESERVE_SHARE,
    UNIT_BYTES,
    PathShare,
    StoreLayout,
    device_capacities,
    stripe,
)
from ds_fuyou.storage.probe import LOCAL_FILESYSTEMS, PathFacts, Probe, open_path, probe_path
from ds_fuyou.storage.records import Manifest, ProcessMark, read_manifest, write_manifest
from ds_fuyou.storage.types import DIRECTORY_FLAGS, RegionSpec, RunIdentity

__all__ = ["CreateOptions", "StoreFiles", "create_files", "open_files", "read_directory_manifest", "told_to_keep"]

logger = logging.getLogger("ds_fuyou")


@dataclass(frozen=True)
class CreateOptions:
    """The choices of :meth:`SlotStore.create`, documented there."""

    weights: Sequence[float] | None = None
    budget_bytes: int | None = None
    keep: bool = False
    direct: bool | None = None
    checksum: bool = True
    probe: Probe = probe_path


@dataclass(frozen=True)
class StoreFiles:
    """Everything open of one store; ``runs`` and ``files`` by path number, ``manifest`` that of path 0."""

    manifest: Manifest
    runs: tuple[RunDirectory, ...]
    files: tuple[DataFile, ...]


@dataclass
class _Pending:
    """What exists so far in one path; the run directory owns the root once it is there."""

    root: StateRoot
    run: RunDirectory | None = None
    file: DataFile | None = None

    def undo(self) -> None:
        if self.file is not None:
            os.close(self.file.fd)
        if self.run is not None:
            self.run.discard()
        else:
            self.root.close(drop_if_empty=True)

    def let_go(self) -> None:
        if self.file is not None:
            os.close(self.file.fd)
        if self.run is not None:
            self.run.release()
        else:
            self.root.close(drop_if_empty=False)


def create_files(
    paths: Sequence[Path], regions: Sequence[RegionSpec], identity: RunIdentity, options: CreateOptions
) -> StoreFiles:
    """Creates, locks and allocates everything, or leaves nothing. Raises as :meth:`SlotStore.create` says."""
    paths = [Path(path).absolute() for path in paths]
    _validate(paths, regions, options)
    for path in paths:
        _warn_of_filesystem(path, options.probe(path))
    with contextlib.ExitStack() as undo:
        pending = _lock_roots(paths, undo)
        facts = [options.probe(path) for path in paths]  # again: nobody else allocates now
        layout = _plan(paths, regions, facts, options)
        for fact, item, num_bytes in zip(facts, pending, layout.file_bytes, strict=True):
            item.run = RunDirectory.create(item.root, identity.directory_name)
            try:
                item.file = create_data_file(item.run, num_bytes, options.direct, _no_direct(fact))
            except FuyouStorageError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                message = f"preallocation failed: {_needed_and_free(paths, layout.file_bytes, facts)}"
                raise FuyouStorageError(error.errno, message, error.filename) from error
        runs = tuple(item.run for item in pending if item.run is not None)
        files = tuple(item.file for item in pending if item.file is not None)
        manifest = Manifest(
            store_id=secrets.token_hex(16),
            index=0,
            directories=tuple(str(run.path) for run in runs),
            identity=identity,
            process=ProcessMark.of_this_process(),
            started=time.time(),
            keep=options.keep,
            checksum=options.checksum,
            layout=layout,
        )
        for index, run in enumerate(runs):
            write_manifest(run.fd, run.path, replace(manifest, index=index))
            run.root.sync()
        undo.pop_all()
    for run in runs:
        run.root.unlock()
    _tell_buffered(files)
    return StoreFiles(manifest, runs, files)


def open_files(directories: Sequence[Path], identity: RunIdentity | None) -> StoreFiles:
    """Opens and locks all directories of one store, in any order. Raises as :meth:`SlotStore.open` says."""
    if not directories:
        raise FuyouConfigError("at least one state directory must be named")
    with contextlib.ExitStack() as undo:
        found: list[tuple[Manifest, _Pending, RunDirectory]] = []
        for directory in sorted({Path(os.path.abspath(directory)) for directory in directories}):
            item = _Pending(_open_root(directory))
            undo.callback(item.let_go)
            item.run = RunDirectory.reopen(item.root, directory.name)
            item.root.unlock()
            found.append((_checked_manifest(item.run, identity), item, item.run))
        found.sort(key=lambda entry: entry[0].index)
        first = found[0][0]
        _check_complete([entry[0] for entry in found])
        for (_, item, run), num_bytes in zip(found, first.layout.file_bytes, strict=True):
            fact = probe_path(run.root.path.parent)
            item.file = open_data_file(run, num_bytes, _no_direct(fact))
        runs = tuple(run for _, _, run in found)
        files = tuple(item.file for _, item, _ in found if item.file is not None)
        undo.pop_all()
    _tell_buffered(files)
    return StoreFiles(first, runs, files)


def told_to_keep(files: StoreFiles, keep: bool) -> StoreFiles:
    """Every manifest says that the state stays, or that it need not, durably.

    Raises:
        FuyouStorageError: one cannot be read or written.
    """
    for run in files.runs:
        manifest = read_manifest(run.fd, run.path)
        if manifest is not None and manifest.keep != keep:
            write_manifest(run.fd, run.path, replace(manifest, keep=keep))
    return replace(files, manifest=replace(files.manifest, keep=keep))


def read_directory_manifest(directory: Path) -> Manifest:
    """The manifest of a state directory, without taking the directory over.

    Raises:
        FuyouStorageError: it is missing, no state of this package, or cannot be read.
        FuyouChecksumError: it is torn or was altered.
    """
    directory = Path(os.path.abspath(directory))
    _open_root(directory).close(drop_if_empty=False)
    try:
        fd = os.open(directory, DIRECTORY_FLAGS)
    except OSError as error:
        message = "the state directory must exist and be readable; check the path"
        raise FuyouStorageError(error.errno or errno.EIO, message, str(directory)) from error
    try:
        manifest = read_manifest(fd, directory)
    finally:
        os.close(fd)
    if manifest is None:
        message = "there is no manifest: the run ended while this was made; remove it with `fuyou clean`"
        raise FuyouStorageError(errno.ENOENT, message, str(directory))
    return manifest


def _validate(paths: Sequence[Path], regions: Sequence[RegionSpec], options: CreateOptions) -> None:
    if not paths or not regions:
        raise FuyouConfigError(f"paths and regions must not be empty, found {len(paths)} and {len(regions)}")
    if options.weights is not None and len(options.weights) != len(paths):
        raise FuyouConfigError(f"there must be one weight a path, found {len(options.weights)} for {len(paths)} paths")
    names = [region.name for region in regions]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise FuyouConfigError(f"region names must be unique, found twice: {', '.join(twice)}")
    total = sum(region.num_bytes * region.num_slots for region in regions)
    if options.budget_bytes is not None and total > options.budget_bytes:
        raise FuyouConfigError(
            f"the state needs {total} bytes on storage, nvme_budget_bytes is {options.budget_bytes}; raise "
            f"it, or keep more tensor classes in host memory"
        )


def _lock_roots(paths: Sequence[Path], undo: contextlib.ExitStack) -> list[_Pending]:
    """Locks ``ds_fuyou`` in every path, in one order for all processes so that none waits in a circle."""
    keys = []
    for path in paths:
        fd = open_path(path)
        found = os.fstat(fd)
        keys.append((found.st_dev, found.st_ino))
        os.close(fd)
    if len(set(keys)) != len(keys):
        raise FuyouConfigError(f"nvme_path must name every directory once, found: {', '.join(map(str, paths))}")
    pending: dict[tuple[int, int], _Pending] = {}
    for key, path in sorted(zip(keys, paths, strict=True)):
        root = StateRoot.open(path, create=True)
        if root is None:
            raise FuyouStorageError(errno.ENOENT, "the nvme_path vanished; create it again", str(path))
        pending[key] = _Pending(root)
        undo.callback(pending[key].undo)
    return [pending[key] for key in keys]


def _plan(
    paths: Sequence[Path], regions: Sequence[RegionSpec], facts: Sequence[PathFacts], options: CreateOptions
) -> StoreLayout:
    capacities = device_capacities(facts)
    weights = options.weights if options.weights is not None else [1.0] * len(paths)
    total = sum(region.num_bytes * region.num_slots for region in regions)
    if total > sum(capacities.values()):
        free = ", ".join(f"{path}: {fact.free_bytes} free" for path, fact in zip(paths, facts, strict=True))
        message = (
            f"the state needs {total} bytes on storage, {sum(capacities.values())} can be used ({free}, of which "
            f"{RESERVE_BYTES} of each disk stay so); free space, add an nvme_path, or keep more tensor classes in host "
            f"memory"
        )
        raise FuyouStorageError(errno.ENOSPC, message, str(paths[0]))
    shares = [PathShare(fact.device, weight) for fact, weight in zip(facts, weights, strict=True)]
    roomy = device_capacities(facts, RESERVE_SHARE)
    layout = stripe(regions, shares, roomy if total <= sum(roomy.values()) else capacities)
    _tell_shares(paths, weights, layout)
    return layout


def _tell_shares(paths: Sequence[Path], weights: Sequence[float], layout: StoreLayout) -> None:
    """Where a device is too small for its share the others take it, and the bound of the step is another one."""
    total = layout.total_bytes
    wanted = [weight / sum(weights) * total for weight in weights]
    short = [
        f"{path} takes {found} bytes of the state instead of {want:.0f}"
        for path, found, want in zip(paths, layout.file_bytes, wanted, strict=True)
        if found < 0.9 * want - UNIT_BYTES
    ]
    if short:
        logger.warning(
            "%s: it has no room for its share, the others take the rest and do more of the work; free space there, or "
            "set fuyou.plan.shares",
            "; ".join(short),
        )


def _needed_and_free(paths: Sequence[Path], needed: Sequence[int], facts: Sequence[PathFacts]) -> str:
    lines = [
        f"{path} needs {num_bytes} bytes, {fact.free_bytes} are free"
        for path, num_bytes, fact in zip(paths, needed, facts, strict=True)
    ]
    return "; ".join(lines) + "; free space, raise the quota or the limit of a file's size, or add an nvme_path"


def _open_root(directory: Path) -> StateRoot:
    where = str(directory)
    if directory.parent.name != ROOT_NAME or not is_run_name(directory.name):
        message = f"a state directory must be PATH/{ROOT_NAME}/RUN-rankN; `fuyou clean --dry-run PATH` lists them"
        raise FuyouStorageError(errno.EINVAL, message, where)
    root = StateRoot.open(directory.parent.parent, create=False)
    if root is None:
        raise FuyouStorageError(errno.ENOENT, "the state directory must exist; check the path", where)
    return root


def _checked_manifest(run: RunDirectory, identity: RunIdentity | None) -> Manifest:
    manifest = read_manifest(run.fd, run.path)
    if manifest is None:
        message = "there is no manifest: the run ended while this was made; remove it with `fuyou clean`"
        raise FuyouStorageError(errno.ENOENT, message, str(run.path))
    mismatch = identity.mismatch(manifest.identity) if identity is not None else ""
    if mismatch:
        raise FuyouStateError(
            f"{run.path} must hold the state of this model, rank and world size, it has {mismatch}; name the "
            f"state of this run or start without it"
        )
    return manifest


def _check_complete(manifests: Sequence[Manifest]) -> None:
    """All directories of one store, each once. Raises :class:`FuyouStorageError` naming what is missing."""
    first = manifests[0]
    if any(manifest.store_id != first.store_id for manifest in manifests):
        raise FuyouStorageError(errno.EINVAL, "the state directories must be of one run", first.directories[0])
    missing = set(range(len(first.directories))) - {manifest.index for manifest in manifests}
    if missing or len(manifests) != len(first.directories):
        names = ", ".join(first.directories[index] for index in sorted(missing))
        message = f"all {len(first.directories)} directories of the state must be named; missing: {names or 'none'}"
        raise FuyouStorageError(errno.EINVAL, message, first.directories[0])


def _no_direct(fact: PathFacts) -> str:
    if fact.is_tmpfs:
        return f"{fact.filesystem} is host memory"
    return "" if fact.supports_direct else f"{fact.filesystem} does not support O_DIRECT"


def _warn_of_filesystem(path: Path, fact: PathFacts) -> None:
    if fact.filesystem not in LOCAL_FILESYSTEMS:
        logger.warning(
            "%s is on a network file system, or an unknown one (%s), on which this is not tested: every step reads and "
            "writes all states; name a directory on a disk of this machine",
            path,
            fact.filesystem,
        )
    if fact.is_tmpfs:
        logger.warning(
            "%s is on %s: the state takes host memory, which it is meant to save; name a directory on a disk",
            path,
            fact.filesystem,
        )


def _tell_buffered(files: Sequence[DataFile]) -> None:
    for file in files:
        if file.buffered_because:
            logger.info("%s is not opened with O_DIRECT: %s", file.path, file.buffered_because)
