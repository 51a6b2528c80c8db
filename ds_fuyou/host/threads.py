# SPDX-License-Identifier: Apache-2.0
"""Starting threads: on which cores of this process they may run, and what is said where the system refuses them.

Where OpenMP binds its threads (``OMP_PROC_BIND``, ``OMP_PLACES``; many clusters set them) it binds the thread that
imports torch to one core, and whatever that thread starts inherits it: all updates and transfers, on the core that
trains. A thread of another kind it binds to the first core of its list, when that first meets a parallel region of
OpenMP's, and never again.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ds_fuyou.errors import FuyouStateError

__all__ = ["openmp_cores", "starting_threads", "stay_unbound", "usable_cores"]

_PARALLEL_ELEMENTS = 1 << 17  # more than torch computes in one thread


def usable_cores() -> set[int]:
    """The calling thread's, and those that OpenMP shares out among its threads, if it binds them. (Those of a list in
    the environment need not be this process's: OpenMP takes it as it is.)
    """
    return os.sched_getaffinity(0) | openmp_cores()


def openmp_cores() -> set[int]:
    """Those that OpenMP binds threads to; none where it binds none."""
    openmp = ctypes.CDLL(None)  # torch loads its OpenMP for everybody
    if not hasattr(openmp, "omp_get_place_num_procs") or not openmp.omp_get_proc_bind():
        return set()
    cores: set[int] = set()
    for place in range(openmp.omp_get_num_places()):
        found = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
        openmp.omp_get_place_proc_ids(place, found)
        cores.update(found)
    return cores


@contextmanager
def starting_threads() -> Iterator[None]:
    """Threads and processes that this thread starts inside may run on :func:`usable_cores`.

    Raises:
        FuyouStateError: the system starts no more threads.
    """
    own = os.sched_getaffinity(0)
    cores = own | openmp_cores()
    if own != cores:
        _move_to(cores)
    try:
        yield
    except RuntimeError as error:  # of C++, and of Python
        if str(error) not in (os.strerror(errno.EAGAIN), "can't start new thread"):
            raise
        raise FuyouStateError(
            "the system refuses another thread; raise the limit of processes (ulimit -u), or the container's (pids.max)"
        ) from error
    finally:
        if own != cores:
            _move_to(own)


def stay_unbound() -> None:
    """In a thread that may run on several cores, before it computes: OpenMP leaves it there."""
    if openmp_cores():
        cores = os.sched_getaffinity(0)
        import torch

        torch.ones(_PARALLEL_ELEMENTS).add_(1.0)
        _move_to(cores)


def _move_to(cores: set[int]) -> None:
    with suppress(OSError):  # slower, but right
        os.sched_setaffinity(0, cores)
