# SPDX-License-Identifier: Apache-2.0
"""Parameters without a gradient in some steps: what a step does to the runs of a chunk, each by its own clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ds_fuyou.optimizer.layout import Chunk, FlatLayout, overlap
from ds_fuyou.optimizer.rules import RuleClock, StepRules

__all__ = ["MissedSteps"]


class MissedSteps:
    """How many applied steps each parameter took no part in; its bias correction counts the others."""

    def __init__(self, layout: FlatLayout, clock: RuleClock) -> None:
        self._layout, self._clock = layout, clock
        self._missed: dict[int, int] = {}

    def any_of(self, params: Collection[int]) -> bool:
        """Whether one of the parameters is behind the others."""
        return not self._missed.keys().isdisjoint(params)

    def segments(self, chunk: Chunk, rules: StepRules, arrived: set[int]) -> list[Any]:
        """Runs (begin, end, rule) of the chunk in a step in which the gradients of ``arrived`` came.

        The rule is None for parameters without a gradient, that of an older clock for late ones.
        """
        rule = rules.rules[chunk.sub_group]
        if arrived.issuperset(chunk.params) and not self.any_of(chunk.params):
            return [(0, chunk.numel, rule)]
        segments: list[Any] = []
        for index in chunk.params:
            begin, end = (at - chunk.begin for at in overlap(self._layout.params[index], chunk))
            one: Any = rule
            if index not in arrived:
                one = None
            elif index in self._missed:
                one = self._clock.rule_at(rules.step - self._missed[index], rules.hypers[chunk.sub_group])
            if segments and segments[-1][2] is one:
                segments[-1] = (segments[-1][0], end, one)
            else:
                segments.append((begin, end, one))
        return segments

    def count(self, arrived: set[int]) -> None:
        """A step was applied in which only the gradients of ``arrived`` came."""
        for span in self._layout.params:
            if span.index not in arrived:
                self._missed[span.index] = self._missed.get(span.index, 0) + 1

    def by_name(self) -> dict[str, int]:
        """Those that missed any, for a checkpoint."""
        return {self._layout.params[index].name: number for index, number in self._missed.items()}

    def restore(self, by_name: Mapping[str, int]) -> None:
        """Takes over a saved run's counts."""
        indices = {span.name: span.index for span in self._layout.params}
        self._missed = {indices[name]: number for name, number in by_name.items()}
