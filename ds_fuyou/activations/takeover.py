# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing that the script or a library switched on, taken over while a forward is swapped.

Such a region would drop what it saves and compute it again in backward. When its activations are swapped, that is
work for nothing: inside of a swapped forward the region's function is called as if there were no checkpoint around it.
The result is that of the model without checkpointing, to the bit. (A non-re-entrant region has the same result; a
re-entrant one may differ from it in rounding: what several operators of the region contribute to the gradient of its
input, or under autocast of a weight, is summed in another order.)

``torch.utils.checkpoint.checkpoint`` looks up what does its work by name in its module at every call, so replacing two
names there reaches every caller, however it imported the function. They are replaced while a swapped forward runs, for
the thread that runs it, and are torch's own at any other time. So is an operator that has its noise saved before it is
drawn, ``torch.rrelu``: of PyTorch's own none else that saves what it changes needs it in backward. Forwards of several
engines over one model, or in several threads, begin and end in any order: who stands for a name is one for all of them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from ds_fuyou.activations.records import HeldBytes
from ds_fuyou.activations.swapper import KeptTensor
from ds_fuyou.log import log_once

__all__ = ["TORCH_POINTS", "CheckpointTakeover", "TakeoverPoint", "directly"]


class TakeoverPoint:
    """A name that is looked up in its module at every call, as a checkpoint function is, and what is called instead.

    ``replace`` gets the point and the original, for which it stands while anybody takes checkpoints over.
    """

    def __init__(self, module: ModuleType, name: str, replace: Callable[[TakeoverPoint, Any], Any]) -> None:
        self.module, self.name = module, name
        self._replace = replace
        self._owners: list[CheckpointTakeover] = []
        self._original: Any = None
        self._instead: Any = None
        self._lock = threading.Lock()

    def begin(self, owner: CheckpointTakeover) -> None:
        with self._lock:
            if not self._owners and getattr(self.module, self.name) is not self._instead:
                self._original = getattr(self.module, self.name)
                self._instead = self._replace(self, self._original)
                setattr(self.module, self.name, self._instead)
            self._owners.append(owner)

    def end(self, owner: CheckpointTakeover) -> None:
        """Where somebody has replaced the name meanwhile, theirs stays; ours passes on. Also of an owner of which an
        interrupt cut begin or end short.
        """
        with self._lock:
            self._owners[:] = [each for each in self._owners if each is not owner]
            if not self._owners and getattr(self.module, self.name) is self._instead:
                setattr(self.module, self.name, self._original)
                self._original = self._instead = None

    def takes_over(self, function: Any) -> bool:
        """Whether a checkpoint of ``function`` that begins now, in this thread, is taken over; says so once."""
        owner = next((owner for owner in tuple(self._owners) if owner.is_mine(function)), None)
        if owner is not None:
            owner.told()
        return owner is not None


class _DirectFunction:
    """Stands for the autograd function of a re-entrant checkpoint."""

    def __init__(self, point: TakeoverPoint, original: Any) -> None:
        self._point, self._original = point, original

    def apply(self, function: Callable[..., Any], preserve_rng_state: Any, *args: Any) -> Any:
        if not self._point.takes_over(function):
            return self._original.apply(function, preserve_rng_state, *args)
        torch.utils.checkpoint.check_backward_validity(args)
        return directly(function, args)


def directly(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a re-entrant region returns, without one: where no tensor that it is given needs a gradient, nothing inside
    gets one, parameters neither.
    """
    is_trained = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with nullcontext() if is_trained else torch.no_grad():
        return function(*args)


def _modules_of(function: Any, depth: int = 3) -> list[nn.Module]:
    """Modules that a region's function is known to call: itself, whose method it is, or what it was made with, which
    may be a function as well.
    """
    if isinstance(function, nn.Module):
        return [function]
    if depth == 0 or not callable(function):
        return []
    if isinstance(function, functools.partial):
        within = [function.func, *function.args, *function.keywords.values()]
    else:
        within = [getattr(function, "__self__", None)]
        for cell in getattr(function, "__closure__", None) or ():
            with suppress(ValueError):  # not filled yet
                within.append(cell.cell_contents)
    return [module for each in within for module in _modules_of(each, depth - 1)]


def _direct_generator(point: TakeoverPoint, original: Any) -> Callable[..., Generator[None, None, None]]:
    """Stands for what brackets the region of a non-re-entrant checkpoint. A context that the script runs its forward in
    is entered; PyTorch's own, which selects outputs to save, is not.
    """
    signature = inspect.signature(original)

    def generator(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
        given = signature.bind_partial(*args, **kwargs).arguments
        if not point.takes_over(next(iter(given.values()), None)):
            yield from original(*args, **kwargs)
            return
        contexts = given.get("context_fn")
        context = contexts()[0] if contexts is not None and torch.is_grad_enabled() else nullcontext()
        with nullcontext() if isinstance(context, _SELECTS) else context:
            yield

    return generator


_SELECTS = getattr(torch.utils.checkpoint, "_CachingTorchDispatchMode", ())


_GENERATOR = "_checkpoint_without_reentrant_generator"
_SINCE_2_14 = f"{_GENERATOR}_impl"  # the other name is for others' calls since then


def _keeping(point: TakeoverPoint, original: Any) -> Callable[..., Any]:
    """Stands for an operator that has autograd save memory which it fills afterwards: what is moved when it is saved
    would be what stood there before. It stays.
    """

    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(_kept, KeptTensor.value):
            return original(*args, **kwargs)

    return instead


def _kept(tensor: torch.Tensor) -> KeptTensor:
    return KeptTensor(tensor, _UNCOUNTED, 0)


_UNCOUNTED = HeldBytes()


TORCH_POINTS = (
    TakeoverPoint(torch, "rrelu", _keeping),
    TakeoverPoint(torch, "rrelu_", _keeping),
    TakeoverPoint(torch.utils.checkpoint, "CheckpointFunction", _DirectFunction),
    TakeoverPoint(
        torch.utils.checkpoint,
        _SINCE_2_14 if hasattr(torch.utils.checkpoint, _SINCE_2_14) else _GENERATOR,
        _direct_generator,
    ),
)


class _Here(threading.local):
    """Of each thread: whether checkpoints that begin now are left alone, whoever else would take them over."""

    leaves_alone = False


_here = _Here()


class CheckpointTakeover:
    """:meth:`begin` and :meth:`end` around a swapped forward; both in the same thread. Idempotent.

    ``instead`` completes the one line of the log: what happens to the regions. ``only``: where nothing leaves the
    device, a region that has none of these blocks in it is left alone, or what it saves would stay.
    """

    def __init__(
        self, instead: str, points: Sequence[TakeoverPoint] = TORCH_POINTS, only: Collection[nn.Module] | None = None
    ) -> None:
        self._instead = instead
        self._points = tuple(points)
        self._only = None if only is None else {id(block) for block in only}
        self._has_begun = False
        self._thread = 0
        self._depth = 0  # of regions of ours, in which nobody else's is needed

    def begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun, self._thread = True, threading.get_ident()
        for point in self._points:
            point.begin(self)

    def end(self) -> None:
        if not self._has_begun:
            return
        for point in self._points:
            point.end(self)
        self._has_begun = False

    def is_mine(self, function: Any) -> bool:
        """Whether a checkpoint of ``function`` that begins now is taken over."""
        if not self._has_begun or threading.get_ident() != self._thread or _here.leaves_alone:
            return False
        if self._only is None or self._depth > 0:
            return True
        found = _modules_of(function)
        return not found or any(id(module) in self._only for each in found for module in each.modules())

    @contextmanager
    def region(self) -> Iterator[None]:
        """Checkpoints that begin inside, in this thread, are taken over, in forward and in backward alike."""
        begun, thread, leaves_alone = self._has_begun, self._thread, _here.leaves_alone
        self.begin()
        self._thread, _here.leaves_alone = threading.get_ident(), False
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._thread, _here.leaves_alone = thread, leaves_alone
            if not begun:
                self.end()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Checkpoints that begin inside, in this thread, are left alone."""
        before, _here.leaves_alone = _here.leaves_alone, True
        try:
            yield
        finally:
            _here.leaves_alone = before

    def told(self) -> None:
        log_once(
            logging.INFO,
            f"gradient checkpointing is switched on in the model; ds_fuyou takes these regions over: {self._instead}",
        )
