# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from ds_fuyou.ds_json import (
    Activation,
    activation_of,
    activation_scope,
    current_activation,
    is_on,
    load_activation,
    stock_states,
)
from ds_fuyou.errors import FuyouConfigError, FuyouStateError


def absorb(fuyou: dict[str, Any] | None = None, zero: dict[str, Any] | None = None, **top_level: Any) -> Activation:
    activation = load_activation({"zero_optimization": {"stage": 3, **(zero or {})}, "fuyou": fuyou or {}, **top_level})
    assert activation is not None
    return activation


def test_an_infinity_configuration_needs_only_the_block() -> None:
    absorbed = absorb(
        zero={
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/nvme",
                "buffer_count": 4,
                "pipeline_read": True,
                "pipeline_write": True,
                "pin_memory": False,
            },
            "offload_param": {"device": "cpu", "nvme_path": "/nvme", "max_in_cpu": 0},
        },
        aio={"queue_depth": 32},
    )
    assert absorbed.config.nvme_path == ("/nvme",)
    assert absorbed.config.optimizer.tier == "nvme"
    assert absorbed.config.parameters.tier == "cpu"
    assert absorbed.pin_memory is False
    keys = [item.key.removeprefix("zero_optimization.") for item in absorbed.ignored]
    assert keys == [
        "offload_optimizer.buffer_count",
        "offload_optimizer.pipeline_read",
        "offload_optimizer.pipeline_write",
        "offload_param.max_in_cpu",
        "aio.queue_depth",
    ]
    assert all(item.reason for item in absorbed.ignored)


def test_an_optimizer_of_pytorch_that_the_json_asks_for_is_told_to_run_with_another_kernel() -> None:
    given = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    (item,) = absorb({"nvme_path": "/nvme"}, optimizer=given).ignored
    assert item.key == "optimizer.params.torch_adam"
    assert "last bits differ" in item.reason


def test_keys_that_deepspeed_has_deprecated_are_told_to_be_without_effect() -> None:
    found = absorb({"nvme_path": "/nvme"}, zero={"cpu_offload": True, "cpu_offload_param": False}).ignored
    assert [item.key for item in found] == ["zero_optimization.cpu_offload"]


def test_the_block_wins_over_the_sections() -> None:
    section = {"device": "nvme", "nvme_path": "/other"}
    absorbed = absorb(
        {"nvme_path": "/nvme", "optimizer": {"tier": "cpu", "overlap": "none"}},
        zero={"offload_optimizer": section},
    )
    assert absorbed.config.nvme_path == ("/nvme",)
    assert (absorbed.config.optimizer.tier, absorbed.config.optimizer.overlap) == ("cpu", "none")
    assert {item.key.rsplit(".", 1)[1] for item in absorbed.ignored} == {"device", "nvme_path"}


def test_two_paths_in_the_sections_are_both_used() -> None:
    absorbed = absorb(
        zero={
            "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
            "offload_param": {"device": "nvme", "nvme_path": "/b"},
        }
    )
    assert absorbed.config.nvme_path == ("/a", "/b")


@pytest.mark.parametrize("spelling", ["/a/", "/a/../a", "/a/.", "/./a"])
def test_one_path_in_two_spellings_is_one(spelling: str) -> None:
    absorbed = absorb(
        zero={
            "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
            "offload_param": {"device": "nvme", "nvme_path": spelling},
        }
    )
    assert absorbed.config.nvme_path == ("/a",)


def test_an_empty_path_in_a_section_names_none() -> None:
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": "/a"}, "offload_param": {"nvme_path": ""}}
    assert absorb(zero=zero).config.nvme_path == ("/a",)
    with pytest.raises(FuyouConfigError, match="no path is named"):
        absorb(zero={"offload_param": {"device": "nvme", "nvme_path": ""}})


def test_a_path_in_a_section_that_can_be_none_is_told_with_its_place() -> None:
    with pytest.raises(FuyouConfigError, match=r"^zero_optimization\.offload_param\.nvme_path: must be made of"):
        absorb(zero={"offload_param": {"device": "nvme", "nvme_path": "/a\0b"}})


def test_auto_and_none_in_the_sections_decide_nothing() -> None:
    absorbed = absorb(zero={"offload_optimizer": {"device": "none", "nvme_path": "auto"}, "offload_param": None})
    assert absorbed.config.optimizer.tier == "auto"
    assert absorbed.config.nvme_path is None


@pytest.mark.parametrize("zero", [None, {}, {"stage": 2}, {"stage": "auto"}, True, False])
def test_stage_3_is_required(zero: object) -> None:
    with pytest.raises(FuyouConfigError, match=r"zero_optimization\.stage 3, found"):
        load_activation({"zero_optimization": zero, "fuyou": {}})


def test_a_storage_tier_needs_a_path() -> None:
    with pytest.raises(FuyouConfigError, match=r'fuyou\.gradients\.tier is "nvme" but no path is named'):
        absorb({"gradients": {"tier": "nvme"}})


def test_shares_match_the_paths() -> None:
    with pytest.raises(FuyouConfigError, match=r"one number for each nvme_path \(2\), found 1"):
        absorb({"nvme_path": ["/a", "/b"], "plan": {"shares": [1]}})


@pytest.mark.parametrize(
    ("zero", "top_level", "named"),
    [
        ({"zenflow": {}}, {}, "zenflow"),
        ({"offload_optimizer": {"super_offload": True}}, {}, "super_offload"),
        ({"offload_optimizer": {"ratio": 0.5}}, {}, "ratio"),
        ({"zero_hpz_partition_size": 2}, {}, "zero_hpz_partition_size"),
        ({"zero_quantized_weights": True}, {}, "zero_quantized_weights"),
        ({"zero_quantized_gradients": True}, {}, "zero_quantized_gradients"),
        ({"zero_quantized_nontrainable_weights": True}, {}, "zero_quantized_nontrainable_weights"),
        ({"mics_shard_size": 2}, {}, "mics_shard_size"),
        ({"elastic_checkpoint": True}, {}, "elastic_checkpoint"),
        ({}, {"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads = true without"),
        (
            {},
            {"bfloat16": {"enabled": True, "bf16_master_weights_and_grads": True}, "optimizer": {"type": "Lion"}},
            "bfloat16.bf16_master_weights_and_grads = true with optimizer.type = 'Lion'",
        ),
        (
            {},
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            "fp16_master_weights_and_grads",
        ),
        ({}, {"compile": {"deepcompile": True}}, "deepcompile"),
        ({}, {"tensor_parallel": {"autotp_size": 2}}, "autotp_size"),
        ({}, {"expert_parallel": {"enabled": True}}, "expert_parallel.enabled"),
        ({}, {"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled"),
        ({}, {"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype"),
        ({}, {"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "amsgrad"),
        ({}, {"optimizer": {"type": "Lamb"}}, "what works: Adam, AdamW, Adagrad, Lion"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(
    zero: dict[str, Any], top_level: dict[str, Any], named: str
) -> None:
    with pytest.raises(FuyouConfigError, match=f"cannot be combined with: .*{named}"):
        absorb(zero=zero, **top_level)


@pytest.mark.parametrize(
    ("bf16", "params", "kept"),
    [
        ({}, {}, ("fp32", "fp32")),
        ({}, {"fp32_optimizer_states": False}, ("fp32", "fp32")),  # as the masters are
        ({"bf16_master_weights_and_grads": True}, {}, ("bf16", "fp32")),
        (
            {"enabled": "true", "bf16_master_weights_and_grads": "true"},
            {},
            ("bf16", "fp32"),
        ),  # DeepSpeed's words for it
        ({"bf16_master_weights_and_grads": True}, {"fp32_optimizer_states": False}, ("bf16", "bf16")),
        ({"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, {}, ("bf16", "bf16")),
    ],
)
def test_states_that_stock_reduces_pass(bf16: dict[str, Any], params: dict[str, Any], kept: tuple[str, str]) -> None:
    config = {"bf16": {"enabled": True, **bf16}, "optimizer": {"type": "AdamW", "params": params}}
    absorb(**config)
    assert stock_states(config) == kept
    assert stock_states({"bfloat16": config["bf16"], "optimizer": config["optimizer"]}) == kept


def test_the_same_features_switched_off_pass() -> None:
    absorb(
        zero={
            "zero_hpz_partition_size": 1,
            "mics_shard_size": -1,
            "zero_quantized_weights": False,
            "zenflow": None,
        },
        compile={"deepcompile": False},
        torch_autocast={"enabled": True, "dtype": "bfloat16"},
        tensor_parallel={"autotp_size": 1},
        optimizer={"type": "AdamW", "params": {"amsgrad": False, "lr": "auto"}},
    )


def test_the_activation_of_an_engine_is_known_only_while_it_is_built() -> None:
    activation = load_activation({"zero_optimization": {"stage": 3}, "fuyou": {}})
    assert activation is not None
    with pytest.raises(FuyouStateError, match="no engine"):
        current_activation()
    with activation_scope(activation):
        assert current_activation() is activation
    with pytest.raises(FuyouStateError, match="no engine"):
        current_activation()


def test_activation_of_a_dictionary_or_a_parsed_configuration() -> None:
    raw = {"zero_optimization": {"stage": 3}, "fuyou": {}}
    activation = activation_of(raw)
    assert activation == load_activation(raw)
    assert activation_of({"train_batch_size": 1}) is None
    parsed = type("Parsed", (), {"fuyou": activation})()
    assert activation_of(parsed) is activation
    assert activation_of(object()) is None


@pytest.mark.parametrize(
    "section",
    [
        {"zero_quantized_weights": 1},
        {"zero_quantized_weights": "true"},
        {"zero_quantized_weights": "On"},
        {"zero_hpz_partition_size": "2"},
    ],
    ids=str,
)
def test_what_deepspeed_takes_for_true_or_a_number_is_refused_as_such(section: dict[str, Any]) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    (key,) = section
    parsed = getattr(DeepSpeedZeroConfig(stage=3, **section), key)
    assert parsed in (True, 2), "DeepSpeed would do it"
    with pytest.raises(FuyouConfigError, match=key):
        load_activation({"zero_optimization": {"stage": 3, **section}, "fuyou": {"nvme_path": "/nvme"}})


@pytest.mark.parametrize("value", [0, "0", "false", "off", False, None, "auto"])
def test_what_deepspeed_does_not_take_for_true_passes(value: object) -> None:
    assert not is_on(value)
