# SPDX-License-Identifier: Apache-2.0
"""Whether a block that is computed again makes the values that it made in forward.

A recomputation sees a block's arguments, buffers and random generators as they were. What else a block uses, an object
that counts its calls, say, may be another by then, and gradients would be of another function, without a word: here as
under any gradient checkpointing, but a script need not have asked for that (mode "auto"). So in some forwards of every
block, the first and ever fewer later ones, what operators make is summed, as the words that it is in memory, and
compared with what they make in the recomputation. A difference is told, not refused: kernels that add in no fixed order
differ in rounding, and train all the same.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_fuyou.activations.calls import CallCounter, OperatorCall, makes_values
from ds_fuyou.activations.unseen import sum_of_words
from ds_fuyou.log import log_once

__all__ = ["Repeats", "WatchingMode", "is_looked_at"]

_MODES_COMPILE = hasattr(TorchDispatchMode, "ignore_compile_internals")  # else dynamo gives up under any, for good

_APART = 16


def is_looked_at(number: int) -> bool:
    """Whether a block's forward is one of those that are compared: 1, 16, 256 and so on. None where a script could
    compile nothing any more.
    """
    if not _MODES_COMPILE:
        return False
    while number > 1 and number % _APART == 0:
        number //= _APART
    return number == 1


class Repeats:
    """Of one forward of a block of a class called ``what``: told of what operators make there, then of what they make
    when it is computed again.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.forward_is_over = self.is_recomputed_within = False
        """One runs while the forward does, of a part: nothing is compared then."""
        self._sums: dict[OperatorCall, torch.Tensor] = {}
        self._differ: list[tuple[OperatorCall, torch.Tensor]] = []

    def made(self, func: Any, call: OperatorCall, outputs: Any) -> None:
        """In forward, just now."""
        values = _first(outputs)
        if makes_values(func) and _is_plain(values):
            self._sums[call] = sum_of_words(values)

    def made_again(self, call: OperatorCall, outputs: Any) -> None:
        """In a recomputation, just now."""
        before, values = self._sums.get(call), _first(outputs)
        if before is not None and _is_plain(values) and values.device == before.device:
            self._differ.append((call, sum_of_words(values) != before))

    def tell(self) -> None:
        """At the end of a recomputation. Waits for a device."""
        differ, self._differ = self._differ, []
        flags: dict[torch.device, list[torch.Tensor]] = {}
        for _, flag in differ:
            flags.setdefault(flag.device, []).append(flag)
        if not any(bool(torch.stack(of_device).any()) for of_device in flags.values()):
            return
        call = next(call for call, flag in differ if bool(flag))
        log_once(
            logging.WARNING,
            f"{self._what}: computed again in backward, {call.operator} (call {call.occurrence}) has made other values "
            f"than in forward, so gradients are not those of that forward. Either its kernel adds in no fixed order, "
            f"which is rounding, or leaves parts unwritten that nobody reads, or the block uses what a recomputation "
            f'does not see (an object that changes with every call, say; docs/activations.md, "Not seen"): then set '
            f"activations.mode to swap",
        )

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the ``context_fn`` of a checkpoint that computes all again."""
        return _Watch(self, is_again=False), _Watch(self, is_again=True)


class WatchingMode(TorchDispatchMode):
    """Sees the operators of a block."""

    supports_higher_order_operators = True
    """``torch.cond`` and its like run as they are, and what is inside of them is not seen."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: what the script compiles itself is compiled, as ever; without, dynamo gives up on it for good."""
        return True


class _Watch(WatchingMode):
    def __init__(self, repeats: Repeats, *, is_again: bool) -> None:
        super().__init__()
        self._repeats, self._is_again = repeats, is_again
        self._calls = CallCounter()

    def __enter__(self) -> Any:
        self._calls.restart()  # a region may be computed again several times
        if self._is_again:
            self._repeats.is_recomputed_within = not self._repeats.forward_is_over
        return super().__enter__()

    def __exit__(self, kind: Any, *exc: Any) -> None:
        super().__exit__(kind, *exc)
        if not self._is_again:
            self._repeats.forward_is_over = True
        elif self._repeats.is_recomputed_within:
            self._repeats.is_recomputed_within = False
        elif kind is None:
            self._repeats.tell()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if self._repeats.is_recomputed_within:
            return func(*args, **named)
        call = self._calls.place(func, args, named)
        outputs = func(*args, **named)
        if call is not None and self._is_again:
            self._repeats.made_again(call, outputs)
        elif call is not None:
            self._repeats.made(func, call, outputs)
        return outputs


def _first(outputs: Any) -> Any:
    """Those behind it are seeds, or partly padding."""
    return outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs


def _is_plain(values: Any) -> bool:
    """Whether it is floating-point numbers in memory of their own, without gaps."""
    if type(values) is not torch.Tensor or values.layout != torch.strided or values.device.type == "meta":
        return False
    is_plain = values.is_floating_point() and not (values._is_zerotensor() or values.is_nested)
    return is_plain and values.untyped_storage().nbytes() == values.nbytes
