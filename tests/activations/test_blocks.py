# SPDX-License-Identifier: Apache-2.0
"""Blocks are found in models of every common shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_fuyou.activations.blocks import find_blocks
from ds_fuyou.errors import FuyouConfigError
from tests.activations.huggingface import TINY
from tests.activations.support import Plain


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("llama", ["model.layers.0", "model.layers.1"]),
        ("bert", ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
        ("vit", ["vit.encoder.layer.0", "vit.encoder.layer.1"]),
        ("t5", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
    ],
)
def test_hugging_face(name: str, names: list[str]) -> None:
    model, _ = TINY[name]()
    found = [block.name for block in find_blocks(model)]
    assert len(found) == len(names)
    if name != "vit":  # whose attribute names differ between versions
        assert found == names


def test_plain_list_and_names() -> None:
    model = Plain(num_layers=4)
    assert [block.name for block in find_blocks(model)] == [f"blocks.{i}" for i in range(4)]
    assert all(block.module is model.blocks[i] for i, block in enumerate(find_blocks(model)))


def test_the_class_that_holds_most_wins() -> None:
    model = nn.Sequential(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))), nn.ModuleList(nn.Conv1d(64, 64, 3) for _ in range(2))
    )
    assert {type(block.module) for block in find_blocks(model)} == {nn.Conv1d}


def test_sizes_can_come_from_elsewhere() -> None:
    """Partitioned parameters are empty; the caller knows how large they are."""
    model = nn.ModuleDict(
        {"a": nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), "b": nn.ModuleList([nn.Bilinear(3, 3, 3)] * 2)}
    )
    sizes = {id(param): 1000 if param.dim() == 2 else 1 for param in model.parameters()}
    assert [block.name for block in find_blocks(model, None, lambda p: sizes[id(p)])] == ["a.0", "a.1"]


def test_a_module_in_two_places_is_one_block() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 8))
    assert [block.name for block in find_blocks(model, ["Linear"])] == ["0", "3"]


def test_nothing_repeats(told: Callable[[], str]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    assert [block.name for block in find_blocks(model)] == ["0", "1"]
    assert "no repeated blocks" in told()
    assert find_blocks(nn.Linear(2, 2)) == []


def test_given_classes() -> None:
    model = Plain(num_layers=2)
    assert [block.name for block in find_blocks(model, ["Embedding", "PlainBlock"])] == [
        "tokens",
        "blocks.0",
        "blocks.1",
    ]
    with pytest.raises(FuyouConfigError, match=r"NoBlock.*PlainBlock"):
        find_blocks(model, ["PlainBlock", "NoBlock"])


def test_the_model_itself_is_no_block() -> None:
    class Nested(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Nested(depth - 1) for _ in range(2)) if depth else nn.ModuleList()
            self.weight = nn.Parameter(torch.zeros(3))

    assert [block.name for block in find_blocks(Nested(2))] == ["inner.0", "inner.1"]
