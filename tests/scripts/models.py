# SPDX-License-Identifier: Apache-2.0
"""Models of odd blocks, chosen by name: each does something that hooks, gathers or recomputation may stumble over.

All parameters get a gradient in every forward, whatever the order in which the blocks are called, but those of a block
that is left out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

__all__ = ["KINDS", "Model", "ScriptError", "loss_of"]

WIDTH, VOCABULARY, LENGTH = 40, 64, 12


class ScriptError(Exception):
    """What a script's own mistake raises."""


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Dropped(Mlp):
    def __init__(self) -> None:
        super().__init__(0.1)


class Attention(nn.Module):
    """Chunks and transposed views of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.mixed(self.norm(x)).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated, self.long = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        hidden = self.gated(rows)
        hidden, cell = self.long(rows, (hidden, hidden * 0.5))
        return x + (hidden + cell).view_as(x)


class InPlace(nn.Module):
    """Changes what it just made, and in the end its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu_(self.up(x.clone()))
        return x.add_(self.dropout(self.down(hidden).mul_(0.5)))


class Views(nn.Module):
    """Slices written in place, strides of zero, memory in another order, a small part of something large."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        woven = torch.empty_like(hidden)
        woven[..., ::2], woven[..., 1::2] = hidden[..., :WIDTH].tanh(), hidden[..., WIDTH:].sigmoid()
        turned = woven.transpose(0, 2).contiguous().transpose(0, 2)
        first = turned[:, :1, :WIDTH].expand_as(x)
        return x + self.down(turned[..., WIDTH:] * first) * self.scale


class _Keeps(torch.autograd.Function):
    """Keeps an input on the context instead of saving it, and saves its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        output = torch.tanh(x * weight)
        ctx.save_for_backward(output, weight)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, weight = ctx.saved_tensors
        gradient = gradient * (1 - output * output)
        return gradient * weight, (gradient * ctx.x).flatten(0, -2).sum(0)


class _Doubles(torch.autograd.Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _Doubles.apply(_Keeps.apply(self.inner(x), self.weight) + 0)


class Checkpointed(nn.Module):
    """Gradient checkpointing of the script, one region within another."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Dropped(), Mlp()

    def _outer(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.utils.checkpoint.checkpoint(self.one, x, use_reentrant=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self._outer, x, use_reentrant=False)


class Statistics(nn.Module):
    """A buffer that every training forward changes, and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.1)
        return x + self.inner(x - self.mean.to(x.dtype))


class Wide(nn.Module):
    """Parameters that are cast before they are used, and a spectrum: complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.filter = nn.Parameter(torch.ones(WIDTH // 2 + 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x.float(), self.inner.weight.float(), self.inner.bias.float())
        spectrum = torch.fft.rfft(hidden, dim=-1) * torch.view_as_complex(self.filter.float())
        return x + torch.fft.irfft(spectrum, n=WIDTH, dim=-1).to(x.dtype)


class Remembering(nn.Module):
    """What training forwards leave behind is used by the next: queues, counters, and plain tensors changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last: deque[torch.Tensor] = deque(maxlen=2)
        self.counts: dict[str, Counter[str]] = {"forwards": Counter()}
        self.total = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x) * (1 + 0.1 * self.counts["forwards"]["all"] % 1) + sum(self.last)
        if torch.is_grad_enabled():
            self.counts["forwards"]["all"] += 1
            self.last.append(hidden.detach().tanh().mean((0, 1)))
            self.total += 0.25
        return x + hidden * float(self.total.cos())


class _Draws(torch.autograd.Function):
    """Completes its output in place, by what it draws."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        kept = (x * weight).bernoulli_(0.8)
        ctx.save_for_backward(kept, weight)
        return x * weight * kept

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept, weight = ctx.saved_tensors
        return gradient * kept * weight, (gradient * kept).flatten(0, -2).sum(0)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(_Draws.apply(self.inner(x), self.weight), 0.1, self.training)


class Hooked(Mlp):
    """Gradients are changed on their way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 0.75)
        return output


class Repeated(nn.Module):
    """One module twice, the first time for two outputs in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def _split(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.inner(x)
        return {"first": output, "second": output.detach()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._split(x)
        return self.inner(parts["first"]) + 0.1 * parts["second"]


class Gates(nn.Module):
    """Sizes that two ranks cannot halve."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.gate = nn.Linear(WIDTH, 203), nn.Linear(203, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.gate(torch.tanh(self.wide(x)))


_KINDS: Sequence[Callable[[], nn.Module]] = (
    *(Mlp, Dropped, Attention, Recurrent, InPlace, Views, Custom, Checkpointed),
    *(Statistics, Wide, Hooked, Repeated, Gates, Remembering, Drawing),
)
KINDS = {kind.__name__.lower(): kind for kind in _KINDS}  # type: ignore[attr-defined]


class Block(nn.Module):
    """What the package takes for the model's repeated block, whatever is in it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.part = KINDS[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


class Model(nn.Module):
    def __init__(self, kinds: Sequence[str], *, tied: bool = False, leaves_loss: bool = False) -> None:
        """``leaves_loss``: to the script."""
        super().__init__()
        self.leaves_loss = leaves_loss
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.fails_at: int | None = None

    def forward(self, ids: torch.Tensor, order: Sequence[int], left_out: int | None = None) -> torch.Tensor:
        """``order``: numbers of blocks, in turn; those that it lacks come after. One may be ``left_out``."""
        numbers = [number % len(self.blocks) for number in order]
        numbers += [number for number in range(len(self.blocks)) if number not in numbers]
        without = None if left_out is None else left_out % len(self.blocks)
        x = self.tokens(ids[:, :-1])
        for place, number in enumerate(number for number in numbers if number != without):
            if place == self.fails_at:
                raise ScriptError
            x = self.blocks[number](x)
        logits = self.head(x)
        return logits if self.leaves_loss else loss_of(logits, ids)


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
