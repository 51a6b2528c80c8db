# SPDX-License-Identifier: Apache-2.0
"""Parameters among the tensors that autograd saves: recognised, remembered by name, rebuilt when needed.

A saved parameter must not become an activation: moving it would copy the model, and keeping it would keep a
gathered parameter on the device long after its owner let it go. What is saved instead is which parameter it was
and which view of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ds_fuyou.activations.views import ViewSpec

__all__ = ["ParameterIndex", "ResidentParameters", "SavedParameter", "as_saved_parameter", "cast_source"]


@dataclass(frozen=True)
class SavedParameter:
    """A view of a parameter; ``view.offset_bytes`` counts from the parameter's first byte.

    ``cast`` is the dtype that autocast gave it, None for the parameter itself. ``version`` is the parameter's version
    counter when it was saved, None where the owner replaces its memory and the counter says nothing.
    """

    param: Any
    view: ViewSpec
    cast: torch.dtype | None = None
    version: int | None = None


class ParameterIndex(Protocol):
    """Knows the model's parameters by the memory they have now."""

    def find(self, tensor: torch.Tensor) -> SavedParameter | None:
        """The parameter that the tensor is, or is a view of; None if it is none."""

    def values(self, saved: SavedParameter) -> torch.Tensor:
        """The parameter's values as one contiguous tensor on the device, for use in backward."""


def as_saved_parameter(
    tensor: torch.Tensor, param: Any, values: torch.Tensor, version: int | None = None
) -> SavedParameter | None:
    """``tensor`` as a view of ``param``, whose present memory is ``values``; None if it reaches outside of it."""
    view = ViewSpec.of(tensor)
    begin = values.storage_offset() * values.element_size()
    span = view.bytes()
    if tensor.dtype != values.dtype or span.begin < begin or span.end > begin + values.nbytes:
        return None
    relative = ViewSpec(view.dtype, view.size, view.stride, view.offset_bytes - begin)
    return SavedParameter(param, relative, None, version)


def cast_source(tensor: torch.Tensor) -> torch.nn.Parameter | None:
    """The trainable parameter of which the tensor is (a view of) autocast's copy in another dtype. None for a copy that
    was changed since, or lies in memory in another order: the parameter cannot give it again.
    """
    base = tensor if tensor._base is None else tensor._base
    node = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or base._version > 0 or not base.is_contiguous():
        return None
    source = getattr(node.next_functions[0][0], "variable", None)
    return source if isinstance(source, torch.nn.Parameter) else None


class ResidentParameters:
    """Parameters and buffers that stay in one place: a model without ZeRO."""

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        self._by_storage = {param.untyped_storage()._cdata: param for param in params}

    def find(self, tensor: torch.Tensor) -> SavedParameter | None:
        param = self._by_storage.get(tensor.untyped_storage()._cdata)
        if param is not None:
            return as_saved_parameter(tensor, param, param.data, param._version)
        source = cast_source(tensor)
        if source is None or not source.is_contiguous() or source.untyped_storage()._cdata not in self._by_storage:
            return None
        return SavedParameter(source, ViewSpec.of(tensor), tensor.dtype, source._version)

    def values(self, saved: SavedParameter) -> torch.Tensor:
        """Raises RuntimeError if the parameter was changed since, as autograd does without hooks."""
        if saved.version is not None and saved.param._version != saved.version:
            raise RuntimeError(
                f"a parameter of shape {tuple(saved.param.shape)} needed for gradient computation was modified by an "
                f"in-place operation: it is at version {saved.param._version}, expected {saved.version}"
            )
        values: torch.Tensor = saved.param.data
        return values
