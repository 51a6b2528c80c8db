# SPDX-License-Identifier: Apache-2.0
"""The planner's place in stage 3: what it watches, and what it may change during a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_fuyou.activations.blocks import Block
from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.profiling.operators import BlockProfile, OperatorRecorder
from ds_fuyou.telemetry.report import LaneTimes, report_leave_out
from ds_fuyou.zero.activations import ActivationInput, attach_auto, model_blocks
from ds_fuyou.zero.auto_activations import AutoActivations
from ds_fuyou.zero.run_plan import RunPlan

__all__ = ["PlanningMixin"]


class _AutoChoice:
    """Mode "auto" as the plan sees it. ``optimizer`` is the stage-3 optimizer that the mode is told of steps by."""

    def __init__(self, optimizer: Any, given: ActivationInput) -> None:
        self._optimizer = optimizer
        self._given = given
        self._latest: AutoActivations | None = optimizer._auto_activations

    def undecided(self) -> bool:
        return self._optimizer._auto_activations is not None

    def profiles(self) -> tuple[BlockProfile, ...]:
        return () if self._latest is None else self._latest.profiles

    def can_decide_anew(self) -> bool:
        return self._latest is not None and not self.undecided()

    def decide_anew(self) -> None:
        """Everything is swapped again until the next step has been measured."""
        session = self._optimizer.rank_state.activations
        auto = attach_auto(session, self._optimizer.module, self._given)
        session.decide({name: BlockFate(Fate.SWAP) for name in (*(block.name for block in session.blocks), "")})
        self._optimizer._auto_activations = self._latest = auto


class PlanningMixin:
    """Needs ``rank_state``. Until :meth:`_attach_plan` there is no plan."""

    _run_plan: RunPlan | None = None
    _auto_activations: AutoActivations | None = None

    def _attach_plan(self: Any, given: ActivationInput) -> None:
        choice = _AutoChoice(self, given)
        self._run_plan = RunPlan(self.rank_state, self.module, self._blocks, choice, self._leave_out)
        if self._auto_activations is not None:
            self._auto_activations.measured_step = self._run_plan.first_usual_step

    def _leave_out(self: Any, secs: float, work: LaneTimes) -> None:
        report_leave_out(self.rank_state, secs, work)
        if self._monitor is not None:
            self._monitor.leave_out(secs, work)

    def _blocks(self: Any) -> Sequence[Block]:
        session = self.rank_state.activations
        if session is not None:
            blocks: Sequence[Block] = session.blocks
            return blocks
        return model_blocks(self.module, self.rank_state.activation.config)

    def _recorder(self: Any) -> OperatorRecorder | None:
        """Whoever records the forward that runs now."""
        if self._auto_activations is not None and self._auto_activations.recorder is not None:
            recorder: OperatorRecorder | None = self._auto_activations.recorder
            return recorder
        return self._run_plan.clock.recorder if self._run_plan is not None else None
