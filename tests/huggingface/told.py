# SPDX-License-Identifier: Apache-2.0
"""What the Trainer scripts beside this file share: the case they are told by, and what they leave behind."""

import json
import sys

import deepspeed
from texts import fresh_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests.harness.forked import accelerator
from tests.harness.gpu import repeatable
from tests.harness.group import leave_group


def read_case() -> dict:
    """From the file that the first argument names; launchers put ``--local_rank`` before it."""
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    with open(arguments[0], encoding="utf-8") as handle:
        return json.load(handle)


def arguments_and_model(case: dict) -> tuple:
    """The model is made before TrainingArguments, or after them by from_pretrained: then under zero.Init."""
    arguments = case["arguments"]
    if accelerator() != "cpu":
        repeatable()
        arguments = {**arguments, "use_cpu": False}
    if case["zero_init"] and case.get("num_ranks", 1) > 1:
        deepspeed.init_distributed("gloo")  # TrainingArguments do it, but not with use_cpu
    built = None if case["zero_init"] else fresh_model(case["model"])
    args = TrainingArguments(
        output_dir=case["output"],
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=11,
        deepspeed=case["config_file"] if case["launcher"] == "deepspeed" else None,
        **arguments,
    )
    return args, built if built is not None else AutoModelForCausalLM.from_pretrained(case["pretrained"])


def leave(trainer: Trainer, case: dict, result: dict) -> None:
    """Rank 0 writes the result, with what every script is asked for; all ranks leave the process group together."""
    if trainer.is_world_process_zero():
        optimizer = trainer.model_wrapped.optimizer
        common = {"history": trainer.state.log_history, "optimizer_class": type(optimizer).__name__}
        with open(case["result"], "w", encoding="utf-8") as handle:
            json.dump({**common, **result}, handle)
    leave_group()
    trainer.accelerator.end_training()
