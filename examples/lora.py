# SPDX-License-Identifier: Apache-2.0
"""LoRA on a frozen Llama with PEFT and the Trainer. The frozen base stays on NVMe and has no gradients and no state.

deepspeed examples/lora.py --deepspeed configs/hf_lora_fuyou.json --output_dir .work/lora --bf16 --max_steps 20
"""

from dataclasses import dataclass, field

from peft import LoraConfig, get_peft_model
from text import Rows
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments


@dataclass
class ModelArguments:
    model: str = field(default="", metadata={"help": "a directory or a name on the hub; default: a new small Llama"})
    hidden: int = 512
    layers: int = 8
    length: int = 256
    rank: int = 8


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    sizes, args = parser.parse_args_into_dataclasses()
    if sizes.model:
        base = AutoModelForCausalLM.from_pretrained(sizes.model)
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
        base = AutoModelForCausalLM.from_config(config)
    model = get_peft_model(base, LoraConfig(r=sizes.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    trainer = Trainer(model=model, args=args, train_dataset=Rows(0, 512, sizes.length))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # the adapter alone


if __name__ == "__main__":
    main()
