# SPDX-License-Identifier: Apache-2.0
"""ms-swift's ``sft``. Options: ``arguments`` that its command line would hold."""

import json

from given import ARGUMENTS, leave_written, paragraphs, told, write_once


def main() -> None:
    config, out, options = told()
    from swift import sft_main

    rows = [
        {"messages": [{"role": "user", "content": text[:40]}, {"role": "assistant", "content": text[40:160]}]}
        for text in paragraphs()[:96]
    ]
    data = write_once(out / "manual.jsonl", "\n".join(json.dumps(row) for row in rows))
    given = {
        **{key: value for key, value in ARGUMENTS.items() if key != "disable_tqdm"},
        "model": f"{options['models']}/policy",
        "model_type": "qwen2",
        "template": "qwen",
        "dataset": str(data),
        "split_dataset_ratio": 0,
        "load_from_cache_file": False,
        "output_dir": str(out),
        "add_version": False,
        "torch_dtype": "bfloat16",
        "max_length": 128,
        "attn_impl": "eager",
        "deepspeed": config,
        "tuner_type": "full",
        **options.get("arguments", {}),
    }
    if options.get("resume"):
        given["resume_from_checkpoint"] = options["resume"]
    command = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    sft_main(command)
    leave_written(out / f"checkpoint-{given['max_steps']}", out)


if __name__ == "__main__":
    main()
