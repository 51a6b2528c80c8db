# SPDX-License-Identifier: Apache-2.0
"""Which call of which operator: how a block's forward and its recomputation agree about outputs.

Counted are calls with an input that requires a gradient and new memory as output. What a block does besides (building
masks or rotary tables, casts, views, fetching parameters) may happen in forward and not in the recomputation, or the
other way round, and must not shift the count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["TORCHS", "CallCounter", "OperatorCall", "is_foreign", "is_view", "makes_values", "written_tensors"]

_CHEAP = frozenset(
    {"aten._to_copy.default", "aten.empty_like.default", "aten.clone.default", "aten._unsafe_view.default"}
)
_PARTLY_FILLED = ("empty", "_grouped_mm", "_flash_attention_forward", "_efficient_attention_forward")
TORCHS = frozenset({"aten", "prim", "prims"})
"""Namespaces of PyTorch's own operators."""


class OperatorCall(NamedTuple):
    """``operator`` as ``str`` of the overload, and which of its counted calls in one forward of a block, from 0."""

    operator: str
    occurrence: int


@dataclass(frozen=True)
class _Kind:
    """What can be said of an operator without its arguments."""

    name: str
    counts: bool
    random: bool
    writes: bool
    is_view: bool
    makes_values: bool


@cache
def _kind(func: Any) -> _Kind:
    if not isinstance(func, torch._ops.OpOverload):
        return _Kind(str(func), counts=False, random=False, writes=False, is_view=False, makes_values=False)
    schema = func._schema
    makes_tensors = any("Tensor" in str(item.type) for item in schema.returns)
    aliases = any(item.alias_info is not None for item in schema.returns)
    counts = makes_tensors and not aliases and not schema.is_mutable and str(func) not in _CHEAP
    view = (aliases and not schema.is_mutable) or str(func) == "aten._unsafe_view.default"
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    makes_values = not is_foreign(func) and not any(part in schema.name for part in _PARTLY_FILLED)
    return _Kind(str(func), counts, is_random, schema.is_mutable, view, makes_values)


class CallCounter:
    """Counts the calls of one forward of a block, or of one recomputation."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def restart(self) -> None:
        self._counts.clear()

    def counts(self) -> dict[str, int]:
        """Calls of each operator so far."""
        return dict(self._counts)

    def place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperatorCall | None:
        """Of the call that a dispatch mode has been handed; None where it does not count.

        Operators that draw random numbers never count: each must run again in the recomputation, or the others would
        draw different ones.
        """
        kind = _kind(func)
        if not kind.counts or (kind.random and _draws(func, args, kwargs)):
            return None
        if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))):
            return None
        occurrence = self._counts[kind.name]
        self._counts[kind.name] += 1
        return OperatorCall(kind.name, occurrence)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a random operator draws: attention with a dropout probability of 0 does not, all others do."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            return value != 0
    return True


def makes_values(func: Any) -> bool:
    """Whether the operator fills what it makes. Other libraries' need not say it."""
    return _kind(func).makes_values


def is_foreign(func: Any) -> bool:
    """Whether the operator is another library's, which need not say that it draws random numbers."""
    return not isinstance(func, torch._ops.OpOverload) or func.namespace not in TORCHS


def is_view(func: Any) -> bool:
    """Whether the operator neither reads nor writes elements."""
    return _kind(func).is_view


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Arguments that the call changes in place."""
    if not _kind(func).writes:
        return []
    written: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]
