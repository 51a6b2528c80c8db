# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models: swapped gradients equal the model's own, with and without its gradient checkpointing."""

from __future__ import annotations

import copy
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
