# SPDX-License-Identifier: Apache-2.0
"""What a block's forward found around it, so that its recomputation in backward finds the same, and leaves no trace.

Between the two the script may have evaluated (``model.eval()``), left a context, or run the block again; and the
forward itself may have changed what its modules hold: a counter, a memory of the last segment, a list of losses.
PyTorch's checkpoint restores autocast, the default device, and the default random generators of the host and of those
devices of which it sees a tensor among the arguments: it does not look into objects. Restored here:

- attributes of the block's modules, ``training`` among them, and what their lists, queues, dictionaries, counters and
  sets hold, small tensors and arrays that are changed in place included. Not what changes inside of other objects, nor
  large plain tensors (buffers: see ``recompute.py``). Streams and events that the forward made stay: a second one would
  give memory that the first one's tensors still read;
- hooks on forwards of the modules inside of the block: some are there for one forward of the model alone, as those by
  which PEFT hands task numbers to its layers;
- random numbers of Python, of NumPy, of the device, and of generators that are attributes, or in such a container, or
  arguments, if the forward drew any;
- the default dtype, and which kernels attention may use, in which order;
- that a parameter which is read, of another module, say, and is not gathered, is gathered then, as DeepSpeed does in
  forwards alone.
"""

from __future__ import annotations

import functools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

__all__ = ["SMALL_BYTES", "SOURCES", "RandomSource", "Surroundings", "are_same"]

SMALL_BYTES = 64 * 1024
"""Of a tensor that a module holds: every forward keeps a copy."""

_OF_DEEPSPEED = frozenset(
    {"applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn", "_original_parameters", "_external_params"}
)
_NOT_RESTORED = (frozenset(vars(nn.Module())) | _OF_DEEPSPEED | {"forward"}) - {"training", "_buffers"}
"""DeepSpeed's hooks count calls in theirs, those of a recomputation as well."""
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_GATHERS_WHAT_IS_READ = "_in_forward"  # DeepSpeed's name, of the dictionary of a module's parameters

_OF_STREAMS = (torch.Stream, torch.Event, torch.cuda.Stream, torch.cuda.Event, torch.xpu.Stream, torch.xpu.Event)
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
_DEPTH = 4  # containers within one another
_ATOMS = frozenset({type(None), bool, int, float, str})  # there may be many


def _state_of(part: nn.Module) -> dict[str, Any]:
    """The attributes that are restored."""
    held = vars(part)
    return {name: held[name] for name in held.keys() - _NOT_RESTORED if not name.startswith("ds_")}


def _hooks_of(part: nn.Module) -> Iterator[dict[int, Any]]:
    held = vars(part)
    return (held[name] for name in _HOOKS if name in held)


class _Small(NamedTuple):
    """A plain tensor, or an array of NumPy's, that may be changed in place: with a copy of what it held."""

    values: Any
    version: int
    copy: Any

    def is_intact(self) -> bool:
        if isinstance(self.values, numpy.ndarray):
            return self.values.tobytes() == self.copy.tobytes()
        return bool(self.values._version == self.version)

    def again(self) -> Any:
        return self.copy.clone() if isinstance(self.copy, torch.Tensor) else self.copy.copy()


def _tensor_as_it_is(value: Any, *, copies: bool = True) -> Any:
    if type(value) is numpy.ndarray and value.nbytes <= SMALL_BYTES and not value.dtype.hasobject:
        return _Small(value, 0, value.copy())
    if not isinstance(value, torch.Tensor):
        return value
    if value.grad_fn is not None:
        return value.detach().requires_grad_()
    is_plain = copies and type(value) is torch.Tensor and value.layout == torch.strided and not value.is_inference()
    if is_plain and not value.requires_grad and value.nbytes <= SMALL_BYTES:
        return _Small(value, value._version, value.clone())
    return value


class _Contents(NamedTuple):
    """Of a container, which itself may go on to hold what keeps the graph that this belongs to. ``make``: another one
    of its kind and these items.
    """

    kind: Any
    make: Callable[[Any], Any]
    items: Any


def _as_it_is(value: Any, *, copies: bool = True, depth: int = _DEPTH) -> Any:
    """What stands for ``value`` as long as a graph lives: nothing that an earlier forward left may keep that one's.
    ``copies``: of small tensors; of buffers somebody else has them.
    """
    is_container = type(value) in _CONTAINERS
    if not depth or not (is_container or type(value) is tuple):
        return _tensor_as_it_is(value, copies=copies)

    def inside(item: Any) -> Any:
        return _as_it_is(item, copies=copies, depth=depth - 1)

    if isinstance(value, dict):
        found: Any = {key: each if type(each) in _ATOMS else inside(each) for key, each in value.items()}
    else:
        found = [each if type(each) in _ATOMS else inside(each) for each in value]
    return _Contents(type(value), _maker(value), found) if is_container else tuple(found)


def _maker(container: Any) -> Callable[[Any], Any]:
    if isinstance(container, deque):
        return functools.partial(deque, maxlen=container.maxlen)
    if isinstance(container, defaultdict):
        return functools.partial(defaultdict, container.default_factory)
    return type(container)


def _inside(value: Any) -> Iterable[Any]:
    if type(value) in _CONTAINERS:
        return value.values() if isinstance(value, dict) else value
    return value if type(value) is tuple else ()


def _fill(container: Any, items: Any) -> None:
    """It stays the same object: others know it, and what was compiled does."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(items)
    else:
        container.update(items)


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
    if isinstance(value, numpy.random.Generator):
        bits: Any = value.bit_generator
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
        state = [(part, _state_of(part)) for part in parts]
        values = [value for _, attributes in state for value in attributes.values()]
        self._attributes = [
            (part, {name: _as_it_is(value, copies=name != "_buffers") for name, value in attributes.items()})
            for part, attributes in state
        ]
        self._hooks = [(hooks, tuple(hooks.items())) for part in parts for hooks in _hooks_of(part)]
        self._gathering = [
            part._parameters for part in parts if getattr(part._parameters, _GATHERS_WHAT_IS_READ, False)
        ]
        inside = chain.from_iterable(map(_inside, values))
        every = (value for value in chain(values, inside, arguments) if type(value) not in _ATOMS)
        own = {id(value): _source(value) for value in every}
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
            _fill(hooks, then)
        try:
            yield
        finally:
            for hooks, then, now in others:
                left = [(key, hook) for key, hook in now if key in hooks or key not in then]
                _fill(hooks, [*left, *((key, hook) for key, hook in hooks.items() if key not in then)])

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
        now = [(part, _state_of(part)) for part, _ in self._attributes]
        then = _Brought()
        states = [(source, source.read()) for source, _ in self._random]
        flags = _flags()
        try:
            for part, attributes in self._attributes:
                brought = {name: then.value(value, vars(part).get(name)) for name, value in attributes.items()}
                streams = {name: value for name, value in _state_of(part).items() if isinstance(value, _OF_STREAMS)}
                _set(part, brought | streams)
            for source, state in self._random:
                source.write(state)
            _set_flags(self._flags, flags)
            with self._has_hooks(), self._gathers():
                yield
        finally:
            _set_flags(flags, self._flags)
            for source, state in states:
                source.write(state)
            for part, attributes in now:
                _set(part, attributes)
            for container, items in reversed(then.filled):
                _fill(container, items)


class _Brought:
    """Attributes as a forward found them. ``filled``: containers, with what they hold now."""

    def __init__(self) -> None:
        self.filled: list[tuple[Any, Any]] = []
        self._copies: dict[int, Any] = {}  # by what they stand for, which several attributes may name

    def value(self, value: Any, now: Any) -> Any:
        """The attribute again: the container that is there ``now`` with what it held, or another like it."""
        if type(value) is tuple:
            found = self._each(value, now if type(now) is tuple else ())
            return tuple(_with_streams(found, now)) if type(now) is tuple else tuple(found)
        if not isinstance(value, _Contents):
            return self._tensor(value)
        is_same_kind = type(now) is value.kind
        if isinstance(value.items, dict):
            there = now if is_same_kind else {}
            items: Any = {
                key: each if type(each) in _ATOMS else self.value(each, there.get(key))
                for key, each in value.items.items()
            }
        else:
            items = self._each(value.items, now if is_same_kind else ())
        if not is_same_kind:
            return value.make(items)
        self.filled.append((now, now.copy()))
        if isinstance(now, dict):
            _fill(now, items | {key: each for key, each in now.items() if isinstance(each, _OF_STREAMS)})
        elif isinstance(now, (list, deque)):
            _fill(now, _with_streams(items, list(now)))
        else:
            _fill(now, [*items, *(each for each in now if isinstance(each, _OF_STREAMS))])
        return now

    def _each(self, values: Iterable[Any], now: Iterable[Any]) -> list[Any]:
        pairs = zip(values, chain(now, repeat(None)), strict=False)
        return [value if type(value) in _ATOMS else self.value(value, there) for value, there in pairs]

    def _tensor(self, value: Any) -> Any:
        """A copy of a tensor that was changed in place since."""
        if not isinstance(value, _Small):
            return value
        if value.is_intact():
            return value.values
        return self._copies.setdefault(id(value.values), value.again())


def _with_streams(then: Sequence[Any], now: Sequence[Any]) -> list[Any]:
    """What was there, place by place, but for streams, and those that came behind it."""
    places = [there if isinstance(there, _OF_STREAMS) else was for was, there in zip(then, now, strict=False)]
    return [*places, *then[len(now) :], *(each for each in now[len(then) :] if isinstance(each, _OF_STREAMS))]


def _set(part: nn.Module, attributes: dict[str, Any]) -> None:
    for name in _state_of(part).keys() - attributes.keys():
        del vars(part)[name]
    vars(part).update(attributes)


def _set_flags(wanted: list[tuple[Callable[[Any], Any], Any]], now: list[tuple[Callable[[Any], Any], Any]]) -> None:
    for (write, value), (_, found) in zip(wanted, now, strict=True):
        if value != found:
            write(value)
