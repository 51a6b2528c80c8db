# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face Trainer on the stand-in device with the block: digits and weights of stock on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

from tests.device.build import build
from tests.huggingface.runner import clean, ds_json, launch, weight_differences, with_block

CONFIG = ds_json()
CONFIG["zero_optimization"] |= {
    section: {"device": "cpu", "pin_memory": True} for section in ("offload_optimizer", "offload_param")
}
CASE = {
    "model": "gpt2",
    "zero_init": False,
    "launcher": "deepspeed",
    "config": CONFIG,
    "arguments": {
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
    },
}
# accelerate finds the devices of vendors alone; others are named to it.
DEVICE = {"STANDIN": json.dumps({"seed": 1, "delay_secs": 0.002}), "ACCELERATE_TORCH_DEVICE": "standin:0"}


def test_equals_stock_on_the_cpu(tmp_path: Path) -> None:
    build()
    saved = {name: tmp_path / f"{name}.model" for name in ("stock", "ours")}
    on_cpu = CASE | {"save_model": str(saved["stock"]), "arguments": {**CASE["arguments"], "use_cpu": True}}
    stock = launch(on_cpu, "trainer_script.py", tmp_path, "stock", by_launcher=False)
    assert stock["optimizer_class"] == "DeepSpeedZeroOptimizer_Stage3"
    assert len({entry["loss"] for entry in stock["history"] if "loss" in entry}) == 4

    on_device = with_block(CASE | {"save_model": str(saved["ours"])}, tmp_path / "swap", "all")
    script = Path(__file__).with_name("trainer_script.py")
    ours = launch(on_device, script, tmp_path, "ours", by_launcher=False, **DEVICE)
    assert ours["optimizer_class"] == "FuyouStage3Optimizer", ours["output"][-3000:]
    assert clean(ours["history"]) == clean(stock["history"])
    assert weight_differences(saved["stock"], saved["ours"]) == []

    (line,) = [line for line in ours["output"].splitlines() if line.startswith("SEEN ")]
    seen = json.loads(line.removeprefix("SEEN "))
    assert seen["trips"] == []
    assert sum(count for what, count in seen["copies"].items() if what.startswith("copies down late")) > 0
    assert [path for path in (tmp_path / "swap").glob("**/*") if path.is_file()] == []
