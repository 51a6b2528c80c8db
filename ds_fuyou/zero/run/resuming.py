# SPDX-License-Identifier: Apache-2.0
"""Which state files a run can go on from in place: complete on every rank, of the same model, world and layout.

[Note: what a run must not begin beside]
Where files of this model hold steps and the run cannot go on from them, it would begin anew: weeks of training would be
made again because a setting changed, a process outlived its launcher or a disk altered a record, and nobody might read
the warning. So it does not begin. Files that hold no step, or a step whose states went with host memory, are told of
alone; so is what began before the run that is gone on from, and what another engine of the script made.

A model is known by the names and sizes of what it trains, in that order. A run with another order, or that freezes
others, has another fingerprint, and would begin anew; so what files of its rank hold is looked at (:func:`_kinship`).
They may as well be of an experiment beside this one: files in use are no hindrance, nor are any if this run has its own
to go on from.

What is looked at: every path, for the directory with the record may be on a disk that is not there; and parts of other
ranks, which these do not find themselves where ranks were given to other machines, or where there are fewer of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed import comm as dist

from ds_fuyou.checkpoint.contents import check_resumable
from ds_fuyou.errors import FuyouError, FuyouStateError
from ds_fuyou.storage.cleanup import StateDirectory, find_state, holds_steps, is_fault, state_of_others
from ds_fuyou.storage.lifetime import open_stores
from ds_fuyou.storage.records import COMMIT_NAME, well_formed
from ds_fuyou.storage.store import CommitRecord, JsonValue, RunIdentity, SlotStore, contents_in
from ds_fuyou.storage.store_files import read_directory_manifest
from ds_fuyou.zero.agreement import of_every_rank

__all__ = ["Fitting", "Resumable", "find_resumable", "tell_start"]

logger = logging.getLogger("ds_fuyou")
_OTHER_ENGINE = "the script built another number of engines with these paths before that one"


@dataclass(frozen=True)
class Fitting:
    """What a run's own state files would hold, and ``reason``: why files with these contents do not serve it, empty if
    they do."""

    contents: Mapping[str, JsonValue]
    reason: Callable[[SlotStore, Mapping[str, Any]], str]


@dataclass(frozen=True)
class Resumable:
    """One rank's part of what a run goes on from: its files, taken over, and the commit that all ranks have made."""

    store: SlotStore
    commit: CommitRecord


class _Chosen(NamedTuple):
    """When it began, the run, and its commit, of which all ranks can go on."""

    started: float
    run_id: str
    commit: tuple[int, ...]


@dataclass(frozen=True)
class _Offer:
    """What a rank has of a dead run: its commits by what ranks have in common, and of which a run can go on."""

    started: float
    commits: tuple[tuple[int, ...], ...]
    complete: tuple[tuple[int, ...], ...]

    @property
    def is_lost(self) -> bool:
        """No step was made: what would be gone on from is what a run begins with."""
        return not self.complete and all(step == 0 for step, *_ in self.commits)


@dataclass(frozen=True)
class _Refused:
    """Files that this run cannot go on from; see [Note: what a run must not begin beside]."""

    run_id: str
    started: float
    path: Path
    why: str
    holds_steps: bool
    is_kin: bool = False


@dataclass(frozen=True)
class _Seen:
    """What a rank sees beside what fits: ``met`` are the runs of which its own part is there, ``elsewhere`` parts of
    other ranks, which no process uses, ``others`` are of other engines of the script."""

    refused: list[_Refused] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    met: set[str] = field(default_factory=set)
    elsewhere: list[StateDirectory] = field(default_factory=list)

    def refuse(self, state: StateDirectory, why: str, holds: bool, is_kin: bool = False) -> None:
        self.refused.append(_Refused(state.run_id, state.started, state.path, why, holds, is_kin))


def find_resumable(
    paths: Sequence[Path], identity: RunIdentity, fitting: Fitting, fingerprint_of: Callable[[int], str]
) -> Resumable | None:
    """The latest of them, None if there is none; says why what is there does not serve. A collective.

    ``fingerprint_of``: the model's, on so many ranks.

    Raises:
        FuyouStateError: files of this model that hold later steps do not serve, on this rank or another.
        FuyouStorageError: the device failed while it was looked for.
    """
    seen = _Seen()
    opened: dict[str, SlotStore] = {}
    chosen = None
    failure: Exception | None = None
    try:
        try:
            for run_id, store in _opened(paths, identity, fitting, fingerprint_of, seen):
                opened[run_id] = store
        except Exception as error:  # the others wait for an answer
            failure = error
        _agree_that_none_failed(failure)
        offers = {run_id: _offer_of(store) for run_id, store in opened.items()}
        lost = {each.run_id for each in seen.refused if not each.holds_steps}
        lost |= {run_id for run_id, offer in offers.items() if offer.is_lost}
        said = of_every_rank((offers, lost, seen.met))
        every = [theirs for theirs, _, _ in said]
        best = _choose(every)
        lost = _begun(every, [met for _, _, met in said]).union(*(theirs for _, theirs, _ in said))
        seen.refused.extend(_incomplete(every, opened, lost))
        _refuse_misplaced(seen, [met for _, _, met in said], lost)
        _tell_older(every, opened, best)
        _tell(seen.refused, best)
        for path in seen.others:  # where all engines of the script that died are built again, each has its own
            _warn(path, _OTHER_ENGINE, is_expected=best is not None)
        chosen = best
    finally:
        for run_id, store in opened.items():
            if chosen is None or run_id != chosen.run_id:
                store.close(remove=False)
    if chosen is None:
        _tell_of_others(paths)
        return None
    store = opened[chosen.run_id]
    (commit,) = [commit for commit in store.commits() if commit.key == chosen.commit]
    return Resumable(store, commit)


def _agree_that_none_failed(failure: Exception | None) -> None:
    """A collective.

    Raises:
        FuyouStateError: another rank failed; this one's failure as it is.
    """
    said = of_every_rank("" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = next((rank for rank, what in enumerate(said) if what), None)
    if failed is not None:
        raise FuyouStateError(f"rank {failed} could not look for state files to go on from: {said[failed]}")


def _opened(
    paths: Sequence[Path],
    identity: RunIdentity,
    fitting: Fitting,
    fingerprint_of: Callable[[int], str],
    seen: _Seen,
) -> Iterator[tuple[str, SlotStore]]:
    """State files of this rank that fit, by run. What else there is of this model goes to ``seen``."""
    mine = {path for store in open_stores() for path in store.directories}
    for state in _states_in(paths):
        is_of_rank = state.rank == identity.rank
        if is_of_rank:
            seen.met.add(state.run_id)
        if state.path in mine:
            continue
        same_world = state.world_size == identity.world_size
        wanted = identity.model_fingerprint if same_world else fingerprint_of(max(1, state.world_size))
        if state.model_fingerprint != wanted:
            if not is_of_rank or state.alive:
                continue
            if not state.model_fingerprint:
                why = "its manifest is missing or cannot be read"
                seen.refuse(state, why, (state.path / COMMIT_NAME).exists())
            elif why := _kinship(state, paths, fitting.contents):
                seen.refuse(state, why, holds_steps(state), is_kin=True)
            continue
        if not is_of_rank:
            if not state.alive:
                seen.elsewhere.append(state)
            continue
        if state.alive and not state.closed_here:
            seen.refuse(state, "a process uses it, or the one that made it still runs", holds_steps(state))
            continue
        if not same_world:
            seen.refuse(state, _other_world(state), holds_steps(state))
            continue
        try:
            store = _open(state, paths, identity)
        except FuyouError as error:
            if is_fault(error):
                raise  # a run that began anew would leave its steps behind because of a disk that may recover
            seen.refuse(state, str(error), holds_steps(state))
            continue
        try:
            why = _mismatch(store, fitting)
        except BaseException:
            store.close(remove=False)
            raise
        if not why:
            yield state.run_id, store
            continue
        if why == _OTHER_ENGINE:
            seen.others.append(state.path)
        else:
            seen.refuse(state, why, holds_steps(state))
        store.close(remove=False)


def _kinship(state: StateDirectory, paths: Sequence[Path], ours: Mapping[str, JsonValue]) -> str:
    """What differs between this run and one of the same model that has another fingerprint; empty if it is of another
    model, or of another engine of the script, or does not say. Disks that this run does not use are left alone.
    """
    try:
        first = Path(read_directory_manifest(state.path).directories[0])
        found = contents_in(first) if first.parent.parent in paths else None
        if found is None or found.get("engine") != ours["engine"]:
            return ""
        with well_formed(first):
            if _trained_shapes(found) == _trained_shapes(ours):
                return "its parameters are grouped or ordered otherwise"
    except OSError as error:
        if is_fault(error):
            raise
        return ""
    return "others of its parameters are frozen" if found.get("shapes") == ours["shapes"] else ""


def _trained_shapes(contents: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape, *_ in contents["params"]}


def _states_in(paths: Sequence[Path]) -> list[StateDirectory]:
    """Of every run and rank the directory in the first path that has one."""
    found: dict[str, StateDirectory] = {}
    for path in paths:
        for state in find_state(path):
            found.setdefault(state.path.name, state)
    return list(found.values())


def _other_world(state: StateDirectory) -> str:
    return f"it is of {state.world_size} ranks, and this run has {dist.get_world_size()}"


def _refuse_misplaced(seen: _Seen, met: Sequence[Collection[str]], lost: Collection[str]) -> None:
    """Parts of ranks that do not find them. ``met``: by rank, the runs of which it finds its own."""
    for state in seen.elsewhere:
        if state.rank < len(met) and state.run_id in met[state.rank]:
            continue
        why = f"it is rank {state.rank}'s, which does not run where it is (ranks were given to other machines or paths)"
        if state.world_size != len(met):
            why = _other_world(state)
        seen.refuse(state, why, state.run_id not in lost and state.path.exists() and holds_steps(state))


def _open(state: StateDirectory, paths: Sequence[Path], identity: RunIdentity) -> SlotStore:
    manifest = read_directory_manifest(state.path)
    directories = [Path(path) for path in manifest.directories]
    if {path.parent.parent for path in directories} != set(paths):
        made_in = ", ".join(str(path.parent.parent) for path in directories)
        if not any(path.exists() for path in directories):
            raise FuyouError(f"it was made in {made_in} and moved here: give it back its place to go on from it")
        raise FuyouError(f"it is striped over {made_in}")
    return SlotStore.open(directories, identity)


def _mismatch(store: SlotStore, fitting: Fitting) -> str:
    """Why the files do not serve this run; empty if they do."""
    if not store.commits():
        return "no commit stands in it"
    if store.commits()[0].lacks_states:
        return "P32 and moments were in host memory when it ended"
    try:
        found = store.contents()
        if found.get("engine") != fitting.contents["engine"] and isinstance(found.get("engine"), int):
            return _OTHER_ENGINE  # whatever else is another: that engine goes on from it
        with well_formed(store.directories[0] / COMMIT_NAME):
            for commit in filter(_is_complete, store.commits()):
                check_resumable(commit, found)
    except FuyouError as error:
        if is_fault(error):
            raise
        return str(error)
    return fitting.reason(store, found)


def _offer_of(store: SlotStore) -> _Offer:
    commits = store.commits()
    complete = tuple(commit.key for commit in filter(_is_complete, commits))
    return _Offer(store.started, tuple(commit.key for commit in commits), complete)


def _is_complete(commit: CommitRecord) -> bool:
    return commit.meta.get("training") is not None


def _choose(every: Sequence[Mapping[str, _Offer]]) -> _Chosen | None:
    """The same on all ranks."""
    whole = {run_id: parts for run_id, parts in _by_run(every).items() if not _why_incomplete(parts)}
    return max(
        (_Chosen(_started(parts), run_id, max(_in_common(parts))) for run_id, parts in whole.items()), default=None
    )


def _started(parts: Sequence[_Offer | None]) -> float:
    return max(part.started for part in parts if part is not None)


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


def _begun(every: Sequence[Mapping[str, _Offer]], met: Sequence[Collection[str]]) -> set[str]:
    """Runs that failed in their first step, which some ranks had made: the others had nothing to keep, and their parts
    are gone. What is left holds the beginning, and one step: nothing that another start would be kept from beginning
    for.
    """
    runs = _by_run(every).items()
    lacking = {run_id for run_id, _ in runs if any(run_id not in theirs for theirs in met)}
    return {
        run_id
        for run_id, parts in runs
        if run_id in lacking and all(part is None or min(part.commits)[0] == 0 for part in parts)
    }


def _incomplete(
    every: Sequence[Mapping[str, _Offer]], opened: Mapping[str, SlotStore], lost: Collection[str]
) -> Iterator[_Refused]:
    """What fits on this rank, and not on all. ``lost``: runs of which some rank has nothing that could be."""
    for run_id, parts in _by_run(every).items():
        why = _why_incomplete(parts)
        if why and run_id in opened:
            yield _Refused(run_id, _started(parts), opened[run_id].directories[0], why, run_id not in lost)


def _tell_older(every: Sequence[Mapping[str, _Offer]], opened: Mapping[str, SlotStore], chosen: _Chosen | None) -> None:
    """Of several runs the one that began last is gone on from, however many steps the others made."""
    for run_id, parts in _by_run(every).items():
        if chosen is not None and run_id != chosen.run_id and not _why_incomplete(parts):
            step = max(_in_common(parts))[0]
            _warn(opened[run_id].directories[0], f"its step {step} is whole, but {chosen.run_id} began later")


def _tell(refused: Sequence[_Refused], chosen: _Chosen | None) -> None:
    """A collective.

    Raises:
        FuyouStateError: see [Note: what a run must not begin beside].
    """
    stops = [
        each
        for each in refused
        if each.holds_steps and (chosen is None or (each.started > chosen.started and not each.is_kin))
    ]
    for each in refused:
        if each not in stops:
            _warn(each.path, each.why)
    said = sorted({f"{each.path}: {each.why}" for theirs in of_every_rank(stops) for each in theirs})
    if said:
        several = "" if len(said) == 1 else f" (and {len(said) - 1} more)"
        raise FuyouStateError(
            f"steps of this model are in nvme_path, and this run cannot go on from them, so it does not begin anew, "
            f"either: {said[0]}{several}. To go on, undo what was changed, or end who uses "
            f"them; fuyou recover makes a checkpoint of them if every rank's are there. To begin anew, remove them "
            f"(fuyou clean), or set another nvme_path"
        )


def _tell_of_others(paths: Sequence[Path]) -> None:
    """A container that ran as root before, and as somebody else now, would begin anew beside its own steps."""
    passed_over = {each: owner for path in paths for each, owner in state_of_others(path).items()}
    if passed_over and os.environ.get("LOCAL_RANK", "0") == "0":  # each machine has its own
        example, owner = next(iter(passed_over.items()))
        message = (
            "state files of other users are passed over: %d directories, %s is user %d's, and this process is %d's"
        )
        logger.warning(message, len(passed_over), example, owner, os.geteuid())


def _warn(path: Path, why: str, *, is_expected: bool = False) -> None:
    level = logging.WARNING if dist.get_rank() == 0 and not is_expected else logging.INFO
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
