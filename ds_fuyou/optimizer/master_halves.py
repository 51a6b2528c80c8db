# SPDX-License-Identifier: Apache-2.0
"""P32 of a split block put together and taken apart, outside of updates. See :mod:`ds_fuyou.state_layout`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.ops.core import load_core
from ds_fuyou.state_layout import SPLIT, WHOLE, StateLayout

__all__ = ["halves_bytes", "join_halves", "make_halves", "native"]

_HALVES, _P32 = StateLayout(SPLIT, 0), StateLayout(WHOLE, 0)


@functools.lru_cache(maxsize=4096)
def native(layout: StateLayout, numel: int) -> Any:
    """Of a block of so many elements, as the core takes it."""
    return load_core().BlockLayout(**layout.native(numel))


def halves_bytes(numel: int) -> int:
    """What lies before a split block's moments: upper halves, joints, lower halves."""
    return _HALVES.num_bytes(numel)


def join_halves(numel: int, halves: torch.Tensor, state: torch.Tensor) -> bool:
    """P32, the first field of the whole block ``state``, from bytes ``halves`` of a split one, behind which P16 of the
    same slot stands if there is any on storage. False if that says nothing: it was not written so.
    """
    at = halves_bytes(numel)
    params = halves.data_ptr() + at if len(halves) > at else 0
    layouts = native(_HALVES, numel), native(_P32, numel)
    joined: bool = load_core().decode_block(
        layouts[0], halves.data_ptr(), params, layouts[1], state.data_ptr(), with_moments=False
    )
    return joined


def make_halves(numel: int, state: torch.Tensor, halves: torch.Tensor | None = None) -> torch.Tensor:
    """Bytes that :func:`join_halves` takes without P16, of P32 in the whole block ``state``."""
    made = aligned_tensor(halves_bytes(numel)) if halves is None else halves[: halves_bytes(numel)]
    load_core().encode_block(
        native(_P32, numel), state.data_ptr(), native(_HALVES, numel), made.data_ptr(), with_moments=False
    )
    return made
