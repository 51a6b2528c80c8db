# SPDX-License-Identifier: Apache-2.0
"""What the scripts beside this file share: text, tokenizer and models without a network, what they are told, and what
they leave behind.

    python -m tests.clients.given DIRECTORY      writes the models "policy" and "judge", with their tokenizer
    SCRIPT DS_JSON OUT OPTIONS                   every script; OPTIONS is JSON

A script leaves ``OUT/log.json`` (a list of dictionaries), ``OUT/final/*.safetensors``, and, where it can go on from
them, ``OUT/checkpoint-N``.
"""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

from tests.harness.group import leave_group
from tests.huggingface.texts import model_config

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ARGUMENTS: dict[str, Any] = {  # of everything that is made of the Trainer
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 2e-3,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "bf16": True,
    "use_cpu": True,
    "seed": 11,
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def paragraphs() -> list[str]:
    """The Python manual in pieces of 60 to 400 characters."""
    text = "\n\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    return [piece.strip()[:400] for piece in text.split("\n\n") if len(piece.strip()) >= 60]


def told() -> tuple[str, Path, dict[str, Any]]:
    """The path of the DeepSpeed JSON, the directory for what is left, and the options. Starts a group of several."""
    config, out, options = sys.argv[1:4]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        deepspeed.init_distributed("gloo")  # TrainingArguments do it, but not with use_cpu
    Path(out).mkdir(parents=True, exist_ok=True)
    return config, Path(out), json.loads(options)


def language(seed: int = 0) -> torch.nn.Module:
    """A small language model that can be made in any ``zero.Init``: its row of a padding token would be written while
    it is partitioned.
    """
    from transformers import AutoModelForCausalLM

    config = model_config("llama")
    config.pad_token_id = None
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def is_first() -> bool:
    """Also when the program has ended the group."""
    return os.environ.get("RANK", "0") == "0"


def write_once(file: Path, text: str) -> Path:
    """By rank 0, before any rank goes on."""
    if is_first():
        file.write_text(text)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return file


def on_disk(data: Any, directory: Path) -> Any:
    """A ``datasets.Dataset`` as those of users are: ranks find beside it what one of them computed."""
    if is_first():
        data.save_to_disk(str(directory))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return type(data).load_from_disk(str(directory))


def know_their_rank() -> None:
    """Ranks that take themselves for the first write the same files, and the last one's stay."""
    accelerate = sys.modules.get("accelerate")
    if accelerate is not None and accelerate.PartialState._shared_state:
        taken_for = accelerate.PartialState().process_index
        if taken_for != int(os.environ.get("RANK", "0")):
            raise AssertionError(f"accelerate takes rank {os.environ['RANK']} for {taken_for}")


def leave_log(out: Path, history: list[dict[str, Any]]) -> None:
    """Rank 0 writes the log; all ranks leave the group together."""
    know_their_rank()
    if is_first():
        (out / "log.json").write_text(json.dumps(history))
    if torch.distributed.is_initialized():
        leave_group()


def leave_trainer(trainer: Any, out: Path, more: list[dict[str, Any]] = ()) -> None:
    """The same of a Trainer, with its final model."""
    trainer.save_model(str(out / "final"))
    leave_log(out, [*trainer.state.log_history, *more])


def leave_written(written: Path, out: Path) -> None:
    """The same of a program that wrote its model and a ``trainer_state.json`` into a directory by itself."""
    if is_first():
        (out / "final").mkdir()
        for file in written.glob("*.safetensors"):
            shutil.copy(file, out / "final")
        (out / "log.json").write_text(
            json.dumps(json.loads((written / "trainer_state.json").read_text())["log_history"])
        )
    know_their_rank()
    if torch.distributed.is_initialized():
        leave_group()


def leave_weights(model: torch.nn.Module, out: Path) -> None:
    """Gathers the parameters of a ZeRO-3 model for ``OUT/final``."""
    from safetensors.torch import save_file

    found = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = param.detach().clone().contiguous()
    if is_first():
        (out / "final").mkdir(parents=True, exist_ok=True)
        save_file(found, out / "final" / "model.safetensors")


def make_models(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet))
    tokenizer.train_from_iterator(paragraphs()[:400], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=CHAT
    )
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=200,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        num_labels=1,
    )
    for name, kind in (("policy", Qwen2ForCausalLM), ("judge", Qwen2ForSequenceClassification)):
        torch.manual_seed(len(name))
        kind(config).to(torch.bfloat16).save_pretrained(directory / name)
        fast.save_pretrained(directory / name)


if __name__ == "__main__":
    make_models(Path(sys.argv[1]))
