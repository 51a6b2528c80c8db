# SPDX-License-Identifier: Apache-2.0
"""Which state files a run can go on from in place: complete on every rank, of the same model, world and layout."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from ds_fuyou.errors import FuyouError
from ds_fuyou.storage.cleanup import StateDirectory, find_state
from ds_fuyou.storage.store import CommitRecord, JsonValue, RegionSpec, RunIdentity, SlotStore
from ds_fuyou.storage.store_files import read_directory_manifest
from ds_fuyou.zero.agreement import of_every_rank

__all__ = ["Resumable", "find_resumable", "tell_start"]

logger = logging.getLogger("ds_fuyou")


@dataclass(frozen=True)
class Resumable:
    """One rank's part of what a run goes on from: its files, taken over, and the commit that all ranks have made."""

    store: SlotStore
    commit: CommitRecord


@dataclass(frozen=True)
class _Offer:
    """What a rank has of a dead run: its commits by what ranks have in common, and of which a run can go on."""

    started: float
    commits: tuple[tuple[int, ...], ...]
    complete: tuple[tuple[int, ...], ...]


def find_resumable(
    paths: Sequence[Path],
    identity: RunIdentity,
    regions: Sequence[RegionSpec],
    contents: Mapping[str, JsonValue],
) -> Resumable | None:
    """The latest of them, None if there is none; says why what is there does not serve. A collective.

    ``regions`` and ``contents`` are what this run would create.
    """
    opened = dict(_opened(paths, identity, regions, contents))
    every = of_every_rank({run_id: _offer_of(store) for run_id, store in opened.items()})
    chosen = _choose(every)
    for run_id, store in opened.items():
        if chosen is None or run_id != chosen[0]:
            store.close(remove=False)
    if chosen is None:
        return None
    store = opened[chosen[0]]
    (commit,) = [commit for commit in store.commits() if commit.key == chosen[1]]
    return Resumable(store, commit)


def _opened(
    paths: Sequence[Path],
    identity: RunIdentity,
    regions: Sequence[RegionSpec],
    contents: Mapping[str, JsonValue],
) -> Iterator[tuple[str, SlotStore]]:
    """State files of this rank that fit, by run."""
    for state in find_state(paths[0]):
        if state.alive or state.rank != identity.rank or state.model_fingerprint != identity.model_fingerprint:
            continue
        try:
            store = _open(state, paths, identity)
        except FuyouError as error:
            _tell(state, str(error))
            continue
        try:
            why = _mismatch(store, regions, contents)
        except BaseException:
            store.close(remove=False)
            raise
        if why:
            _tell(state, why)
            store.close(remove=False)
        else:
            yield state.run_id, store


def _open(state: StateDirectory, paths: Sequence[Path], identity: RunIdentity) -> SlotStore:
    manifest = read_directory_manifest(state.path)
    directories = [Path(path) for path in manifest.directories]
    if {path.parent.parent for path in directories} != set(paths):
        raise FuyouError(f"it is striped over {', '.join(str(path.parent.parent) for path in directories)}")
    return SlotStore.open(directories, identity)


def _mismatch(store: SlotStore, regions: Sequence[RegionSpec], contents: Mapping[str, JsonValue]) -> str:
    """Why the files do not serve this run; empty if they do."""
    if not store.commits():
        return "no commit stands in it"
    try:
        found = store.contents()
    except FuyouError as error:
        return str(error)
    if found != contents:
        return "its dtype, optimizer or groups are others, or its parameters are cut into other chunks (chunk_bytes)"
    missing = [region.name for region in regions if store.regions.get(region.name) != region]
    if missing:
        return f"it has no place for {missing[0]}: it was made with other tiers, budgets or slots"
    return ""


def _offer_of(store: SlotStore) -> _Offer:
    commits = store.commits()
    complete = tuple(commit.key for commit in commits if commit.meta.get("training") is not None)
    return _Offer(store.started, tuple(commit.key for commit in commits), complete)


def _choose(every: Sequence[Mapping[str, _Offer]]) -> tuple[str, tuple[int, ...]] | None:
    """Run and commit, the same on all ranks."""
    best: tuple[float, str, tuple[int, ...]] | None = None
    for run_id in set.union(*(set(offers) for offers in every)):
        parts = [offers.get(run_id) for offers in every]
        common = set.intersection(*(set(part.commits if part is not None else ()) for part in parts))
        # Only the newest of those in common is surely whole: an older one's slots may be in use again.
        if not common or not all(part is not None and max(common) in part.complete for part in parts):
            continue
        candidate = (max(part.started for part in parts if part is not None), run_id, max(common))
        best = max(best or candidate, candidate)
    return best[1:] if best is not None else None


def _tell(state: StateDirectory, why: str) -> None:
    level = logging.WARNING if dist.get_rank() == 0 else logging.INFO
    logger.log(level, "%s is of this model, but this run cannot go on from it: %s", state.path, why)


def tell_start(commit: CommitRecord | None, store: SlotStore | None) -> None:
    """On rank 0: how this run begins."""
    if dist.get_rank() != 0:
        return
    if commit is None or store is None:
        logger.info("no complete state of this model and world is in nvme_path: this run starts from its beginning")
        return
    step: Any = commit.meta["optimizer_step"]
    logger.info("going on from step %d, in place, in %s", step, store.directories[0])
