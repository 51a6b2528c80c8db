# SPDX-License-Identifier: Apache-2.0
"""The files in configs/ are valid, do what their names say, and docs/configs.md documents each of them."""

import json
from pathlib import Path

import pytest

from ds_fuyou.ds_json import load_activation

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs").glob("*.json"))


def tiers(name: str) -> tuple[str, str, str]:
    config = load_activation(json.loads((ROOT / "configs" / name).read_text())).config
    return config.parameters.tier, config.optimizer.tier, config.gradients.tier


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_block_is_there_exactly_when_the_name_says_so(file) -> None:
    activation = load_activation(json.loads(file.read_text()))
    assert (activation is not None) == ("fuyou" in file.stem)
    if activation is not None:
        assert activation.ignored == ()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_and_every_key_is_documented(file) -> None:
    page = (ROOT / "docs" / "configs.md").read_text()
    assert f"`{file.name}`" in page
    missing = [key for key in keys(json.loads(file.read_text())) if key not in page]
    assert missing == []


def keys(data: dict) -> set[str]:
    found = set(data)
    for value in data.values():
        if isinstance(value, dict):
            found |= keys(value)
    return found


def test_placements() -> None:
    assert tiers("finetune_fuyou.json") == ("cpu", "nvme", "cpu")
    assert tiers("fuyou_optimizer_nvme.json") == ("cpu", "nvme", "cpu")
    assert tiers("fuyou_all_nvme.json") == ("nvme", "nvme", "nvme")
    assert tiers("fuyou_dram.json") == ("cpu", "cpu", "cpu")
    assert tiers("fuyou_auto.json") == ("auto", "auto", "auto")
    assert tiers("hf_trainer_fuyou.json") == ("auto", "nvme", "auto")
    assert tiers("hf_lora_fuyou.json") == ("auto", "auto", "auto")


def test_the_demo_uses_the_file_that_exists() -> None:
    default = next(
        line.split("?=")[1].strip()
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith("DEMO_CONFIG")
    )
    assert (ROOT / default).is_file()


def test_a_block_is_the_only_edit_to_the_tuned_zero_infinity_file() -> None:
    config = json.loads((ROOT / "configs" / "zero_infinity_tuned.json").read_text())
    activation = load_activation({**config, "fuyou": {}})
    assert activation.state_paths == ("/nvme0/swap",)
    assert activation.config.optimizer.tier == "nvme"
    assert activation.config.parameters.tier == "cpu"
