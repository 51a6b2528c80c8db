# SPDX-License-Identifier: Apache-2.0
"""LoRA on a frozen Llama with PEFT and the Trainer. The frozen base has no gradients and no state; what of it host
memory has no room for stays on NVMe.

deepspeed examples/lora.py --deepspeed configs/hf_lora_fuyou.json --output_dir .work/lora --bf16 --max_steps 20
"""

from dataclasses import dataclass

from llama import ModelArguments, build
from peft import LoraConfig, get_peft_model
from text import Rows
from transformers import HfArgumentParser, Trainer, TrainingArguments


@dataclass
class AdapterArguments(ModelArguments):
    rank: int = 8


def main() -> None:
    sizes, args = HfArgumentParser((AdapterArguments, TrainingArguments)).parse_args_into_dataclasses()
    model = get_peft_model(build(sizes), LoraConfig(r=sizes.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    trainer = Trainer(model=model, args=args, train_dataset=Rows(0, 512, sizes.length))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # the adapter alone


if __name__ == "__main__":
    main()
