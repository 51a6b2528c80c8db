# SPDX-License-Identifier: Apache-2.0
"""States in the layout of a slot made whole, and made of whole ones, outside of updates. See
:mod:`ds_fuyou.state_layout`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.ops.core import load_core
from ds_fuyou.state_layout import StateLayout

__all__ = ["decode", "encode", "native"]


@functools.lru_cache(maxsize=4096)
def native(layout: StateLayout, numel: int) -> Any:
    """Of a block of so many elements, as the core takes it."""
    core, values = load_core(), layout.native(numel)
    return core.BlockLayout(**{**values, "moment_type": getattr(core.MomentType, layout.moments)})


def decode(layout: StateLayout, numel: int, block: torch.Tensor, state: torch.Tensor) -> bool:
    """The whole block ``state``, or its first fields where ``layout`` has the master alone, from bytes ``block``,
    behind which P16 of the same slot stands if there is any on storage. False if that says nothing: it was not written
    so.
    """
    at = layout.num_bytes(numel)
    params = block.data_ptr() + at if len(block) > at else 0
    decoded: bool = load_core().decode_block(
        native(layout, numel), block.data_ptr(), params, native(layout.whole, numel), state.data_ptr()
    )
    return decoded


def encode(layout: StateLayout, numel: int, state: torch.Tensor, block: torch.Tensor | None = None) -> torch.Tensor:
    """Bytes, ``block`` if it is given, that :func:`decode` takes without P16, of the whole block ``state``."""
    made = aligned_tensor(layout.num_bytes(numel)) if block is None else block[: layout.num_bytes(numel)]
    load_core().encode_block(native(layout.whole, numel), state.data_ptr(), native(layout, numel), made.data_ptr())
    return made
