# SPDX-License-Identifier: Apache-2.0
"""Small models with awkward shapes, and their batches: the same for every run of a case."""

import hashlib
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn
from torch.nn import functional as F


class TinyBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyExperts(nn.Module):
    """Tokens go to one of four experts each, by their largest feature: some experts get none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = x[..., :4].argmax(-1)
        out = x
        for index, expert in enumerate(self.experts):
            chosen = choice == index
            if bool(chosen.any()):
                out = out + chosen.unsqueeze(-1) * expert(x)
        return out


class TinyGate(nn.Module):
    """One number a token from an odd width: a bias of one element, and a scalar, which two ranks cannot share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 1003)
        self.gate = nn.Linear(1003, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.gate(torch.tanh(self.wide(x)))


class TinyCount(nn.Module):
    """Grows with every forward in training: what it has counted is an extra state, and a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        self.seen += self.training
        return x * (1.0 + self.calls / 16 + float(self.seen) / 8)

    def get_extra_state(self) -> dict:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict) -> None:
        self.calls = state["calls"]


class TinyGPT(nn.Module):
    def __init__(
        self,
        num_layers: int = 3,
        width: int = 72,
        vocabulary: int = 500,
        tied: bool = False,
        skip: int = -1,
        experts: bool = False,
        tied_blocks: bool = False,
        gates: bool = False,
        counts: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(TinyBlock(width) for _ in range(num_layers))
        if experts:
            self.blocks[1] = TinyExperts(width)
        if gates:
            self.blocks[0], self.blocks[2] = TinyGate(width), TinyGate(width)
        if tied_blocks:
            self.blocks[2].up.weight = self.blocks[0].up.weight
        self.norm = nn.LayerNorm(width)
        self.count = TinyCount() if counts else None
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.skip = skip
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = self.tokens(ids[:, :-1])
        for index, block in enumerate(self.blocks):
            if not (skip and index == self.skip):
                x = block(x)
        if self.count is not None:
            x = self.count(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def build_model(spec: dict) -> nn.Module:
    model = TinyGPT(**{k: v for k, v in spec.items() if k not in ("frozen", "skip_at")})
    for name, param in model.named_parameters():
        if any(part in name for part in spec.get("frozen", ())):
            param.requires_grad = False
    return model


def make_batch(spec: dict, index: int, rank: int) -> dict:
    generator = torch.Generator().manual_seed(1000 * index + rank)
    ids = torch.randint(spec.get("vocabulary", 500), (2, 17), generator=generator)
    ids = ids.to(get_accelerator().current_device_name())
    return {"ids": ids, "skip": index in spec.get("skip_at", ())}


def masters_digest(engine: Any) -> str:
    """Of P32 of all parameters, whole, as the engine holds it now."""
    found = hashlib.sha256()
    for _, param in sorted(engine.module.named_parameters()):
        found.update(safe_get_full_fp32_param(param).cpu().numpy().tobytes())
    return found.hexdigest()
