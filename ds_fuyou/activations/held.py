# SPDX-License-Identifier: Apache-2.0
"""What modules hold when a forward begins, taken so that it can be brought back: attributes, and what is inside.

Containers of the standard library are looked into, and brought back as the same objects where the modules still have
them, for others may know these; what two attributes name is one object again. Small tensors and arrays may be changed
in place, past PyTorch's counting too, so there are copies of them: of whole storages, for one may be a view of another.
Everything else is kept as it is, and not looked into. Nothing that is taken keeps a graph (it may be part of one), but
for what such objects hold.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from ds_fuyou.activations.views import ByteRange, ViewSpec, byte_view, is_movable

__all__ = ["OF_STREAMS", "SMALL_BYTES", "Brought", "Held", "fill", "is_small"]

SMALL_BYTES = 64 * 1024
"""Of a tensor, with its storage, or an array, that is copied in every forward."""
OF_STREAMS = (torch.Stream, torch.Event, torch.cuda.Stream, torch.cuda.Event, torch.xpu.Stream, torch.xpu.Event)
"""These stay where they were made since: second ones would give memory that the first ones' tensors still read."""
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, deque})
_ATOMS = frozenset({type(None), bool, int, float, str})  # there may be many
_DEPTH = 20  # containers within one another


@dataclass(slots=True, eq=False)
class _Tensor:
    """Of a small storage, by its address then. ``base``: what PyTorch knows it to be a view of."""

    storage: int
    view: ViewSpec
    needs_gradient: bool
    is_leaf: bool
    attributes: dict[str, Any]
    base: _Tensor | None


class _Array(NamedTuple):
    """A view of an array that owns its memory, by the address of that, or all of it."""

    owner: int
    dtype: Any
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


class _Copied(NamedTuple):
    """Bytes, or a set, which filled again would have another order: the one that is there is not touched."""

    address: int
    copy: Any


class _Tuple(NamedTuple):
    make: Callable[[Iterable[Any]], Any]
    items: list[Any]


@dataclass(slots=True, eq=False)
class _Container:
    """``make``: another one of the kind, with these items. The container itself may come to hold what keeps a graph."""

    address: int
    kind: Any
    make: Callable[[Iterable[Any]], Any]
    items: Any = ()


@dataclass(slots=True, eq=False)
class _Wrapper:
    address: int
    kind: Any
    attributes: dict[str, Any]


def _wraps(kind: type) -> bool:
    """Whether it is Python's class for containers of one's own: an object with attributes, one of them the container,
    and nothing else. (To ask ``isinstance`` costs more: these are abstract.)"""
    mro = kind.__mro__
    is_one = (UserDict in mro or UserList in mro) and nn.Module not in mro
    return is_one and not any(vars(each).get("__slots__") for each in mro)


def is_small(tensor: torch.Tensor) -> bool:
    """Whether it is copied with what holds it."""
    if type(tensor) is not torch.Tensor or not is_movable(tensor, tensor.device) or tensor.is_inference():
        return False
    there = tensor.untyped_storage().nbytes()
    return ViewSpec.of(tensor).bytes().end <= there <= SMALL_BYTES  # else the script has freed it


class _Made(torch.autograd.Function):
    """The same memory as what has a history: it may be changed in place, a leaf may not."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class Held:
    """``states``: of each module the attributes that matter, now. ``others``: what they hold, at any depth, that is
    neither looked into nor copied.
    """

    def __init__(self, states: Iterable[Mapping[str, Any]]) -> None:
        self.others: list[Any] = []
        self.storages: dict[int, torch.Tensor] = {}
        self.arrays: dict[int, Any] = {}
        self._known: dict[int, Any] = {}
        self.attributes = [{name: self._take(each, _DEPTH) for name, each in state.items()} for state in states]
        self._known.clear()

    def _take(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            return self._taken(value)
        if kind is numpy.ndarray:
            return self._array(value)
        if kind is set or (kind is bytearray and len(value) <= SMALL_BYTES):
            return _Copied(id(value), value.copy())
        if depth and kind in _CONTAINERS:
            return self._contents(value, depth)
        if depth and isinstance(value, tuple) and (kind is tuple or hasattr(kind, "_make")):
            items = [self._take(each, depth - 1) for each in value]
            is_same = all(one is other for one, other in zip(items, value, strict=True))
            return value if is_same else _Tuple(tuple if kind is tuple else kind._make, items)
        if depth and _wraps(kind):
            if id(value) not in self._known:
                found = self._known[id(value)] = _Wrapper(id(value), kind, {})
                found.attributes = {name: self._take(each, depth - 1) for name, each in vars(value).items()}
            return self._known[id(value)]
        self.others.append(value)
        return value

    def _contents(self, value: Any, depth: int) -> _Container:
        found: _Container | None = self._known.get(id(value))
        if found is None:
            found = self._known[id(value)] = _Container(id(value), type(value), _maker(value))
            if isinstance(value, dict):
                found.items = {
                    key: each if type(each) in _ATOMS else self._take(each, depth - 1) for key, each in value.items()
                }
            else:
                found.items = [each if type(each) in _ATOMS else self._take(each, depth - 1) for each in value]
        return found

    def _taken(self, value: torch.Tensor) -> Any:
        if not is_small(value):
            return value if value.grad_fn is None else value.detach().requires_grad_()
        if id(value) not in self._known:
            storage, base = value.untyped_storage(), value._base
            if storage._cdata not in self.storages:
                self.storages[storage._cdata] = byte_view(value.detach(), ByteRange(0, storage.nbytes())).clone()
            if base is not None and (
                not is_small(base) or (base.dtype, base.requires_grad) != (value.dtype, value.requires_grad)
            ):
                base = None
            self._known[id(value)] = _Tensor(
                storage._cdata,
                ViewSpec.of(value),
                value.requires_grad,
                value.is_leaf,
                dict(vars(value)),
                None if base is None else self._taken(base),
            )
        return self._known[id(value)]

    def _array(self, value: Any) -> Any:
        owner = value
        while type(owner.base) is numpy.ndarray:
            owner = owner.base
        if owner.base is not None or not 0 < owner.nbytes <= SMALL_BYTES or owner.dtype.hasobject:
            return value
        if id(owner) not in self.arrays:
            self.arrays[id(owner)] = owner.ravel(order="K").view(numpy.uint8).copy()
        first, begin = (each.__array_interface__["data"][0] for each in (value, owner))
        return _Array(id(owner), value.dtype, value.shape, first - begin, value.strides)


def _maker(container: Any) -> Callable[[Iterable[Any]], Any]:
    if isinstance(container, deque):
        return functools.partial(deque, maxlen=container.maxlen)
    if isinstance(container, defaultdict):
        return functools.partial(defaultdict, container.default_factory)
    made: Callable[[Iterable[Any]], Any] = type(container)
    return made


class Brought:
    """``held`` once more; ``states``: what the same modules hold now. Containers among that are filled with what they
    held, until :meth:`undo`: each is one object, and noted once.
    """

    def __init__(self, held: Held, states: Sequence[Mapping[str, Any]]) -> None:
        self._held, self._states = held, states
        self._there: dict[int, Any] = {id(container): container for container in _containers(states)}
        self._made: dict[int, Any] = {}
        self._found: list[tuple[Any, Any]] = []
        self._copies: dict[int, Any] = {}
        self._arrays: dict[int, Any] = {}

    def attributes(self) -> list[dict[str, Any]]:
        """Of each module."""
        return [
            {name: self._bring(each, now.get(name)) for name, each in then.items()}
            for then, now in zip(self._held.attributes, self._states, strict=True)
        ]

    def undo(self) -> None:
        for container, items in self._found:
            fill(container, items)

    def _bring(self, value: Any, now: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is _Tensor:
            return self._tensor(value)
        if kind is _Array:
            return self._array(value)
        if kind is _Copied:
            return self._copied(value, now)
        if kind is _Container:
            return self._container(value)
        if kind is _Wrapper:
            return self._wrapper(value)
        if kind is _Tuple:
            return value.make(_with_streams(self._each(value.items, now), now))
        return tuple(_with_streams(value, now)) if kind is type(now) is tuple else value

    def _copied(self, value: _Copied, now: Any) -> Any:
        if value.address not in self._copies:
            found = self._copies[value.address] = value.copy.copy()
            if isinstance(found, set) and isinstance(now, set):
                found.update(each for each in now if isinstance(each, OF_STREAMS))
        return self._copies[value.address]

    def _each(self, values: Iterable[Any], now: Any) -> list[Any]:
        places = zip(values, chain(now if isinstance(now, (tuple, list, deque)) else (), repeat(None)), strict=False)
        return [value if type(value) in _ATOMS else self._bring(value, there) for value, there in places]

    def _container(self, value: _Container) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        now = self._there.get(value.address)
        is_there = type(now) is value.kind
        found: Any = now if is_there else value.make(())
        self._made[id(value)] = found  # it may lie in itself
        if isinstance(value.items, dict):
            items: Any = {
                key: each if type(each) in _ATOMS else self._bring(each, found.get(key))
                for key, each in value.items.items()
            }
            items |= {key: each for key, each in found.items() if isinstance(each, OF_STREAMS)}
        else:
            items = _with_streams(self._each(value.items, found), [*found])
        if is_there:
            self._found.append((found, found.copy()))
        fill(found, items)
        return found

    def _wrapper(self, value: _Wrapper) -> Any:
        if id(value) not in self._made:
            now = self._there.get(value.address)
            found = self._made[id(value)] = now if type(now) is value.kind else object.__new__(value.kind)
            there = vars(found)
            items = {name: self._bring(each, there.get(name)) for name, each in value.attributes.items()}
            self._found.append((there, there.copy()))
            fill(there, items)
        return self._made[id(value)]

    def _tensor(self, value: _Tensor) -> torch.Tensor:
        found: torch.Tensor | None = self._made.get(id(value))
        if found is None:
            _, size, stride, offset = value.view
            if value.base is not None:
                found = self._tensor(value.base).as_strided(size, stride, offset // value.view.dtype.itemsize)
            else:
                found = self._own(value)
            vars(found).update(value.attributes)
            self._made[id(value)] = found
        return found

    def _own(self, value: _Tensor) -> torch.Tensor:
        if value.storage not in self._copies:
            self._copies[value.storage] = self._held.storages[value.storage].clone()
        found = value.view.over(self._copies[value.storage], 0)
        if value.needs_gradient:
            found.requires_grad_()
        made: torch.Tensor = found if value.is_leaf else _Made.apply(found)
        return made

    def _array(self, value: _Array) -> Any:
        if value.owner not in self._arrays:
            self._arrays[value.owner] = self._held.arrays[value.owner].copy()
        return numpy.ndarray(value.shape, value.dtype, self._arrays[value.owner], value.offset, value.strides)


def _containers(states: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    """All that are reached, and wrappers, each once."""
    seen: set[int] = set()
    left: list[Any] = [each for state in states for each in state.values()]
    while left:
        value = left.pop()
        kind = type(value)
        if kind in _ATOMS or id(value) in seen:
            continue
        if kind in _CONTAINERS:
            seen.add(id(value))
            yield value
            left += value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            left += value
        elif _wraps(kind):
            seen.add(id(value))
            yield value
            left += vars(value).values()


def _is_filled(container: Any, items: Any) -> bool:
    if len(container) != len(items):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), items.items(), strict=True)
        return all(key is other and one is two for (key, one), (other, two) in pairs)
    return all(one is other for one, other in zip(container, items, strict=True))


def fill(container: Any, items: Any) -> None:
    """It stays the same object: others know it, and what was compiled does."""
    if _is_filled(container, items):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(items)
    else:
        container.update(items)


def _with_streams(then: Sequence[Any], now: Any) -> list[Any]:
    """What was there, place by place, but for streams, and those that came behind it."""
    there = now if isinstance(now, (tuple, list)) else ()
    places = [each if isinstance(each, OF_STREAMS) else was for was, each in zip(then, there, strict=False)]
    return [*places, *then[len(there) :], *(each for each in there[len(then) :] if isinstance(each, OF_STREAMS))]
