# SPDX-License-Identifier: Apache-2.0
"""Parameters among the tensors that autograd saves: recognised, remembered by name, rebuilt when needed.

A saved parameter must not become an activation: moving it would copy the model, and keeping it would keep a
gathered parameter on the device long after its owner let it go. What is saved instead is which parameter it was
and which view of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ds_fuyou.activations.views import ViewSpec

__all__ = ["ParameterIndex", "SavedParameter", "as_saved_parameter", "cast_source"]


@dataclass(eq=False, slots=True)
class SavedParameter:
    """A view of a parameter; ``view.offset_bytes`` counts from the parameter's first byte.

    ``cast`` is the dtype that autocast gave it, None for the parameter itself.
    """

    param: Any
    view: ViewSpec
    cast: torch.dtype | None = None


class ParameterIndex(Protocol):
    """Knows the model's parameters by the memory they have now."""

    def find(self, tensor: torch.Tensor) -> SavedParameter | None:
        """The parameter that the tensor is, or is a view of; None if it is none."""

    def values(self, saved: SavedParameter) -> torch.Tensor:
        """The parameter's values as one contiguous tensor on the device, for use in backward."""


def as_saved_parameter(tensor: torch.Tensor, param: Any, values: torch.Tensor) -> SavedParameter | None:
    """``tensor`` as a view of ``param``, whose present memory is ``values``; None if it reaches outside of it."""
    if tensor.dtype != values.dtype:
        return None
    offset = tensor.storage_offset() - values.storage_offset()
    view = ViewSpec(tensor.dtype, tensor.size(), tensor.stride(), offset * tensor.dtype.itemsize)
    span = view.bytes()
    return None if span.begin < 0 or span.end > values.nbytes else SavedParameter(param, view)


def cast_source(tensor: torch.Tensor) -> torch.nn.Parameter | None:
    """The trainable parameter of which the tensor is (a view of) autocast's copy in another dtype. None for a copy that
    was changed since, or lies in memory in another order, and for a view that takes its bytes for another type's
    (complex numbers of pairs, say): the parameter cannot give it again.
    """
    base = tensor if tensor._base is None else tensor._base
    node = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or base._version > 0 or not base.is_contiguous():
        return None
    if tensor.dtype != base.dtype:
        return None
    source = getattr(node.next_functions[0][0], "variable", None)
    return source if isinstance(source, torch.nn.Parameter) else None
