# SPDX-License-Identifier: Apache-2.0
"""Training cases on the stand-in device, and what they must equal: stock DeepSpeed on the CPU, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

from tests.harness.runner import differences, run_case, with_fuyou
from tests.parity.cases import STOCK, block
from tests.parity.test_behaviours import case_of as behaviour

__all__ = ["CELLS", "case_of", "fuyou_of", "must_equal_stock"]

NUM_STEPS = 6
ACTIVATIONS: dict[str, dict] = {
    "none": {"activations": {"mode": "none"}},
    "recompute": {"activations": {"mode": "recompute"}},
    "swap": {"activations": {"mode": "swap"}},
    "swap-nvme": {"activations": {"mode": "swap", "tier": "nvme"}},
    "auto": {"activations": {"mode": "auto"}, "gpu_budget_bytes": 150_000},  # room for two blocks of three
}
SMALL_ARENA = {"smallest_swapped_bytes": 1024, "activation_bytes": 65536}

CASES = STOCK | {"frozen": behaviour("frozen"), "frozen-2ranks": behaviour("frozen") | {"world_size": 2}}

# (stock case, tiers, clip_policy, overlap, slots, activations, zero.Init)
CELLS: list[tuple[str, str, str, str, int, str, bool]] = [
    ("bf16-off-1-one", "all", "auto", "backward", 2, "swap", True),
    ("bf16-off-1-one", "states", "speculate", "backward_and_forward", 2, "recompute", False),
    ("bf16-always-1-two", "all", "speculate", "none", 2, "auto", True),
    ("bf16-always-1-two", "none", "auto", "backward_and_forward", 2, "swap-nvme", False),
    ("bf16-rarely-3-two_lrs", "quarter", "speculate", "backward_and_forward", 2, "swap-nvme", True),
    ("bf16-rarely-3-two_lrs", "most", "defer", "none", 1, "auto", False),
    ("fp16-off-1-one", "grads_cpu", "auto", "backward_and_forward", 2, "none", True),
    ("fp16-rarely-3-two", "half", "auto", "backward_and_forward", 2, "swap", False),
    ("fp16-rarely-3-two", "all", "speculate", "backward", 1, "auto", True),
    ("fp32-always-1-two_lrs", "params_only", "speculate", "backward_and_forward", 2, "swap-nvme", False),
    ("fp32-off-3-one", "all", "auto", "backward_and_forward", 2, "recompute", True),
    ("bf16-rarely-1-two-2ranks", "half", "speculate", "backward_and_forward", 2, "swap", True),
    ("bf16-rarely-1-two-2ranks", "states", "auto", "backward", 2, "auto", False),
    ("fp16-always-3-one-2ranks", "all", "speculate", "backward", 2, "recompute", False),
    ("fp32-off-1-two_lrs-2ranks", "grads_cpu", "auto", "backward_and_forward", 2, "swap-nvme", True),
    ("frozen", "all", "auto", "backward_and_forward", 2, "swap-nvme", True),
    ("frozen", "states", "speculate", "backward", 2, "recompute", False),
    ("frozen-2ranks", "all", "speculate", "backward_and_forward", 2, "none", False),
    ("frozen-2ranks", "states", "auto", "backward_and_forward", 2, "swap", True),
]


def case_of(name: str, zero_init: bool) -> dict:
    """A stock case as users of accelerators write it: with pinned memory; and with what scripts do between steps."""
    case = copy.deepcopy(CASES[name])
    for section in ("offload_optimizer", "offload_param"):
        case["config"]["zero_optimization"][section] = {"device": "cpu", "pin_memory": True}
    # Stock has no moments while its first steps overflow, and never any of what is frozen.
    looks = [] if "fp16" in case["config"] or "frozen" in case["model"] else [4]
    return {"eval_before": [2], **case, "steps": NUM_STEPS, "zero_init": zero_init, "look_at": looks, "pairs_in": [3]}


def fuyou_of(path: Path, tiers: str, policy: str, overlap: str, slots: int, activations: str, **plan: int) -> dict:
    return block(str(path), tiers, policy, overlap, slots, **SMALL_ARENA, **plan) | ACTIVATIONS[activations]


def must_equal_stock(
    case: dict, fuyou: dict, device: dict | str, stock_run: Callable[[dict], list[dict]], directory: Path
) -> list[dict]:
    """Runs ``case`` with the block on the device: every bit is stock's, no wire was tripped, nothing is left.

    Stock runs on the CPU for the stand-in device, whose bits are the CPU's, and on any other device itself.
    """
    stock = stock_run(case if isinstance(device, dict) else {**case, "device": device})
    Path(fuyou["nvme_path"]).mkdir(parents=True)
    ours = run_case(with_fuyou({"most_ahead_bytes": 1 << 14, **case, "device": device}, fuyou), directory, "ours")
    trips = [trip for result in ours for trip in result.get("trips", ())]
    assert not trips, f"{len(trips)} trips, the first: {trips[0]}"
    found = differences(stock, ours)
    assert not found, "\n".join(found)
    left = [str(path) for path in Path(fuyou["nvme_path"]).glob("**/*") if path.is_file()]
    assert not left, f"files left behind: {left}"
    return ours
