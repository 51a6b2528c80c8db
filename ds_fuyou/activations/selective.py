# SPDX-License-Identifier: Apache-2.0
"""Three fates for the outputs of a recomputed block's operators: kept, swapped, or computed again.

The block is a region of ``torch.utils.checkpoint`` (not re-entrant), and this is the pair of contexts that its
``context_fn`` asks for, as ``create_selective_checkpoint_contexts`` makes one for PyTorch's own selective policy. That
one holds what it saves on the device until the region is recomputed; here an output may leave, and come back ahead of
need, by the same way as any saved tensor.

In the recomputation a saved output is handed out instead of running its operator; all others run again, in order. So
results are those of the block without any of this, to the bit: the values are the same, wherever they lay.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_fuyou.activations.calls import CallCounter, OperatorCall, written_tensors
from ds_fuyou.activations.policy import Fate
from ds_fuyou.activations.swapper import PACKED, Swapper

__all__ = ["OutputSelection", "RegionOutputs"]

Shapes: TypeAlias = "tuple[torch.Size, ...]"


@dataclass(frozen=True)
class _Saved:
    """The outputs of one call (their nested structure, tensors packed), and the shapes that went in."""

    outputs: Any
    inputs: Shapes


class OutputSelection:
    """What to do with each output in every forward of one block; calls that are not named are computed again."""

    def __init__(self, swapper: Swapper, fates: Mapping[OperatorCall, Fate]) -> None:
        self._swapper = swapper
        self._fates = {call: fate for call, fate in fates.items() if fate is not Fate.RECOMPUTE}

    def region(self) -> RegionOutputs:
        """For one forward of the block."""
        return RegionOutputs(self._swapper, self._fates)


class RegionOutputs:
    """Outputs that one forward of a block saved. They live as long as the graph that may need them."""

    def __init__(self, swapper: Swapper, fates: Mapping[OperatorCall, Fate]) -> None:
        self._swapper = swapper
        self._fates = fates
        self._saved: dict[OperatorCall, _Saved] = {}
        self._by_storage: dict[int, OperatorCall] = {}
        self.counts: dict[str, int] = {}

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the ``context_fn`` of a checkpoint: around the forward, and around every recomputation."""
        return _Forward(self), _Recomputation(self)

    def save(self, call: OperatorCall, inputs: Shapes, outputs: Any) -> None:
        """The call has just run. Raises what moving a tensor may raise."""
        fate = self._fates.get(call)
        if fate is None:
            return
        for tensor in _tensors(outputs):
            self._by_storage[tensor.untyped_storage()._cdata] = call
        packed = tree_map_only(torch.Tensor, lambda tensor: self._swapper.pack_output(tensor, fate), outputs)
        self._saved[call] = _Saved(packed, inputs)

    def changed(self, tensors: list[torch.Tensor]) -> None:
        """These are about to be changed in place: an output among them must be computed again, and changed again."""
        for tensor in tensors:
            call = self._by_storage.pop(tensor.untyped_storage()._cdata, None)
            if call is not None:
                self._saved.pop(call, None)

    def end_forward(self, counts: dict[str, int]) -> None:
        self.counts = counts
        self._by_storage.clear()

    def take(self, call: OperatorCall, inputs: Shapes) -> Any:
        """The saved outputs of the call, or None if it has to run.

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
        return tree_map_only(PACKED, self._swapper.unpack_output, saved.outputs)

    def come(self) -> None:
        """Backward is about to need all of it."""
        packed = [item for saved in self._saved.values() for item in _packed(saved.outputs)]
        self._swapper.read_ahead(packed)


class _Forward(TorchDispatchMode):
    def __init__(self, region: RegionOutputs) -> None:
        super().__init__()
        self._region = region
        self._calls = CallCounter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        self._region.changed(written_tensors(func, args, named))
        call = self._calls.place(func, args, named)
        outputs = func(*args, **named)
        if call is not None:
            self._region.save(call, _shapes(args), outputs)
        return outputs

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._region.end_forward(self._calls.counts())


class _Recomputation(TorchDispatchMode):
    def __init__(self, region: RegionOutputs) -> None:
        super().__init__()
        self._region = region
        self._calls = CallCounter()

    def __enter__(self) -> Any:
        self._calls.restart()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        call = self._calls.place(func, args, named)
        outputs = None if call is None else self._region.take(call, _shapes(args))
        return func(*args, **named) if outputs is None else outputs

    def __exit__(self, kind: Any, *exc: Any) -> None:
        super().__exit__(kind, *exc)
        counts = self._calls.counts()
        if kind is None and counts != self._region.counts:
            names = sorted({*counts, *self._region.counts})
            differ = [n for n in names if counts.get(n, 0) != self._region.counts.get(n, 0)]
            raise RuntimeError(
                f"a recomputed block must do what it did in forward: {differ[0]} ran "
                f"{self._region.counts.get(differ[0], 0)} times then and {counts.get(differ[0], 0)} times now. Set "
                f"activations.mode to swap"
            )


def _shapes(args: tuple[Any, ...]) -> Shapes:
    return tuple(tensor.shape for tensor in _tensors(args))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _packed(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, PACKED)]
