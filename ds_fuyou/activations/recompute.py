# SPDX-License-Identifier: Apache-2.0
"""Blocks that are computed again in backward instead of being saved, whole or but for some of their operators, by
``torch.utils.checkpoint``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ds_fuyou.activations.held import SMALL_BYTES, Brought, Held, fill, is_small
from ds_fuyou.activations.open_hooks import aside_for_transforms
from ds_fuyou.activations.repeats import Repeats, is_looked_at
from ds_fuyou.activations.selective import OutputSelection, RegionOutputs
from ds_fuyou.activations.surroundings import RandomSource, Surroundings
from ds_fuyou.activations.takeover import CheckpointTakeover
from ds_fuyou.log import log_once

__all__ = ["RecomputedForward", "Stays"]


def _no_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


Stays = Callable[[nn.Module], AbstractContextManager[Any]]
"""Inside, hooks of a module's forward let go of no parameter that is gathered when it begins."""

_CACHES = ("past_key_values", "past_key_value", "layer_past")


class _RecomputeFirst(torch.autograd.Function):
    """Identity whose backward needs a saved tensor, and so has the whole region recomputed, before anything else.

    Without it the first operator's backward would do that, after ZeRO-3 gathered the parameters of the operator's
    module: these stay, see :data:`Stays`, or the recomputation's forward hooks would release them under its feet.
    Where backward comes by a tensor that is not marked (an object's inside of another one, a hook's) it does.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, token: torch.Tensor, saved: RegionOutputs | None) -> torch.Tensor:
        ctx.save_for_backward(token)
        ctx.saved = None if saved is None else weakref.ref(saved)  # they belong to what backward frees, not to the node
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        saved = None if ctx.saved is None else ctx.saved()
        if saved is not None:
            saved.come()
        _ = ctx.saved_tensors
        return grads[0], None, None


class _Given:
    """What a block is given: tensors, with how often each was changed in place, and what holds others, by identity. All
    of it is kept meanwhile, or what the block lets go of would leave its number to something new.
    """

    def __init__(self, arguments: Any) -> None:
        self.containers: dict[int, Any] = {}
        self._tensors: dict[int, tuple[torch.Tensor, int]] = {}
        self._look(arguments)

    def has(self, tensor: torch.Tensor) -> bool:
        """As it was given."""
        known = self._tensors.get(id(tensor))
        return known is not None and known[1] == tensor._version

    def _look(self, value: Any, *, into_objects: bool = True) -> None:
        """Objects inside of objects are not looked into: they may know the whole program."""
        if isinstance(value, torch.Tensor):
            if not value.is_inference():
                self._tensors[id(value)] = value, value._version
            return
        is_object = not isinstance(value, (tuple, list, deque, dict))
        if id(value) in self.containers or (is_object and not into_objects):
            return
        if not isinstance(value, tuple):
            self.containers[id(value)] = value
        for each in value if isinstance(value, (tuple, list, deque)) else _held_by(value).values():
            self._look(each, into_objects=into_objects and not is_object)


def _is_among(numbers: Collection[int], value: Any) -> bool:
    return id(value) in numbers


class _Marking:
    """Marks all tensors of an output, also those in objects that PyTorch's trees do not know: dataclasses and other
    plain objects, subclasses of dict. What is one tensor stays one, for the caller may change it in place; what was
    ``given`` and is handed back stays itself, for the caller may have it still: a tensor as it was, and what holds
    others, with those marked in it.

    (Functions that know each other would keep all tensors until Python collects cycles. PyTorch's trees make one of
    what says where their leaves are, so that knows numbers alone.)
    """

    def __init__(self, saved: RegionOutputs | None, given: _Given) -> None:
        self._saved, self._given = saved, given
        self._token = torch.empty(1)
        self._marked: dict[int, torch.Tensor] = {}
        self._within: set[int] = set()
        self._is_own = functools.partial(_is_among, frozenset(given.containers))

    def all_of(self, value: Any) -> Any:
        return tree_map(self._leaf, value, is_leaf=self._is_own)

    def _leaf(self, value: Any) -> Any:
        if self._is_own(value):
            return self._filled(value)
        held = dict(_held_by(value))
        if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(held)):
            return self._tensor(value)
        copied = copy.copy(value)
        _held_by(copied).update(tree_map(self._in_object, held, is_leaf=self._is_own))
        return copied

    def _filled(self, value: Any) -> Any:
        if id(value) in self._within:
            return value
        self._within.add(id(value))
        if isinstance(value, (list, deque)):
            for place, each in enumerate(value):
                if (found := self.all_of(each)) is not each:
                    value[place] = found
        else:
            held = _held_by(value)
            leaf = self._leaf if isinstance(value, dict) else self._in_object
            marked = {name: tree_map(leaf, each, is_leaf=self._is_own) for name, each in held.items()}
            dict.update(held, marked)
        return value

    def _in_object(self, value: Any) -> Any:
        """Other objects that it knows stay."""
        return self._filled(value) if self._is_own(value) else self._tensor(value)

    def _tensor(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.requires_grad) or self._given.has(value):
            return value
        if id(value) not in self._marked:
            marked = self._marked[id(value)] = _RecomputeFirst.apply(value, self._token, self._saved)
            vars(marked).update(_on_tensor(value))
        return self._marked[id(value)]


def _held_by(value: Any) -> dict[str, Any]:
    """What an object holds by name; nothing of tensors and modules, which are no containers."""
    held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return held if isinstance(held, dict) and not isinstance(value, (torch.Tensor, nn.Module)) else {}


def _on_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Attributes that a script has set; not those of parameters, which are known by more than their values."""
    return {} if isinstance(tensor, nn.Parameter) else dict(vars(tensor))


@contextmanager
def _with_attributes(tensors: Sequence[torch.Tensor], then: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Those of then, inside: a tensor may be another object by now, with values that were moved, or have others."""
    others = []
    for tensor, attributes in zip(tensors, then, strict=True):
        now = _on_tensor(tensor)
        if now.keys() != attributes.keys() or any(now[name] is not attributes[name] for name in now):
            others.append((vars(tensor), now))
            fill(vars(tensor), attributes)
    try:
        yield
    finally:
        for there, now in others:
            fill(there, now)


def _is_same_number(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other


def _tell_changed(given: Iterable[tuple[Any, dict[str, Any]]]) -> None:
    """Objects that are not brought back, and what they held when the forward began."""
    for value, then in given:
        now, absent = _held_by(value), object()
        names = [
            str(name)
            for name in then | now
            if (one := then.get(name, absent)) is not (other := now.get(name, absent))
            and not _is_same_number(one, other)
        ]
        if names:
            log_once(
                logging.WARNING,
                f"a block that may be computed again in backward assigns to {names[0]} of the {type(value).__name__} "
                "that it is given, and finds that changed then: where it reads it, gradients are wrong. With "
                'activations.mode "swap" nothing is computed again',
            )


def _is_cache(value: Any) -> bool:
    return any("Cache" in kind.__name__ for kind in type(value).__mro__)


def _can_be_saved(leaf: Any) -> bool:
    """Autograd saves no tensor that an evaluation made under ``torch.inference_mode()`` and left, a mask, say."""
    return isinstance(leaf, torch.Tensor) and not leaf.is_inference()


class _ChangedBuffers:
    """Large buffers that a module's forward changes, as batch normalisation its statistics: a recomputation starts from
    what the forward found, and leaves what is there now. Which do is seen in the first forward. Small ones are copied
    with all that the module holds; those of an odd layout here, in every forward, because some change only later (a
    mean that is followed after a warm-up).
    """

    def __init__(self) -> None:
        self._names: list[str] | None = None

    def before(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Copies by name, to be taken before a forward."""
        wanted = [
            (name, each)
            for name, each in module.named_buffers(remove_duplicate=False)
            if not is_small(each) and (self._names is None or name in self._names or _num_bytes(each) <= SMALL_BYTES)
        ]
        copies = {id(each): each.clone() for _, each in wanted}
        return {name: copies[id(each)] for name, each in wanted}

    def after(self, module: nn.Module, before: dict[str, torch.Tensor]) -> None:
        """The forward that ``before`` was taken for has ended: forgets there the large ones that it did not change."""
        if self._names is not None:
            return
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self._names = [name for name, value in before.items() if not _is_same(value, buffers.get(name))]
        for name in [name for name in before if name not in self._names and _num_bytes(before[name]) > SMALL_BYTES]:
            del before[name]


def _num_bytes(buffer: torch.Tensor) -> int:
    """Of all elements, also of those that a sparse tensor leaves out."""
    return buffer.numel() * buffer.element_size()


def _is_same(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    """Where PyTorch cannot compare them, as sparse ones, they count as changed."""
    strided = after is not None and before.layout == after.layout == torch.strided
    return strided and after is not None and before.dtype == after.dtype and torch.equal(before, after)


def _set_copies(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Copies of ``values`` stand for the module's buffers of these names."""
    copies = {id(value): value.clone() for value in values.values()}
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path)._buffers[leaf] = copies[id(value)]


class RecomputedForward:
    """Takes the place of ``module.forward`` on the instance; :meth:`undo` puts back what was there.

    The module's hooks run outside, once; those of its submodules run again in backward, which is what ZeRO-3 needs to
    gather their parameters again. Checkpointing is non-re-entrant and without early stop, so every hook that began
    also ends. A deep copy of the module gets its class's own forward.

    ``selection`` names operators whose outputs are not computed again; None: all of them are. ``draws``: see
    :class:`Surroundings`.
    """

    def __init__(
        self,
        module: nn.Module,
        takeover: CheckpointTakeover,
        selection: OutputSelection | None = None,
        draws: RandomSource | None = None,
        stays: Stays = nullcontext,
    ) -> None:
        self._draws, self._stays = draws, stays
        self._module = weakref.ref(module)
        self._selection = selection
        self._takeover = takeover
        self._own = module.__dict__.get("forward")  # what accelerate, say, put there
        self._changed = _ChangedBuffers()
        self._num_forwards = 0
        module.forward = self

    @property
    def __signature__(self) -> inspect.Signature:
        """The module's own: models ask which arguments a block takes."""
        return inspect.signature(self._forward_of(self._alive()))

    def _alive(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError("the module of this forward is gone; call the copy's own forward")
        return module

    def _forward_of(self, module: nn.Module) -> Callable[..., Any]:
        return self._own if self._own is not None else types.MethodType(type(module).forward, module)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs uncompiled: compiled in forward and not in the recomputation, a block would have two results."""
        module = self._alive()
        forward = self._forward_of(module)
        if not (torch.is_grad_enabled() and module.training):
            return forward(*args, **kwargs)
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # in a transform of torch.func
            return forward(*args, **kwargs)
        # All tensors, wherever they are given, are saved as any tensor is, and may leave the device. Of lists and
        # dictionaries the recomputation gets its own: others may have changed them, and it changes them once more.
        leaves, tree = tree_flatten((args, kwargs))
        if self._changes_a_cache(kwargs, leaves):
            return forward(*args, **kwargs)

        self._num_forwards += 1
        repeats = Repeats(type(module).__name__) if is_looked_at(self._num_forwards) else None
        saved = self._selection.region(repeats) if self._selection is not None else None
        are_inputs = [*map(_can_be_saved, leaves)]
        inputs = [*compress(leaves, are_inputs)]
        others = Held(
            [{"given": [None if is_input else leaf for leaf, is_input in zip(leaves, are_inputs, strict=True)]}]
        )
        unseen = [(each, dict(_held_by(each))) for each in others.others]
        found = Surroundings(module, (*leaves, *others.others), self._draws)
        buffers = self._changed.before(module)
        given = [(args, kwargs)]
        named_on = [_on_tensor(each) for each in inputs]

        def marked(values: Any, named: Any) -> Any:
            marking = _Marking(saved, _Given((values, named)))
            return marking.all_of(forward(*values, **named))

        def again(tensors: Sequence[torch.Tensor]) -> Any:
            came = iter(tensors)
            places = zip(Brought(others, [{}]).attributes()[0]["given"], are_inputs, strict=True)
            values, named = tree_unflatten([next(came) if is_input else leaf for leaf, is_input in places], tree)
            with self._stays(module), found.restored(), _with_attributes(tensors, named_on):
                _set_copies(module, buffers)
                return marked(values, named)

        def region(*tensors: torch.Tensor) -> Any:
            with self._takeover.region(), aside_for_transforms():
                if not given:
                    return again(tensors)
                output = marked(*given.pop())
            self._changed.after(module, buffers)
            found.forward_ended()
            _tell_changed(unseen)
            unseen.clear()
            return output

        watched = saved if saved is not None else repeats
        contexts = watched.contexts if watched is not None else _no_contexts
        with self._takeover.suspended(), torch.utils.checkpoint.set_checkpoint_early_stop(False):
            return torch.utils.checkpoint.checkpoint(region, *inputs, use_reentrant=False, context_fn=contexts)

    @staticmethod
    def _changes_a_cache(named: dict[str, Any], leaves: list[Any]) -> bool:
        """Whether the block would add to a cache of keys and values, or of states: done twice, it would be wrong. It
        may be given by any name or by none (to GPT-2's blocks), so it is known by its class, too: Hugging Face's are
        called something with "Cache". Where it is none the block is saved for nothing, and right.
        """
        found = [name for name in _CACHES if named.get(name) is not None]
        found += sorted({type(leaf).__name__ for leaf in leaves if _is_cache(leaf)})
        if found:
            log_once(
                logging.WARNING,
                f"blocks are called with {found[0]} in training; these calls are not recomputed, because that would "
                f"add to the cache twice. Set use_cache to False",
            )
        return bool(found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module()))
        return self if copied is None else types.MethodType(type(copied).forward, copied)

    def undo(self) -> None:
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:
            return
        if self._own is None:
            del module.forward
        else:
            module.forward = self._own
