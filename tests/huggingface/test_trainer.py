# SPDX-License-Identifier: Apache-2.0
"""One Trainer script, the JSON with and without the block: the same log, digit for digit, and the same weights.

The run with the block saves as it goes; a fresh process that starts from its last checkpoint but one ends like it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_fuyou.checkpoint.recovery import recover_checkpoint
from ds_fuyou.errors import FuyouStateError
from tests.huggingface.runner import clean, ds_json, launch, weight_differences, with_block

SCRIPT = "trainer_script.py"
DEEPSPEED_OPTIMIZER = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
}
DEEPSPEED_SCHEDULER = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
}
RICH = {
    "bf16": True,
    "activation_checkpointing": True,
    "use_cpu": True,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
    "learning_rate": 2e-3,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
}
CASES: dict[str, dict] = {
    # the model through from_pretrained under zero.Init; optimizer (two groups) and schedule of the Trainer
    "llama-zero-init": {
        "model": "llama",
        "zero_init": True,
        "launcher": "deepspeed",
        "arguments": RICH,
        "generate_after": [1, 2, 5],
        "config": ds_json(),
    },
    # two ranks; the model made before; tied embeddings, dropout, re-entrant checkpointing; optimizer and schedule of
    # DeepSpeed
    "gpt2-two-ranks": {
        "model": "gpt2",
        "zero_init": False,
        "launcher": "accelerate",
        "flags": {"mixed_precision": "bf16"},
        "num_ranks": 2,
        "arguments": {**RICH, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        "generate_after": [3, 6],
        "config": ds_json(**DEEPSPEED_OPTIMIZER, **DEEPSPEED_SCHEDULER),
    },
}


Pretrained, StockRun, OursRun = Callable[[str], str], Callable[[dict, str], dict], Callable[..., dict]


def case_of(name: str, pretrained) -> dict:
    case = CASES[name]
    return {**case, "pretrained": pretrained(case["model"])} if case["zero_init"] else case


def _exercised(result: dict, name: str) -> None:
    """That the run did what its name says: equal logs prove little otherwise."""
    steps = [entry for entry in result["history"] if "loss" in entry]
    assert len(steps) == 6
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    assert any(entry["grad_norm"] > 1.0 for entry in steps)
    assert len({entry["learning_rate"] for entry in steps}) >= 5
    assert sum("eval_loss" in entry for entry in result["history"]) == 3
    assert len(result["texts"]) == len(CASES[name]["generate_after"])
    assert result["num_groups"] == (2 if name == "llama-zero-init" else 1)


@pytest.mark.parametrize(
    ("name", "tiers", "save"), [("llama-zero-init", "all", "blocking"), ("gpt2-two-ranks", "states", "background")]
)
def test_equals_stock_and_resumes(
    name: str, tiers: str, save: str, pretrained, stock_run, ours_run, tmp_path: Path
) -> None:
    """Also where checkpoints are written behind training, and older ones deleted meanwhile."""
    case = case_of(name, pretrained)
    stock = stock_run(case, SCRIPT)
    _exercised(stock, name)
    given = with_block(case, tmp_path / "swap", tiers)
    given["config"]["fuyou"]["checkpoint"] = {"save": save}
    ours = ours_run(given, SCRIPT)
    assert clean(ours["history"]) == clean(stock["history"])
    assert ours["texts"] == stock["texts"]
    assert weight_differences(stock["saved"], ours["saved"]) == []

    assert [path.name for path in ours["out"].rglob(".incomplete-*")] == []
    assert sorted(path.name for path in ours["out"].glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    resumed = {**with_block(case, tmp_path / "swap", tiers), "resume": str(ours["out"] / "checkpoint-4")}
    again = ours_run(resumed, SCRIPT, "again")
    # The last entry is the mean over the steps of the process.
    assert clean(again["history"])[:-1] == clean(ours["history"])[:-1]
    assert again["texts"] == ours["texts"][-1:]
    assert weight_differences(ours["saved"], again["saved"]) == []


@pytest.mark.parametrize("name", CASES)
def test_a_dead_run_goes_on_from_a_recovered_folder(
    name: str, pretrained: Pretrained, stock_run: StockRun, ours_run: OursRun, tmp_path: Path
) -> None:
    """Killed after step 5; made like its checkpoint of step 2: right batch, dropout and schedule. In place the Trainer
    would begin with its first batch, and is stopped."""
    case = case_of(name, pretrained)
    stock, ours = stock_run(case, SCRIPT), with_block(case, tmp_path / "swap", "states")
    told = {**ours, "save_model": str(tmp_path / "none"), "killed_after": 5}
    with pytest.raises(AssertionError, match="-9"):
        launch(told, SCRIPT, tmp_path, "killed", by_launcher=False)
    in_place = {**ours, "save_model": str(tmp_path / "none")}
    in_place["config"] = {**ours["config"], "fuyou": {**ours["config"]["fuyou"], "resume": "auto"}}
    with pytest.raises(AssertionError, match=r"went on from step 5 in place .* and the Trainer from its step 0"):
        launch(in_place, SCRIPT, tmp_path, "in-place", by_launcher=False)
    directories = sorted((tmp_path / "swap").glob("ds_fuyou/*"))
    like = tmp_path / "killed.out" / "checkpoint-2"
    with pytest.raises(FuyouStateError, match=f"the recovered step is 5: name {tmp_path}/checkpoint-5"):
        recover_checkpoint(directories, tmp_path / "checkpoint-3", like=like)
    assert not (tmp_path / "checkpoint-3").exists()
    made = recover_checkpoint(directories, tmp_path / "recovered", like=like)
    recovered = tmp_path / "recovered"
    assert not [file for file in recovered.iterdir() if "safetensors" in file.name]
    state = json.loads((recovered / "trainer_state.json").read_text())
    assert state["global_step"] == made.global_steps == 5
    for directory in directories:
        shutil.rmtree(directory)

    again = ours_run({**ours, "resume": str(recovered)}, SCRIPT, "again")
    steps = [entry for entry in clean(again["history"]) if entry["step"] > made.global_steps]
    expected = [entry for entry in clean(stock["history"]) if entry["step"] > made.global_steps]
    assert steps[:-1] == expected[:-1]
    assert len(steps) == len(expected) == 3  # step 6, its evaluation, the mean of the process
    assert weight_differences(stock["saved"], again["saved"]) == []
