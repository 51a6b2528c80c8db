# SPDX-License-Identifier: Apache-2.0
"""The slot store that a run begins with: files of a dead run that it goes on from, or new ones that the disks hold."""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed import comm as dist

from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.log import log_once
from ds_fuyou.planner.plan import handles_activations
from ds_fuyou.storage.cleanup import lost_state, settle_stale, stale_bytes
from ds_fuyou.storage.layout import CHECKPOINT_BYTES, CHECKPOINTS_BESIDE, most_slots
from ds_fuyou.storage.probe import probe_path
from ds_fuyou.storage.store import CommitRecord, RunIdentity, SlotStore, choose_num_slots
from ds_fuyou.zero.agreement import all_or_none, least, of_every_rank, of_rank_0
from ds_fuyou.zero.run.neighbours import machine
from ds_fuyou.zero.run.resuming import Fitting, find_resumable
from ds_fuyou.zero.run.run_design import RunDesign, TrainedModel
from ds_fuyou.zero.run.striping import path_weights
from ds_fuyou.zero.run.taken_design import design_in, tell_taken

__all__ = ["OpenedStore", "count_engine", "forget_engine", "open_store", "tell_durability"]

logger = logging.getLogger("ds_fuyou")
_RUN_NUMBERS = itertools.count()
_NUMBERS: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)
"""Of engines of this process that had state on these paths: two of one shape are told apart by their order. One that
failed leaves its number to the engine that is built in its place."""


class OpenedStore(NamedTuple):
    """``store``: None where nothing lives on storage. ``design``: the run's; ``resumed``: the commit that it goes on
    from, None at the begin of one."""

    store: SlotStore | None
    num_slots: int
    design: RunDesign
    resumed: CommitRecord | None


def count_engine(model: TrainedModel) -> int:
    """Its number, until :func:`forget_engine`."""
    number = _next_number(model)
    _NUMBERS[model.activation.state_paths].add(number)
    return number


def forget_engine(model: TrainedModel, number: int) -> None:
    """It was not built after all, or failed: the next one takes its number."""
    _NUMBERS[model.activation.state_paths].discard(number)


def _next_number(model: TrainedModel) -> int:
    taken = _NUMBERS[model.activation.state_paths]
    return next(number for number in itertools.count() if number not in taken)


def open_store(design: RunDesign) -> OpenedStore:
    """For ``design``, or for what state files to go on from make of it. A collective.

    Raises:
        FuyouStorageError: the disks have no room, or for one slot alone where the block says ``durable``.
    """
    run_id = _run_id()
    model = design.model
    config, paths = model.activation.config, model.paths
    identity = RunIdentity(_fingerprint(design), dist.get_rank(), dist.get_world_size(), run_id)
    found = _taken_over(design, identity) if config.resume == "auto" and paths else None
    if found is None and not design.residency.needs_storage:
        if dist.get_rank() == 0 and (paths or config.relies_on_slots):
            tell_durability(design.residency.states, 1, is_wanted=config.relies_on_slots)
        return OpenedStore(None, 1, design, None)
    # Where a run may go on, what holds a step stays: it may be another engine's, or another start's to go on from.
    cleaned = identity.model_fingerprint if config.on_stale == "clean" else ""
    bytes_stale = _settle_stale(paths, cleaned, resumes=config.resume != "off")
    if found is not None:
        return found
    budget_bytes = None if config.nvme_budget_bytes == "auto" else int(config.nvme_budget_bytes)
    num_slots = _chosen_slots(design, budget_bytes, bytes_stale)
    regions, weights = design.regions(num_slots), path_weights(model.activation)
    contents = design.contents(_next_number(model))
    with ExitStack() as undo:
        with all_or_none("make its state files"):
            store = SlotStore.create(
                paths,
                regions,
                identity,
                weights=weights,
                budget_bytes=budget_bytes,
                keep=config.keep_state,
                checksum=config.checksum,
                recoverable=True,  # commits that lack states say so
            )
            undo.callback(store.close)
            store.describe(contents)
        if dist.get_rank() == 0:
            tell_durability(design.residency.states, num_slots, is_wanted=config.relies_on_slots)
        undo.pop_all()
    return OpenedStore(store, num_slots, design, None)


def _taken_over(own: RunDesign, identity: RunIdentity) -> OpenedStore | None:
    """State files to go on from, as they are: this run then is as they say. A collective."""
    engine = _next_number(own.model)
    designs: dict[SlotStore, RunDesign] = {}

    def reason(store: SlotStore, contents: Mapping[str, Any]) -> str:
        try:
            designs[store] = design_in(own, contents, store.regions, engine)
        except FuyouStateError as error:
            return str(error)
        return ""

    fitting = Fitting(own.contents(engine), reason)
    found = find_resumable(own.model.paths, identity, fitting, functools.partial(_fingerprint_on, own))
    if found is None:
        return None
    store, design = found.store, designs[found.store]
    tell_taken(own, design)
    return OpenedStore(store, max(region.num_slots for region in store.regions.values()), design, found.commit)


def _chosen_slots(design: RunDesign, budget_bytes: int | None, bytes_stale: int) -> int:
    """As many as the plan wants, if the disks of all ranks hold them; the same on all. A collective.

    Raises:
        FuyouStorageError: ``durable`` needs two.
    """
    activation = design.model.activation
    config, paths = activation.config, design.model.paths
    swaps = config.activations.tier != "cpu" and config.activations.mode != "recompute"
    sizes = {n: sum(region.num_bytes * region.num_slots for region in design.regions(n)) for n in (1, 2, 3)}
    num_slots = 1
    for wanted in range(_most_slots(design), 1, -1):
        beside = 0 if wanted == 2 else CHECKPOINTS_BESIDE * CHECKPOINT_BYTES * design.layout.numel
        choice = choose_num_slots(
            paths,
            sizes[1],
            sizes[wanted],
            budget_bytes,
            wanted=wanted,
            bytes_beside=beside,
            bytes_of_others=_bytes_of_others(paths, sizes[wanted] + beside),
            bytes_stale=bytes_stale,
            swaps_activations=swaps and handles_activations(config, design.model.device.is_host),
        )
        if wanted == 2 and choice.num_slots == 1 and not config.durable:
            logger.warning("%s", choice.reason)
        num_slots = int(least(choice.num_slots)[0])  # also: no rank allocates before all have looked
        if num_slots > 1:
            break
    if config.durable and num_slots == 1:
        limit = choice.limit or "the disks of another rank, which says it, have no room for them"
        message = f"fuyou.durable needs two slots a chunk: {limit}. Free space, raise the budget or add a path"
        raise FuyouStorageError(errno.ENOSPC, message, str(paths[0]))
    return num_slots


def _most_slots(design: RunDesign) -> int:
    """The same on all ranks."""
    are_cloned = design.given.layout.is_whole and design.model.may_share_blocks
    most = most_slots(design.plan.slots, in_memory=any(design.residency.states), are_cloned=are_cloned)
    return int(least(most)[0])


def _fingerprint(design: RunDesign) -> str:
    text = ";".join(f"{span.name}:{span.numel}" for span in design.layout.params)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fingerprint_on(design: RunDesign, world_size: int) -> str:
    """What :func:`_fingerprint` is where the model is partitioned among so many ranks."""
    numels = {name: param.ds_numel for param, name in design.model.names.items()}
    text = ";".join(f"{span.name}:{-(-numels[span.name] // world_size)}" for span in design.layout.params)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _run_id() -> str:
    """One for all ranks, and for no other run: `fuyou recover` takes ranks of one run alone. A collective."""
    return of_rank_0(f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_RUN_NUMBERS)}-{secrets.token_hex(3)}")


def _bytes_of_others(paths: Sequence[Path], num_bytes: int) -> int:
    """What other ranks will take of the devices that this one uses. A collective."""
    mine, here = {probe_path(path).device for path in paths}, machine()
    every = of_every_rank((here, mine, num_bytes))
    return sum(size for where, devices, size in every if where == here and devices & mine) - num_bytes


def tell_durability(are_resident: Sequence[bool], num_slots: int, *, is_wanted: bool) -> None:
    """What a run that is killed leaves, where that is less than its last step; of states in host memory by chunk. A
    warning where the block says that somebody will go on from it.
    """
    if any(are_resident):
        where = f"P32 and the moments of {sum(are_resident)} of {len(are_resident)} chunks are in host memory"
        to_do = 'with optimizer.tier "nvme" every step is'
    elif num_slots == 1:
        where, to_do = "chunks have one slot on storage", "with room for two every step is"
    else:
        return
    level = logging.WARNING if is_wanted else logging.INFO
    log_once(level, f"{where}: this run is as durable as its last checkpoint; {to_do} kept on storage")


def _settle_stale(paths: Sequence[Path], clean: str, *, resumes: bool) -> int:
    """State of dead runs is told or removed, on every disk of every machine by one rank: bytes of it that stay in this
    rank's paths. A collective: no rank goes on before all have looked.

    Machines are told apart by name, too, here: of two containers of one machine each may have a disk of its own at a
    path.

    ``clean``: fingerprint of the model whose state is removed; none is without. ``resumes``: but for what a run may go
    on from.
    """
    host = machine(), os.uname().nodename
    users = of_every_rank((host, [str(path) for path in paths]))
    mine = [path for path in paths if _first_user(users, host, str(path)) == dist.get_rank()]
    lost = lost_state(mine) if clean and resumes else None
    of_every_rank(None)  # what a directory holds is said in the first of its run, which may be another rank's to remove
    settle_stale(mine, logger, clean, lost)
    of_every_rank(None)
    return stale_bytes(paths)


def _first_user(users: Sequence[tuple[tuple[str, str], list[str]]], host: tuple[str, str], path: str) -> int:
    return next(rank for rank, (where, theirs) in enumerate(users) if where == host and path in theirs)
