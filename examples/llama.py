# SPDX-License-Identifier: Apache-2.0
"""The model of the Trainer examples: one that you name, or a new small Llama over bytes. No network for the latter."""

from dataclasses import dataclass, field

from transformers import AutoModelForCausalLM, LlamaConfig


@dataclass
class ModelArguments:
    model: str = field(default="", metadata={"help": "a directory or a name on the hub; default: a new small Llama"})
    hidden: int = 512
    layers: int = 8
    length: int = 256


def build(sizes: ModelArguments):
    """Called after TrainingArguments were made, it builds the model partitioned (zero.Init) and never as a whole."""
    if sizes.model:
        return AutoModelForCausalLM.from_pretrained(sizes.model)
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
    return AutoModelForCausalLM.from_config(config)
