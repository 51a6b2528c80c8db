# SPDX-License-Identifier: Apache-2.0
"""What a run compares with its plan, step by step, and what follows. On one rank; others are answered for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from ds_fuyou.planner.watch import StepMeasurement
from tests.harness.models import TinyGPT
from tests.harness.runner import ds_config

pytestmark = pytest.mark.usefixtures("only_rank")

MODEL = {"num_layers": 2, "width": 72, "vocabulary": 500}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    swap = tmp_path / "swap"
    swap.mkdir()
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    fuyou = {"nvme_path": str(swap), "optimizer": {"tier": "nvme"}, "dram_budget_bytes": 4 << 30}
    config = ds_config(gradient_clipping=0.0, fuyou=fuyou)
    made, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    yield made
    made.destroy()


def train(engine: Any, count: int) -> None:
    for _ in range(count):
        engine.backward(engine(torch.ones(2, 17, dtype=torch.int64)))
        engine.step()


def watched(run_plan: Any, monkeypatch: pytest.MonkeyPatch) -> list[StepMeasurement]:
    """What its watch is told from now on."""
    told: list[StepMeasurement] = []
    monkeypatch.setattr(run_plan._watch, "step", lambda measured: told.append(measured) or [])
    return told


def test_what_a_script_does_between_steps_is_told_apart(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train(engine, 3)
    told = watched(engine.optimizer.run_plan, monkeypatch)
    for _ in range(2):
        time.sleep(0.05)
        train(engine, 1)
    for step in told:
        assert step.outside_secs >= 0.05
        assert 0 < step.compute_secs <= step.secs - 0.05
