# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models: swapped gradients equal the model's own, with and without its gradient checkpointing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.activations.huggingface import TINY
from tests.activations.support import must_agree

SMALL = 256 * 1024


@pytest.mark.parametrize("checkpointing", [None, "re-entrant", "non-re-entrant"])
@pytest.mark.parametrize("name", TINY)
def test_gradients(name: str, checkpointing: str | None, tmp_path: Path, told: Callable[[], str]) -> None:
    torch.manual_seed(0)
    model, batch = TINY[name]()
    reference = copy.deepcopy(model)  # re-entrant regions alone sum gradients in another order than the model
    if checkpointing is not None:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # by version
        enable({"use_reentrant": checkpointing == "re-entrant"})

    def step(model: nn.Module) -> None:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=name in ("bert", "vit")):
                loss = model(**batch).loss
            loss.backward()

    found = must_agree(model, step, tmp_path, reference=reference, arena_bytes=SMALL)
    taken_over = "takes these regions over" in told()
    assert taken_over == (checkpointing is not None)
    assert found.swapper.num_saved_parameters > 0


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "asked for"])
def test_a_cache_that_is_not_given_by_name_grows_once(is_given: bool, tmp_path: Path, told: Callable[[], str]) -> None:
    """GPT-2 hands it to its blocks by place. A prefix, as of prompt tuning, is in it when the forward begins."""
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=199, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    ids = torch.randint(199, (3, 24), generator=torch.Generator().manual_seed(1))
    lengths = []
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def step(model: nn.Module) -> None:
        cache = None
        if is_given:
            cache = DynamicCache()
            for layer in range(2):
                cache.update(torch.ones(3, 4, 5, 16), torch.ones(3, 4, 5, 16), layer)
        found = model(ids, labels=ids, **{name: cache}, use_cache=True)
        found.loss.backward()
        lengths.append(found[name].get_seq_length())

    must_agree(model, step, tmp_path, arena_bytes=SMALL, recompute=lambda name: True)
    assert lengths == [24 + 5 * is_given] * 3
    assert "blocks are called with DynamicCache in training" in told()
