# SPDX-License-Identifier: Apache-2.0
"""A run in a control group with a limit of memory, which the kernel enforces by killing: it is refused where what the
group leaves holds no plan, and lives where it holds one, also when the limit is lowered to little more while it trains:
then states leave memory, through as little as will do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.forked import finish, start
from tests.harness.memory_limit import NAMES
from tests.harness.ports import free_port
from tests.harness.runner import HERE, environment

MIB = 1 << 20
AUTO = {"optimizer": {"tier": "auto"}, "plan": {"chunk_bytes": "1MiB"}}
STORED = {**AUTO, "parameters": {"tier": "nvme"}}  # so states may go there, too


def candidates() -> Iterator[Path]:
    """Groups in which one of our own may have a limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        mount = Path("/sys/fs/cgroup", "memory" if controllers == "memory" else "")
        if controllers in ("", "memory"):
            yield mount / name.lstrip("/")
            yield mount


@pytest.fixture
def group() -> Iterator[Path]:
    for parent in candidates():
        made = parent / f"fuyou-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            if any((made / name).exists() for name in NAMES):
                yield made
                return
        finally:
            made.rmdir()
    pytest.skip("no control group of memory can be made here")


def lived(path: Path, group: Path, **case: object) -> tuple[int | None, str]:
    path.mkdir()
    given = {"steps": 10, "left_bytes": 2048 * MIB, "block": AUTO, **case}
    log = path / "log"
    env = {**environment(0, 1, free_port()), "DS_FUYOU_PROFILES": str(path / "profiles")}
    process = start(HERE / "memory_limit.py", [str(path), str(group), json.dumps(given)], env, log)
    finish([process])
    return process.exitcode, log.read_text(errors="replace")


def told(status: int | None, said: str) -> tuple[float, float, str]:
    """Shares of states in host memory, before and after, and what was left."""
    assert status == 0, (status, said[-3000:])
    found = re.search(r"^SHARE (\S+) (\S+)\nLEFT (\S+)", said, re.MULTILINE)
    assert found, said[-3000:]
    return float(found[1]), float(found[2]), found[3]


def test_a_run_plans_with_what_its_control_group_leaves_it_or_is_refused(group: Path, tmp_path: Path) -> None:
    before, after, left = told(*lived(tmp_path / "enough", group))
    assert (before, after) == (1.0, 1.0)
    # States that the JSON keeps in memory need not leave: a step takes nothing that the one before had not.
    held = {"left_bytes": 4000 * MIB, "lowered": 20 * MIB, "held_bytes": 2500 * MIB}
    assert told(*lived(tmp_path / "lowered", group, **held)) == (1.0, 1.0, left)
    assert told(*lived(tmp_path / "leaving", group, block=STORED, decides=True, **held)) == (1.0, 0.0, left)
    # Enough for what is imported and copied until a plan is made, which nobody can refuse.
    status, said = lived(tmp_path / "none", group, left_bytes=150 * MIB)
    assert status not in (0, -9), said[-3000:]
    assert re.search(r"FuyouConfigError: the smallest placement .* needs .* of host memory, dram_budget_bytes is", said)


def test_what_a_forked_process_will_copy_is_left_to_it(group: Path, tmp_path: Path) -> None:
    assert told(*lived(tmp_path / "enough", group, left_bytes=1024 * MIB, collects=True))[0] == 1.0
    status, said = lived(tmp_path / "little", group, left_bytes=240 * MIB, collects=True)  # enough but for that
    assert status not in (0, -9), said[-3000:]
    assert "MiB are left to what this process shares with the one that it was forked from" in said
    assert re.search(r"FuyouConfigError: the smallest placement .* needs .* of host memory, dram_budget_bytes is", said)
