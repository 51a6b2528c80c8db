# SPDX-License-Identifier: Apache-2.0
"""Tiny Hugging Face models built from configurations (nothing is downloaded), each with a batch that gives a loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["TINY"]

Made = tuple[nn.Module, dict[str, torch.Tensor]]


def _ids(vocabulary: int, length: int = 24) -> torch.Tensor:
    return torch.randint(vocabulary, (3, length), generator=torch.Generator().manual_seed(1))


def _padded(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[1, -7:] = 0
    return mask


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=199, num_hidden_layers=2, **sizes))
    ids = _ids(199)
    return model, {"input_ids": ids, "attention_mask": _padded(ids), "labels": ids}


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(vocab_size=199, num_hidden_layers=2, max_position_embeddings=64, **sizes))
    ids = _ids(199)
    return model, {"input_ids": ids, "attention_mask": _padded(ids), "labels": ids}


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    model = ViTForImageClassification(
        ViTConfig(image_size=32, patch_size=8, num_hidden_layers=2, num_labels=5, **sizes)
    )
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    return model, {"pixel_values": pixels, "labels": torch.tensor([0, 4, 2])}


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    start = {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = T5Config(
        vocab_size=199, d_model=64, d_kv=16, d_ff=160, num_layers=2, num_decoder_layers=2, num_heads=4, **start
    )
    model = T5ForConditionalGeneration(config)
    ids = _ids(199)
    return model, {"input_ids": ids, "attention_mask": _padded(ids), "labels": ids}


TINY: dict[str, Callable[[], Made]] = {"llama": llama, "bert": bert, "vit": vit, "t5": t5}
