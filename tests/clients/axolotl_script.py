# SPDX-License-Identifier: Apache-2.0
"""axolotl's ``train`` with the preset, made small. Options: ``arguments`` that its YAML file would hold."""

import json
import os
import sys
from typing import Any

import deepspeed
import yaml
from given import ARGUMENTS, leave_written, paragraphs, told, write_once

from tests.huggingface.runner import ROOT

SAME = ("max_steps", "learning_rate", "weight_decay", "max_grad_norm", "logging_steps", "seed")


def on_the_cpu() -> None:
    """What the Trainer's ``--use_cpu`` says; axolotl has no key for it. Without a device, and not told so, accelerate
    takes every rank for the only one, and all of them would write the same files.
    """
    from accelerate import PartialState
    from transformers import TrainingArguments

    prepare = PartialState._prepare_backend

    def _prepare_backend(self: PartialState, cpu: bool = False, *how: Any, **more: Any) -> Any:
        return prepare(self, True, *how, **more)

    PartialState._prepare_backend = _prepare_backend
    stock = TrainingArguments.__post_init__

    def __post_init__(self: TrainingArguments) -> None:
        self.use_cpu = True
        stock(self)

    TrainingArguments.__post_init__ = __post_init__


def main() -> None:
    os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "LOG_LEVEL": "INFO"}  # by default it hides what others tell
    config, out, options = told()
    deepspeed.init_distributed("gloo")  # on one rank it would ask for NCCL by name
    on_the_cpu()
    from axolotl.cli.train import do_cli

    rows = [{"instruction": text[:40], "input": "", "output": text[40:160]} for text in paragraphs()[:48]]
    data = write_once(out / "manual.jsonl", "\n".join(json.dumps(row) for row in rows))
    arguments = {
        **yaml.safe_load((ROOT / "configs/axolotl_fuyou.yaml").read_text()),
        **{name: ARGUMENTS[name] for name in SAME},
        "base_model": f"{options['models']}/policy",
        "datasets": [{"path": str(data), "ds_type": "json", "type": "alpaca"}],
        "dataset_prepared_path": str(out / "prepared"),
        "val_set_size": 0,
        "sequence_len": 256,
        "micro_batch_size": 2,
        "dataloader_num_workers": 0,
        "dataset_num_proc": 1,
        "saves_per_epoch": None,
        "save_steps": 2,
        "output_dir": str(out / "trained"),
        "deepspeed": config,
        **options.get("arguments", {}),
    }
    if options.get("resume"):
        arguments["resume_from_checkpoint"] = options["resume"]
    file = write_once(out / "axolotl.yaml", yaml.safe_dump(arguments))
    sys.argv = sys.argv[:1]
    do_cli(str(file))
    leave_written(out / "trained" / f"checkpoint-{arguments['max_steps']}", out)


if __name__ == "__main__":
    main()
