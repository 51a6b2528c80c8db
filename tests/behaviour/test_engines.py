# SPDX-License-Identifier: Apache-2.0
"""Two engines in one process, one after another and together; what destroy() leaves behind: nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.forked import finish, start
from tests.harness.runner import environment, free_port

ROOT = Path(__file__).parents[2]
LIMIT_SECS = 150


def run(name: str, swap: Path) -> dict[str, Any]:
    swap.mkdir()
    log = swap.with_name("log")
    process = start(ROOT / "tests/behaviour/engines.py", [name, str(swap)], environment(0, 1, free_port()), log)
    finish([process], LIMIT_SECS)
    output = log.read_text()
    assert process.exitcode == 0, output[-4000:]
    line = next(line for line in output.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


def test_two_engines_train_as_each_of_them_alone(tmp_path: Path) -> None:
    found = run("together", tmp_path / "swap")
    assert found == {"as alone": [True, True], "own directories": True, "files": [True, 0], "scores": 6}


def test_a_reference_model_without_an_optimizer_stays_as_it_is(tmp_path: Path) -> None:
    found = run("reference", tmp_path / "swap")
    assert found == {"equal at first": True, "actor moved": True, "reference stayed": True}


@pytest.mark.parametrize("tiers", ["all", "none"])
def test_destroy_frees_threads_descriptors_files_and_memory(tiers: str, tmp_path: Path) -> None:
    found = run(f"freed-{tiers}", tmp_path / "swap")
    assert found["after"] == found["before"]
    assert found["growth"] < 16 << 20  # one engine's states are 70 MB or more
