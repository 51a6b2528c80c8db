# SPDX-License-Identifier: Apache-2.0
"""Trains a Llama on the Python manual with the Hugging Face Trainer. An ordinary Trainer script.

deepspeed examples/trainer.py --deepspeed configs/hf_trainer_fuyou.json --output_dir .work/trainer --bf16 \
    --max_steps 20 --logging_steps 5 --save_steps 10 --save_total_limit 2
Start it again with --resume_from_checkpoint .work/trainer/checkpoint-10 and it goes on from there.
"""

from llama import ModelArguments, build
from text import Rows
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

ROWS = 512


def main() -> None:
    sizes, args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)  # the Trainer does, but later than the model is made
    trainer = Trainer(
        model=build(sizes),
        args=args,
        train_dataset=Rows(0, ROWS, sizes.length),
        eval_dataset=Rows(ROWS, 16, sizes.length),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
