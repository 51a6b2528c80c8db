# SPDX-License-Identifier: Apache-2.0
"""Threads where OpenMP binds its own to cores, as clusters have it: in a process that begins so."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.host.threads import starting_threads, usable_cores

_CORE_OF_THREE_THREADS = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from ds_fuyou.host.device import HostDevice
from ds_fuyou.host.memory import PageLocks
from ds_fuyou.host.threads import usable_cores
from ds_fuyou.optimizer.host_sums import HostSum, HostSums
from ds_fuyou.zero.run.neighbours import cores_of_rank
from tests.harness.small_core import small_core, step
from tests.unit.test_checksums import LAYOUT

tasks = lambda: {int(task) for task in os.listdir("/proc/self/task")}
before, cores = os.sched_getaffinity(0), usable_cores()
torch.ones(1 << 20).add_(1)  # OpenMP's threads are there
others = tasks()
with small_core(Path(sys.argv[1]), LAYOUT, residency=(1.0, 0.0, 1.0), num_update_threads=3) as core:
    step(core, 1)
    ours = {task: sorted(os.sched_getaffinity(task)) for task in tasks() - others}
sums = HostSums(torch.float32, HostDevice(), PageLocks(HostDevice()), 2)
event, pieces = SimpleNamespace(synchronize=int), [torch.ones(1 << 20)]
one = HostSum(torch.ones(1 << 20), sums.staging(1 << 20).zero_(), event, None, adds=True, gradient=pieces)
sums.submit(one).wait()
ours["sums"] = sorted(os.sched_getaffinity(sums._thread.native_id))  # behind a region of torch's OpenMP
sums.close()
print(json.dumps([sorted(before), sorted(os.sched_getaffinity(0)), sorted(cores), cores_of_rank(), [*ours.values()]]))
"""


@pytest.mark.parametrize("binding", [{"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "threads", "OMP_PROC_BIND": "spread"}])
def test_threads_are_not_bound_to_the_core_that_trains(
    binding: dict[str, str], tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    done = run_python(["-c", _CORE_OF_THREE_THREADS, str(tmp_path)], OMP_NUM_THREADS="2", **binding)
    assert done.returncode == 0, done.stderr
    before, after, found, of_rank, ours = json.loads(done.stdout.splitlines()[-1])
    assert len(before) == 1, "nothing is bound, so nothing was tested"
    assert after == before, "the thread that trains stays where OpenMP put it"
    assert found == cores
    assert of_rank == len(cores)
    assert len(ours) >= 5, "updates, their worker, the transfers' threads, and the one that adds"
    assert ours == [cores] * len(ours)


_FEW_THREADS = """
import os, resource, sys
import torch
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.ops.core import load_core
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.types import Extent

NUM_BYTES = 8 << 20
path, user = sys.argv[1], int(sys.argv[2])
load_core()
os.setgroups([]); os.setgid(user); os.setuid(user)
def allow(more):
    there = len(os.listdir("/proc/self/task"))
    resource.setrlimit(resource.RLIMIT_NPROC, (there + more, resource.getrlimit(resource.RLIMIT_NPROC)[1]))

torch.set_num_threads(1)
allow(0)
for engine in ("io_uring", "threads"):
    try:
        IoLane(IoSettings(engine), lambda _: None)
        print("a thread was started")
    except FuyouStateError as error:
        print(error)
allow(1)
lane = IoLane(IoSettings("io_uring"), lambda _: None)
fd = os.open(path, os.O_RDWR | os.O_CREAT)  # writes that allocate blocks, and buffered ones, may block
values = aligned_tensor(NUM_BYTES)
values.view(torch.int32).copy_(torch.arange(NUM_BYTES // 4))
lane.write([Extent(fd, 0, NUM_BYTES)], values, "writing").wait()
found = aligned_tensor(NUM_BYTES)
lane.read([Extent(fd, 0, NUM_BYTES)], found, "reading").wait()
lane.close()
print("equal" if torch.equal(values, found) else "other bytes")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may become a user without processes")
def test_where_no_more_threads_may_be_started(run_python: Callable[..., Any]) -> None:
    """Starting some is refused by name; the kernel's own, which it starts for what would block, are done without."""
    with tempfile.TemporaryDirectory() as path:  # below tmp_path nobody else could look
        os.chmod(path, 0o777)
        done = run_python(["-c", _FEW_THREADS, f"{path}/data", str(50_000 + os.getpid() % 10_000)])
    assert done.returncode == 0, done.stderr
    *refused, last = done.stdout.splitlines()
    assert last == "equal"
    assert len(refused) == 2
    assert all(line.startswith("the system refuses another thread; raise the limit of") for line in refused), refused


def test_nothing_is_bound_where_openmp_binds_nothing() -> None:
    own = os.sched_getaffinity(0)
    assert usable_cores() == own
    with starting_threads():
        assert os.sched_getaffinity(0) == own
