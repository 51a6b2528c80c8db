# SPDX-License-Identifier: Apache-2.0
"""One step's accumulation window: which gradients came, and what backward made of them. Bookkeeping alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_fuyou.optimizer.clip_policy import UpdateStart
from ds_fuyou.optimizer.layout import FlatLayout
from ds_fuyou.optimizer.missed_steps import Run
from ds_fuyou.optimizer.rules import StepRules

__all__ = ["EndedWindow", "Window"]


@dataclass(frozen=True)
class EndedWindow:
    """Gradients of the last step, which stay where they are until the next window's come."""

    arrived: set[int]
    overrides: dict[int, torch.Tensor]
    multiplier: float
    """What the step made of them; 1 if it was skipped."""


class Window:
    """From the first backward after a step to the next ``step()``. Used by the training thread alone."""

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self.arrived: set[int] = set()
        """Parameters with a gradient."""
        self.summed: set[int] = set()
        """Those of them whose G16 holds values of this window: a gradient that the script set has none."""
        self.overrides: dict[int, torch.Tensor] = {}
        """Gradients that the script replaced for this step, fp32, 1-D."""
        self.prepared: dict[int, tuple[Run, ...]] = {}
        """Chunks that were updated into their spare slot, by :attr:`rules` and :attr:`multiplier`, and which runs of
        them: the step publishes that if it would do the very same."""
        self.held: set[int] = set()
        """Chunks whose state is read ahead of their gradient."""
        self.opened: set[int] = set()
        """Chunks whose gradient memory nothing of an earlier step reads any more."""
        self.start = UpdateStart.DEFER
        self.rules: StepRules | None = None
        """Those of the step, as its last micro-batch began; None before."""
        self.multiplier = 0.0
        self._missing: dict[int, set[int]] = {}

    def reset(self) -> tuple[set[int], dict[int, torch.Tensor]]:
        """A new window: nothing has arrived. Returns what had, and which gradients the script had replaced."""
        ended = self.arrived, self.overrides
        self.arrived, self.overrides = set(), {}
        for kept in (self.summed, self.prepared, self.held, self.opened, self._missing):
            kept.clear()
        self.start, self.rules, self.multiplier = UpdateStart.DEFER, None, 0.0
        return ended

    @property
    def is_empty(self) -> bool:
        return self.rules is None and not (self.arrived or self.prepared or self.held)

    def begin_last(self, rules: StepRules, multiplier: float, start: UpdateStart) -> None:
        """The last micro-batch begins: a chunk whose gradients have all come in it may be prepared by these rules."""
        self._missing.clear()
        self.rules, self.multiplier, self.start = rules, multiplier, start

    def began_as(self, rules: StepRules, multiplier: float) -> bool:
        """Whether the last micro-batch began with these."""
        mine = self.rules
        is_same_step = mine is not None and mine.step == rules.step and mine.hypers == rules.hypers
        return is_same_step and multiplier == self.multiplier

    def await_gradient(self, chunk: int, param: int) -> None:
        """A gradient is on its way. A chunk that was complete is so again when all its gradients came again."""
        missing = self._missing.get(chunk)
        if not missing:
            missing = self._missing[chunk] = set(self._layout.chunks[chunk].params)
        missing.add(param)

    def is_completed_by(self, chunk: int, param: int) -> bool:
        """The gradient is in place: whether it was the last one that the chunk missed."""
        missing = self._missing.get(chunk)
        if missing is None:
            missing = self._missing[chunk] = set(self._layout.chunks[chunk].params)
        if param not in missing:
            return False
        missing.remove(param)
        return not missing

    def is_overridden(self, chunk: int) -> bool:
        """Whether the script replaced a gradient of the chunk."""
        return bool(self.overrides) and not self.overrides.keys().isdisjoint(self._layout.chunks[chunk].params)
