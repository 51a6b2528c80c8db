# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing that the script or a library switched on, taken over while a forward is swapped.

Such a region would drop what it saves and compute it again in backward. When its activations are swapped, that is
work for nothing: inside of a swapped forward the region's function is called as if there were no checkpoint around it.
The result is that of the model without checkpointing, to the bit. (A non-re-entrant region has the same result; a
re-entrant one may differ from it in rounding: what several operators of the region contribute to the gradient of its
input, or under autocast of a weight, is summed in another order.)

``torch.utils.checkpoint.checkpoint`` looks up what does its work by name in its module at every call, so replacing two
names there reaches every caller, however it imported the function. They are replaced while a swapped forward runs, for
the thread that runs it, and are torch's own at any other time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch.utils.checkpoint

from ds_fuyou.log import log_once

__all__ = ["TORCH_POINTS", "CheckpointTakeover", "TakeoverPoint"]


@dataclass(frozen=True)
class TakeoverPoint:
    """A name that a checkpoint function looks up in its module at every call, and what to call a region by instead.

    ``replace`` gets the takeover and the original.
    """

    module: ModuleType
    name: str
    replace: Callable[[CheckpointTakeover, Any], Any]


class _DirectFunction:
    """Stands for the autograd function of a re-entrant checkpoint."""

    def __init__(self, owner: CheckpointTakeover, original: Any) -> None:
        self._owner, self._original = owner, original

    def apply(self, function: Callable[..., Any], preserve_rng_state: Any, *args: Any) -> Any:
        if not self._owner.is_mine():
            return self._original.apply(function, preserve_rng_state, *args)
        self._owner.told()
        return function(*args)


def _direct_generator(owner: CheckpointTakeover, original: Any) -> Callable[..., Generator[None, None, None]]:
    """Stands for what brackets the region of a non-re-entrant checkpoint."""

    def generator(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
        if not owner.is_mine():
            yield from original(*args, **kwargs)
            return
        owner.told()
        yield

    return generator


_GENERATOR = "_checkpoint_without_reentrant_generator"
_SINCE_2_14 = f"{_GENERATOR}_impl"  # the other name is for others' calls since then

TORCH_POINTS = (
    TakeoverPoint(torch.utils.checkpoint, "CheckpointFunction", _DirectFunction),
    TakeoverPoint(
        torch.utils.checkpoint,
        _SINCE_2_14 if hasattr(torch.utils.checkpoint, _SINCE_2_14) else _GENERATOR,
        _direct_generator,
    ),
)


class CheckpointTakeover:
    """:meth:`begin` and :meth:`end` around a swapped forward; both in the same thread. Idempotent.

    ``instead`` completes the one line of the log: what happens to the regions.
    """

    def __init__(self, instead: str, points: Sequence[TakeoverPoint] = TORCH_POINTS) -> None:
        self._instead = instead
        self._points = tuple(points)
        self._originals: list[tuple[TakeoverPoint, Any]] = []
        self._thread = 0
        self._suspended = False

    def begin(self) -> None:
        if self._originals:
            return
        self._thread = threading.get_ident()
        for point in self._points:
            original = getattr(point.module, point.name)
            self._originals.append((point, original))
            setattr(point.module, point.name, point.replace(self, original))

    def end(self) -> None:
        originals, self._originals = self._originals, []
        for point, original in originals:
            setattr(point.module, point.name, original)

    def is_mine(self) -> bool:
        """Whether a checkpoint that begins now is taken over. Two that end in another order than they began in, in two
        threads, leave one's names in torch's module for good: then it is asked when it has nothing to say any more.
        """
        return bool(self._originals) and threading.get_ident() == self._thread and not self._suspended

    @contextmanager
    def region(self) -> Iterator[None]:
        """Checkpoints that begin inside, in this thread, are taken over, in forward and in backward alike."""
        begun, thread, suspended = bool(self._originals), self._thread, self._suspended
        self.begin()
        self._thread, self._suspended = threading.get_ident(), False
        try:
            yield
        finally:
            self._thread, self._suspended = thread, suspended
            if not begun:
                self.end()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Checkpoints that begin inside are left alone."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def told(self) -> None:
        log_once(
            logging.INFO,
            f"gradient checkpointing is switched on in the model; ds_fuyou takes these regions over: {self._instead}",
        )
