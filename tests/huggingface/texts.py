# SPDX-License-Identifier: Apache-2.0
"""Models without weights to download and real text without a network, for the scripts beside this file."""

import pydoc_data.topics

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

VOCABULARY = 256
LENGTH = 48


def sequences(number: int, skip: int = 0, length: int = LENGTH) -> list:
    """Rows of the Python manual as bytes, for a causal language model."""
    text = "".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)).encode()
    rows = (text[(skip + row) * length : (skip + row + 1) * length] for row in range(number))
    return [{"input_ids": torch.tensor(list(row)), "labels": torch.tensor(list(row))} for row in rows]


def model_config(kind: str):
    if kind.startswith("llama"):
        wide = kind == "llama-wide"  # its matrices are large enough to be read ahead
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=384 if wide else 96,
            intermediate_size=1000 if wide else 200,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        )
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=96,
        n_layer=3,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.1,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )


def fresh_model(kind: str, seed: int = 0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(model_config(kind))
