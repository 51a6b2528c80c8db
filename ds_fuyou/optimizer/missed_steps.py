# SPDX-License-Identifier: Apache-2.0
"""Parameters without a gradient in some steps: what a step does to the runs of a chunk, each by its own clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ds_fuyou.optimizer.layout import Chunk, FlatLayout, overlap
from ds_fuyou.optimizer.rules import RuleClock, Segment, StepRules

__all__ = ["MissedSteps", "Run"]

Run = tuple[int, int, int | None]
"""Elements [begin, end) of a chunk, and how many steps their parameters missed before; None: no gradient now."""


class MissedSteps:
    """How many applied steps each parameter took no part in; its bias correction counts the others."""

    def __init__(self, layout: FlatLayout, clock: RuleClock) -> None:
        self._layout, self._clock = layout, clock
        self._missed: dict[int, int] = {}

    def any_of(self, params: Collection[int]) -> bool:
        """Whether one of the parameters is behind the others."""
        return bool(self._missed) and not self._missed.keys().isdisjoint(params)

    def runs(self, chunk: Chunk, arrived: set[int]) -> tuple[Run, ...]:
        """What a step does to the chunk in which the gradients of ``arrived`` came."""
        if arrived.issuperset(chunk.params) and not self.any_of(chunk.params):
            return ((0, chunk.numel, 0),)
        runs: list[Run] = []
        for index in chunk.params:
            begin, end = (at - chunk.begin for at in overlap(self._layout.params[index], chunk))
            missed = self._missed.get(index, 0) if index in arrived else None
            if runs and runs[-1][2] == missed:
                begin = runs.pop()[0]
            runs.append((begin, end, missed))
        return tuple(runs)

    def segments(self, chunk: Chunk, rules: StepRules, runs: tuple[Run, ...]) -> list[Segment]:
        """(begin, end, rule) of every run; the rule is None without a gradient, of an older clock for late ones."""
        return [(begin, end, self._rule(chunk, rules, missed)) for begin, end, missed in runs]

    def _rule(self, chunk: Chunk, rules: StepRules, missed: int | None) -> Any:
        if not missed:
            return None if missed is None else rules.rules[chunk.sub_group]
        return self._clock.rule_at(rules.step - missed, rules.hypers[chunk.sub_group])

    def count(self, arrived: set[int]) -> None:
        """A step was applied in which only the gradients of ``arrived`` came."""
        if len(arrived) < len(self._layout.params):
            for span in self._layout.params:
                if span.index not in arrived:
                    self._missed[span.index] = self._missed.get(span.index, 0) + 1
        if self._missed:
            self._clock.keep_late(self._missed.values())

    def by_name(self) -> dict[str, int]:
        """Those that missed any, for a checkpoint."""
        return {self._layout.params[index].name: number for index, number in self._missed.items()}

    def restore(self, by_name: Mapping[str, int]) -> None:
        """Takes over a saved run's counts."""
        indices = {span.name: span.index for span in self._layout.params}
        self._missed = {indices[name]: number for name, number in by_name.items()}
