# SPDX-License-Identifier: Apache-2.0
"""Saved-tensor hooks that stay open after the model's forward, for the loss that the script computes from its outputs.

PyTorch keeps hooks on a stack of the thread, and who closes hooks takes off whatever lies on top. Hooks that outlive
the forward are taken off by nobody's bracket, so they look before they close: what is not theirs is left there, and
closing is tried again later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["OpenHooks", "computes_its_loss"]


def _top() -> tuple[Any, Any] | None:
    """Hooks that apply now, in this thread; None without any, or where PyTorch cannot tell."""
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    found: tuple[Any, Any] | None = None if ask is None else ask(False)
    return found


def computes_its_loss(output: Any) -> bool:
    """Whether a model's output holds a scalar with a history: the loss. Otherwise the script computes one."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.requires_grad for leaf in tree_leaves(output)
    )


class OpenHooks:
    """``pack`` and ``unpack`` applied from :meth:`open` to :meth:`close`, both idempotent."""

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._pair = (pack, unpack)
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._is_lowest = False

    def open(self) -> None:
        if self._hooks is None:
            self._is_lowest = _top() is None
            self._hooks = torch.autograd.graph.saved_tensors_hooks(*self._pair)
            self._hooks.__enter__()

    @property
    def may_stay(self) -> bool:
        """Whether nobody opened hooks before these, who would close them before these are."""
        top = _top()
        return self._is_lowest and top is not None and top[0] is self._pair[0]

    def close(self) -> None:
        """At the end of the bracket that :meth:`open` began: these are on top."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()

    def close_if_on_top(self) -> None:
        """At any other time."""
        top = _top()
        if top is not None and top[0] is self._pair[0]:
            self.close()
