# SPDX-License-Identifier: Apache-2.0
"""Saved-tensor hooks that stay open after the model's forward, for the loss that the script computes from its outputs.

PyTorch keeps hooks on a stack of the thread, and who closes hooks takes off whatever lies on top. Hooks that outlive
the forward are taken off by nobody's bracket, so they look before they close: what is not theirs is left there, and
closing is tried again later.

The transforms of ``torch.func`` refuse to run while there are any. They say so through one name of
``torch.autograd.graph``, which they look up at every call; while hooks of this package are open, or those of a region
that it computes again, that name takes them off the stack for as long as the transform runs. What is saved inside stays
where it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["OpenHooks", "aside_for_transforms", "computes_its_loss"]


_ASK = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _top() -> tuple[Any, Any] | None:
    """Hooks that apply now, in this thread; None without any, or where PyTorch cannot tell."""
    found: tuple[Any, Any] | None = None if _ASK is None else _ASK(False)
    return found


def computes_its_loss(output: Any) -> bool:
    """Whether a model's output holds a scalar with a history: the loss. Otherwise the script computes one."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.requires_grad for leaf in tree_leaves(output)
    )


class _StepsAside:
    """Stands for ``torch.autograd.graph.disable_saved_tensors_hooks`` while anybody's hooks are to step aside: those on
    top of the thread's stack, the last ones first, as long as a transform runs. One for all threads.
    """

    def __init__(self) -> None:
        self._packs: list[Any] = []  # by which hooks are known
        self._disable: Any = None  # what it stands for
        self._lock = threading.Lock()
        self._instead = self._stepping_aside  # each time it is asked for this would be another object

    def begin(self, pack: Any) -> None:
        with self._lock:
            self._packs.append(pack)
            if self._disable is None:
                self._disable = torch.autograd.graph.disable_saved_tensors_hooks
                torch.autograd.graph.disable_saved_tensors_hooks = self._instead

    def end(self, pack: Any) -> None:
        """Of a pack that began."""
        with self._lock:
            del self._packs[next(place for place, each in enumerate(self._packs) if each is pack)]
            is_last = torch.autograd.graph.disable_saved_tensors_hooks is self._instead  # else this passes on
            if is_last and not self._packs:
                torch.autograd.graph.disable_saved_tensors_hooks, self._disable = self._disable, None

    @contextmanager
    def _stepping_aside(self, error_message: str) -> Iterator[None]:
        hooks: list[tuple[Any, Any]] = []
        with self._lock:  # another thread may be the last that ends
            disable = self._disable or torch.autograd.graph.disable_saved_tensors_hooks
            packs = list(self._packs)
        while (top := _top()) is not None and any(top[0] is pack for pack in packs):
            torch._C._autograd._pop_saved_tensors_default_hooks()
            hooks.append(top)
        try:
            with disable(error_message):
                yield
        finally:
            for each in reversed(hooks):
                torch._C._autograd._push_saved_tensors_default_hooks(*each)


_steps_aside = _StepsAside()


@contextmanager
def aside_for_transforms() -> Iterator[None]:
    """Inside, the hooks that lie on top now do not keep transforms from running."""
    top = _top()
    if top is None:
        yield
        return
    _steps_aside.begin(top[0])
    try:
        yield
    finally:
        _steps_aside.end(top[0])


_over: list[OpenHooks] = []
"""Closed below others, which are still open."""


class OpenHooks:
    """``pack`` and ``unpack`` applied from :meth:`open` to :meth:`close`, both idempotent. A transform of
    ``torch.func`` that has begun allows no hooks, so inside of one they do not open.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._pair = (pack, unpack)
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._is_lowest = False

    def open(self) -> None:
        if self in _over:
            _over.remove(self)
        if self._hooks is None and torch._C._autograd._saved_tensors_hooks_is_enabled():
            self._is_lowest = _top() is None
            self._hooks = torch.autograd.graph.saved_tensors_hooks(*self._pair)
            self._hooks.__enter__()
            _steps_aside.begin(self._pair[0])

    def _is_on_top(self) -> bool:
        top = _top()
        return top is not None and top[0] is self._pair[0]

    @property
    def may_stay(self) -> bool:
        """Whether nobody opened hooks before these, who would close them before these are."""
        return self._is_lowest and self._is_on_top()

    def close(self) -> None:
        """At the end of the bracket that :meth:`open` began: these are on top, or have been open below the script's
        own since an earlier one, or lie below another engine's over the same model, which end after these.
        """
        if _ASK is not None and not self._is_on_top():
            if self._hooks is not None and self not in _over:
                _over.append(self)
            return
        if self in _over:
            _over.remove(self)
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
            _steps_aside.end(self._pair[0])
            below = next((each for each in tuple(_over) if each._is_on_top()), None)
            if below is not None:
                below.close()

    def close_if_on_top(self) -> None:
        """At any other time."""
        if self._is_on_top():
            self.close()
