# SPDX-License-Identifier: Apache-2.0
"""Whole engines with awkward models: what swapping and recomputing leave behind equals stock, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.forked import finish, start
from tests.harness.ports import free_port
from tests.harness.runner import environment

SCRIPT = Path(__file__).with_name("engine_script.py")
MICRO_BATCHES, TOKENS = 2, 3 * 24
RUNS = (
    "everything swap",
    "everything planned",
    "llama swap",
    "llama recompute",
    "llama planned",
    "deepspeed swap",
    "drawing swap",
    "drawing recompute",
    "transforming swap",
    "transforming recompute",
    "borrowing recompute",
    "asides recompute",
)


@pytest.fixture(scope="module")
def monitors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("monitors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, monitors: Path) -> tuple[dict, str]:
    """Results of all models from one process, and what it logged."""
    directory = tmp_path_factory.mktemp("swap")
    env, log = environment(0, 1, free_port()), directory.parent / "engine.log"
    process = start(SCRIPT, [str(directory), str(monitors)], env, log)
    finish([process])
    output = log.read_text(errors="replace")
    assert process.exitcode == 0, output[-5000:]
    assert not [path for path in directory.glob("**/*") if path.is_file()]
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[0].removeprefix("RESULT ")), output


@pytest.mark.parametrize("name", RUNS)
def test_equals_stock(name: str, trained: tuple[dict, str]) -> None:
    found = trained[0][name]
    assert found["differs"] == []
    if "recompute" not in name:
        assert found["swapped"] > 0
        has_room = any(each in name for each in ("planned", "drawing", "transforming"))  # in host memory, for all of it
        assert found["read"] > 0 or has_room
        assert found["left"] == 0


@pytest.mark.parametrize("mode", ["swap", "auto", "none"])
def test_an_interrupted_first_forward_leaves_nothing_behind(mode: str, trained: tuple[dict, str]) -> None:
    assert trained[0][f"interrupted {mode}"] == {"hooks": False, "modes": [], "aside": False}


def test_the_plan_decided_after_the_first_step(trained: tuple[dict, str]) -> None:
    assert trained[1].count("activations, decided after step 1: of") == 2
    assert "mlp_up (mlp.up_proj/mm)" in trained[1]


def test_checkpointing_was_taken_over(trained: tuple[dict, str]) -> None:
    assert trained[1].count("their activations are swapped, not recomputed") == 1
    assert trained[1].count("it recomputes whole blocks") == 1


def test_monitors_are_told_of_every_step(trained: tuple[dict, str], monitors: Path) -> None:
    """DeepSpeed's CSV monitor: from the second step on, beside its own events, at the same number of samples."""

    def rows(name: str) -> list[list[float]]:
        lines = (monitors / "llama-swap" / f"Train_{name}.csv").read_text().splitlines()
        return [[float(value) for value in line.split(",")] for line in lines[1:]]

    def last(name: str) -> float:
        return rows(f"Fuyou_{name}")[-1][1]

    stock = rows("Samples_lr")
    assert [row[0] for row in rows("Fuyou_step_secs")] == [row[0] for row in stock[1:]]
    assert last("step_secs") > last("exposed_secs") >= 0
    assert last("hidden_secs") >= 0
    assert last("tokens_per_sec") == pytest.approx(MICRO_BATCHES * TOKENS / last("step_secs"))
    assert last("device_to_host_bytes") == last("host_to_device_bytes") == trained[0]["llama swap"]["swapped"] / 2
    assert last("storage_write_bytes") > 0
    assert last("storage_read_bytes") > 0
    assert last("bytes_in_storage") > last("bytes_in_host_memory") > 0
    assert last("bound_lane") in (0, 1, 2)
