# SPDX-License-Identifier: Apache-2.0
"""Runs of the whole engine with swapped or recomputed activations equal stock, bit by bit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ds_fuyou.telemetry.lane_times import read_trace
from tests.harness.forked import accelerator
from tests.harness.models import build_model
from tests.harness.plans import plan_document
from tests.parity.cases import STOCK, TIERS, block

IS_HOST = accelerator() == "cpu"
NUM_MATRICES = 7  # weights of linear layers: each is saved once in every forward, and must be known for a parameter
PLANNED = {"block_input": (0, 3, 0), "mlp_up": (1, 1, 1), "mlp_activation": (0, 1, 2)}
RUNS = [
    # stock case, tiers of the states, activations
    ("bf16-rarely-3-two_lrs", "all", {"mode": "swap", "tier": "nvme"}),
    ("fp32-always-1-two_lrs", "states", {"mode": "swap"}),
    ("bf16-rarely-1-two-2ranks", "all", {"mode": "auto", "tier": "nvme", "block_classes": ["TinyBlock"]}),
    ("bf16-always-1-two", "all", {"mode": "recompute"}),
    ("bf16-always-1-two", "states", {"mode": "auto"}),
]


@pytest.mark.parametrize(("name", "tiers", "activations"), RUNS, ids=[f"{run[2]['mode']}-{run[0]}" for run in RUNS])
def test_equals_stock(name: str, tiers: str, activations: dict, must_equal, tmp_path: Path) -> None:
    assert tiers in TIERS
    fuyou = block(str(tmp_path / "swap"), tiers, "auto", "backward_and_forward", 2)
    trace = tmp_path / "trace.json"
    fuyou |= {"activations": activations, "trace": str(trace)}
    fuyou["plan"] = {**fuyou.get("plan", {}), "smallest_swapped_bytes": 1024, "activation_bytes": 65536}
    by_plan = "block_classes" in activations
    if by_plan:  # everything is swapped in the first step, and then as the plan says
        numel = sum(param.numel() for param in build_model({}).parameters())
        fuyou["plan"] = plan_document(numel, 3, PLANNED, **fuyou["plan"]) | {"world_size": 2}
    elif activations["mode"] == "auto":
        fuyou["gpu_budget_bytes"] = 150_000  # room for two blocks of three
    _, ours = must_equal(STOCK[name], fuyou)
    swaps = activations["mode"] != "recompute"
    if activations["mode"] == "auto":
        step, row = (1, r"mlp_up \(up/mm\) +1 +1 +1") if by_plan else (2, r"block inputs +\d +0 +[0-2]\n")
        assert re.search(rf"decided after step {step}: .*\n.* in how many of 3 blocks:[^\[]*{row}", ours[0]["output"])
    assert (ours[0]["swapped_bytes"] > 0) == swaps
    if swaps:
        assert ours[0]["swap_read_bytes"] > 0, "an arena this small cannot hold what a forward saves"
        micro_batches = len(ours[0]["losses"]) * STOCK[name]["config"]["gradient_accumulation_steps"]
        # Until "auto" has decided, in two steps, a device keeps one block of two matrices whole, and looks at neither.
        kept = 0 if IS_HOST or activations["mode"] != "auto" else 2 * 2
        assert ours[0]["saved_parameters"] >= NUM_MATRICES * micro_batches - kept
    content = read_trace(trace)
    assert max(tiers["storage"] for _, tiers in content.tiers) > 0
    if IS_HOST:  # elsewhere it is all of the device's memory that is in use
        assert (max(tiers["device"] for _, tiers in content.tiers) > 0) == swaps, "recomputed blocks save nothing"
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {"compute", "step()", "cpu optimizer"} <= {span["cat"] for span in spans}
    saved = {span["cat"] for span in spans if not span["name"].startswith("step ")}  # those are the optimizer's
    assert ("storage write" in saved) == swaps
