# SPDX-License-Identifier: Apache-2.0
"""Threads where OpenMP binds its own to cores, as clusters have it: in a process that begins so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_fuyou.host.cores import on_all_cores, usable_cores
from tests.harness.limits import HANG_SECS

_CORE_OF_THREE_THREADS = """
import json, os, sys
from pathlib import Path
import torch
from ds_fuyou.host.cores import usable_cores
from ds_fuyou.zero.budgets import cores_of_rank
from tests.harness.small_core import small_core, step
from tests.unit.test_checksums import LAYOUT

tasks = lambda: {int(task) for task in os.listdir("/proc/self/task")}
before, cores = os.sched_getaffinity(0), usable_cores()
torch.ones(1 << 20).add_(1)  # OpenMP's threads are there
others = tasks()
with small_core(Path(sys.argv[1]), LAYOUT, residency=(1.0, 0.0, 1.0), num_update_threads=3) as core:
    step(core, 1)
    ours = {task: sorted(os.sched_getaffinity(task)) for task in tasks() - others}
print(json.dumps([sorted(before), sorted(os.sched_getaffinity(0)), sorted(cores), cores_of_rank(), [*ours.values()]]))
"""


@pytest.mark.parametrize("binding", [{"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "threads", "OMP_PROC_BIND": "spread"}])
def test_threads_are_not_bound_to_the_core_that_trains(binding: dict[str, str], tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    done = subprocess.run(
        [sys.executable, "-c", _CORE_OF_THREE_THREADS, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "2", **binding},
        stdout=subprocess.PIPE,
        text=True,
        timeout=HANG_SECS,
        check=True,
    )
    before, after, found, of_rank, ours = json.loads(done.stdout.splitlines()[-1])
    assert len(before) == 1, "nothing is bound, so nothing was tested"
    assert after == before, "the thread that trains stays where OpenMP put it"
    assert found == cores
    assert of_rank == len(cores)
    assert len(ours) >= 4, "updates, their worker and the transfers' threads"
    assert ours == [cores] * len(ours)


def test_nothing_is_bound_where_openmp_binds_nothing() -> None:
    own = os.sched_getaffinity(0)
    assert usable_cores() == own
    with on_all_cores():
        assert os.sched_getaffinity(0) == own
