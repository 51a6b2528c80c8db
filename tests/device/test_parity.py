# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed on the stand-in device equals DeepSpeed on the CPU: stock first, then ours.

Where there is CUDA, ours is compared with stock there instead.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.device.parity import CELLS, case_of, fuyou_of, must_equal_stock
from tests.harness.runner import differences, ds_config, run_case
from tests.parity.cases import block

DELAYS = (0.0005, 0.003)  # seconds, the longest
IDS = ["-".join([name, tiers, activations]) for name, tiers, _, _, _, activations, _ in CELLS]


@pytest.mark.parametrize("name", ["bf16-rarely-3-two_lrs", "fp32-always-1-two_lrs", "bf16-rarely-1-two-2ranks"])
def test_stock_equals_itself(name: str, stock_run, tmp_path: Path) -> None:
    case = case_of(name, zero_init=True)
    found = run_case({**case, "device": {"seed": 1, "delay_secs": 0.002}}, tmp_path, "device")
    assert found[0]["optimizer_class"] == "DeepSpeedZeroOptimizer_Stage3"
    assert found[0]["device"]["bytes up"] > 0
    assert differences(stock_run(case), found) == []
    assert found[0]["trips"] == []


def devices(number: int) -> list[dict | str]:
    if torch.cuda.is_available():
        return ["cuda"]
    return [{"seed": 100 * turn + number, "delay_secs": delay, "polls": turn} for turn, delay in enumerate(DELAYS)]


@pytest.mark.parametrize("number", range(len(CELLS)), ids=IDS)
def test_ours_equals_stock(number: int, stock_run, tmp_path: Path) -> None:
    name, tiers, policy, overlap, slots, activations, zero_init = CELLS[number]
    case = case_of(name, zero_init)
    for turn, device in enumerate(devices(number)):
        directory = tmp_path / str(turn)
        fuyou = fuyou_of(directory / "swap", tiers, policy, overlap, slots, activations)
        ours = must_equal_stock(case, fuyou, device, stock_run, directory)
        assert ours[0]["optimizer_class"] == "FuyouStage3Optimizer"
        assert (ours[0].get("swapped_bytes", 0) > 0) == (activations not in ("none", "recompute"))
        if "frozen" in name:
            assert [ours[0]["frozen_bytes"][tier] > 0 for tier in ("cpu", "nvme")] == [tiers != "all", tiers == "all"]
        if device != "cuda":
            assert sum(count for what, count in ours[0]["device"].items() if what.startswith("copies down late")) > 0


WITHIN = {"edit_within": [1, 3], "eval_within": [2, 3]}
# (stock case, tiers, activations, what scripts do, live parameters)
STAYING: list[tuple[str, str, str, dict, int]] = [
    ("bf16-rarely-3-two_lrs", "all", "none", WITHIN, 10**9),
    ("bf16-rarely-3-two_lrs", "states", "recompute", WITHIN, 60_000),
    ("fp16-rarely-3-two", "all", "swap-nvme", WITHIN | {"zero_grad_in": [4]}, 60_000),  # the first steps overflow
    ("fp16-rarely-3-two", "none", "auto", WITHIN, 10**9),
    ("fp16-always-3-one-2ranks", "all", "none", WITHIN, 10**9),
    ("fp16-always-3-one-2ranks", "states", "recompute", WITHIN, 60_000),
]


@pytest.mark.parametrize("number", range(len(STAYING)), ids=["-".join(each[:3]) for each in STAYING])
def test_what_stays_between_micro_batches_changes_no_bit(number: int, stock_run, tmp_path: Path) -> None:
    name, tiers, activations, script, most_live = STAYING[number]
    case = case_of(name, zero_init=bool(number % 2)) | script
    limits = {"stage3_max_live_parameters": most_live, "stage3_prefetch_bucket_size": 10_000}
    case["config"]["zero_optimization"] |= limits | {"stage3_max_reuse_distance": 10_000}
    device = {"seed": number, "delay_secs": 0.002}
    fuyou = fuyou_of(tmp_path / "swap", tiers, "auto", "backward_and_forward", 2, activations)
    must_equal_stock(case, fuyou, device, stock_run, tmp_path)


def test_leaf_modules_that_deepspeed_lets_go_by_itself(stock_run, tmp_path: Path) -> None:
    """It drops what such a module has gathered without a word to the allocator: the next expert is of its size."""
    zero = {"stage3_module_granularity_threshold": 6000, "stage3_param_persistence_threshold": 0}
    zero |= {name: {"device": "cpu", "pin_memory": True} for name in ("offload_optimizer", "offload_param")}
    config = ds_config(bf16=None, gradient_clipping=1.0, zero_optimization=zero)
    case = {"steps": 3, "model": {"experts": True}, "groups": "one", "config": config, "most_ahead_bytes": 1 << 30}
    fuyou = block(str(tmp_path / "swap"), "states", "speculate")
    must_equal_stock(case, fuyou, {"seed": 1, "delay_secs": 0.003}, stock_run, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gathers_where_the_model_computes(ranks: int, stock_run, tmp_path: Path) -> None:
    """DeepSpeed lets the memory of leaf modules go in the order of the stream that gathers, which then is that one."""
    zero = {"overlap_comm": False, "stage3_module_granularity_threshold": 6000, "stage3_param_persistence_threshold": 0}
    zero |= {name: {"device": "cpu", "pin_memory": True} for name in ("offload_optimizer", "offload_param")}
    config = ds_config(bf16=None, gradient_clipping=1.0, zero_optimization=zero)
    case = {"steps": 3, "model": {"experts": True}, "groups": "one", "config": config, "world_size": ranks}
    fuyou = block(str(tmp_path / "swap"), "states", "speculate")
    must_equal_stock(case, fuyou, {"seed": 1, "delay_secs": 0.003}, stock_run, tmp_path)
