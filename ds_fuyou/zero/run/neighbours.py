# SPDX-License-Identifier: Apache-2.0
"""Which other ranks share what this one plans with: the machine, its host memory, its cores, its storage devices."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ds_fuyou.host.available_memory import MemoryLimit, memory_limits
from ds_fuyou.host.threads import openmp_cores, usable_cores
from ds_fuyou.log import log_once
from ds_fuyou.storage.records import boot_id
from ds_fuyou.zero.agreement import of_every_rank

__all__ = [
    "Neighbours",
    "cores_of_rank",
    "count_neighbours",
    "free_memory_of_rank",
    "free_of_rank",
    "local_ranks",
    "machine",
    "memory_of_rank",
    "share_of_cores",
]

_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",  # torchrun and accelerate
    "LOCAL_SIZE",  # deepspeed
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",  # of this srun; the job's own number is also there for what it runs by itself
)


@dataclass(frozen=True)
class Neighbours:
    """Ranks, with this one, by what they share.

    Attributes:
        on_machine: all of this machine.
        in_groups: by the holder of a limit of host memory, of those that hold for this rank.
        on_cores: by core, of those that this rank may use.
    """

    on_machine: int = 1
    in_groups: Mapping[tuple[int, int], int] = field(default_factory=dict)
    on_cores: Mapping[int, int] = field(default_factory=dict)


_counted = Neighbours()


def machine() -> str:
    """Of a running system: what its containers share, whatever they are called. Names may be those of many
    (``localhost``); they are used where nothing else is told.
    """
    return boot_id() or os.uname().nodename


def count_neighbours() -> None:
    """Launchers may be silent, or know their own processes alone: Ray's actors are each told that they are the first, a
    script under Slurm may start ranks by itself, containers may have limits of their own. So they are counted where all
    meet. A collective.
    """
    global _counted
    mine = machine(), [limit.holder for limit in memory_limits()], usable_cores()
    here = [one for one in of_every_rank(mine) if one[0] == mine[0]]
    in_groups = Counter(holder for _, holders, _ in here for holder in holders if holder is not None)
    _counted = Neighbours(len(here), in_groups, Counter(core for _, _, cores in here for core in cores))


def local_ranks() -> int:
    """Ranks of this machine: those that were counted, or more that the launcher says."""
    return max(_counted.on_machine, _told_ranks())


def free_memory_of_rank() -> int:
    """Of the bytes that are free where this rank is, in all limits that hold for it, those that others leave it."""
    return max(0, min(limit.free_bytes // _num_in(limit) for limit in memory_limits()))


def memory_of_rank() -> int:
    """As :func:`free_memory_of_rank`, of all bytes."""
    return min(limit.num_bytes // _num_in(limit) for limit in memory_limits())


def _num_in(limit: MemoryLimit) -> int:
    if not _counts_all():
        return _told_ranks()
    if limit.holder is None:
        return _counted.on_machine
    return _counted.in_groups.get(limit.holder, _counted.on_machine)  # one that was set since then: all may be in it


def _counts_all() -> bool:
    """The launcher knows of no rank that was not counted: of several jobs beside each other each counts its own."""
    return _counted.on_machine >= _told_ranks()


def _told_ranks() -> int:
    """As the launcher says; where it does not, as many as this rank knows of by its own number."""
    for name in _LOCAL_SIZES:
        found = re.match(r"[1-9]\d*", os.environ.get(name, ""))
        if found is not None:
            return int(found[0])
    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) + 1 if rank.isdigit() else 1


def cores_of_rank() -> int:
    """Cores that this rank may use, at least one."""
    try:
        launcher = os.sched_getaffinity(os.getppid())
    except OSError:  # it has ended
        launcher = set()
    own, all_cores = usable_cores(), os.cpu_count() or 1
    if len(own) == 1 and launcher == own and all_cores > local_ranks() and openmp_cores():
        log_once(
            logging.WARNING,
            f"this rank, and its launcher, may use one core of {all_cores}. If nothing else says so, OpenMP bound the "
            "launcher, and with it what it starts: unset OMP_PROC_BIND and OMP_PLACES in its environment",
            on_any_rank=True,
        )
    if _counts_all():
        return max(1, int(sum(Fraction(1, _counted.on_cores.get(core, 1)) for core in own)))
    return share_of_cores(own, launcher, _told_ranks())


def share_of_cores(own: set[int], launcher: set[int], ranks: int) -> int:
    """Of the cores of this process, whose neighbours have not been asked for theirs; all of them where the launcher,
    which has more, gave each rank some of its own (``deepspeed --bind_cores_to_rank``).
    """
    return max(1, len(own) if own < launcher else len(own) // ranks)


def free_of_rank(free: Mapping[str, float], users: Sequence[tuple[str, Collection[str]]]) -> float:
    """Of the bytes that are free on the storage devices of this rank those that others leave it. ``users``: machine and
    devices of every rank.
    """
    here = machine()
    return sum(
        num_bytes / sum(where == here and device in devices for where, devices in users)
        for device, num_bytes in free.items()
    )
