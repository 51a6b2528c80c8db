# SPDX-License-Identifier: Apache-2.0
"""Modules whose weights are computed when they are read, or read by others than themselves: as in stock, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ds_fuyou.errors import FuyouStateError
from tests.harness.runner import ds_config

pytestmark = pytest.mark.usefixtures("only_rank")

NVME = {"tier": "nvme"}
VOCABULARY, WIDTH = 97, 32


class Stack(nn.Module):
    """Token numbers → layers → the loss of finding them again."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        values = self.tokens(ids)
        for layer in self.layers:
            values = layer(values)
        return F.cross_entropy(self.head(values).float().flatten(0, 1), ids.flatten())


class NormFused(nn.Module):
    """Evaluates with its norm's parameters, past the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            return values + self.linear(self.norm(values))
        return values + self.linear(F.layer_norm(values, (WIDTH,), self.norm.weight, self.norm.bias))


class Decomposed(nn.Module):
    """Computed again in backward, where it reads a small weight past its module, as adapters with magnitudes do."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1, bias=False)
        self._use_reentrant = use_reentrant

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = checkpoint(self._inner, values, use_reentrant=self._use_reentrant)
        return again

    def _inner(self, values: torch.Tensor) -> torch.Tensor:
        weight = self.scale.weight
        return values + self.linear(values) * self.scale(torch.eye(weight.shape[1], dtype=values.dtype)).T


def decomposed() -> nn.Module:
    return Decomposed(use_reentrant=False)


def decomposed_reentrant() -> nn.Module:
    return Decomposed(use_reentrant=True)


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def encoder_layer() -> nn.Module:
    """In evaluations one operator has all its parameters."""
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)


def trained(layer: Any, block: dict[str, Any] | None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, in training and in evaluations between steps; parameters, and buffers, at the end."""
    torch.manual_seed(0)
    model = Stack([layer() for _ in range(3)])
    memory = {"device": "cpu"}
    zero = {"offload_optimizer": memory, "offload_param": memory, "stage3_param_persistence_threshold": 100}
    config = ds_config(zero_optimization=zero, bf16=None) | ({} if block is None else {"fuyou": block})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    draw, losses = torch.Generator().manual_seed(0), list[float]()
    for step in range(6):
        ids = torch.randint(0, VOCABULARY, (2, 8), generator=draw)
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        engine.eval()
        with torch.inference_mode():
            losses += [engine(ids).item() for _ in range(step % 3)]
        engine.train()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        values = [value.detach().clone() for value in (*model.parameters(), *model.buffers())]
    engine.destroy()
    return losses, values


@pytest.mark.parametrize("layer", [spectral, encoder_layer, NormFused, decomposed, decomposed_reentrant])
@pytest.mark.parametrize("mode", ["none", "auto"])
def test_as_in_stock(layer: Any, mode: str, tmp_path: Path) -> None:
    losses, values = trained(layer, None)
    classes = dict.fromkeys(("parameters", "optimizer", "gradients"), NVME)
    plan = {"chunk_bytes": 16384, "smallest_swapped_bytes": 64}
    activations = {"activations": {"mode": mode, "tier": "nvme"}, "gpu_budget_bytes": 2 << 20}
    block = {"nvme_path": str(tmp_path), **classes, **activations, "plan": plan}
    found_losses, found_values = trained(layer, block)
    assert found_losses == losses
    assert all(map(torch.equal, values, found_values))


def test_a_sparse_gradient_is_refused_by_name(tmp_path: Path) -> None:
    """ZeRO-3 has no way for it; stock says that copy_() is not implemented."""
    model = Stack([])
    model.tokens = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
    config = ds_config(bf16=None) | {"fuyou": {"nvme_path": str(tmp_path)}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    with pytest.raises(FuyouStateError, match="ZeRO-3 reduces dense ones alone"):
        engine.backward(engine(torch.arange(VOCABULARY).view(1, -1)))
    engine.destroy()
