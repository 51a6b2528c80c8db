# SPDX-License-Identifier: Apache-2.0
"""P16 that a test moves, where the plan of a run would, and the steps around it."""

from __future__ import annotations

from typing import Any

from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from tests.harness.models import make_batch

__all__ = ["come_to_rest", "place_params_in_step", "train"]


def train(engine: Any, model: dict[str, int], first: int, last: int) -> list[float]:
    """Losses of the steps from ``first`` to before ``last``, of a TinyGPT made of ``model``."""
    losses = []
    for step in range(first, last):
        loss = engine(make_batch(model, step, 0)["ids"])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


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
