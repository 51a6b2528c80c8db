# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory's ``train``. Options: ``arguments`` that its YAML file would hold."""

import json
import sys
import types

from given import ARGUMENTS, leave_written, paragraphs, told, write_once


def without_audio() -> None:
    """It imports torchaudio for models that hear; there is none for this torch build on the package index."""
    from importlib.machinery import ModuleSpec

    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)


def main() -> None:
    config, out, options = told()
    without_audio()
    from llamafactory.train.tuner import run_exp

    data = out / "data"
    data.mkdir(exist_ok=True)
    rows = [{"instruction": text[:40], "input": "", "output": text[40:160]} for text in paragraphs()[:48]]
    write_once(data / "manual.json", json.dumps(rows))
    write_once(data / "dataset_info.json", json.dumps({"manual": {"file_name": "manual.json"}}))
    arguments = {
        **ARGUMENTS,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "model_name_or_path": f"{options['models']}/policy",
        "template": "qwen",
        "dataset": "manual",
        "dataset_dir": str(data),
        "cutoff_len": 128,
        "output_dir": str(out),
        "overwrite_output_dir": True,
        "deepspeed": config,
        "ddp_timeout": 600,
        **options.get("arguments", {}),
    }
    if options.get("resume"):
        arguments["resume_from_checkpoint"] = options["resume"]
    run_exp(arguments)
    leave_written(out, out)


if __name__ == "__main__":
    main()
