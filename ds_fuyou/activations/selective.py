# SPDX-License-Identifier: Apache-2.0
"""Three fates for the outputs of a recomputed block's operators: kept, swapped, or computed again.

The block is a region of ``torch.utils.checkpoint`` (not re-entrant), and this is the pair of contexts that its
``context_fn`` asks for, as ``create_selective_checkpoint_contexts`` makes one for PyTorch's own selective policy. That
one holds what it saves on the device until the region is recomputed; here an output may leave, and come back ahead of
need, by the same way as any saved tensor.

In the recomputation a saved output is handed out instead of running its operator; all others run again, in order. So
results are those of the block without any of this, to the bit: the values are the same, wherever they lay.

[Note: outputs that are changed in place]
An output that the block changes later cannot be handed out, since somebody may have read it before: it is computed
again, and changed again. One case is common and safe: DeepSpeed's linear layer adds the bias to the product. There the
change belongs to the output: what is saved is the complete one, and the recomputation leaves the change out. So an
output is saved when the operator after it is seen, not at once. Of no other function it is known that nobody reads the
output in between, by ``tolist()`` or in a kernel that PyTorch does not see. Changes that PyTorch does not see are
looked for in the first forward of every block after a decision: what is found is computed again in this and in every
other one.

[Note: operators that draw]
An operator that is not run again draws no random numbers, and what draws after it would draw others. PyTorch says
which of its own draw (``calls.py``). Those of other libraries need not say it (flash attention with dropout does not),
so generators are compared around each of their calls that is to be saved: one that has drawn is computed again.

[Note: a forward that differentiates]
A block may take derivatives in its own forward (forces, penalties), for which the region is recomputed while that
still runs. Such a recomputation is of a part, so nothing is compared with it or handed out to it, and it is none of the
forward's calls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_fuyou.activations.calls import CallCounter, OperatorCall, is_foreign, is_view, written_tensors
from ds_fuyou.activations.policy import Fate
from ds_fuyou.activations.repeats import Repeats, WatchingMode
from ds_fuyou.activations.surroundings import SOURCES, RandomSource, are_same
from ds_fuyou.activations.swapper import PACKED, Swapper
from ds_fuyou.activations.unseen import UnseenChanges

__all__ = ["OutputSelection", "RegionOutputs"]

Shapes: TypeAlias = "tuple[torch.Size, ...]"
_LINEAR_LAYER = os.path.join("deepspeed", "runtime", "zero", "linear.py")
_BETWEEN = (__file__, os.path.dirname(torch.__file__) + os.sep)
_OF_HOST = RandomSource(torch.get_rng_state, torch.set_rng_state)


@dataclass(frozen=True)
class _Saved:
    """The outputs of one call (their nested structure, tensors packed), the shapes that went in, and how many changes
    in place are part of the outputs.
    """

    outputs: Any
    inputs: Shapes
    num_completions: int


@dataclass
class _Made:
    """Outputs that were just made, and may yet be completed."""

    call: OperatorCall
    inputs: Shapes
    outputs: Any
    stream: Any
    """On which they are made."""
    num_completions: int = 0

    def is_completed_by(self, written: list[torch.Tensor]) -> bool:
        """Whether a change of these is part of making the output: see [Note: outputs that are changed in place]."""
        return (
            not torch.is_grad_enabled()
            and isinstance(self.outputs, torch.Tensor)
            and len(written) == 1
            and _address(written[0]) == _address(self.outputs)
            and _is_of_linear_layer()
        )


def _is_of_linear_layer() -> bool:
    """Whether the operator that is about to run is called by DeepSpeed's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith(_LINEAR_LAYER)


class OutputSelection:
    """What to do with each output in every forward of one block; calls that are not named are computed again.

    ``draws``: random numbers of a device with memory of its own.
    """

    def __init__(self, swapper: Swapper, fates: Mapping[OperatorCall, Fate], draws: RandomSource | None = None) -> None:
        self._swapper, self._draws = swapper, draws
        self._fates = {call: fate for call, fate in fates.items() if fate is not Fate.RECOMPUTE}
        self._is_looked_at = False

    def region(self, repeats: Repeats | None) -> RegionOutputs:
        """For one forward of the block. ``repeats``: is told of outputs that are computed again."""
        found = None if self._is_looked_at else self._found
        return RegionOutputs(self._swapper, self._fates, self._draws, found, repeats)

    def _found(self, changed: set[OperatorCall]) -> None:
        """In the first forward: outputs of these calls are changed unseen."""
        self._is_looked_at = True
        self._fates = {call: fate for call, fate in self._fates.items() if call not in changed}


class RegionOutputs:
    """Outputs that one forward of a block saved. They live as long as the graph that may need them. ``found``: is told
    which are changed unseen; None: nobody looks.
    """

    def __init__(
        self,
        swapper: Swapper,
        fates: Mapping[OperatorCall, Fate],
        draws: RandomSource | None,
        found: Callable[[set[OperatorCall]], None] | None,
        repeats: Repeats | None,
    ) -> None:
        self._swapper = swapper
        self.repeats = repeats
        self._fates = fates
        self._found = found
        self._unseen: UnseenChanges[OperatorCall] | None = None if found is None else UnseenChanges()
        self._sources = (_OF_HOST, *SOURCES, *([] if draws is None else [draws]))
        self._saved: dict[OperatorCall, _Saved] = {}
        self._by_storage: dict[int, OperatorCall] = {}
        self._made: _Made | None = None
        self._begun_at = swapper.num_moved
        self.counts: dict[str, int] = {}
        self.forward_is_over = self.is_recomputed_within = False
        """One runs while the forward does: see [Note: a forward that differentiates]."""

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the ``context_fn`` of a checkpoint: around the forward, and around every recomputation."""
        return _Forward(self), _Recomputation(self)

    def wants(self, call: OperatorCall) -> bool:
        return call in self._fates

    def random_states(self) -> list[Any]:
        """Of the generators that operators draw from."""
        return [source.read() for source in self._sources]

    def made(self, call: OperatorCall, inputs: Shapes, outputs: Any) -> None:
        """A wanted call has just run."""
        self._made = _Made(call, inputs, outputs, self._swapper.current_stream())
        if self._unseen is not None:
            self._unseen.made(call, _tensors(outputs))

    def changed(self, written: list[torch.Tensor]) -> None:
        """An operator has just changed these in place."""
        if self._unseen is not None:
            self._unseen.written(written)

    def changes(self, written: list[torch.Tensor]) -> None:
        """An operator that is no view is about to run, and changes these in place.

        Raises:
            FuyouStorageError: what was made before it could not be moved.
        """
        if self._made is not None and self._made.is_completed_by(written):
            self._made.num_completions += 1
            self._made.stream = self._swapper.current_stream()
            return
        self.save()
        for tensor in written:
            call = self._by_storage.pop(_address(tensor), None)
            if call is not None:
                self._saved.pop(call, None)

    def save(self) -> None:
        """Saves what was made last, if anything. Raises what moving a tensor may raise."""
        made, self._made = self._made, None
        if made is None:
            return
        fate = self._fates[made.call]
        for tensor in _tensors(made.outputs):
            self._by_storage[_address(tensor)] = made.call
        # The operator that ends the waiting may be one of ZeRO's own, on a stream that gathers.
        with self._swapper.on_stream(made.stream):
            packed = tree_map_only(
                torch.Tensor, lambda tensor: self._swapper.pack_output(tensor, fate, self._begun_at), made.outputs
            )
        self._saved[made.call] = _Saved(packed, made.inputs, made.num_completions)

    def end_forward(self, counts: dict[str, int], *, has_ended: bool) -> None:
        """``has_ended``: else something was raised in it, and another forward is looked at."""
        self.counts, self.forward_is_over = counts, True
        self._by_storage.clear()
        unseen, self._unseen = self._unseen, None
        if has_ended and unseen is not None and self._found is not None:
            changed = unseen.found()
            self._found(changed)
            for call in changed:
                self._saved.pop(call, None)

    def take(self, call: OperatorCall, inputs: Shapes) -> tuple[Any, int] | None:
        """The saved outputs of the call, and how many changes in place are in them; None if it has to run.

        Raises:
            RuntimeError: the recomputation does something else than the forward did.
        """
        saved = self._saved.get(call)
        if saved is None:
            return None
        if saved.inputs != inputs:
            raise RuntimeError(
                f"a recomputed block must do what it did in forward: call {call.occurrence} of {call.operator} had "
                f"inputs of shapes {[tuple(size) for size in saved.inputs]} and has {[tuple(size) for size in inputs]} "
                f"now. Set activations.mode to swap"
            )
        if not all(self._swapper.is_intact(packed) for packed in _packed(saved.outputs)):
            del self._saved[call]  # changed in place after the block had ended: the value of then is gone
            return None
        return tree_map_only(PACKED, self._swapper.unpack_output, saved.outputs), saved.num_completions

    def come(self) -> None:
        """Backward is about to need all of it."""
        packed = [item for saved in self._saved.values() for item in _packed(saved.outputs)]
        self._swapper.read_ahead(packed)


class _Forward(WatchingMode):
    def __init__(self, region: RegionOutputs) -> None:
        super().__init__()
        self._region = region
        self._calls = CallCounter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if self._region.is_recomputed_within:
            return func(*args, **named)
        written: list[torch.Tensor] = []
        if not is_view(func):
            written = written_tensors(func, args, named)
            self._region.changes(written)
        call = self._calls.place(func, args, named)
        if call is None or not self._region.wants(call):
            outputs = func(*args, **named)
            self._region.changed(written)
            if call is not None and self._region.repeats is not None:
                self._region.repeats.made(func, call, outputs)
            return outputs
        before = self._region.random_states() if is_foreign(func) else []
        outputs = func(*args, **named)
        after = self._region.random_states() if before else []
        if all(map(are_same, before, after)):
            self._region.made(call, _shapes(args), outputs)
        return outputs

    def __exit__(self, kind: Any, *exc: Any) -> None:
        super().__exit__(kind, *exc)
        if kind is None:
            self._region.save()
        self._region.end_forward(self._calls.counts(), has_ended=kind is None)


class _Recomputation(WatchingMode):
    def __init__(self, region: RegionOutputs) -> None:
        super().__init__()
        self._region = region
        self._calls = CallCounter()
        self._complete: dict[int, int] = {}  # address of a storage → changes in place that it has behind it already

    def __enter__(self) -> Any:
        self._region.is_recomputed_within = not self._region.forward_is_over
        self._calls.restart()
        self._complete.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if self._region.is_recomputed_within:
            return func(*args, **named)
        for tensor in written_tensors(func, args, named):
            left = self._complete.get(_address(tensor), 0)
            if left > 0:
                self._complete[_address(tensor)] = left - 1
                return tensor
        call = self._calls.place(func, args, named)
        taken = None if call is None else self._region.take(call, _shapes(args))
        if taken is None:
            outputs = func(*args, **named)
            if call is not None and self._region.repeats is not None:
                self._region.repeats.made_again(call, outputs)
            return outputs
        outputs, num_completions = taken
        if num_completions:
            self._complete[_address(outputs)] = num_completions
        return outputs

    def __exit__(self, kind: Any, *exc: Any) -> None:
        super().__exit__(kind, *exc)
        if self._region.is_recomputed_within:
            self._region.is_recomputed_within = False
            return
        counts = self._calls.counts()
        if kind is None and counts != self._region.counts:
            names = sorted({*counts, *self._region.counts})
            differ = [n for n in names if counts.get(n, 0) != self._region.counts.get(n, 0)]
            raise RuntimeError(
                f"a recomputed block must do what it did in forward: {differ[0]} ran "
                f"{self._region.counts.get(differ[0], 0)} times then and {counts.get(differ[0], 0)} times now. Set "
                f"activations.mode to swap"
            )
        if kind is None and self._region.repeats is not None:
            self._region.repeats.tell()


def _address(tensor: torch.Tensor) -> int:
    """Of the tensor's storage, of the tensor where it has none, as a sparse one; its own while it lives."""
    has_storage = tensor.layout == torch.strided and not tensor._is_zerotensor()
    return tensor.untyped_storage()._cdata if has_storage else id(tensor)


def _shapes(args: tuple[Any, ...]) -> Shapes:
    return tuple(tensor.shape for tensor in _tensors(args))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _packed(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, PACKED)]
