# SPDX-License-Identifier: Apache-2.0
"""Which state files a run can go on from in place: complete on every rank, of the same model, world and layout."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from ds_fuyou.checkpoint.contents import check_resumable
from ds_fuyou.errors import FuyouError, shown
from ds_fuyou.state_layout import BF16, FP32, WHOLE
from ds_fuyou.storage.cleanup import StateDirectory, find_state, is_fault
from ds_fuyou.storage.lifetime import open_stores
from ds_fuyou.storage.records import COMMIT_NAME, well_formed
from ds_fuyou.storage.store import CommitRecord, JsonValue, RegionSpec, RunIdentity, SlotStore
from ds_fuyou.storage.store_files import read_directory_manifest
from ds_fuyou.zero.agreement import of_every_rank

__all__ = ["Fitting", "Resumable", "find_resumable", "tell_start"]

logger = logging.getLogger("ds_fuyou")
_OTHER_ENGINE = "the script built another number of engines with these paths before that one"


@dataclass(frozen=True)
class Fitting:
    """What the state files of a run hold, with one layout of states: ``choices`` are the regions that it may create."""

    contents: Mapping[str, JsonValue]
    choices: Sequence[Sequence[RegionSpec]]


@dataclass(frozen=True)
class Resumable:
    """One rank's part of what a run goes on from: its files, taken over, and the commit that all ranks have made.
    ``which`` of what would fit they are, the same on all ranks."""

    store: SlotStore
    commit: CommitRecord
    which: int


@dataclass(frozen=True)
class _Offer:
    """What a rank has of a dead run: its commits by what ranks have in common, and of which a run can go on."""

    started: float
    commits: tuple[tuple[int, ...], ...]
    complete: tuple[tuple[int, ...], ...]


def find_resumable(paths: Sequence[Path], identity: RunIdentity, fitting: Sequence[Fitting]) -> Resumable | None:
    """The latest of them, None if there is none; says why what is there does not serve. A collective.

    ``fitting``: what would do, by layout of states, this run's own first.

    Raises:
        FuyouStorageError: the device failed while it was looked for.
    """
    opened = dict(_opened(paths, identity, fitting))
    every = of_every_rank({run_id: _offer_of(store) for run_id, store in opened.items()})
    chosen = _choose(every)
    _tell_incomplete(every, opened)
    _tell_older(every, opened, chosen)
    for run_id, store in opened.items():
        if chosen is None or run_id != chosen[0]:
            store.close(remove=False)
    if chosen is None:
        return None
    store = opened[chosen[0]]
    (commit,) = [commit for commit in store.commits() if commit.key == chosen[1]]
    layouts = [each.contents.get("states") for each in fitting]
    return Resumable(store, commit, layouts.index(store.contents().get("states")))


def _opened(
    paths: Sequence[Path], identity: RunIdentity, fitting: Sequence[Fitting]
) -> Iterator[tuple[str, SlotStore]]:
    """State files of this rank that fit, by run."""
    mine = {path for store in open_stores() if isinstance(store, SlotStore) for path in store.directories}
    for state in find_state(paths[0]):
        if state.rank != identity.rank or state.path in mine:
            continue
        if state.model_fingerprint != identity.model_fingerprint:
            if not state.model_fingerprint and not state.alive:
                logger.warning("%s: its manifest is missing or cannot be read, so no run can go on from it", state.path)
            continue
        if state.alive:
            _tell(state.path, "a process uses it, or the one that made it still runs")
            continue
        try:
            store = _open(state, paths, identity)
        except FuyouError as error:
            if is_fault(error):
                raise  # a run that began anew would leave its steps behind because of a disk that may recover
            _tell(state.path, str(error))
            continue
        try:
            why = _mismatch(store, fitting)
        except BaseException:
            store.close(remove=False)
            raise
        if why:
            _tell(state.path, why, logging.INFO if why == _OTHER_ENGINE else logging.WARNING)
            store.close(remove=False)
        else:
            yield state.run_id, store


def _open(state: StateDirectory, paths: Sequence[Path], identity: RunIdentity) -> SlotStore:
    manifest = read_directory_manifest(state.path)
    directories = [Path(path) for path in manifest.directories]
    if {path.parent.parent for path in directories} != set(paths):
        raise FuyouError(f"it is striped over {', '.join(str(path.parent.parent) for path in directories)}")
    return SlotStore.open(directories, identity)


def _mismatch(store: SlotStore, fitting: Sequence[Fitting]) -> str:
    """Why the files do not serve this run; empty if they do."""
    if not store.commits():
        return "no commit stands in it"
    if store.commits()[0].lacks_states:
        return "P32 and moments were in host memory when it ended"
    try:
        found = store.contents()
        with well_formed(store.directories[0] / COMMIT_NAME):
            for commit in filter(_is_complete, store.commits()):
                check_resumable(commit, found)
    except FuyouError as error:
        if is_fault(error):
            raise
        return str(error)
    alike = [each for each in fitting if found.get("states") == each.contents.get("states")]
    if not alike:
        return _other_layout(found.get("states"), fitting[0].contents.get("states"))
    contents = alike[0].contents
    if found != contents and {**found, "engine": contents["engine"]} == contents:
        return _OTHER_ENGINE
    if found != contents:
        return "its dtype, optimizer or groups are others, or its parameters are cut into other chunks (chunk_bytes)"
    wanted = [{region.name: region for region in regions} for regions in alike[0].choices]
    if store.regions not in wanted:
        # Also where it has more than this run needs: that would stay as it is, and be old for the next run.
        name = min(name for name, _ in store.regions.items() ^ wanted[0].items())
        return f"it was made with other tiers, budgets or slots, and holds other bytes of {name}"
    return ""


def _other_layout(found: Any, wanted: Any) -> str:
    """Moments of other bits are other moments: what a run rounds it goes on to round, and what it does not it must not
    begin to, unless somebody says so.
    """
    theirs, ours = (_said(layout, "moment_type", FP32) for layout in (found, wanted))
    if theirs != ours and _said(wanted, "masters", WHOLE) == shown(BF16, 20):
        return f"its moments are {theirs}, and bf16.bf16_optimizer_states with fuyou.optimizer.moments says {ours}"
    if theirs != ours:
        return (
            f"its moments are {theirs}, and fuyou.optimizer.moments says {ours}: say {theirs} to go on from it, or "
            f"make a checkpoint of it with fuyou recover, which is loaded under any"
        )
    masters = _said(found, "masters", WHOLE)
    return (
        f"its masters are {masters} (split ones need bfloat16 parameters and fuyou.checksum, bf16 ones "
        f"bf16.bf16_master_weights_and_grads), or its optimizer is of another kind"
    )


def _said(layout: Any, name: str, otherwise: str) -> str:
    return shown(layout.get(name, otherwise) if isinstance(layout, Mapping) else otherwise, 20)


def _offer_of(store: SlotStore) -> _Offer:
    commits = store.commits()
    complete = tuple(commit.key for commit in filter(_is_complete, commits))
    return _Offer(store.started, tuple(commit.key for commit in commits), complete)


def _is_complete(commit: CommitRecord) -> bool:
    return commit.meta.get("training") is not None


def _choose(every: Sequence[Mapping[str, _Offer]]) -> tuple[str, tuple[int, ...]] | None:
    """Run and commit, the same on all ranks."""
    best: tuple[float, str, tuple[int, ...]] | None = None
    for run_id, parts in _by_run(every).items():
        if _why_incomplete(parts):
            continue
        candidate = (max(part.started for part in parts if part is not None), run_id, max(_in_common(parts)))
        best = max(best or candidate, candidate)
    return best[1:] if best is not None else None


def _by_run(every: Sequence[Mapping[str, _Offer]]) -> dict[str, list[_Offer | None]]:
    """Every rank's offers of a run, in order of ranks."""
    return {
        run_id: [offers.get(run_id) for offers in every] for run_id in set.union(*(set(offers) for offers in every))
    }


def _in_common(parts: Sequence[_Offer | None]) -> set[tuple[int, ...]]:
    return set.intersection(*(set(part.commits if part is not None else ()) for part in parts))


def _why_incomplete(parts: Sequence[_Offer | None]) -> str:
    """Why no run can go on from what all ranks have of one; empty if one can."""
    missing = [str(rank) for rank, part in enumerate(parts) if part is None]
    if missing:
        return f"rank {', '.join(missing)} found nothing of that run that it could go on from"
    common = _in_common(parts)
    if not common:
        return "its ranks have no step in common"
    # Only the newest of those in common is surely whole: an older one's slots may be in use again.
    if not all(part is not None and max(common) in part.complete for part in parts):
        return f"of its last step, {max(common)[0]}, the state of training was not recorded"
    return ""


def _tell_incomplete(every: Sequence[Mapping[str, _Offer]], opened: Mapping[str, SlotStore]) -> None:
    for run_id, parts in _by_run(every).items():
        why = _why_incomplete(parts)
        if why and run_id in opened:
            _tell(opened[run_id].directories[0], why)


def _tell_older(
    every: Sequence[Mapping[str, _Offer]],
    opened: Mapping[str, SlotStore],
    chosen: tuple[str, tuple[int, ...]] | None,
) -> None:
    """Of several runs the one that began last is gone on from, however many steps the others made."""
    for run_id, parts in _by_run(every).items():
        if chosen is not None and run_id != chosen[0] and not _why_incomplete(parts):
            step = max(_in_common(parts))[0]
            _tell(opened[run_id].directories[0], f"its step {step} is whole, but {chosen[0]} began later")


def _tell(path: Path, why: str, level: int = logging.WARNING) -> None:
    level = level if dist.get_rank() == 0 else logging.INFO
    logger.log(level, "%s is of this model, but this run cannot go on from it: %s", path, why)


def tell_start(commit: CommitRecord | None, store: SlotStore | None, read_bytes: int) -> None:
    """On rank 0: how this run begins. ``read_bytes``: of P32, before its first step."""
    if dist.get_rank() != 0:
        return
    if commit is None or store is None:
        logger.info("no complete state of this model and world is in nvme_path: this run starts from its beginning")
        return
    step: Any = commit.meta["optimizer_step"]
    reads = f"; {read_bytes} bytes of P32 are read, to make P16 in host memory" if read_bytes else ""
    logger.info("going on from step %d, in place, in %s%s", step, store.directories[0], reads)
