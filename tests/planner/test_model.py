# SPDX-License-Identifier: Apache-2.0
"""Parameters, FLOPs and bytes of a model, from a shape or a Hugging Face config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.blocks import Operator
from ds_fuyou.planner.presets import model_shapes
from ds_fuyou.simulator.models import load_model, published_model, with_adapters

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 1024}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def _written(tmp_path: Path, config: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def flops_per_byte(operator: Operator) -> float:
    return operator.flops(1024) / operator.output_bytes


@pytest.mark.parametrize(("config", "params"), [(GPT2, 124_439_808), (LLAMA, 8_030_261_248)])
def test_parameters_are_those_of_the_real_models(config: dict[str, Any], params: int, tmp_path: Path) -> None:
    found = load_model(_written(tmp_path, config))
    assert found.params == params
    assert load_model(str(tmp_path)).fingerprint == found.fingerprint


def test_published_sizes_have_their_parameters() -> None:
    for name in model_shapes():
        found = published_model(f"GPT3-{name}")
        assert found is not None
        assert found.params == pytest.approx(found.nominal_params, rel=0.08)  # 70B is 64.8, the others within 3 %
        assert flops_per_byte(found.operators[1]) == pytest.approx(found.hidden)
        down = next(op for op in found.operators if op.name == "mlp_down")
        assert flops_per_byte(down) == pytest.approx(4 * found.hidden)
        attention = next(op for op in found.operators if op.name == "attention")
        assert flops_per_byte(attention) == pytest.approx(2 * 1024)


def test_flops_and_saved_bytes_of_a_gpt_block() -> None:
    found = load_model("gpt:2,4,256,1000")
    assert found.block_flops(0) == 24 * 256 * 256
    assert found.block_flops(128) - found.block_flops(0) == 4 * 128 * 256
    assert found.forward_flops(0) == 2 * 24 * 256 * 256 + 2 * 1000 * 256
    assert found.saved_bytes == 32 * 256  # 34 s b h less dropout's masks
    assert found.params == 2 * (12 * 256 * 256 + 13 * 256) + 1000 * 256 + 2 * 256


def test_of_a_base_in_4_bits_the_embedding_is_held_in_16(tmp_path: Path) -> None:
    """It is larger there than the largest matrix; of a vocabulary that is small it is not."""
    for vocab, largest in ((128256, 2 * 128256 * 4096), (1000, 4096 * 14336 * (1 / 2 + 1 / 64 + 1 / 4096))):
        base = load_model(_written(tmp_path, {**LLAMA, "vocab_size": vocab}))
        four = with_adapters(base, 16, base_bits=4)
        assert four.largest_frozen_bytes == pytest.approx(largest, rel=1e-3)
        assert with_adapters(base, 16).largest_frozen_bytes == 2 * four.largest_param


def test_a_gated_model_saves_both_halves(tmp_path: Path) -> None:
    found = load_model(_written(tmp_path, LLAMA))
    sizes = {op.name: op.output_bytes for op in found.operators}
    assert sizes["qkv"] == 2 * (4096 + 2 * 1024)
    assert sizes["mlp_up"] == 2 * 2 * 14336
    assert sizes["mlp_activation"] == 2 * 14336


def test_a_nested_text_config_is_found(tmp_path: Path) -> None:
    found = load_model(
        _written(tmp_path, {"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": 960}})
    )
    assert found.layers == 32
    assert found.params == 8_030_261_248 + found.tower_params + (960 + 1) * 4096 + (4096 + 1) * 4096


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_layer": 0}, "n_layer must be a positive whole number, found 0"),
        ({"model_type": None}, "model_type must name the model's family"),
        ({"n_embd": "768"}, "n_embd must be a positive whole number"),
        ({"n_head": 7}, "must be a multiple of the 7 heads"),
        ({"is_encoder_decoder": True}, "an encoder beside a decoder"),
    ],
)
def test_a_config_that_describes_no_stack_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(FuyouConfigError, match=said):
        load_model(_written(tmp_path, {**GPT2, **change}))


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    plain = load_model(_written(tmp_path, GPT2))
    (tmp_path / "config.json").write_text(json.dumps(GPT2), encoding="utf-8-sig")
    assert load_model(str(tmp_path)).params == plain.params


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FuyouConfigError, match="JSON object, found list"):
        load_model(_written(tmp_path, [1]))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(FuyouConfigError, match="readable JSON"):
        load_model(str(tmp_path))
    with pytest.raises(FuyouConfigError, match=r"6B is the nearest of the sizes 6B, 13B, .*276B"):
        load_model("7B")
