# SPDX-License-Identifier: Apache-2.0
"""Runs of tests/harness/killed_ranks.py."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Collection, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.harness.forked import finish, start
from tests.harness.ports import free_port
from tests.harness.runner import HERE, environment


def launch(
    path: Path, case: dict, world_size: int, name: str = "log", **env: str
) -> tuple[list[BaseProcess], list[Path]]:
    """State files go to ``path``, output to ``path``/``name``RANK. ``env``: of the environment."""
    path.mkdir(parents=True, exist_ok=True)
    port = free_port()
    logs = [path / f"{name}{rank}" for rank in range(world_size)]
    processes = [
        start(HERE / "killed_ranks.py", [path, json.dumps(case)], environment(rank, world_size, port) | env, logs[rank])
        for rank in range(world_size)
    ]
    return processes, logs


def run_to_end(path: Path, case: dict, world_size: int, name: str = "log", **env: str) -> str:
    """What rank 0 said."""
    processes, logs = launch(path, case, world_size, name, **env)
    finish(processes)
    said = logs[0].read_text(errors="replace")
    assert [each.exitcode for each in processes] == [0] * world_size, said[-3000:]
    return said


def steps_in(logs: Collection[Path]) -> int:
    """The last step that returned on any rank."""
    found = [re.findall(r"STEP (\d+)", log.read_text(errors="replace")) for log in logs if log.exists()]
    return max((int(steps[-1]) for steps in found if steps), default=0)


def wait_for_step(awaited: int, processes: Sequence[BaseProcess], logs: Collection[Path]) -> None:
    """Until this step has returned on a rank, or a rank has ended."""
    while steps_in(logs) < awaited and all(each.is_alive() for each in processes):
        time.sleep(0.005)


def kill_some(chance: random.Random, processes: Sequence[BaseProcess], logs: Collection[Path], awaited: int) -> None:
    """Random ranks, a moment after this step; what is left soon after, as launchers do."""
    chosen = chance.sample(range(len(processes)), chance.randint(1, len(processes)))
    wait_for_step(awaited, processes, logs)
    time.sleep(chance.random() * 0.2)
    for rank in chosen:
        processes[rank].kill()
    finish(processes, chance.random() * 0.5)
