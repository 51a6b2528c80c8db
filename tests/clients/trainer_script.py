# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer beyond a causal language model. Options: ``kind`` (moe, t5, vit, gpt), ``arguments``."""

import torch
from given import ARGUMENTS, leave_trainer, told
from transformers import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.huggingface.texts import fresh_model, sequences


def moe() -> torch.nn.Module:
    import deepspeed

    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = Qwen3MoeForCausalLM(config)
    deepspeed.utils.set_z3_leaf_modules(model, [Qwen3MoeSparseMoeBlock])
    return model


def t5() -> torch.nn.Module:
    config = T5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def vit() -> torch.nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=5, **sizes))


def images(number: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    labels = torch.randint(5, (number,), generator=drawn)
    return [{"pixel_values": torch.randn(3, 32, 32, generator=drawn) + n, "labels": n} for n in labels]


def main() -> None:
    config, out, options = told()
    kind = options["kind"]
    arguments = {**ARGUMENTS, "eval_strategy": "steps", "eval_steps": 2, **options.get("arguments", {})}
    classes = (Seq2SeqTrainer, Seq2SeqTrainingArguments) if kind == "t5" else (Trainer, TrainingArguments)
    args = classes[1](output_dir=str(out), deepspeed=config, logging_nan_inf_filter=False, **arguments)
    torch.manual_seed(5)
    data = images(64) if kind == "vit" else sequences(64)
    more = {"data_collator": default_data_collator}
    if kind == "t5":
        more["compute_metrics"] = lambda answer: {"told": float((answer.predictions % 97).sum())}
    model = {"moe": moe, "t5": t5, "vit": vit, "gpt": lambda: fresh_model("gpt2")}[kind]()
    trainer = classes[0](model=model, args=args, train_dataset=data, eval_dataset=data[:4], **more)
    trainer.train(resume_from_checkpoint=options.get("resume"))
    leave_trainer(trainer, out, [trainer.evaluate()] if args.load_best_model_at_end else [])


if __name__ == "__main__":
    main()
