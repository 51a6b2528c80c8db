# SPDX-License-Identifier: Apache-2.0
"""A loop of its own under Accelerate equals stock and resumes from its saved state; values "auto" of the block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import RunPython
from tests.huggingface.runner import ds_json, weight_differences, weights, with_block
from tests.huggingface.test_trainer import DEEPSPEED_SCHEDULER

SCRIPT = "accelerate_script.py"
DUMMY_OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
COMMON = {"launcher": "accelerate", "flags": {"mixed_precision": "bf16", "gradient_clipping": "1.0"}, "steps": 6}
CASES: dict[str, dict] = {
    "torch-optimizer-deepspeed-schedule": {
        **COMMON,
        "model": "gpt2",
        "optimizer": "torch",
        "scheduler": "dummy",
        "config": ds_json(**DEEPSPEED_SCHEDULER),
    },
    "deepspeed-optimizer-torch-schedule": {
        **COMMON,
        "model": "llama",
        "optimizer": "dummy",
        "scheduler": "callable",
        "config": ds_json(**DUMMY_OPTIMIZER),
    },
}


@pytest.mark.parametrize(
    ("name", "tiers"),
    [
        ("torch-optimizer-deepspeed-schedule", "all"),
        ("deepspeed-optimizer-torch-schedule", "auto"),
    ],
)
def test_equals_stock_and_resumes(name: str, tiers: str, stock_run, ours_run, tmp_path: Path) -> None:
    stock = stock_run(CASES[name], SCRIPT)
    steps = [entry for entry in stock["history"] if "loss" in entry]
    assert len(steps) == 6
    assert any(entry["grad_norm"] > 1.0 for entry in steps)
    assert len({tuple(entry["lr"]) for entry in steps}) >= 5
    assert stock["num_groups"] == 2
    block = with_block(CASES[name], tmp_path / "swap", tiers)
    ours = ours_run({**block, "save_after": 3, "state": str(tmp_path / "state")}, SCRIPT)
    assert ours["history"] == stock["history"]
    # On the host Accelerate takes stock's partitions, which lie in one buffer, for tied weights, and saves few of them.
    known, saved = weights(stock["saved"]), weights(ours["saved"])
    assert len(saved) == ours["num_weights"]
    assert [name for name in known if not torch.equal(known[name], saved[name])] == []

    resumed = ours_run({**block, "load": str(tmp_path / "state")}, SCRIPT, "resumed")
    assert resumed["history"] == ours["history"][-len(resumed["history"]) :]
    assert len(resumed["history"]) == 5  # three steps and the evaluations after the fourth and the sixth
    assert weight_differences(ours["saved"], resumed["saved"]) == []


def test_a_group_without_parameters_stays_where_a_torch_schedule_counts_it(stock_run, ours_run, tmp_path: Path) -> None:
    """As of biases, where adapters have none. The JSON has no offload section, as the docs have it."""
    case = {**COMMON, "model": "gpt2", "optimizer": "torch", "scheduler": "torch", "empty_group": True, "steps": 3}
    stock = stock_run({**case, "config": ds_json()}, SCRIPT)
    ours = with_block({**case, "config": ds_json()}, tmp_path / "swap", "auto")
    for section in ("offload_optimizer", "offload_param"):
        del ours["config"]["zero_optimization"][section]
    assert ours_run(ours, SCRIPT)["history"] == stock["history"]
    assert len({tuple(entry["lr"]) for entry in stock["history"] if "lr" in entry}) == 3


AUTO = """
import {first}
import {second}
from accelerate.utils import DeepSpeedPlugin
config = {{"gradient_accumulation_steps": 1, "zero_optimization": {{"stage": 3}}, {more}
          "fuyou": {{"dram_budget_bytes": "auto", "optimizer": {{"tier": "auto"}}}}}}
plugin = DeepSpeedPlugin(hf_ds_config=config)
plugin.deepspeed_config_process(must_match=False)
assert plugin.deepspeed_config["fuyou"] == config["fuyou"]
"""


@pytest.mark.parametrize(("first", "second"), [("accelerate", "deepspeed"), ("deepspeed", "accelerate")])
def test_accelerate_leaves_the_blocks_auto_alone(run_python: RunPython, first: str, second: str) -> None:
    done = run_python(AUTO.format(first=first, second=second, more=""))
    assert done.returncode == 0, done.stderr


def test_other_unknown_auto_values_are_still_refused_by_accelerate(run_python: RunPython) -> None:
    done = run_python(AUTO.format(first="accelerate", second="deepspeed", more='"fuyo": {"optimizer": "auto"},'))
    assert "`fuyo.optimizer` not found in kwargs" in done.stderr
