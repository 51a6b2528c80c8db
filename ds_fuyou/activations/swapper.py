# SPDX-License-Identifier: Apache-2.0
"""Autograd's saved-tensor hooks: what is saved becomes a handle, and the handle becomes a tensor again in backward."""

from __future__ import annotations

import bisect
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_fuyou.activations.parameters import ParameterIndex, SavedParameter
from ds_fuyou.activations.policy import Fate
from ds_fuyou.activations.records import CHANGED, HeldBytes, Record
from ds_fuyou.activations.tier import SwapTier
from ds_fuyou.activations.views import (
    ALIGN_BYTES,
    ByteRange,
    ViewSpec,
    alias_of,
    byte_view,
    byte_view_within,
    is_movable,
)
from ds_fuyou.host.compute_clock import ComputeClock, HostClock, Phase
from ds_fuyou.host.run_ahead import RunAhead
from ds_fuyou.log import log_once

__all__ = ["PACKED", "KeptTensor", "MovedTensor", "Packed", "Swapper", "Tape"]

SOON = 32
"""So many records, and so many bytes as the tier says, are copied to a device before backward asks for them."""


class KeptTensor:
    """A saved tensor that stays where it is. Refuses to come back changed, as autograd does without hooks."""

    __slots__ = ("__weakref__", "_held", "_num_bytes", "_tensor", "_version", "block", "has_history")

    def __init__(self, tensor: torch.Tensor, held: HeldBytes, num_bytes: int, block: str = "") -> None:
        self.block, self.has_history = block, tensor.requires_grad
        self._tensor = alias = alias_of(tensor)  # without history: the node that owns us must not own itself
        self._version = alias._version
        self._held, self._num_bytes = held, num_bytes
        if num_bytes:
            held.add(num_bytes)

    def is_intact(self) -> bool:
        return self._tensor._version == self._version

    def value(self) -> torch.Tensor:
        if not self.is_intact():
            raise RuntimeError(
                f"a saved tensor of shape {tuple(self._tensor.shape)}: {CHANGED} (it is at version "
                f"{self._tensor._version}, expected {self._version})"
            )
        return self._tensor

    def __del__(self) -> None:
        if self._num_bytes:
            self._held.add(-self._num_bytes)


@dataclass(eq=False)
class Tape:
    """What one forward moved, in the order of saving. Backward needs it in reverse."""

    records: list[weakref.ref[Record]] = field(default_factory=list)
    ahead: int = -1  # everything from here upwards was thought of
    last: int = -1  # the place that backward asked for last
    task: int = -2  # of which backward; none has this number

    def before(self, place: int) -> Iterator[Record]:
        """Living records below ``place``, the soonest needed first, from where reading ahead stopped."""
        task = torch._C._current_graph_task_id()
        if task != self.task or place - self.last > SOON:  # backward begins, or again; a node may ask in any order
            self.ahead = place
        self.last, self.task = place, task
        self.ahead = min(self.ahead, place)
        while self.ahead > 0:
            record = self.records[self.ahead - 1]()
            if record is not None:
                yield record
            self.ahead -= 1

    def soon(self, place: int) -> Iterator[Record]:
        """Living records below ``place``, the soonest needed first."""
        for reference in reversed(self.records[max(0, place - SOON) : place]):
            record = reference()
            if record is not None:
                yield record


@dataclass(eq=False, slots=True)
class MovedTensor:
    """A view of a record, of which byte 0 is byte ``begin`` of the storage it was taken from."""

    record: Record
    view: ViewSpec
    begin: int
    tape: Tape
    place: int
    block: str


Packed: TypeAlias = "KeptTensor | MovedTensor | SavedParameter"
PACKED = (KeptTensor, MovedTensor, SavedParameter)


@dataclass(frozen=True)
class _Moved:
    """Entry of the table of storages. The weak reference to the storage pins its identity: no other storage can get
    the same address while the entry exists. A version is that of a tensor and its views. There are tensors in one
    storage that are no views of another and have versions of their own (``unsafe_chunk``, in the cells of recurrent
    networks): ``part`` is such a tensor, None what has the storage for itself.
    """

    storage: StorageWeakRef
    part: ViewSpec | None
    span: ByteRange
    record: weakref.ref[Record]
    place: int
    tape: Tape


_GIVE_BACK_NOTHING = {"LinearFunctionForZeroStage3Backward", "CheckpointFunctionBackward"}


def _may_give_back(node: Any) -> bool:
    """Whether what this node is given may become a gradient as it is: of operators PyTorch has none that does, of
    functions written in Python many are large, and two are known. A tensor with a history autograd puts into another
    object, which nobody can keep an owner of: so it must not be the script's own memory.
    """
    is_written_in_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    return is_written_in_python and type(node).__name__ not in _GIVE_BACK_NOTHING


def _feeds_a_leaf() -> bool:
    """Whether a leaf takes what the node that runs returns. For all others copies would be of every kernel's inputs."""
    node: Any = torch._C._current_autograd_node()
    return any(type(each).__name__ == "AccumulateGrad" for each, _ in node.next_functions)


def _has_other_owners(value: torch.Tensor) -> bool:
    """Of its memory, beside this tensor and the object that is asked."""
    return torch._C._storage_Use_Count(value.untyped_storage()._cdata) > 2


class _OfStorage:
    """What was moved of one storage at one version, by part: found again by place, however many slices there are."""

    def __init__(self) -> None:
        self._begins: dict[ViewSpec | None, list[int]] = {}
        self._entries: dict[ViewSpec | None, list[_Moved]] = {}
        self._longest = 0

    def add(self, moved: _Moved) -> None:
        begins = self._begins.setdefault(moved.part, [])
        place = bisect.bisect(begins, moved.span.begin)
        begins.insert(place, moved.span.begin)
        self._entries.setdefault(moved.part, []).insert(place, moved)
        self._longest = max(self._longest, moved.span.num_bytes)

    def covering(self, part: ViewSpec | None, span: ByteRange) -> Iterator[_Moved]:
        begins = self._begins.get(part, [])
        first = bisect.bisect_left(begins, span.end - self._longest)
        for moved in self._entries.get(part, [])[first : bisect.bisect(begins, span.begin)]:
            if moved.span.covers(span):
                yield moved


class Swapper:
    """Pack and unpack hooks of one model.

    Args:
        parameters: recognises parameters, which are never moved.
        resident: storages (by address of their StorageImpl) that stay on the device anyway: the model's buffers.
        smallest_bytes: tensors that cover less stay on the device.
        tier: None where nothing is ever moved: the device is the host, and host memory is the tier.
        clock: told of what the device may have to wait for.
        ahead: told of what comes back, which backward lets go at once; None: the device is the host.
    """

    def __init__(
        self,
        tier: SwapTier | None,
        parameters: ParameterIndex,
        *,
        device: torch.device,
        smallest_bytes: int = 64 * 1024,
        resident: Callable[[], Collection[int]] = frozenset,
        clock: ComputeClock | None = None,
        ahead: RunAhead | None = None,
    ) -> None:
        self.tier = tier
        self._ahead = ahead
        self._told_bytes = 0  # to it
        self.clock = clock if clock is not None else HostClock()
        self.parameters = parameters
        self.held = tier.held if tier is not None else HeldBytes()
        self.kept = HeldBytes(self.held)  # of what could have been moved
        self.block = ""
        self.fates: Mapping[str, Fate] | None = None
        """Of what each block saves, "" for what lies around blocks; what is not named is kept. None: all is swapped."""
        self.room_bytes = math.inf
        """Of the device, for all that forward leaves there: a choice to keep holds as long as there is room, and what
        leaves is waited for."""
        self.keeps_what_storage_refuses = False
        self.blocks_begin: Callable[[], None] | None = None
        """Told once, when backward asks for the first of what a block saved."""
        self._in_forward = self._in_backward = False
        self._forward_task = -1  # the backward that forward runs within; -1: none
        self._asked = (-1, -1)  # by which node of which backward
        self._handed: list[torch.Tensor] = []  # to it
        self.num_saved_parameters = 0
        self.saved_bytes: Counter[str] = Counter()  # of what is large enough to be moved, by block, since the start
        self._device = device
        self._smallest_bytes = smallest_bytes
        self._resident_of = resident
        self._resident: Collection[int] = frozenset()
        self._moved: dict[tuple[int, int], _OfStorage] = {}
        self._kept: dict[tuple[int, int], weakref.ref[KeptTensor]] = {}
        self._tape = Tape()

    def begin_forward(self) -> None:
        """A forward begins: its records are a tape of their own. What was moved before is moved anew: versions do not
        tell of what came past PyTorch, as a batch that other code, or another process, writes to the same memory.
        """
        self._tape = Tape()
        self.block = ""
        self._in_forward, self._in_backward = True, False
        self._forward_task = torch._C._current_graph_task_id()
        self._handed.clear()
        self._resident = self._resident_of()
        self._moved = {}
        self._kept = {key: kept for key, kept in self._kept.items() if kept() is not None}
        if self.tier is not None:
            self.tier.poll()

    def end_forward(self) -> None:
        """What is saved from here on is of the script's loss, until backward begins."""
        self._in_forward = False

    # ---- pack ---------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Packed:
        """The hook that autograd calls for every tensor it saves. Raises what moving it may raise.

        Once backward has begun, what is saved is for second derivatives, or no part of this training: it stays. (One
        within the model's forward, as of forces by positions, is another one; that forward itself is within one where
        the model is checkpointed whole, re-entrantly.)
        """
        is_late = self._in_backward or torch._C._current_graph_task_id() != self._forward_task
        if is_late or not is_movable(tensor, self._device):
            return KeptTensor(tensor, self.held, 0)
        saved = self.parameters.find(tensor)
        if saved is not None:
            self.num_saved_parameters += 1
            return saved
        root = tensor if tensor._base is None else tensor._base
        if type(root) is not torch.Tensor and isinstance(root, torch.nn.Parameter):  # of the script, and there
            return KeptTensor(tensor, self.held, 0)
        storage = tensor.untyped_storage()
        if storage._cdata in self._resident:
            return KeptTensor(tensor, self.held, 0)
        storage_bytes = storage.nbytes()
        if storage_bytes < self._smallest_bytes:
            return KeptTensor(tensor, self.held, min(storage_bytes, tensor.nbytes))
        view = ViewSpec.of(tensor)
        span = view.bytes()
        if span.num_bytes < self._smallest_bytes:
            return self._copy_small(tensor, view, span)
        fate = Fate.SWAP if self.fates is None else self.fates.get(self.block, Fate.KEEP)
        return self._move(tensor, view, span, storage, fate)

    @property
    def num_moved(self) -> int:
        """Records so far: where a block begins."""
        return self.tier.num_saved if self.tier is not None else 0

    def current_stream(self) -> Any:
        """Of the device; None where it is the host."""
        return self.tier.copies.current_stream() if self.tier is not None else None

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, what is moved was made on ``stream``."""
        return self.tier.copies.on_stream(stream) if self.tier is not None else nullcontext()

    def pack_output(self, tensor: torch.Tensor, fate: Fate, begun_at: int) -> Packed:
        """An operator's output that a recomputation will not compute again; no parameter, and not saved by autograd.
        ``begun_at``: :attr:`num_moved` when the block began.
        """
        if not is_movable(tensor, self._device):
            return KeptTensor(tensor, self.held, 0)
        view = ViewSpec.of(tensor)
        span = view.bytes()
        if span.num_bytes < self._smallest_bytes:
            return KeptTensor(tensor, self.held, span.num_bytes)
        return self._move(tensor, view, span, tensor.untyped_storage(), fate, begun_at)

    def _copy_small(self, tensor: torch.Tensor, view: ViewSpec, span: ByteRange) -> Packed:
        """A small part of something large stays as a copy that does not hold on to the rest."""
        if span.num_bytes > 0:
            begin = span.begin // ALIGN_BYTES * ALIGN_BYTES
            tensor = view.over(byte_view(tensor, ByteRange(begin, span.end)).clone(), begin)
        return KeptTensor(tensor, self.held, span.num_bytes)

    def _move(
        self,
        tensor: torch.Tensor,
        view: ViewSpec,
        span: ByteRange,
        storage: Any,
        fate: Fate,
        made_after: int | None = None,
    ) -> Packed:
        key = (storage._cdata, tensor._version)
        if fate is Fate.KEEP and self._is_kept(key):
            return KeptTensor(tensor, self.held, 0, self.block)
        base, root, whole = tensor._base, view, span
        if base is not None and base.layout == torch.strided and not base.is_nested:
            root = ViewSpec.of(base)
            whole = root.bytes()
        part = root if whole.num_bytes < storage.nbytes() else None
        known = self._moved.get(key)
        for entry in known.covering(part, span) if known is not None else ():
            record = entry.record()
            if record is not None:
                return MovedTensor(record, view, entry.span.begin, entry.tape, entry.place, self.block)
        is_small_part = span.num_bytes * 2 < whole.num_bytes
        if is_small_part or not whole.covers(span):  # take no more than that
            whole = span
        whole = ByteRange(whole.begin // ALIGN_BYTES * ALIGN_BYTES, whole.end)
        if self.tier is None or (fate is Fate.KEEP and self._has_room(self.tier, whole.num_bytes)):
            return self._keep(key, tensor, whole.num_bytes)
        if self.keeps_what_storage_refuses and not self.tier.has_storage_for(whole.num_bytes):
            log_once(
                logging.WARNING,
                "storage has no room for swapped activations beside the states: what does not fit stays on the device. "
                "Free space, raise nvme_budget_bytes, or use smaller batches",
                on_any_rank=True,
            )
            return self._keep(key, tensor, whole.num_bytes)
        alias = alias_of(tensor)
        version = alias._version
        with self.clock.within(Phase.ACTIVATIONS):  # where the device is full of what leaves it, the host waits
            record = self.tier.put(
                byte_view_within(alias, whole),
                self._name(tensor),
                lambda: alias._version == version,
                made_after=made_after,
                room_bytes=self.room_bytes,
            )
        if record is None:
            log_once(
                logging.WARNING,
                f"host memory for swapped activations ({self.tier.arena_bytes} bytes) is full and there is no storage "
                f"behind it: what does not fit stays on the device. Raise dram_budget_bytes, or name an nvme_path",
                on_any_rank=True,
            )
            return self._keep(key, tensor, whole.num_bytes)
        self.saved_bytes[self.block] += whole.num_bytes
        tape, place = self._tape, len(self._tape.records)
        tape.records.append(weakref.ref(record))
        moved = _Moved(StorageWeakRef(storage), part, whole, weakref.ref(record), place, tape)
        self._moved.setdefault(key, _OfStorage()).add(moved)
        return MovedTensor(record, view, whole.begin, tape, place, self.block)

    def _is_kept(self, key: tuple[int, int]) -> bool:
        known = self._kept.get(key)
        return known is not None and known() is not None

    def _has_room(self, tier: SwapTier, num_bytes: int) -> bool:
        """Batches may be larger than those that the choice to keep was made for."""
        if self.held.now + num_bytes <= self.room_bytes:
            return True
        with self.clock.within(Phase.ACTIVATIONS):
            return tier.let_leave(num_bytes, self.room_bytes)

    def _keep(self, key: tuple[int, int], tensor: torch.Tensor, num_bytes: int) -> KeptTensor:
        """What several operators save is on the device once, and counts once."""
        if self._is_kept(key):
            return KeptTensor(tensor, self.held, 0, self.block)
        self.saved_bytes[self.block] += num_bytes
        kept = KeptTensor(tensor, self.kept, num_bytes, self.block)
        self._kept[key] = weakref.ref(kept)
        return kept

    def _name(self, tensor: torch.Tensor) -> str:
        return f"an activation of {self.block or 'the model outside of its blocks'} {tuple(tensor.shape)}"

    # ---- unpack -------------------------------------------------------------------------------------------

    def unpack(self, packed: Packed) -> torch.Tensor:
        """The hook that autograd calls when it needs the tensor. Raises what bringing it back may raise."""
        self._in_backward = not self._in_forward
        is_moved = isinstance(packed, MovedTensor)
        is_given_back = not is_moved and _may_give_back(torch._C._current_autograd_node())
        if self._handed or is_moved or is_given_back:
            self._note_who_asks()
        if self.blocks_begin is not None and not isinstance(packed, SavedParameter) and packed.block:
            told, self.blocks_begin = self.blocks_begin, None
            told()
        value = self._value(packed)
        if is_given_back and _has_other_owners(value):
            if isinstance(packed, KeptTensor) and packed.has_history and _feeds_a_leaf():
                value = value.clone()
            else:
                self._handed.append(value)
        if isinstance(packed, MovedTensor) and self.tier is not None:
            self._handed.append(value)
            self.tier.read_ahead(packed.tape.before(packed.place), packed.tape.soon(packed.place))
            self._let_go(self.tier)
        return value

    def _note_who_asks(self) -> None:
        """What a node was given keeps an owner until another one asks. A leaf takes a gradient that nobody else has as
        its own, and later ones are added to it in place: of a function that gives back what it had saved that would be
        memory of other nodes', or the script's. The leaf's turn comes at once.
        """
        task, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        asks = (task, -1 if node is None else node._sequence_nr())
        if asks == self._asked:
            return
        self._handed.clear()
        if task >= 0 and task != self._asked[0]:
            queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback
            queue_callback(self._handed.clear)
        self._asked = asks

    def _let_go(self, tier: SwapTier) -> None:
        if self._ahead is not None:
            told, self._told_bytes = self._told_bytes, tier.counters.in_bytes
            self._ahead.let_go(self._told_bytes - told)

    def _value(self, packed: Packed) -> torch.Tensor:
        if isinstance(packed, KeptTensor):
            return packed.value()
        if isinstance(packed, SavedParameter):
            return self._parameter(packed)
        if isinstance(packed, MovedTensor) and self.tier is not None:
            with self.clock.within(Phase.ACTIVATIONS):
                values = self.tier.take(packed.record)
            if packed.record.source is not None and _may_give_back(torch._C._current_autograd_node()):
                return packed.view.over(values.clone(), packed.begin)
            return packed.view.within(values, packed.begin)
        raise TypeError(f"a saved tensor came back as {type(packed).__name__}")

    def is_intact(self, packed: Packed) -> bool:
        """Whether the value at the time of saving can still be had."""
        if isinstance(packed, KeptTensor):
            return packed.is_intact()
        return not isinstance(packed, MovedTensor) or self.tier is None or self.tier.is_intact(packed.record)

    def unpack_output(self, packed: Packed) -> torch.Tensor:
        """A tensor object of its own each time: autograd will write a history to it."""
        return self._value(packed).detach()

    def read_ahead(self, packed: Sequence[Packed]) -> None:
        """A recomputation is about to ask for these, in this order; backward then for what was saved before them."""
        moved = [item for item in packed if isinstance(item, MovedTensor)]
        if self.tier is not None and moved:
            records = [item.record for item in moved]
            first = min(moved, key=lambda item: item.place)
            self.tier.read_ahead(chain(records, first.tape.before(first.place)), records)
            self._let_go(self.tier)

    def _parameter(self, saved: SavedParameter) -> torch.Tensor:
        values, view = self.parameters.values(saved), saved.view
        if saved.cast is not None:
            values = values.to(saved.cast)
        offset = values.storage_offset() + view.offset_bytes // view.dtype.itemsize
        return values.as_strided(view.size, view.stride, offset)
