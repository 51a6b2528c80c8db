# SPDX-License-Identifier: Apache-2.0
"""FLOPs and bytes of every operator output of each block, seen while one forward runs.

A dispatch mode sees every operator below autograd, after composite operators have been taken apart, in the order in
which a selective checkpoint policy sees them too. Results do not change. What autograd saves is seen by saved-tensor
hooks, so an output is known to be needed by backward or not. FLOPs are those of ``torch.utils.flop_counter``: matmuls,
convolutions and attention. A kernel of another library, of which torch has no formula (fused attention, say), is timed
instead, and counts as many as the others reach in that time; what else torch has counts as none.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ds_fuyou.activations.blocks import Block
from ds_fuyou.activations.calls import TORCHS, CallCounter, OperatorCall, written_tensors
from ds_fuyou.activations.open_hooks import OpenHooks
from ds_fuyou.activations.records import HeldBytes
from ds_fuyou.activations.swapper import KeptTensor
from ds_fuyou.activations.unseen import UnseenChanges
from ds_fuyou.activations.views import alias_of
from ds_fuyou.host.device import Device
from ds_fuyou.planner.profile import BlockCost, OperatorCost

__all__ = ["OperatorRecorder", "SavedHooks"]

SavedHooks: TypeAlias = "tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]"


def _keep(tensor: torch.Tensor) -> Any:
    """A leaf has no history, and ZeRO-3 fills parameters again."""
    return tensor if tensor.is_leaf else KeptTensor(tensor, HeldBytes(), 0)


def _give(kept: Any) -> torch.Tensor:
    return kept.value() if isinstance(kept, KeptTensor) else kept


class _Calls:
    """Calls of operators within one block."""

    def __init__(self, block: str) -> None:
        self.block = block
        self.outputs: list[OperatorCost] = []
        self.input_bytes = 0
        self.saves_own = False
        self.counter = CallCounter()
        self._names: Counter[str] = Counter()

    def add(self, module: str, func: Any, flops: int, num_bytes: int, call: OperatorCall | None) -> int:
        """Place of the output in the list; -1 if it is none worth a line."""
        operator = str(func)
        if not flops and not num_bytes:
            return -1
        short = operator.split(".")[1] if operator.count(".") else operator
        name = f"{module}/{short}" if module else short
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}/{self._names[name]}"
        self.outputs.append(OperatorCost(name, float(flops), float(num_bytes), False, call))
        return len(self.outputs) - 1

    def took(self, args: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        self.input_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def cost(self) -> BlockCost:
        """Where nothing of its own was seen to be saved, as outside of blocks and inside of a gradient checkpoint, all
        may be.
        """
        known = self.block != "" and self.saves_own
        outputs = tuple(replace(output, saved=output.saved or not known) for output in self.outputs)
        return BlockCost(self.block, sum((output.flops for output in outputs), 0.0), float(self.input_bytes), outputs)


class _Timings:
    """How long calls took, on a device by its own clock: those that are timed instead of counted, and those by which
    seconds become FLOPs.
    """

    _OWN = TORCHS | {"profiler", "c10d", "_c10d_functional", "inductor"}

    def __init__(self, device: Device | None) -> None:
        self._device = device if device is not None and not device.is_host else None
        self._calls: list[tuple[_Calls, int, Any, Any]] = []

    def wants(self, func: Any) -> bool:
        return _packet(func) in flop_registry or func.namespace not in self._OWN

    def now(self) -> Any:
        return time.perf_counter() if self._device is None else self._device.record_event(timed=True)

    def add(self, calls: _Calls, place: int, begin: Any) -> None:
        self._calls.append((calls, place, begin, self.now()))

    def settle(self) -> None:
        """Gives calls without FLOPs theirs: seconds are the median of all blocks, the first call being slower."""
        secs: dict[str, list[float]] = defaultdict(list)
        flops: dict[str, float] = {}
        for calls, place, begin, end in self._calls:
            output = calls.outputs[place]
            secs[output.name].append(self._secs(begin, end))
            flops[output.name] = max(flops.get(output.name, 0.0), output.flops)
        took = {name: statistics.median(every) for name, every in secs.items()}
        counted = sum(took[name] for name, count in flops.items() if count)
        rate = sum(flops.values()) / counted if counted > 0 else 0.0
        for calls, place, _, _ in self._calls:
            output = calls.outputs[place]
            if not output.flops:
                calls.outputs[place] = replace(output, flops=float(round(took[output.name] * rate)))
        self._calls.clear()

    def _secs(self, begin: Any, end: Any) -> float:
        if self._device is None:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


@dataclass(eq=False, slots=True)
class _Asked:
    """What a block saved, and the backward that asked for it last."""

    block: str
    packed: Any
    by: int = -1


def _dense(tree: Any) -> list[torch.Tensor]:
    """Tensors that have a storage: sparse ones, say, have none."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.layout == torch.strided]


def _counts_changes(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_inference()


def _counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Counts changes of ``tensor`` and of its views, and holds none of its memory."""
    alias = alias_of(tensor)
    if type(alias) is torch.Tensor and alias.layout == torch.strided:
        alias.data = torch.empty(0, dtype=alias.dtype, device=alias.device)
    return alias


class OperatorRecorder(TorchDispatchMode):
    """Records what a model does while this is entered: around one forward.

    Args:
        blocks: the units of the result. A block that runs twice is recorded the first time.
        hooks: pack and unpack that take what is saved inside of blocks, so that who swaps activations goes on doing
            so; None keeps them as autograd does.
        sees_saves: whether what is saved is looked at. Under ZeRO-3 only with hooks that know gathered parameters:
            others hold on to the memory that these are gathered in.
        device: whose clock times what is timed; None: the host's.
    """

    supports_higher_order_operators = True
    """``torch.cond`` and its like run as they are, and what is inside of them is not seen."""

    def __init__(
        self,
        blocks: Sequence[Block],
        hooks: SavedHooks | None = None,
        *,
        sees_saves: bool = True,
        device: Device | None = None,
    ) -> None:
        super().__init__()
        self._blocks = blocks
        self._sees_saves = sees_saves
        self._pack, self._unpack = hooks if hooks is not None else (_keep, _give)
        self._outside = _Calls("")
        self._calls: dict[str, _Calls] = {}
        self._current = self._outside
        self._module: list[str] = []
        self._made: dict[int, tuple[StorageWeakRef, _Calls, int]] = {}
        self._handles: list[Any] = []
        self._hooks: list[OpenHooks] = []
        self._given: list[tuple[str, torch.Tensor, int]] = []  # to blocks, at these versions
        self._unseen: tuple[_Calls, UnseenChanges[int]] | None = None  # in the first block, by place in its list
        self._timings = _Timings(device)
        self._paused = 0
        self.is_open = False
        self.once: dict[str, str] = {}
        """Blocks that cannot be computed again, and why: they change what they were given, or ask twice for what they
        saved, in the backward that follows. (``torch.utils.checkpoint`` refuses both.)"""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: what the script compiles itself is compiled, as ever; without, dynamo gives up on it for good."""
        return True

    def __enter__(self) -> OperatorRecorder:
        for block in self._blocks:
            self._watch_block(block)
            for name, module in block.module.named_modules():
                if name:
                    self._watch_module(name, module)
        super().__enter__()
        self.is_open = True
        return self

    def __exit__(self, *exc: Any) -> None:
        self.is_open = False
        super().__exit__(*exc)
        while self._hooks:
            self._hooks.pop().close_if_on_top()  # an interrupt runs no hook behind a forward
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for block, counter, version in self._given:
            if counter._version != version:
                self.once.setdefault(block, "what it is given is changed in place, by itself or behind it")
        self._given.clear()
        self._made.clear()
        self._unseen = None
        self._current = self._outside
        self._module.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is no work of the model: fetching its parameters, say. May be nested."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def profiles(self) -> tuple[BlockCost, ...]:
        """The blocks that ran, in the order in which they ran first; last, under "", what lay outside of them. Waits
        for what was timed.
        """
        self._timings.settle()
        return tuple(calls.cost() for calls in (*self._calls.values(), self._outside))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        begin = self._timings.now() if not self._paused and self._timings.wants(func) else None
        out = func(*args, **kwargs)
        if not self._paused:
            place = self._note(func, args, kwargs, out)
            if begin is not None and place >= 0:
                self._timings.add(self._current, place, begin)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Place of the output in its block; -1: none."""
        flops = _flops(func, args, kwargs, out)
        there = {tensor.untyped_storage()._cdata for tensor in _dense((args, kwargs))}
        made = _dense(out)
        fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in there]
        num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in fresh)
        call = self._current.counter.place(func, args, kwargs)
        place = self._current.add(self._module[-1] if self._module else "", func, flops, num_bytes, call)
        for tensor in fresh if place >= 0 else ():
            storage = tensor.untyped_storage()
            self._made[storage._cdata] = (StorageWeakRef(storage), self._current, place)
        if self._unseen is not None and self._unseen[0] is self._current:
            self._unseen[1].written(_dense(written_tensors(func, args, kwargs)))
            if call is not None and place >= 0:
                self._unseen[1].made(place, fresh)
        return place

    def _saved(self, block: str, tensor: torch.Tensor) -> _Asked:
        with self.paused():
            made = self._made.get(tensor.untyped_storage()._cdata) if _dense(tensor) else None
            if made is not None:
                _, calls, place = made
                calls.outputs[place] = replace(calls.outputs[place], saved=True)
                self._current.saves_own |= calls is self._current
            return _Asked(block, self._pack(tensor))

    def _asked(self, saved: _Asked) -> torch.Tensor:
        backward = torch._C._current_graph_task_id()
        if backward >= 0 and saved.by == backward:
            self.once.setdefault(saved.block, "an autograd function in it asks twice for what it saved")
        saved.by = backward
        return self._unpack(saved.packed)

    def _watch_block(self, block: Block) -> None:
        hooks: list[OpenHooks] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if block.name in self._calls:
                return
            self._current = self._calls[block.name] = _Calls(block.name)
            self._current.took((args, kwargs))
            with self.paused():
                given = map(_counter_of, filter(_counts_changes, tree_leaves((args, kwargs))))
                self._given += ((block.name, counter, counter._version) for counter in given)
            if len(self._calls) == 1:
                self._unseen = self._current, UnseenChanges()
            if self._sees_saves and torch.is_grad_enabled():
                hooks.append(OpenHooks(functools.partial(self._saved, block.name), self._asked))
                hooks[-1].open()
                self._hooks.append(hooks[-1])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._unseen is not None and self._unseen[0] is self._current:
                with self.paused(), torch.no_grad():
                    places = self._unseen[1].found()
                for place in places:
                    self._current.outputs[place] = replace(self._current.outputs[place], call=None)
            self._current = self._outside
            if hooks:
                hooks.pop().close()

        self._handles.append(block.module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(block.module.register_forward_hook(leave, always_call=True))

    def _watch_module(self, name: str, module: nn.Module) -> None:
        def enter(called: nn.Module, args: Any) -> None:
            self._module.append(name)

        def leave(called: nn.Module, args: Any, output: Any) -> None:
            if self._module:
                self._module.pop()

        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave, always_call=True))


def _packet(func: Any) -> Any:
    """An operator of a higher order has no overloads."""
    return getattr(func, "_overloadpacket", func)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """0 where torch's formula does not understand the call: a count must not end a training run."""
    packet = _packet(func)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # torch's table knows only those of CUDA
        query, key, value = args[:3]
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))
    count = flop_registry.get(packet)
    try:
        return int(count(*args, **kwargs, out_val=out)) if count is not None else 0
    except Exception:
        return 0
