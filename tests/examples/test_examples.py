# SPDX-License-Identifier: Apache-2.0
"""Every example runs as its docstring says, with small sizes, and with the configuration it names."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.harness.cpu_info import python_path
from tests.huggingface.runner import BIN, ROOT, accelerate_variables, launcher, run_command, run_script

LOSS = re.compile(r"step +(\d+)  loss ([0-9.]+)")
EXAMPLES = ROOT / "examples"
AT_EXIT = Path(__file__).with_name("at_exit")


@pytest.fixture
def config(tmp_path: Path):
    """``config(name)``: a copy of a file in configs/ whose state goes to this test's directory."""

    def copy(name: str) -> Path:
        settings = json.loads((ROOT / "configs" / name).read_text())
        settings["fuyou"]["nvme_path"] = str(tmp_path / "swap")
        (tmp_path / "swap").mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(settings))
        return tmp_path / name

    return copy


def losses(output: str) -> dict[int, str]:
    assert "is active under DeepSpeed" in output
    return {int(step): loss for step, loss in LOSS.findall(output)}


def logged(directory: Path) -> dict[int, float]:
    state = json.loads((directory / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def test_two_ranks(config) -> None:
    sizes = ["--layers", 2, "--width", 64, "--heads", 2, "--length", 32, "--steps", 3]
    variables = {"CONFIG": str(config("finetune_fuyou.json")), "PYTHONPATH": f"{AT_EXIT}{os.pathsep}{python_path()}"}
    output = run_command(["bash", EXAMPLES / "two_ranks.sh", *sizes], num_ranks=2, **variables)
    assert sorted(losses(output)) == [1, 2, 3]


def test_resume_prints_what_one_run_would_have_printed(config, tmp_path: Path) -> None:
    file = config("finetune_fuyou.json")

    def run(directory: str, steps: int, *, by_launcher: bool = False) -> dict[int, str]:
        sizes = ["--layers", 2, "--width", 64, "--length", 32, "--save-every", 2, "--steps", steps]
        options = ["--deepspeed_config", file, "--checkpoints", tmp_path / directory, *sizes]
        if by_launcher:
            return losses(run_command([*launcher("deepspeed", 1), EXAMPLES / "resume.py", *options]))
        return losses(run_script(EXAMPLES / "resume.py", options, tmp_path / f"{directory}-{steps}"))

    first, second = run("a", 4, by_launcher=True), run("a", 6)
    assert (sorted(first), sorted(second)) == ([1, 2, 3, 4], [5, 6])
    assert {**first, **second} == run("b", 6)


def test_trainer_and_its_resume(config, tmp_path: Path) -> None:
    options = ["--deepspeed", config("hf_trainer_fuyou.json"), "--output_dir", tmp_path]
    options += ["--hidden", 64, "--layers", 2, "--length", 32, "--bf16", "--max_steps", 4, "--save_steps", 2]
    options += ["--use_cpu", "--logging_steps", 1, "--report_to", "none", "--save_total_limit", 1]
    run_command([*launcher("deepspeed", 1), EXAMPLES / "trainer.py", *options])
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert sorted(logged(tmp_path / "checkpoint-4")) == [1, 2, 3, 4]
    assert (tmp_path / "model.safetensors").stat().st_size > 50_000
    more = ["--resume_from_checkpoint", tmp_path / "checkpoint-4", "--max_steps", 6]
    run_script(EXAMPLES / "trainer.py", [*options, *more], tmp_path / "resumed")
    assert sorted(logged(tmp_path / "checkpoint-6")) == [1, 2, 3, 4, 5, 6]


def test_accelerate_and_its_saved_state(config, tmp_path: Path) -> None:
    file, precision = config("hf_trainer_fuyou.json"), {"mixed_precision": "bf16"}
    script, sizes = EXAMPLES / "accelerate_loop.py", ["--hidden", 64, "--layers", 2, "--length", 32]
    command = launcher("accelerate", 1, file, **precision)
    output = run_command([*command, script, *sizes, "--steps", 3, "--save", tmp_path / "state"])
    assert sorted(losses(output)) == [1, 2, 3]
    options = [*sizes, "--steps", 5, "--load", tmp_path / "state"]
    output = run_script(script, options, tmp_path / "again", **accelerate_variables(file, precision))
    assert sorted(losses(output)) == [4, 5]


def test_lora(config, tmp_path: Path) -> None:
    options = ["--deepspeed", config("hf_lora_fuyou.json"), "--output_dir", tmp_path, "--bf16", "--max_steps", 3]
    options += ["--hidden", 64, "--layers", 2, "--length", 32, "--logging_steps", 1, "--report_to", "none"]
    options += ["--use_cpu", "--save_strategy", "no"]
    output = run_script(EXAMPLES / "lora.py", options, tmp_path / "lora")
    assert "frozen parameters" in output
    assert (tmp_path / "adapter_model.safetensors").is_file()


@pytest.mark.thorough
def test_a_run_that_is_killed_twice_prints_what_an_undisturbed_one_prints(config, tmp_path: Path) -> None:
    options = ["--deepspeed_config", config("finetune_fuyou.json"), "--kills", 2, "--folder", tmp_path / "crash"]
    output = run_command([sys.executable, EXAMPLES / "crash.py", *options])
    assert "killed 2 times in 14 steps: the losses are equal" in output
    assert output.count("kill  ") == 2
    assert len(re.findall(r"^ +\d+ +[0-9.]+ +[0-9.]+$", output, re.MULTILINE)) == 14


def test_every_example_is_run_by_a_test() -> None:
    here = Path(__file__).read_text() + (ROOT / "Makefile").read_text() + (EXAMPLES / "two_ranks.sh").read_text()
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")} - {"text.py", "llama.py"}
    assert {name for name in names if name not in here} == set()
    assert (BIN / "deepspeed").exists()
