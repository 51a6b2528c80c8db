# SPDX-License-Identifier: Apache-2.0
"""Sizes read from a config against those of the model that transformers builds of it: equal to the last parameter."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
import torch

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.simulator.families import known_families, read_config
from ds_fuyou.simulator.models import with_adapters

transformers = pytest.importorskip("transformers", reason="needs the extra huggingface")

REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2 7B": ("llama", {}),
    "Llama 2 70B": ("llama", {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
                    | {"num_attention_heads": 64, "num_key_value_heads": 8}),
    "Llama 3 8B": ("llama", {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}),
    "Llama 3.2 1B": ("llama", {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
                     | {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True}),
    "Llama 4 Maverick": ("llama4_text", {"num_local_experts": 128, "interleave_moe_layer_step": 2}),
    "Mistral 7B": ("mistral", {}),
    "Mixtral 8x22B": ("mixtral", {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56}
                      | {"num_attention_heads": 48, "head_dim": 128, "vocab_size": 32768}),
    "Qwen2 0.5B": ("qwen2", {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
                   | {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "Qwen2.5 72B": ("qwen2", {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
                    | {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064}),
    "Qwen1.5 MoE": ("qwen2_moe", {}),
    "Qwen3 8B": ("qwen3", {"intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8}),
    "Qwen3 30B A3B": ("qwen3_moe", {"num_hidden_layers": 48, "head_dim": 128}),
    "Qwen3 MoE, some dense": ("qwen3_moe", {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "Gemma 2B": ("gemma", {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18}
                 | {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "Gemma 2 27B": ("gemma2", {"hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46}
                    | {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}),
    "Gemma 3 1B": ("gemma3_text", {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4}
                   | {"num_key_value_heads": 1, "vocab_size": 262144}),
    "Phi-2": ("phi", {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32}),
    "Phi with norms of queries": ("phi", {"qk_layernorm": True}),
    "Phi-3 medium": ("phi3", {"hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40}
                     | {"num_attention_heads": 40, "num_key_value_heads": 10}),
    "DeepSeek V2 Lite": ("deepseek_v2", {"hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27}
                         | {"num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408}
                         | {"q_lora_rank": None, "first_k_dense_replace": 1, "num_experts_per_tok": 6}),
    "DeepSeek V3": ("deepseek_v3", {}),
    "GPT-2 XL": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "GPT-NeoX 20B": ("gpt_neox", {}),
    "OPT 350M": ("opt", {"hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096, "num_attention_heads": 16}
                 | {"word_embed_proj_dim": 512, "do_layer_norm_before": False}),
    "OPT 66B": ("opt", {"hidden_size": 9216, "num_hidden_layers": 64, "ffn_dim": 36864, "num_attention_heads": 72}
                | {"word_embed_proj_dim": 9216}),
    "BLOOM 176B": ("bloom", {"hidden_size": 14336, "n_layer": 70, "n_head": 112}),
    "Falcon 40B": ("falcon", {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128}
                   | {"num_kv_heads": 8, "new_decoder_architecture": True}),
    "Falcon RW 1B": ("falcon", {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "bias": True}
                     | {"multi_query": False, "parallel_attn": False, "alibi": True, "vocab_size": 50304}),
    "StableLM 2 12B": ("stablelm", {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40}
                       | {"num_key_value_heads": 8, "qk_layernorm": True, "use_parallel_residual": True}),
    "OLMo 7B": ("olmo", {}),
    "OLMo 2 13B": ("olmo2", {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40}
                   | {"num_attention_heads": 40, "vocab_size": 100352}),
    "OLMoE": ("olmoe", {"intermediate_size": 1024}),
    "Granite 8B, with biases": ("granite", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8}),
    "Helium, with biases": ("helium", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 4}),
    "BERT, not tied": ("bert", {"tie_word_embeddings": False}),
    "RoBERTa, not tied": ("roberta", {"tie_word_embeddings": False}),
    "Command R+": ("cohere", {"hidden_size": 12288, "intermediate_size": 33792, "num_hidden_layers": 64}
                   | {"num_attention_heads": 96, "num_key_value_heads": 8, "use_qk_norm": True}),
    "StarCoder2 15B": ("starcoder2", {"hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 40}
                       | {"num_attention_heads": 48, "num_key_value_heads": 4, "sliding_window": 4096}),
    "gpt-oss 20B": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "GLM-4 9B": ("glm4", {}),
    "GLM-4.5": ("glm4_moe", {"hidden_size": 5120, "num_hidden_layers": 92, "head_dim": 128, "use_qk_norm": True}
                | {"n_routed_experts": 160, "first_k_dense_replace": 3, "attention_bias": True}),
    "Qwen2-VL 72B": ("qwen2_vl", {}),
    "Gemma 3 4B": ("gemma3", {}),
}  # fmt: skip


def _built(config: Any) -> Any:
    with torch.device("meta"):
        try:
            return transformers.AutoModelForImageTextToText.from_config(config)
        except ValueError:
            return transformers.AutoModelForCausalLM.from_config(config)


def _config(family: str, **values: Any) -> Any:
    usual = {"mixtral": {"head_dim": 128}, "glm4_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 6}}
    return transformers.CONFIG_MAPPING[family](**{**usual.get(family, {}), **values})


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", REAL)
def test_a_real_model_has_its_parameters_block_by_block(name: str) -> None:
    family, values = REAL[name]
    config = _config(family, **values)
    found, built = read_config(config.to_dict()), _built(config)
    assert found.params == _count(built)
    stacks = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d+)\.")
    by_block: Counter[int] = Counter()
    for path, parameter in built.named_parameters():
        place = stacks.search(path)
        if place is not None and "vision" not in path and "visual" not in path:
            by_block[int(place[1])] += parameter.numel()
    assert [block.params for block in found.blocks] == [by_block[index] for index in range(found.layers)]
    towers = [p.numel() for path, p in built.named_parameters() if ".vision_tower." in path]
    if towers:
        assert found.tower_params == sum(towers)
        assert found.trainable_params == found.params - sum(towers)


@pytest.mark.parametrize("family", [name for name in known_families() if not name.endswith("vl_text")])
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str) -> None:
    """Files have what differs from the family's own, or less."""
    config = _config(family)
    wanted = _count(_built(config))
    assert read_config(json.loads(json.dumps(config.to_diff_dict()))).params == wanted
    is_composed = hasattr(config, "vision_config")  # its parts have other sizes there than alone
    if not is_composed and family not in ("glm4_moe", "deepseek_v2"):
        assert read_config({"model_type": family}).params == wanted


def test_a_wild_file_of_a_composed_model_says_little_of_its_stack() -> None:
    found = read_config(
        {
            "model_type": "gemma3",
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
            | {"num_hidden_layers": 34, "sliding_window": 1024},
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304}
            | {"num_attention_heads": 16, "num_hidden_layers": 27, "image_size": 896, "patch_size": 14}
            | {"vision_use_head": False},
        }
    )
    assert found.params == 4_300_079_472  # Gemma 3 4B
    assert (found.layers, len(set(found.blocks))) == (34, 2)


def test_of_experts_only_those_cost_flops_that_a_token_goes_to() -> None:
    found = read_config(_config("mixtral").to_dict())
    expert = 2 * 3 * 4096 * 14336
    (up,) = (op for op in found.operators if op.name == "mlp_up")
    (down,) = (op for op in found.operators if op.name == "mlp_down")
    assert up.matmul_flops + down.matmul_flops == 2 * expert + 2 * 8 * 4096  # two of eight, and the router
    assert up.output_bytes == 2 * 2 * 2 * 14336
    v3 = read_config(_config("deepseek_v3").to_dict())
    active = (v3.forward_flops(0) - v3.head_flops) / 2 + 2 * 129280 * 7168
    assert active == pytest.approx(37.5e9, rel=0.01)  # of 671 B


def test_a_sliding_window_bounds_what_attention_costs() -> None:
    found = read_config(_config("gpt_oss").to_dict())
    scores = 2 * 64 * 2 * 64
    (attention,) = (op for op in found.operators if op.name == "attention")
    assert attention.flops(8192) == pytest.approx(scores * (128 + 8192) / 2)
    assert attention.flops(64) == pytest.approx(scores * 64)
    assert attention.params == 64  # sinks
    ends = read_config(_config("qwen2", use_sliding_window=True, max_window_layers=20, sliding_window=512).to_dict())
    assert [block.operators[2].attention[0][1] for block in ends.blocks] == [0] * 20 + [512] * 12


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:::peft.*")
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gpt_neox", "qwen2_moe"])
def test_adapters_have_the_size_that_peft_gives_them(family: str) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra huggingface")
    small = {"num_hidden_layers": 2}
    config = _config(family, **({"n_layer": 2} if family == "gpt2" else small))
    found = with_adapters(read_config(config.to_dict()), 8, base_bits=4)
    built = _built(config)
    whole = _count(built)
    adapted = peft.get_peft_model(built, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert found.trainable_params == trained
    assert found.frozen_params == whole
    assert found.params == whole + trained
    linear = sum(op.linear_params for block in found.blocks for op in block.operators)
    assert found.frozen_bytes == pytest.approx(2 * (whole - linear) + (0.5 + 1 / 64 + 1 / 4096) * linear)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "model_type must name the model's family, found None"),
        ({"model_type": "lama"}, r"'lama' is not known; nearest known are llama.*gpt:layers"),
        ({"model_type": "mamba"}, "is not known"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder beside a decoder"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "attention to another stack"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 32}, "'linear_attention' are not modelled"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "must name all 32 layers, found 1"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "cannot go to 9 of 8 experts"),
        ({"model_type": "llama", "num_hidden_layers": 10**8}, "at most 4096 layers"),
        ({"model_type": "llama", "hidden_size": "4096"}, "hidden_size must be a positive whole number, found '4096'"),
        ({"model_type": "llava", "text_config": [1]}, "text_config must be an object"),
        ({"model_type": "llava", "text_config": {"model_type": "nope"}}, "'nope' is not known"),
    ],
)
def test_what_is_not_known_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(FuyouConfigError, match=said):
        read_config(config)
