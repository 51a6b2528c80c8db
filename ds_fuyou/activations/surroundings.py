# SPDX-License-Identifier: Apache-2.0
"""What a block's forward found around it, so that its recomputation in backward finds the same, and leaves no trace.

Between the two the script may have evaluated (``model.eval()``), left a context, or run the block again; and the
forward itself may have changed what its modules hold: a counter, a memory of the last segment, a list of losses.
PyTorch's checkpoint restores autocast, the default device, and the default random generators of the host and of those
devices of which it sees a tensor among the arguments: it does not look into objects. Restored here:

- attributes of the block's modules, ``training`` among them, buffers, and which modules they have: see ``held.py``. Not
  what changes inside of other objects, nor large plain tensors (large buffers: see ``recompute.py``);
- which parameters are trained: some are frozen for one forward, as a discriminator's in the generator's step;
- hooks on forwards of the modules inside of the block: some are there for one forward of the model alone, as those by
  which PEFT hands task numbers to its layers;
- random numbers of Python, of NumPy, of the device, and of generators that are attributes, or in a container that is
  one, or arguments, if the forward drew any;
- the default dtype, and which kernels attention may use, in which order;
- that a parameter which is read, of another module, say, and is not gathered, is gathered then, as DeepSpeed does in
  forwards alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from ds_fuyou.activations.held import OF_STREAMS, Brought, Held, fill

__all__ = ["SOURCES", "RandomSource", "Surroundings", "are_same"]

_OF_DEEPSPEED = frozenset(
    {"applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn", "_original_parameters", "_external_params"}
)
_NOT_RESTORED = (frozenset(vars(nn.Module())) | _OF_DEEPSPEED | {"forward"}) - {"training", "_buffers", "_modules"}
"""DeepSpeed's hooks count calls in theirs, those of a recomputation as well."""
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_GATHERS_WHAT_IS_READ = "_in_forward"  # DeepSpeed's name, of the dictionary of a module's parameters


def _state_of(part: nn.Module) -> dict[str, Any]:
    """The attributes that are restored."""
    held = vars(part)
    return {name: held[name] for name in held.keys() - _NOT_RESTORED if not name.startswith("ds_")}


def _hooks_of(part: nn.Module) -> Iterator[dict[int, Any]]:
    held = vars(part)
    return (held[name] for name in _HOOKS if name in held)


class RandomSource(NamedTuple):
    """Random numbers, by the state of what draws them."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


SOURCES = (
    RandomSource(random.getstate, random.setstate),
    RandomSource(numpy.random.get_state, numpy.random.set_state),
)


def _source(value: Any) -> RandomSource | None:
    if isinstance(value, torch.Generator):
        return RandomSource(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return RandomSource(value.getstate, value.setstate)
    if isinstance(value, numpy.random.RandomState):
        return RandomSource(value.get_state, value.set_state)
    if isinstance(value, (numpy.random.Generator, numpy.random.BitGenerator)):
        bits: Any = getattr(value, "bit_generator", value)
        return RandomSource(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def are_same(one: Any, other: Any) -> bool:
    """Two states of a source, which hold the same at the same places."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return numpy.array_equal(one, other)
    try:
        return bool(one == other)  # by far the fastest, of Python's 625 numbers
    except ValueError:  # there are arrays inside
        values, others = (each.values() if isinstance(each, dict) else each for each in (one, other))
        return all(map(are_same, values, others))


_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def _flags() -> list[tuple[Callable[[Any], Any], Any]]:
    """How each is set, and what it is."""
    found: list[tuple[Callable[[Any], Any], Any]] = [(torch.set_default_dtype, torch.get_default_dtype())]
    for name in _KERNELS:
        ask = getattr(torch.backends.cuda, f"{name}_sdp_enabled", None)
        if ask is not None:
            found.append((getattr(torch.backends.cuda, f"enable_{name}_sdp"), ask()))
    ask, order = (getattr(torch._C, f"_{way}_sdp_priority_order", None) for way in ("get", "set"))
    if ask is not None and order is not None:
        found.append((order, ask()))
    return found


class Surroundings:
    """Taken when a forward of ``module`` with ``arguments`` begins. ``device``: where random numbers of a device with
    memory of its own come from.
    """

    def __init__(self, module: nn.Module, arguments: Iterable[Any], device: RandomSource | None = None) -> None:
        parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        self._parts, self._held = parts, Held(map(_state_of, parts))
        self._hooks = [(hooks, tuple(hooks.items())) for part in parts for hooks in _hooks_of(part)]
        params = {id(each): each for part in parts for each in part._parameters.values() if each is not None}
        self._trained = [(each, each.requires_grad) for each in params.values()]
        self._gathering = [
            part._parameters for part in parts if getattr(part._parameters, _GATHERS_WHAT_IS_READ, False)
        ]
        own = {id(value): _source(value) for value in chain(self._held.others, arguments)}
        sources = (*SOURCES, *(source for source in (device, *own.values()) if source is not None))
        self._random = [(source, source.read()) for source in sources]
        self._flags = _flags()

    def forward_ended(self) -> None:
        """Random numbers that it did not draw are nothing to restore: somebody else may be drawing them."""
        self._random = [(source, state) for source, state in self._random if not are_same(state, source.read())]

    @contextmanager
    def _has_hooks(self) -> Iterator[None]:
        """In the same dictionaries: handles know these. What is added or removed inside is, afterwards, too."""
        others = [(hooks, dict(then), now) for hooks, then in self._hooks if (now := tuple(hooks.items())) != then]
        for hooks, then, _ in others:
            fill(hooks, then)
        try:
            yield
        finally:
            for hooks, then, now in others:
                left = {key: hook for key, hook in now if key in hooks or key not in then}
                fill(hooks, left | {key: hook for key, hook in hooks.items() if key not in then})

    @contextmanager
    def _trains(self) -> Iterator[None]:
        """Gradients for the same parameters."""
        now = [(param, param.requires_grad) for param, _ in self._trained]
        for param, then in self._trained:
            if param.requires_grad is not then:
                param.requires_grad_(then)
        try:
            yield
        finally:
            for param, trains in now:
                if param.requires_grad is not trains:
                    param.requires_grad_(trains)

    @contextmanager
    def _gathers(self) -> Iterator[None]:
        others = [each for each in self._gathering if not getattr(each, _GATHERS_WHAT_IS_READ)]
        for parameters in others:
            setattr(parameters, _GATHERS_WHAT_IS_READ, True)
        try:
            yield
        finally:
            for parameters in others:
                setattr(parameters, _GATHERS_WHAT_IS_READ, False)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, everything is as the forward found it; afterwards as it is now."""
        now = [_state_of(part) for part in self._parts]
        states = [(source, source.read()) for source, _ in self._random]
        flags, then = _flags(), Brought(self._held, now)
        try:
            for part, attributes, there in zip(self._parts, then.attributes(), now, strict=True):
                streams = {name: value for name, value in there.items() if isinstance(value, OF_STREAMS)}
                _set(part, attributes | streams)
            for source, state in self._random:
                source.write(state)
            _set_flags(self._flags, flags)
            with self._has_hooks(), self._trains(), self._gathers():
                yield
        finally:
            _set_flags(flags, _flags())
            for source, state in states:
                source.write(state)
            for part, attributes in zip(self._parts, now, strict=True):
                _set(part, attributes)
            then.undo()


def _set(part: nn.Module, attributes: dict[str, Any]) -> None:
    for name in _state_of(part).keys() - attributes.keys():
        del vars(part)[name]
    vars(part).update(attributes)


def _set_flags(wanted: list[tuple[Callable[[Any], Any], Any]], now: list[tuple[Callable[[Any], Any], Any]]) -> None:
    for (write, value), (_, found) in zip(wanted, now, strict=True):
        if value != found:
            write(value)
