# SPDX-License-Identifier: Apache-2.0
"""What stock's files of an optimizer (stage 3, CPU tier) hold of the states, by sub-group; and where it is in them.

Knows no engine: an engine that saves and ``fuyou recover``, which has none, make it of the same facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_fuyou.state_layout import BF16, FP32, StateLayout

__all__ = ["CLOCK_KEY", "DTYPES", "FLAT_GROUPS", "OPTIMIZER_STATE", "StateEntries", "states_of"]

OPTIMIZER_STATE, FLAT_GROUPS = "optimizer_state_dict", "fp32_flat_groups"  # stock's keys
CLOCK_KEY = "ds_fuyou_clock"
DTYPES = {FP32: torch.float32, BF16: torch.bfloat16}


@dataclass(frozen=True)
class StateEntries:
    """Of one rank.

    Attributes:
        groups: hyperparameters of the parameter groups, without their parameters.
        group_of_sub_group: parameter group of every sub-group.
        moments: names of the moments as stock's optimizer of this kind saves them.
        step: optimizer steps applied; before the first there are no moments.
        history: ``[[steps, betas by sub-group], ...]``, see RuleClock.
        missed_steps: by parameter.
        layout: how the run kept its states.
    """

    groups: Sequence[Mapping[str, Any]]
    group_of_sub_group: Sequence[int]
    moments: Sequence[str]
    step: int
    history: Sequence[Any]
    missed_steps: Mapping[str, Any]
    layout: StateLayout

    @property
    def num_parts(self) -> int:
        """Flat tensors of a sub-group: P32, then the moments."""
        return 1 + (len(self.moments) if self.step else 0)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Of those parts; a moment that nothing reads has the type of the others."""
        saved_as = self.layout.saved_as
        return [DTYPES[saved_as[min(part, len(saved_as) - 1)]] for part in range(self.num_parts)]

    def named(self, flats: Sequence[Sequence[torch.Tensor]]) -> dict[str, Any]:
        """``flats``: ``[sub-group][P32, moments...]``, 1-D."""
        return {
            OPTIMIZER_STATE: self._optimizer_state(flats),
            FLAT_GROUPS: [parts[0] for parts in flats],
            CLOCK_KEY: {
                "history": [(n, [list(b) for b in betas]) for n, betas in self.history],
                "missed_steps": dict(self.missed_steps),
                **({} if self.layout.moments == FP32 else {"moments": self.layout.moments}),
            },
        }

    def _optimizer_state(self, flats: Sequence[Sequence[torch.Tensor]]) -> dict[str, Any]:
        """As ``optimizer.state_dict()`` of stock: one "parameter" a sub-group, in the order of the groups."""
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        num_before = 0
        for index, group in enumerate(self.groups):
            members = [i for i, g in enumerate(self.group_of_sub_group) if g == index]
            ids = list(range(num_before, num_before + len(members)))
            num_before += len(members)
            groups.append({**_completed(group), "params": ids})
            if self.step:
                for place, sub_group in zip(ids, members, strict=True):
                    moments = dict(zip(self.moments, flats[sub_group][1:], strict=True))
                    state[place] = {"step": self.step, **moments}
        return {"state": state, "param_groups": groups}


def _completed(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what stock's Adam reads of a group, and takes from the file: torch's has no such option, which may be what a
    run was given where stock makes its own of it.
    """
    is_adam = {"betas", "eps"} <= group.keys()
    return {"bias_correction": True, **group} if is_adam else group


def states_of(saved: Any) -> list[object]:
    """What is large in a state dictionary of an optimizer of stage 3; nothing of another one."""
    if not isinstance(saved, dict):
        return []
    inner = saved.get(OPTIMIZER_STATE)
    return [saved.get(FLAT_GROUPS), inner.get("state") if isinstance(inner, dict) else None]
