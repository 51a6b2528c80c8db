# SPDX-License-Identifier: Apache-2.0
"""How long forwards and backwards of a step took, what went in, and once: what every operator made."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ds_fuyou.activations.blocks import Block
from ds_fuyou.host.compute_clock import ComputeClock, Phase
from ds_fuyou.host.device import Device
from ds_fuyou.host.outermost_call import OutermostCall
from ds_fuyou.planner.hardware import ThreadSecs
from ds_fuyou.planner.profile import BlockCost
from ds_fuyou.profiling.operators import OperatorRecorder, SavedHooks

__all__ = ["StepClock", "StepTimes"]


@dataclass(frozen=True)
class StepTimes:
    """Seconds of all forwards and backwards of a step without the waits in them, by the rank's clock; ``num_elements``
    of a micro-batch; ``thread``: what threads did themselves of a micro-batch, and between its last backward and the
    step's end; ``outside_secs``: the script's own, since the end of the step before.
    """

    num_forwards: int
    forward_secs: float
    backward_secs: float
    num_elements: float
    thread: ThreadSecs
    outside_secs: float


class StepClock:
    """Watches the model's forwards in training for the rank's clock. Used by the training thread alone."""

    def __init__(self, model: nn.Module, clock: ComputeClock, device: Device | None = None) -> None:
        self._model = weakref.ref(model)
        self._clock, self._device = clock, device
        self._since: tuple[tuple[float, float], ...] = ()
        self.recorder: OperatorRecorder | None = None
        """Of the recorded forward, until :meth:`recorded` takes it."""
        self.shape: tuple[int, ...] = ()
        """Of a micro-batch of the last step: the mean of all, where they have as many dimensions."""
        self.recorded_elements = 0
        """Of the forward that was recorded last."""
        self._wanted: tuple[Sequence[Block], SavedHooks | None, bool] | None = None
        self._is_open = False  # a forward in training, until it ends or is known to have been interrupted
        self._outermost = OutermostCall()
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(torch.compiler.disable(self._enter), with_kwargs=True),
            model.register_forward_hook(torch.compiler.disable(self._leave), always_call=True),
        ]
        self._reset()

    def _reset(self) -> None:
        self._shapes: list[tuple[int, ...]] = []
        self._since = self._secs()
        self._outside_secs = self._clock.secs(Phase.OUTSIDE)

    def _secs(self) -> tuple[tuple[float, float], ...]:
        """Of forward, of backward, and of what is neither: the rank's clock's and the threads' own."""
        clock = self._clock
        phases = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
        return tuple((clock.secs(phase), clock.thread_secs(phase)) for phase in phases)

    def record_next(self, blocks: Sequence[Block], hooks: SavedHooks | None, *, even_compiled: bool) -> None:
        """The next forward tells what its operators make. Compiled code need not reach a dispatch mode operator by
        operator, so its FLOPs may be too few; what goes into blocks, and which of them cannot be computed again, is
        seen all the same.
        """
        self._wanted = (blocks, hooks, even_compiled)

    def recorded(self) -> tuple[tuple[BlockCost, ...], dict[str, str]]:
        """What the recorded forward made, and which of its blocks cannot be computed again (:class:`OperatorRecorder`);
        empty if there was none. Forgotten afterwards.
        """
        recorder, self.recorder = self.recorder, None
        return ((), {}) if recorder is None else (recorder.profiles(), recorder.once)

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._outermost.enter():
            return
        self._undo_interrupted()
        if not (torch.is_grad_enabled() and model.training):
            return
        if not self._shapes:
            self._since = self._secs()  # what the last step did after its end is not this one's
        self._shapes.append(_shape_of((args, kwargs)))
        if self._wanted is not None and model is self._model():  # a deep copy has the hooks, too
            blocks, hooks, even_compiled = self._wanted
            if even_compiled or not _is_compiled(model):
                self.recorded_elements = math.prod(self._shapes[-1])
                self.recorder = OperatorRecorder(blocks, hooks, sees_saves=hooks is not None, device=self._device)
                self.recorder.__enter__()
        self._is_open = True
        self._clock.enter(Phase.FORWARD)

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._outermost.leave() or not self._is_open:
            return
        self._is_open = False
        if model is self._model():
            self._wanted = None
        self._close_recorder()
        self._clock.enter(Phase.BACKWARD)

    def _undo_interrupted(self) -> None:
        """A forward that Ctrl-C ended is as if it had not begun."""
        if not self._is_open:
            return
        self._is_open = False
        if self._clock.phase is Phase.FORWARD:
            self._clock.enter(Phase.OUTSIDE)
        self._clock.settle(wait=True)
        self._shapes.pop()
        if self.recorder is not None and self.recorder.is_open:
            self._close_recorder()
            self.recorder = None

    def _close_recorder(self) -> None:
        if self.recorder is not None and self.recorder.is_open:
            self.recorder.__exit__(None, None, None)

    def backward_ended(self) -> None:
        """All gradients of a micro-batch have arrived. The script's loss counts too."""
        if self._clock.phase is Phase.BACKWARD:
            self._clock.enter(Phase.OUTSIDE)

    def end_step(self, *, wait: bool = False) -> StepTimes:
        """The step's times; a new step begins. What the device has not done yet counts in the next step, unless
        ``wait`` says that the host waits for it.
        """
        self._undo_interrupted()
        self._clock.settle(wait=wait)
        self._outermost.forget()
        count = max(1, len(self._shapes))
        (forward, in_forward), (backward, in_backward), (_, in_step) = (
            (now[0] - then[0], now[1] - then[1]) for now, then in zip(self._secs(), self._since, strict=True)
        )
        thread = ThreadSecs(in_forward / count, in_backward / count, in_step)
        num_elements = sum(map(math.prod, self._shapes)) / count
        outside = self._clock.secs(Phase.OUTSIDE) - self._outside_secs
        times = StepTimes(len(self._shapes), forward, backward, num_elements, thread, outside)
        if self._shapes:
            are_alike = len({len(shape) for shape in self._shapes}) == 1
            means = (round(sum(sizes) / count) for sizes in zip(*self._shapes, strict=are_alike))
            self.shape = tuple(means) if are_alike else self._shapes[-1]
        self._reset()
        return times

    def close(self) -> None:
        """Takes its hooks off the model. Idempotent."""
        self._outermost.forget()
        self._close_recorder()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _is_compiled(model: nn.Module) -> bool:
    return any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())


def _shape_of(batch: Any) -> tuple[int, ...]:
    """Of the first tensor with at least two dimensions, else of the first; () where there is none."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    first = next((tensor for tensor in tensors if tensor.dim() >= 2), tensors[0] if tensors else None)
    return () if first is None else tuple(first.shape)
