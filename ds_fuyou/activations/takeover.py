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
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.utils.checkpoint

from ds_fuyou.log import log_once

__all__ = ["CheckpointTakeover"]

_GENERATOR = "_checkpoint_without_reentrant_generator"
_FUNCTION = "CheckpointFunction"


class _DirectFunction:
    """Stands for the autograd function of a re-entrant checkpoint."""

    def __init__(self, owner: CheckpointTakeover, original: Any) -> None:
        self._owner, self._original = owner, original

    def apply(self, function: Callable[..., Any], preserve_rng_state: Any, *args: Any) -> Any:
        if not self._owner.is_mine():
            return self._original.apply(function, preserve_rng_state, *args)
        self._owner.told()
        return function(*args)


class CheckpointTakeover:
    """:meth:`begin` and :meth:`end` around a swapped forward; both in the same thread. Idempotent.

    ``instead`` completes the one line of the log: what happens to the regions.
    """

    def __init__(self, instead: str) -> None:
        self._instead = instead
        self._module: ModuleType = torch.utils.checkpoint
        self._originals: dict[str, Any] = {}
        self._thread = 0
        self._suspended = False

    def begin(self) -> None:
        if self._originals:
            return
        self._thread = threading.get_ident()
        self._originals = {name: getattr(self._module, name) for name in (_FUNCTION, _GENERATOR)}
        setattr(self._module, _FUNCTION, _DirectFunction(self, self._originals[_FUNCTION]))
        setattr(self._module, _GENERATOR, self._direct_generator)

    def end(self) -> None:
        originals, self._originals = self._originals, {}
        for name, original in originals.items():
            setattr(self._module, name, original)

    def is_mine(self) -> bool:
        """Whether a checkpoint that begins now is taken over."""
        return threading.get_ident() == self._thread and not self._suspended

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

    def _direct_generator(self, *args: Any, **kwargs: Any) -> Generator[None, None, None]:
        if not self.is_mine():
            yield from self._originals[_GENERATOR](*args, **kwargs)
            return
        self.told()
        yield
