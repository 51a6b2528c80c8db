# SPDX-License-Identifier: Apache-2.0
"""States, P16 and G16 that move between host memory and storage while training runs: every bit is stock's, on the CPU
and on the stand-in device, and a checkpoint that is saved meanwhile is one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.device.parity import case_of
from tests.harness.runner import differences, run_case, with_fuyou
from tests.parity.cases import STOCK, block

Stock = Callable[[dict], list[dict]]

TO_MEMORY_AND_BACK = {"1": 0.6, "4": 1.0, "6": 0.0}
FROM_MEMORY_AND_BACK = {"1": 0.3, "4": 0.0, "6": 0.8}

# (stock case, tiers, clip_policy, overlap, slots, shares of states in memory after steps)
CASES = [
    ("bf16-off-1-one", "states", "speculate", "backward_and_forward", 2, TO_MEMORY_AND_BACK),
    ("bf16-rarely-3-two_lrs", "all", "speculate", "backward", 2, TO_MEMORY_AND_BACK),
    ("bf16-rarely-3-two_lrs", "half", "auto", "backward_and_forward", 2, FROM_MEMORY_AND_BACK),
    ("fp16-rarely-3-two", "grads_cpu", "speculate", "backward_and_forward", 2, TO_MEMORY_AND_BACK),
    ("fp16-off-1-one", "most", "defer", "none", 1, FROM_MEMORY_AND_BACK),
    ("bf16-rarely-1-two-2ranks", "states", "speculate", "backward_and_forward", 2, TO_MEMORY_AND_BACK),
    ("fp16-always-3-one-2ranks", "half", "auto", "backward_and_forward", 2, FROM_MEMORY_AND_BACK),
]


def moving(case: dict, shares: dict[str, float]) -> dict:
    return {**case, "move_after": shares, "move_bytes": 600_000}


@pytest.mark.parametrize(("name", "tiers", "policy", "overlap", "slots", "shares"), CASES)
def test_a_run_in_which_states_move_equals_stock(
    name: str, tiers: str, policy: str, overlap: str, slots: int, shares: dict, stock_run: Stock, tmp_path: Path
) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    fuyou = block(str(swap), tiers, policy, overlap, slots)
    ours = run_case(moving(with_fuyou(STOCK[name], fuyou), shares), tmp_path, "ours")
    assert differences(stock_run(STOCK[name]), ours) == []
    assert all(min(result["moved"]) > 0 for result in ours), [result["moved"] for result in ours]
    share = list(shares.values())[-1]
    assert ours[0]["shares"]["optimizer"] == pytest.approx(share, abs=0.15)
    assert not [path for path in swap.glob("**/*") if path.is_file()]


GRADS = {"2": 1.0, "4": 0.0, "7": 0.6}
# (stock case, tiers, clip_policy, overlap, slots, shares of P16 in memory after steps, those of states)
PARAM_CASES = [
    ("bf16-off-1-one", "states", "speculate", "backward_and_forward", 2, {"1": 0.5, "3": 0.0, "6": 0.7}, {}),
    ("bf16-rarely-3-two_lrs", "all", "speculate", "backward", 2, {"1": 0.6, "4": 1.0, "7": 0.0}, {"2": 0.5}),
    ("fp16-rarely-3-two", "half", "auto", "backward_and_forward", 2, {"2": 0.0, "5": 1.0}, FROM_MEMORY_AND_BACK),
    ("fp16-off-1-one", "most", "defer", "none", 1, {"1": 1.0, "2": 0.0, "3": 0.4}, {}),
    ("fp32-always-1-two_lrs", "all", "auto", "backward_and_forward", 2, {"1": 1.0, "5": 0.3}, {}),
    ("bf16-rarely-1-two-2ranks", "states", "speculate", "backward_and_forward", 2, {"1": 0.0, "4": 0.6}, {"6": 0.4}),
    ("fp16-always-3-one-2ranks", "half", "auto", "backward_and_forward", 2, {"1": 1.0, "3": 0.2, "6": 0.9}, {}),
]


@pytest.mark.parametrize(("name", "tiers", "policy", "overlap", "slots", "params", "states"), PARAM_CASES)
def test_a_run_in_which_p16_moves_equals_stock(
    name: str,
    tiers: str,
    policy: str,
    overlap: str,
    slots: int,
    params: dict,
    states: dict,
    stock_run: Stock,
    tmp_path: Path,
) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    fuyou = block(str(swap), tiers, policy, overlap, slots)
    case = moving(with_fuyou(STOCK[name], fuyou), states) | {"params_after": params, "grads_after": GRADS}
    ours = run_case(case, tmp_path, "ours")
    assert differences(stock_run(STOCK[name]), ours) == []
    assert ours[0]["shares"]["gradients"] == pytest.approx(list(GRADS.values())[-1], abs=0.2)
    assert ours[0]["shares"]["parameters"] == pytest.approx(list(params.values())[-1], abs=0.15)
    assert not [path for path in swap.glob("**/*") if path.is_file()]


@pytest.mark.parametrize(("name", "tiers"), [("bf16-rarely-3-two_lrs", "all"), ("fp16-always-3-one-2ranks", "half")])
def test_p16_on_the_stand_in_device(name: str, tiers: str, stock_run: Stock, tmp_path: Path) -> None:
    """Pages that were copied go back at once; whoever read them later would find zeros."""
    swap = tmp_path / "swap"
    swap.mkdir()
    case = {**case_of(name, zero_init=True), "steps": 10}
    fuyou = block(str(swap), tiers, "speculate", "backward_and_forward", 2)
    ours = with_fuyou(case, fuyou) | {"device": {"seed": 11, "delay_secs": 0.002}}
    ours |= {"params_after": {"1": 0.6, "3": 1.0, "5": 0.0, "8": 0.4}, "grads_after": GRADS}
    found = run_case(ours, tmp_path, "ours")
    assert differences(stock_run(case), found) == []
    assert found[0]["trips"] == []


@pytest.mark.parametrize(("name", "tiers"), [("bf16-rarely-3-two_lrs", "all"), ("fp16-always-3-one-2ranks", "half")])
def test_on_the_stand_in_device(name: str, tiers: str, stock_run: Stock, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    case = {**case_of(name, zero_init=True), "steps": 10}
    shares = {"1": 0.7, "5": 0.0} if tiers == "all" else {"1": 0.0, "6": 0.9}
    fuyou = block(str(swap), tiers, "speculate", "backward_and_forward", 2)
    ours = with_fuyou(case, fuyou) | {"device": {"seed": 7, "delay_secs": 0.002}}
    found = run_case(moving(ours, shares), tmp_path, "ours")
    assert differences(stock_run(case), found) == []
    assert all(min(result["moved"]) > 0 for result in found)
    assert found[0]["trips"] == []


def test_a_checkpoint_that_is_saved_while_states_move_is_the_step_s(stock_run: Stock, tmp_path: Path) -> None:
    """Stock reads it, and has what a stock run has after that step."""
    case = copy.deepcopy(STOCK["bf16-off-1-one"])
    swap, saved = tmp_path / "swap", tmp_path / "saved"
    swap.mkdir()
    fuyou = block(str(swap), "states", "speculate")
    save = {"save_after": 4, "save_to": str(saved)}
    ours = run_case(moving(with_fuyou(case, fuyou), {"2": 0.8, "3": 0.2, "5": 1.0}) | save, tmp_path, "ours")
    assert differences(stock_run(case), ours) == []
    assert min(ours[0]["moved"]) > 0
    read = run_case({**case, "steps": 4, "load": str(saved)}, tmp_path, "read")
    expected = run_case({**case, "steps": 4}, tmp_path, "expected")
    for key in ("p16", "p32", "exp_avg", "exp_avg_sq"):
        assert expected[0][key].keys() == read[0][key].keys()
        assert all(torch.equal(expected[0][key][name], read[0][key][name]) for name in expected[0][key]), key
