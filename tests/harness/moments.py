# SPDX-License-Identifier: Apache-2.0
"""How moments are rounded, written anew from what was published, with torch's operators alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.optimizer.coded_states import decode
from ds_fuyou.state_layout import CODE_BLOCK as BLOCK
from ds_fuyou.state_layout import INT8, WHOLE, layout_of


@functools.cache
def numbers(is_signed: bool) -> torch.Tensor:
    """What the codes stand for, as a block that holds each of them once says."""
    layout = layout_of(WHOLE, 2, INT8)
    block, state = aligned_tensor(layout.num_bytes(BLOCK)), aligned_tensor(layout.whole.num_bytes(BLOCK))
    at, which = layout.offsets(BLOCK), 0 if is_signed else 1
    block.zero_()
    block[at[f"moment{which}"] :][:BLOCK] = torch.arange(BLOCK, dtype=torch.uint8)
    block[at[f"scales{which}"] :][:4].view(torch.float32)[0] = 1.0
    assert decode(layout, BLOCK, block, state)
    return state[layout.whole.offsets(BLOCK)[f"moment{which}"] :].view(torch.float32)[:BLOCK].clone()


def published_numbers(is_signed: bool) -> torch.Tensor:
    """The dynamic map of arXiv 2110.02861: of every decade the middles of a linear grid, zero and one. Last bits depend
    on how torch was compiled.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        grid = torch.linspace(0.1, 1, (1 if is_signed else 2) * 2**decade + 1)
        middles = (10 ** (decade - 6) * (grid[:-1] + grid[1:]) / 2.0).tolist()
        found += middles + ([-middle for middle in middles] if is_signed else [])
    return torch.tensor(sorted(found))


def codes(values: torch.Tensor, is_signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of whole blocks, ``(blocks, 256)``, and their scales."""
    table = numbers(is_signed)
    scales = values.abs().amax(-1).clip(1e-12)
    quotients = values / scales.unsqueeze(-1)
    below = torch.zeros_like(quotients, dtype=torch.long)
    for half in (128, 64, 32, 16, 8, 4, 2, 1):
        below = torch.where(quotients >= table[below + half], below + half, below)
    above = (below + 1).clip(max=255)
    is_nearer = quotients - table[below] >= (table[above] - table[below]) * 0.5
    return torch.where(is_nearer, above, below), scales


def rounded(values: torch.Tensor, moments: str, is_signed: bool, param_begins: Sequence[int] = ()) -> torch.Tensor:
    """A moment of a chunk, fp32, 1-D, as a step leaves it; in which parameters begin at these elements."""
    if moments == "fp32":
        return values
    if moments == "bf16":
        return values.bfloat16().float()
    bounds = sorted({0, *range(0, len(values), BLOCK), *param_begins, len(values)})
    rows = [values[begin:end] for begin, end in itertools.pairwise(bounds)]
    found, scales = codes(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), is_signed)
    meant = numbers(is_signed)[found] * scales.unsqueeze(-1)
    return torch.cat([row[: len(own)] for row, own in zip(meant, rows, strict=True)])
