# SPDX-License-Identifier: Apache-2.0
"""Starting threads: on which cores of this process they may run, and what is said where the system refuses them.

Where OpenMP binds its threads (``OMP_PROC_BIND``, ``OMP_PLACES``; many clusters set them) it binds the thread that
imports torch to one core, and whatever that thread starts inherits it: all updates and transfers, on the core that
trains.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ds_fuyou.errors import FuyouStateError

__all__ = ["starting_threads", "usable_cores"]


def usable_cores() -> set[int]:
    """The calling thread's, and those that OpenMP shares out among its threads, if it binds them."""
    return os.sched_getaffinity(0) | _openmp_cores()


def _openmp_cores() -> set[int]:
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
        FuyouStateError: the system starts none any more.
    """
    own, cores = os.sched_getaffinity(0), usable_cores()
    if own != cores:
        os.sched_setaffinity(0, cores)
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
            os.sched_setaffinity(0, own)
