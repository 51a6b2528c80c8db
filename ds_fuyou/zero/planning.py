# SPDX-License-Identifier: Apache-2.0
"""The planner's place in stage 3: what watches a run, and what it may change while it lasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ds_fuyou.activations.blocks import Block
from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.profiling.operators import BlockProfile, OperatorRecorder
from ds_fuyou.telemetry.report import LaneTimes
from ds_fuyou.zero.activations import ActivationInput, attach_auto, model_blocks
from ds_fuyou.zero.auto_activations import AutoActivations
from ds_fuyou.zero.rank_state import RankState
from ds_fuyou.zero.run_plan import RunPlan

__all__ = ["Planning"]


class Planning:
    """Tells the plan and mode "auto" of every step, and is what the plan may ask of activations.

    Args:
        leave_out: seconds and work of lanes that were spent on measuring, to be left out of reports.
    """

    def __init__(
        self,
        rank_state: RankState,
        module: torch.nn.Module,
        given: ActivationInput,
        leave_out: Callable[[float, LaneTimes], None],
    ) -> None:
        self._rank_state = rank_state
        self._module = module
        self._given = given
        self.auto: AutoActivations | None = attach_auto(rank_state.activations, module, given)
        self._latest = self.auto
        self.run_plan = RunPlan(rank_state, module, self._blocks, self, leave_out)
        if self.auto is not None:
            self.auto.measured_step = self.run_plan.first_usual_step

    def _blocks(self) -> Sequence[Block]:
        session = self._rank_state.activations
        if session is not None:
            blocks: Sequence[Block] = session.blocks
            return blocks
        return model_blocks(self._module, self._rank_state.activation.config)

    # ---- told by stage 3 ----------------------------------------------------------------------------------

    @property
    def recorder(self) -> OperatorRecorder | None:
        """Whoever records the forward that runs now."""
        if self.auto is not None and self.auto.recorder is not None:
            return self.auto.recorder
        return self.run_plan.clock.recorder

    @property
    def holds_updates(self) -> bool:
        """Whether this step updates nothing before ``step()``, so that backward can be timed alone."""
        return self.run_plan.holds_updates

    def backward_ended(self) -> None:
        """All gradients of a micro-batch have arrived."""
        self.run_plan.clock.backward_ended()

    def step_skipped(self) -> None:
        """Gradients overflowed: what was timed belongs to no step."""
        if self.auto is not None:
            self.auto.step_skipped()
        self.run_plan.step_skipped()

    def step_applied(self) -> None:
        """A step was applied; its updates may still run."""
        if self.auto is not None and self.auto.step_applied():
            self.auto = None
        self.run_plan.step_applied()

    def close(self) -> None:
        """Idempotent."""
        self.run_plan.close()

    # ---- asked by the plan --------------------------------------------------------------------------------

    def undecided(self) -> bool:
        """Whether fates are still to be decided."""
        return self.auto is not None

    def profiles(self) -> tuple[BlockProfile, ...]:
        """What was recorded of the first forward; empty where mode "auto" does not record."""
        return () if self._latest is None else self._latest.profiles

    def can_decide_anew(self) -> bool:
        """Whether fates were decided, and may be again. The same on all ranks."""
        return self._latest is not None and not self.undecided()

    def decide_anew(self) -> None:
        """Everything is swapped again until the next step has been measured. On all ranks after the same step."""
        session = self._rank_state.activations
        if session is None:
            return
        auto = attach_auto(session, self._module, self._given)
        session.decide({name: BlockFate(Fate.SWAP) for name in (*(block.name for block in session.blocks), "")})
        self.auto = self._latest = auto
