# SPDX-License-Identifier: Apache-2.0
"""Ten steps under every kind of setting equal stock ZeRO-3 with DeepSpeedCPUAdam, bit by bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.parity.cases import MATRIX, STOCK, TIERS, block


def _exercised(stock: dict, case: dict, name: str) -> None:
    """That the case is what its name says: otherwise equal results prove less than they seem to."""
    clip = case["config"]["gradient_clipping"]
    norms = [norm for norm, applied in zip(stock["norms"], stock["applied"], strict=True) if applied]
    if "always" in name:
        assert all(norm > clip for norm in norms)
    if "rarely" in name:
        assert any(norm > clip for norm in norms)
        assert any(norm <= clip for norm in norms)
    if name.startswith("fp16"):
        assert not all(stock["applied"]), "no step overflowed"
        assert sum(stock["applied"]) >= 4
        assert len(set(stock["scales"])) > 2
    assert len({tuple(rates) for rates in stock["rates"]}) > 3, "the schedule stands still"


@pytest.mark.parametrize(("name", "tiers", "policy", "overlap", "slots"), MATRIX)
def test_equals_stock(name: str, tiers: str, policy: str, overlap: str, slots: int, must_equal, tmp_path: Path) -> None:
    case = STOCK[name]
    fuyou = block(str(tmp_path / "swap"), tiers, policy, overlap, slots)
    stock, ours = must_equal(case, fuyou)
    _exercised(stock[0], case, name)
    assert ours[0]["num_chunks"] >= 6
    for section, home in zip(("optimizer", "parameters", "gradients"), TIERS[tiers], strict=False):
        wanted = home if isinstance(home, float) else {"cpu": 1.0, "nvme": 0.0}[home]
        assert ours[0]["shares"][section] == pytest.approx(wanted, abs=0.12)
    can_speculate = tiers != "none" and overlap != "none" and (slots == 2 or "twice" in tiers)
    if policy == "defer" or not can_speculate:
        assert ours[0]["redone_chunks"] == 0
    elif policy == "speculate" and "always" in name:
        assert ours[0]["redone_chunks"] > 0


@pytest.mark.parametrize(
    ("name", "tiers", "policy", "overlap", "slots"),
    [row for row in MATRIX if row[0][:4] == "bf16" and row[1] not in ("none", "twice")],
)
def test_whole_masters_equal_stock(
    name: str, tiers: str, policy: str, overlap: str, slots: int, must_equal, tmp_path: Path
) -> None:
    """Those of the test above are split: that is the default in bfloat16."""
    fuyou = block(str(tmp_path / "swap"), tiers, policy, overlap, slots)
    fuyou["optimizer"]["masters"] = "whole"
    must_equal(STOCK[name], fuyou)


def test_the_matrix_covers_every_pair_of_values() -> None:
    """Each value of a setting meets each of dtype, clip, accumulation and tiers at least once."""
    rows = [(*name.split("-")[:3], *rest) for name, *rest in MATRIX]
    wanted = [("bf16", "fp16", "fp32"), ("off", "rarely", "always"), ("1", "3"), tuple(set(TIERS) - {"params_only"})]
    wanted += [("auto", "defer", "speculate"), ("none", "backward", "backward_and_forward"), (1, 2)]
    for column, values in enumerate(wanted):
        assert {row[column] for row in rows} == set(values)
    for dtype, clip in itertools.product(("bf16", "fp16", "fp32"), ("off", "always")):
        assert any(row[:2] == (dtype, clip) for row in rows)
    for dtype, tiers in itertools.product(("bf16", "fp16", "fp32"), ("all", "none", "grads_cpu")):
        assert any(row[0] == dtype and row[3] == tiers for row in rows), (dtype, tiers)
    for dtype, tiers in itertools.product(("bf16", "fp16"), ("quarter", "half", "most")):
        assert any(row[:2] == (dtype, "rarely") and row[3] == tiers for row in rows), (dtype, tiers)
    for policy, overlap in itertools.product(("auto", "speculate"), ("backward", "backward_and_forward")):
        assert any(row[4:6] == (policy, overlap) for row in rows), (policy, overlap)
