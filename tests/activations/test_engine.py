# SPDX-License-Identifier: Apache-2.0
"""Whole engines with awkward models: what swapping and recomputing leave behind equals stock, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runner import environment, free_port

SCRIPT = Path(__file__).with_name("engine_script.py")
RUNS = (
    "everything swap",
    "everything planned",
    "llama swap",
    "llama recompute",
    "llama planned",
    "deepspeed swap",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """Results of all models from one process, and what it logged."""
    directory = tmp_path_factory.mktemp("swap")
    env = environment(0, 1, free_port())
    env["PYTHONPATH"] = str(SCRIPT.parents[2])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory)], capture_output=True, text=True, timeout=280, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert not [path for path in directory.glob("**/*") if path.is_file()]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[0].removeprefix("RESULT ")), done.stderr


@pytest.mark.parametrize("name", RUNS)
def test_equals_stock(name: str, trained: tuple[dict, str]) -> None:
    found = trained[0][name]
    assert found["differs"] == []
    if "recompute" not in name:
        assert found["swapped"] > 0
        assert found["read"] > 0
        assert found["left"] == 0


def test_the_plan_decided_after_the_first_step(trained: tuple[dict, str]) -> None:
    assert trained[1].count("activations, decided after step 1, in how many of") == 2
    assert "mlp_up (mlp.up_proj/mm)" in trained[1]


def test_checkpointing_was_taken_over(trained: tuple[dict, str]) -> None:
    assert trained[1].count("their activations are swapped, not recomputed") == 1
    assert trained[1].count("it recomputes whole blocks") == 1
