# SPDX-License-Identifier: Apache-2.0
"""What a block saves for backward by its shape, beside what autograd saves of the real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_fuyou.simulator.families import read_config

transformers = pytest.importorskip("transformers", reason="needs the extra huggingface")

BATCH, SEQ = 2, 128
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = [(64, 160, 4, 4), (128, 448, 8, 2), (96, 256, 6, 1)]


def _config(family: str, hidden: int, inner: int, heads: int, kv_heads: int) -> dict[str, Any]:
    if family == "gpt2":
        sizes = {"n_embd": hidden, "n_inner": inner, "n_head": heads, "n_positions": SEQ}
        return {"model_type": family, **TOKENS, **sizes, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden // heads}
    experts = {"moe_intermediate_size": inner, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes = {"hidden_size": hidden, "intermediate_size": inner, **attention, **experts}
    return {"model_type": family, **TOKENS, **sizes}


def _measured(config: dict[str, Any], layers: int) -> int:
    """Bytes of all storages that a forward saves, but for those of the model."""
    name = "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"
    asked = transformers.AutoConfig.for_model(**config, **{name: layers})
    model = transformers.AutoModelForCausalLM.from_config(
        asked, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).train()
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(BATCH, SEQ, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "mixtral", "qwen3_moe"]
)
def test_a_block_saves_what_is_planned(family: str, sizes: tuple[int, int, int, int]) -> None:
    """Not more, but for a few bytes a token, and hardly less."""
    config = _config(family, *sizes)
    measured = (_measured(config, 4) - _measured(config, 2)) / (2 * BATCH * SEQ)
    planned = read_config(config).saved_bytes
    assert measured <= 1.005 * planned
    assert planned <= 1.04 * measured


def test_dropout_has_a_mask_of_each_half() -> None:
    config = _config("gpt2", *SIZES[0])
    masked = read_config({**config, "resid_pdrop": 0.1})
    assert masked.saved_bytes - read_config(config).saved_bytes == 2 * 64
