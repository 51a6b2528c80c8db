# SPDX-License-Identifier: Apache-2.0
"""The presets of programs: files in configs/ that name a DeepSpeed JSON.

Accelerate's is run by Accelerate. Of LLaMA-Factory and ms-swift, which hand what they do not use themselves to the
Trainer's arguments, those are taken, and the Trainer trains with them and with the JSON. axolotl has names of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness.limits import HANG_SECS
from tests.huggingface.runner import BIN, ROOT, free_port, run_command, run_script

CONFIGS = ROOT / "configs"
SIZES = ["--hidden", 64, "--layers", 2, "--length", 32]
# What each program reads itself; everything else in its preset must be an argument of the Trainer.
OWN = {
    "llamafactory": {
        *("model_name_or_path", "stage", "finetuning_type", "dataset", "template", "cutoff_len"),
    },
    "ms_swift": {"model", "tuner_type", "dataset", "torch_dtype", "max_length"},
}


def preset(name: str) -> dict[str, Any]:
    if name == "ms_swift":
        command, variables = ["sh", str(CONFIGS / "ms_swift_fuyou.sh")], {**os.environ, "SWIFT": "echo"}
        said = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=HANG_SECS, check=True
        ).stdout
        words = said.split()[1:]  # behind "sft"
        return {key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)}
    import yaml  # of the extra huggingface, like transformers below

    found: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}_fuyou.yaml").read_text())
    return found


def trainer_arguments(name: str) -> dict[str, Any]:
    """Those of a preset that the Trainer takes, by its own list."""
    from transformers import TrainingArguments

    taken = {field.name for field in dataclasses.fields(TrainingArguments)}
    given = preset(name)
    assert given.keys() - taken == OWN[name]
    return {key: value for key, value in given.items() if key in taken}


@pytest.fixture
def ds_json(tmp_path: Path):
    """A copy of the JSON that a preset names, its state in this test's directory."""

    def copied(named: str) -> Path:
        assert (ROOT / named).is_file()
        settings = json.loads((ROOT / named).read_text())
        settings["fuyou"]["nvme_path"] = str(tmp_path)
        (tmp_path / "ds.json").write_text(json.dumps(settings))
        return tmp_path / "ds.json"

    return copied


@pytest.mark.parametrize("name", ["llamafactory", "ms_swift", "axolotl"])
def test_the_json_that_is_named_has_a_block(name: str) -> None:
    assert json.loads((ROOT / preset(name)["deepspeed"]).read_text())["fuyou"]["enabled"]


@pytest.mark.parametrize("name", ["llamafactory", "ms_swift"])
def test_the_trainer_takes_a_presets_arguments(name: str, ds_json, tmp_path: Path) -> None:
    given = trainer_arguments(name)
    given |= {"deepspeed": ds_json(given["deepspeed"]), "output_dir": tmp_path / "out", "logging_steps": 1}
    given.pop("do_train", None)
    given.setdefault("bf16", "true")  # ms-swift: by --torch_dtype
    options = [str(part) for key, value in given.items() for part in (f"--{key}", value)]
    options += [*SIZES, "--use_cpu", "true", "--max_steps", 2, "--report_to", "none", "--save_strategy", "no"]
    output = run_script(ROOT / "examples/trainer.py", options, tmp_path / "run")
    assert "is active under DeepSpeed" in output
    assert len(re.findall(r"'grad_norm'", output)) == 2


def test_accelerate_takes_its_preset(ds_json, tmp_path: Path) -> None:
    import yaml

    given = preset("accelerate")
    given["deepspeed_config"]["deepspeed_config_file"] = str(
        ds_json(given["deepspeed_config"]["deepspeed_config_file"])
    )
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(given))
    command = [BIN / "accelerate", "launch", "--config_file", tmp_path / "accelerate.yaml", "--mixed_precision", "bf16"]
    command += ["--main_process_port", free_port(), ROOT / "examples/accelerate_loop.py", *SIZES, "--steps", 2]
    output = run_command(command)
    assert "is active under DeepSpeed" in output
    assert len(re.findall(r"step +\d+  loss", output)) == 2
