# SPDX-License-Identifier: Apache-2.0
"""A profile is kept for a model as it is set: what changes its speed makes it another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from ds_fuyou.zero.run.run_facts import model_settings


def model() -> nn.Sequential:
    made = nn.Sequential(nn.MultiheadAttention(16, 2), nn.Dropout(0.1))
    made.config = SimpleNamespace(attention="eager", mask=object())
    return made


def test_equal_models_are_the_same() -> None:
    first, second = model(), model()
    second.eval()
    second.ds_id, second._steps = 7, 9  # what engines note
    assert model_settings(first) == model_settings(second)


def test_a_model_that_was_loaded_from_another_folder_is_the_same(tmp_path: Path) -> None:
    """A script that is started again from its last checkpoint names that."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64)
    made = transformers.GPT2LMHeadModel(config)
    for folder in ("1", "2"):
        made.save_pretrained(tmp_path / folder)
    first, second = (made.from_pretrained(tmp_path / folder) for folder in ("1", "2"))
    assert model_settings(first) == model_settings(second)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: setattr(made[0], "num_heads", 4),
        lambda made: setattr(made[1], "p", 0.2),
        lambda made: setattr(made[1], "gradient_checkpointing", True),
        lambda made: setattr(made.config, "attention", "flash"),
        lambda made: made.append(nn.Identity()),
    ],
    ids=["heads", "dropout", "checkpointing", "attention", "module"],
)
def test_what_is_set_otherwise_is_another(change: Callable[[nn.Sequential], object]) -> None:
    other = model()
    change(other)
    assert model_settings(other) != model_settings(model())
