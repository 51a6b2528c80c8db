# SPDX-License-Identifier: Apache-2.0
"""Moments of fewer bits: training is the same to the bit wherever states are, however they are cut, and after a
checkpoint; and it is near stock's, which has fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.runner import differences, ds_config, run_case, with_fuyou
from tests.parity.cases import STOCK, block

ROUNDED = ("bf16", "int8")


def ours(case: dict, directory: Path, tiers: str, moments: str, masters: str = "whole", **plan: int) -> dict:
    (directory / "swap").mkdir(exist_ok=True)
    fuyou = block(str(directory / "swap"), tiers, **plan)
    fuyou["optimizer"].update(moments=moments, masters=masters)
    return with_fuyou(case, fuyou)


@pytest.mark.parametrize("moments", ROUNDED)
@pytest.mark.parametrize("name", ["bf16-rarely-3-two_lrs", "bf16-rarely-1-two-2ranks", "fp16-rarely-3-two"])
def test_tiers_and_chunks_change_nothing(name: str, moments: str, stock_run: Any, tmp_path: Path) -> None:
    """With accumulation, clipping, skipped steps, on two ranks; against stock, how near it is."""
    case, stock = STOCK[name], stock_run(STOCK[name])
    first = run_case(ours(case, tmp_path, "none", moments), tmp_path, "none")
    masters = "split" if name.startswith("bf16") else "whole"
    for tiers, plan in (("states", {}), ("all", {"chunk_bytes": 131072})):
        other = run_case(ours(case, tmp_path, tiers, moments, masters, **plan), tmp_path, tiers)
        assert differences(first, other) == [], tiers
    assert differences(stock, first)
    assert first[0]["losses"][0] == stock[0]["losses"][0]
    assert first[0]["losses"] == pytest.approx(stock[0]["losses"], rel=2e-2, nan_ok=True)


@pytest.mark.parametrize("saved_by", ["nobody", "stock"])
@pytest.mark.parametrize("tiers", ["none", "all"])
def test_what_partitions_have_behind_a_parameter_changes_nothing(tiers: str, saved_by: str, tmp_path: Path) -> None:
    """Stock makes them of memory as it is, and decay takes it into moments, which share a scale with a parameter's."""
    optimizer = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}}
    case = {"model": {"gates": True}, "config": ds_config(optimizer=optimizer), "world_size": 2, "steps": 3}
    results = []
    for padding in (0.0, 1e4):
        folder = tmp_path / f"{padding:g}"
        folder.mkdir()
        held = {**case, "zero_init": True, "padding": padding}
        if saved_by == "stock":
            run_case({**held, "save": str(folder / "saved")}, folder, "stock")
            held = {**case, "load": str(folder / "saved")}
        results.append(run_case(ours(held, folder, tiers, "int8"), folder, "ours"))
    assert differences(*results) == []


def test_what_a_script_has_behind_a_gradient_changes_no_moment(tmp_path: Path) -> None:
    """It is in the norm, as in stock."""
    case = {"model": {"gates": True}, "config": ds_config(), "world_size": 2, "steps": 3}
    results = []
    for padding in (0.0, 1e4):
        folder = tmp_path / f"{padding:g}"
        folder.mkdir()
        found = run_case(ours({**case, "gradient_padding": padding}, folder, "states", "int8"), folder, "ours")
        results.append([{**result, "norms": []} for result in found])
    assert differences(*results) == []


@pytest.mark.parametrize(
    ("moments", "loaded_as"), [("bf16", "bf16"), ("int8", "int8"), ("int8", "fp32"), ("fp32", "int8")]
)
def test_a_fresh_process_continues_the_run(moments: str, loaded_as: str, tmp_path: Path) -> None:
    saved, case = str(tmp_path / "saved"), {**STOCK["bf16-rarely-3-two_lrs"], "steps": 6}
    save = {"save_after": 3, "save_to": saved}
    whole = run_case(ours({**case, **save}, tmp_path, "states", moments, "split"), tmp_path, "whole")
    resumed = run_case(ours({**case, "load": saved}, tmp_path, "none", loaded_as), tmp_path, "resumed")
    said = (tmp_path / "resumed.0.log").read_text()
    assert ("run kept moments as" in said) == (moments != loaded_as)
    per_step = ("losses", "norms", "applied", "scales", "rates")
    tail = [{k: v[3:] if k in per_step else v for k, v in result.items()} for result in whole]
    if moments == loaded_as:
        assert differences(tail, resumed) == []
    else:
        assert resumed[0]["losses"][0] == tail[0]["losses"][0]
        assert resumed[0]["losses"] == pytest.approx(tail[0]["losses"], rel=2e-2)
