# SPDX-License-Identifier: Apache-2.0
"""A bias-correction history saved by one process and replayed by another continues to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from ds_fuyou.optimizer.rules import GroupHyper, OptimizerKind, RuleClock
from tests.conftest import RunPython

NUMEL = 5000
KIND = OptimizerKind("adam", ("exp_avg", "exp_avg_sq"))
BETAS = {"equal": [(0.9, 0.999)] * 2, "different": [(0.9, 0.999), (0.85, 0.99)]}

RESUME = """
import json, sys, torch
from tests.conformance.test_rule_clock import KIND, advance, hypers
from ds_fuyou.optimizer.rules import RuleClock
saved = torch.load(sys.argv[1])
clock = RuleClock(KIND, hypers(saved["betas"])[0])
clock.replay(json.loads(saved["history"]))
advance(clock, saved["betas"], saved["tensors"], 60)
torch.save(saved["tensors"], sys.argv[1] + ".out")
"""


def hypers(betas: list[tuple[float, float]]) -> list[GroupHyper]:
    return [GroupHyper(1e-3, tuple(pair), 1e-8, 0.1, True) for pair in betas]


def gradient(step: int, group: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + group)) * 0.02


def fresh_tensors() -> list[list[torch.Tensor]]:
    return [[gradient(0, group), torch.zeros(NUMEL), torch.zeros(NUMEL)] for group in range(2)]


def advance(clock: RuleClock, betas: list[tuple[float, float]], tensors: list[list[torch.Tensor]], to: int) -> None:
    while clock.step < to:
        rules = clock.prepare(hypers(betas))
        for group, (rule, (param, *moments)) in enumerate(zip(rules.rules, tensors, strict=True)):
            rule.apply(param, gradient(rules.step, group), moments)
        clock.commit(rules)


def stock_after(betas: list[tuple[float, float]], num_steps: int) -> list[list[torch.Tensor]]:
    params = [torch.nn.Parameter(values[0]) for values in fresh_tensors()]
    groups = [{"params": [p], "betas": pair} for p, pair in zip(params, betas, strict=True)]
    optimizer = DeepSpeedCPUAdam(groups, lr=1e-3, eps=1e-8, weight_decay=0.1)
    for step in range(1, num_steps + 1):
        for group, param in enumerate(params):
            for other in params:
                other.grad = gradient(step, group) if other is param else None
            optimizer.step()
    return [[p.data, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]] for p in params]


@pytest.mark.parametrize("which", sorted(BETAS))
def test_resumed_in_a_fresh_process_equals_uninterrupted_stock(
    which: str, tmp_path: Path, run_python: RunPython
) -> None:
    betas, tensors = BETAS[which], fresh_tensors()
    clock = RuleClock(KIND, hypers(betas)[0])
    advance(clock, betas, tensors, 23)
    saved = {"betas": betas, "tensors": tensors, "history": json.dumps(clock.history)}
    torch.save(saved, tmp_path / "state")
    ran = run_python(["-c", RESUME, str(tmp_path / "state")])
    assert ran.returncode == 0, ran.stderr
    resumed = torch.load(f"{tmp_path / 'state'}.out")
    for ours, stock in zip(resumed, stock_after(betas, 60), strict=True):
        for a, b in zip(ours, stock, strict=True):
            assert torch.equal(a, b)
