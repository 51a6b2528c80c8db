# SPDX-License-Identifier: Apache-2.0
"""Regions that come and go while the store is in use.

[Note: the order of growing and shrinking]
The manifest in the first directory is the one that counts. Files grow before it names what is new, so it never names
bytes that are not there; a run that is killed in between leaves files longer than it says, which is no fault. A region
goes from the manifest, durably, before its blocks do. The caller sees to it that no commit names a region that goes,
and that none names one that comes before it is there. A manifest that may not be durable is replaced by the one before;
where that fails, too, nobody knows which one a crash would leave, and nothing may be committed any more. Nor may it
where a longer file could not be made durable: what fails may be data that the next commit names, and no later call says
so again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.data_file import SyncError, free_blocks, preallocate, sync_errors, what_gives_room
from ds_fuyou.storage.layout import PathShare, Piece, RegionLayout, StoreLayout, device_capacities, stripe
from ds_fuyou.storage.probe import probe_path
from ds_fuyou.storage.records import NotDurableError, read_manifest, write_manifest
from ds_fuyou.storage.store_files import StoreFiles
from ds_fuyou.storage.types import RegionSpec

__all__ = ["DataUnknownError", "ManifestUnknownError", "Vacant", "grown", "manifest_on_disk", "shrunk"]

logger = logging.getLogger("ds_fuyou")

Vacant = dict[tuple[int, int], list[tuple[tuple[Piece, ...], ...]]]
"""Slots without a region, their blocks freed, by (bytes, slots): space in files that a region of this size takes."""


class DataUnknownError(FuyouStorageError):
    """What was written to a file, before it was to grow or then, may not be durable."""


class ManifestUnknownError(FuyouStorageError):
    """It could not be written, nor the one before be put back."""


def grown(files: StoreFiles, regions: Sequence[RegionSpec], vacant: Vacant, budget_bytes: int | None) -> StoreFiles:
    """With ``regions``, durably: in vacant places, which are taken out of ``vacant``, or at the ends of the files.

    Raises:
        FuyouStorageError: no room (needed and free bytes are named), or a file or the manifest cannot be written.
            Nothing changed.
        DataUnknownError: nothing changed, either.
        ManifestUnknownError: what is new stays in the files.
    """
    layout = files.manifest.layout
    needed = sum(region.num_bytes * region.num_slots for region in regions)
    if budget_bytes is not None and layout.total_bytes + needed > budget_bytes:
        message = (
            f"{needed} bytes beside {layout.total_bytes} are more than {budget_bytes}, which may be used: "
            "nvme_budget_bytes, or what is free, without a part for others and for swapped activations"
        )
        raise FuyouStorageError(errno.ENOSPC, message, str(files.files[0].path))
    facts = [probe_path(run.root.path.parent) for run in files.runs]
    capacities = device_capacities(facts)
    if needed > sum(capacities.values()):
        message = f"{needed} more bytes are needed, {sum(capacities.values())} can be used; free space"
        raise FuyouStorageError(errno.ENOSPC, message, str(files.files[0].path))
    at_end, placed = [], []
    inside: list[RegionLayout] = []
    begins = layout.file_bytes

    def take_back() -> None:
        _free(files, inside)
        for file, size in zip(files.files, begins, strict=True):
            with contextlib.suppress(OSError):
                os.ftruncate(file.fd, size)
        for one in inside:
            vacant.setdefault((one.spec.num_bytes, one.spec.num_slots), []).append(one.slots)

    try:
        for region in regions:
            places = vacant.get((region.num_bytes, region.num_slots))
            if places:
                inside.append(RegionLayout(region, places.pop()))
            else:
                at_end.append(region)
        # Shares as they were when the store was made.
        shares = [PathShare(fact.device, max(1, size)) for fact, size in zip(facts, layout.file_bytes, strict=True)]
        added = stripe(at_end, shares, capacities)
        for one in added.regions:
            moved = (tuple(replace(p, offset=p.offset + begins[p.path]) for p in pieces) for pieces in one.slots)
            placed.append(RegionLayout(one.spec, tuple(moved)))
        sizes = tuple(begin + more for begin, more in zip(begins, added.file_bytes, strict=True))
        runs = _runs([*inside, *placed])
        for file in [files.files[path] for path in sorted({path for path, _, _ in runs})]:
            try:
                for begin, num_bytes in [run[1:] for run in runs if files.files[run[0]] is file]:
                    preallocate(file.fd, num_bytes, begin)
                with sync_errors():
                    os.fdatasync(file.fd)  # how long it is
            except SyncError as error:
                message = "making data durable failed while a file grew"
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    message += f"; {what_gives_room(error)}"
                raise DataUnknownError(error.errno or errno.EIO, message, str(file.path)) from error
            except OSError as error:
                message = f"{needed} more bytes cannot be allocated; {what_gives_room(error)}"
                raise FuyouStorageError(error.errno or errno.EIO, message, str(file.path)) from error
    except BaseException:
        take_back()
        raise
    try:
        return _with_layout(files, StoreLayout((*layout.regions, *placed, *inside), sizes))
    except ManifestUnknownError:
        raise
    except FuyouStorageError:
        take_back()
        raise  # Ctrl-C takes nothing back: the manifest may name what is new; see manifest_on_disk


def shrunk(files: StoreFiles, names: Iterable[str], vacant: Vacant) -> StoreFiles:
    """Without these regions, durably; their blocks are given back, their places added to ``vacant``.

    Raises:
        FuyouStorageError: the manifest cannot be written; nothing changed.
        ManifestUnknownError: no block has gone.
    """
    gone = set(names)
    layout = files.manifest.layout
    leaving = [region for region in layout.regions if region.spec.name in gone]
    staying = tuple(region for region in layout.regions if region.spec.name not in gone)
    found = _with_layout(files, StoreLayout(staying, layout.file_bytes))
    _free(found, leaving)
    for region in leaving:
        vacant.setdefault((region.spec.num_bytes, region.spec.num_slots), []).append(region.slots)
    return found


def manifest_on_disk(files: StoreFiles) -> StoreFiles:
    """As a change found it, or left it, that Ctrl-C cut short.

    Raises:
        FuyouStorageError: it cannot be read.
    """
    run = files.runs[0]
    found = read_manifest(run.fd, run.path)
    return files if found is None else replace(files, manifest=replace(files.manifest, layout=found.layout))


def _with_layout(files: StoreFiles, layout: StoreLayout) -> StoreFiles:
    manifest, run = replace(files.manifest, layout=layout), files.runs[0]
    try:
        write_manifest(run.fd, run.path, manifest)
    except NotDurableError as failure:
        try:
            write_manifest(run.fd, run.path, files.manifest)
        except FuyouStorageError as error:
            message = f"{failure.strerror}, and so did putting it back"
            raise ManifestUnknownError(error.errno or errno.EIO, message, failure.filename) from error
        raise
    return replace(files, manifest=manifest)


def _free(files: StoreFiles, regions: Sequence[RegionLayout]) -> None:
    for path, begin, num_bytes in _runs(regions):
        try:
            free_blocks(files.files[path].fd, num_bytes, begin)
        except OSError as error:
            logger.warning("%s: space is not given back (%s)", files.files[path].path, error.strerror)
            return


def _runs(regions: Sequence[RegionLayout]) -> list[tuple[int, int, int]]:
    """(path, offset, bytes) of all their pieces, neighbours put together."""
    pieces = sorted((p.path, p.offset, p.num_bytes) for region in regions for slot in region.slots for p in slot)
    runs: list[tuple[int, int, int]] = []
    for path, offset, num_bytes in pieces:
        if runs and runs[-1][0] == path and runs[-1][1] + runs[-1][2] == offset:
            runs[-1] = (path, runs[-1][1], runs[-1][2] + num_bytes)
        else:
            runs.append((path, offset, num_bytes))
    return runs
