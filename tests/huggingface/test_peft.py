# SPDX-License-Identifier: Apache-2.0
"""Adapters on a frozen base that lives on storage: the numbers of stock, no state and no gradient of the base."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.huggingface.runner import clean, ds_json, weight_differences, with_block

SCRIPT = "lora_script.py"
ARGUMENTS = {
    "bf16": True,
    "use_cpu": True,
    "max_steps": 5,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "save_strategy": "no",
}
BASE = {"model": "llama-wide", "zero_init": True, "launcher": "deepspeed", "arguments": ARGUMENTS, "config": ds_json()}
CASES: dict[str, dict] = {
    # the base by from_pretrained under zero.Init, two ranks
    "lora": {
        **BASE,
        "num_ranks": 2,
        "arguments": {**ARGUMENTS, "activation_checkpointing": True, "save_strategy": "steps", "save_steps": 3},
    },
    # quantised base, LoRA-FA (of the adapter only B is trained), two ranks
    "int8-base-frozen-a": {
        **BASE,
        "quantise": True,
        "frozen": ["lora_A"],
        "zero_init": False,
        "num_ranks": 2,
        "arguments": {**ARGUMENTS, "max_steps": 3},
    },
}


@pytest.mark.parametrize(("name", "tiers"), [("lora", "all"), ("int8-base-frozen-a", "lora")])
def test_frozen_parameters_cost_one_copy(
    name: str, tiers: str, pretrained, stock_run, ours_run, tmp_path: Path
) -> None:
    case = CASES[name]
    if case["zero_init"]:
        case = {**case, "pretrained": pretrained("llama-wide")}
    stock = stock_run(case, SCRIPT)
    ours = ours_run(with_block(case, tmp_path / "swap", tiers), SCRIPT)
    assert clean(ours["history"]) == clean(stock["history"])
    losses = [entry["loss"] for entry in stock["history"] if "loss" in entry]
    assert losses[-1] < losses[0]
    if name == "lora":
        assert weight_differences(stock["saved"], ours["saved"]) == []
        resumed = {**with_block(case, tmp_path / "swap", tiers), "resume": str(ours["out"] / "checkpoint-3")}
        again = ours_run(resumed, SCRIPT, "again")
        assert clean(again["history"])[:-1] == clean(ours["history"])[:-1]
        assert weight_differences(ours["saved"], again["saved"]) == []
        files = list((ours["out"] / "checkpoint-3" / "global_step3").iterdir())
        base_bytes = 2 * (ours["total"] - ours["trainable"])
        assert sum(file.stat().st_size for file in files) < 12 * ours["trainable"] + base_bytes / 2, "no frozen base"

    placed, ranks = ours["placement"], case.get("num_ranks", 1)
    trainable, total = ours["trainable"] // ranks, ours["total"] // ranks
    assert trainable < total / 20
    assert placed["layout_numel"] == trainable
    assert all("lora_" in part for part in placed["names"])
    if name == "int8-base-frozen-a":
        assert not any("lora_A" in part for part in placed["names"])
    assert placed["frozen_bytes"]["nvme"] > 0.8 * (total - trainable)
    assert placed["ahead_reads"] > 5
    pages = 4096 * 3 * len(placed["names"])  # what rounding up to pages may add
    if tiers == "lora":  # states and gradients in host memory
        assert placed["gradient_bytes"] <= 2 * trainable + pages
    else:  # two slots of P32 and two moments and of P16, and G16
        assert placed["store_bytes"] <= (2 * (12 + 2) + 2) * trainable + 8 * pages
