# SPDX-License-Identifier: Apache-2.0
"""Trains a Llama on the Python manual with the Hugging Face Trainer. An ordinary Trainer script.

deepspeed examples/trainer.py --deepspeed configs/hf_trainer_fuyou.json --output_dir .work/trainer --bf16 \
    --max_steps 20 --save_steps 10 --save_total_limit 2
Start it again with --resume_from_checkpoint .work/trainer/checkpoint-10 and it goes on from there.
"""

from dataclasses import dataclass, field

from text import Rows
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments


@dataclass
class ModelArguments:
    model: str = field(default="", metadata={"help": "a directory or a name on the hub; default: a new small Llama"})
    hidden: int = 512
    layers: int = 8
    length: int = 256
    rows: int = 512


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    sizes, args = parser.parse_args_into_dataclasses()
    # TrainingArguments came first, so the model is built partitioned (zero.Init) and never as a whole.
    if sizes.model:
        model = AutoModelForCausalLM.from_pretrained(sizes.model)
    else:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=sizes.hidden,
            intermediate_size=3 * sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=8,
            max_position_embeddings=sizes.length,
            bos_token_id=0,
            eos_token_id=None,
        )
        model = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Rows(0, sizes.rows, sizes.length),
        eval_dataset=Rows(sizes.rows, 16, sizes.length),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
