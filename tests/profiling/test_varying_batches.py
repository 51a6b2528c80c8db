# SPDX-License-Identifier: Apache-2.0
"""A script that does not pack has batches of any length: what is recorded of one is scaled to those that are timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from ds_fuyou.planner.profile import BlockCost, RunProfile
from ds_fuyou.planner.watch import Cause
from tests.harness.models import TinyGPT
from tests.harness.runner import ds_config

pytestmark = pytest.mark.usefixtures("only_rank")

MODEL = {"num_layers": 3, "width": 72, "vocabulary": 500}


def run_plan_of(steps: Sequence[Sequence[int]], swap: Path, mode: str) -> Any:
    """After steps of micro-batches with so many rows."""
    swap.mkdir()
    activations = {"activations": {"mode": mode}, "gpu_budget_bytes": 150_000}
    plan = {"smallest_swapped_bytes": 1024, "activation_bytes": 1 << 20}
    fuyou = {"nvme_path": str(swap), "optimizer": {"tier": "nvme"}, "dram_budget_bytes": 4 << 30, **activations}
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    config = ds_config(gradient_clipping=0.0, gradient_accumulation_steps=len(steps[0]), fuyou={**fuyou, "plan": plan})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for rows in (rows for step in steps for rows in step):
        engine.backward(engine(torch.randint(0, 500, (rows, 17))))
        engine.step()
    plan = engine.optimizer.run_plan
    engine.destroy()
    return plan


def of_a_row(blocks: Sequence[BlockCost], rows: float) -> list[float]:
    """Numbers of the first block."""
    numbers = [blocks[0].flops, blocks[0].input_bytes]
    numbers += [number for one in blocks[0].operators for number in (one.flops, one.num_bytes)]
    return [number / rows for number in numbers]


@pytest.mark.parametrize("mode", ["auto", "swap"])
@pytest.mark.parametrize(
    ("steps", "mean"),
    [([[8], [8], [8]], 8), ([[2], [8], [8]], 8), ([[32], [8], [8]], 8), ([[2, 6], [6, 10], [8, 8]], 8)],
    ids=["alike", "shorter first", "longer first", "accumulated"],
)
def test_what_was_recorded_is_of_a_mean_micro_batch_of_the_measured_step(
    mode: str, steps: list[list[int]], mean: float, tmp_path: Path
) -> None:
    plan = run_plan_of(steps, tmp_path / "swap", mode)
    profile: RunProfile = plan.profile
    assert (profile.shape, profile.num_elements) == ((mean, 17), 17 * mean)
    assert profile.blocks[0].input_bytes == mean * 16 * 72 * 2
    if mode == "auto":
        assert of_a_row(plan.auto.blocks, mean) == pytest.approx(of_a_row(profile.blocks, mean))
        saved = plan.auto._decided_by
        assert saved.block_flops == pytest.approx(profile.blocks[0].flops)
        assert saved.input_bytes == pytest.approx(profile.blocks[0].input_bytes)
        assert saved.block_bytes > sum(one.num_bytes for one in saved.outputs.values()) / 2


def test_the_profile_is_of_the_mean_whatever_the_last_micro_batch_was(tmp_path: Path) -> None:
    """So five steps of other lengths with the same mean are no other batches, and a next run finds it alike."""
    steps = [[2, 14], [12, 4], *[[15, 1]] * 7]
    plan = run_plan_of(steps, tmp_path / "swap", "swap")
    assert plan.profile.num_elements == 8 * 17
    assert Cause.WORKLOAD not in {finding.cause for finding in plan.findings}
    assert plan.profile.shape == (8, 17)


def test_batches_that_last_are_planned_for_by_their_median_not_the_last_one(tmp_path: Path) -> None:
    steps = [[4], [4], [4], [4], [12], [12], [12], [12], [8]]
    plan = run_plan_of(steps, tmp_path / "swap", "swap")
    (found,) = [finding for finding in plan.findings if finding.cause is Cause.WORKLOAD]
    assert plan.profile.num_elements == found.measured == 12 * 17
