# SPDX-License-Identifier: Apache-2.0
"""Equal to the bit: -0 is not 0."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["same"]


def same(one: Any, other: Any) -> bool:
    """To the bit. Every NaN is one: torch's vectors and its loops over what is left of them round to different ones, so
    which it is depends on where in a buffer a value lies."""
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        is_none = torch.isnan(one)
        values = [value.masked_fill(is_none, 0).reshape(-1).view(torch.uint8) for value in (one, other)]
        return torch.equal(is_none, torch.isnan(other)) and torch.equal(*values)
    return repr(one) == repr(other)
