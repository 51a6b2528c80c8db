# SPDX-License-Identifier: Apache-2.0
"""P16 that a test moves, where the plan of a run would."""

from __future__ import annotations

from typing import Any

from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["come_to_rest", "place_params_in_step"]


def come_to_rest(core: OutOfCoreOptimizer) -> None:
    """States that are to move do not, and what they leave is given back."""
    core.mover.stop()
    while not core.mover.is_idle:
        core.wait_all()
        core.mover.advance()


def place_params_in_step(engine: Any, share: float) -> None:
    """At the end of the next ``step()`` that is applied, in other versions than before where it stays apart."""
    plan, rank_state = engine.optimizer.run_plan, engine.optimizer.rank_state

    def step_applied() -> None:
        del plan.step_applied
        plan.step_applied()
        come_to_rest(rank_state.core)
        assert rank_state.may_place_params
        versions = 3 - rank_state.core.place.num_versions if 0.0 < share < 1.0 else None
        assert rank_state.place_params(share, num_versions=versions)

    plan.step_applied = step_applied  # of steps that were skipped the last one counts
