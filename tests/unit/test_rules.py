# SPDX-License-Identifier: Apache-2.0
"""Which optimizers map to which arithmetic, and the history of a rule clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, build_layout
from ds_fuyou.optimizer.missed_steps import MissedSteps
from ds_fuyou.optimizer.rules import GroupHyper, OptimizerKind, RuleClock, optimizer_kind

KIND = OptimizerKind("adam", ("exp_avg", "exp_avg_sq"))
HYPER = GroupHyper(1e-3, (0.9, 0.999), 1e-8, 0.0, True)


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(4))]


def test_torch_optimizers_map_to_their_arithmetic() -> None:
    assert optimizer_kind(torch.optim.AdamW(parameters())) == KIND
    assert optimizer_kind(torch.optim.Adam(parameters())).adamw_mode is False
    assert optimizer_kind(torch.optim.Adam(parameters(), decoupled_weight_decay=True)) == KIND, "what AdamW does"
    groups = [{"params": parameters()}, {"params": parameters(), "decoupled_weight_decay": True}]
    with pytest.raises(FuyouConfigError, match="must have one decoupled_weight_decay"):
        optimizer_kind(torch.optim.Adam(groups))
    assert optimizer_kind(torch.optim.Adagrad(parameters())).moments == ("exp_avg_sq",)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adadelta"])
def test_other_optimizers_are_refused_with_what_works(name: str) -> None:
    with pytest.raises(FuyouConfigError, match=f"{name} cannot be updated out of core.*DeepSpeedCPUAdam"):
        optimizer_kind(getattr(torch.optim, name)(parameters(), lr=0.1))


@pytest.mark.parametrize("flag", ["amsgrad", "maximize"])
def test_flags_without_arithmetic_are_refused(flag: str) -> None:
    with pytest.raises(FuyouConfigError, match=f"{flag}=True has no out-of-core arithmetic"):
        optimizer_kind(torch.optim.AdamW(parameters(), **{flag: True}))


@pytest.mark.parametrize("value", ["lr_decay", "initial_accumulator_value"])
def test_adagrad_as_stock_does_not_do_it_is_refused(value: str) -> None:
    with pytest.raises(FuyouConfigError, match="not supported"):
        optimizer_kind(torch.optim.Adagrad(parameters(), **{value: 0.1}))


def test_preparing_a_step_changes_nothing_until_it_is_committed() -> None:
    clock = RuleClock(KIND, HYPER)
    assert clock.prepare([HYPER]).step == 1
    rules = clock.prepare([HYPER])
    assert (rules.step, clock.step, clock.history) == (1, 0, [])
    clock.commit(rules)
    assert clock.step == 1
    assert clock.prepare([HYPER]).step == 2


def test_history_is_kept_in_runs_of_equal_betas_and_replayed() -> None:
    clock, other = RuleClock(KIND, HYPER), GroupHyper(1e-3, (0.8, 0.9), 1e-8, 0.0, True)
    for hyper in (HYPER, HYPER, other, HYPER):
        clock.commit(clock.prepare([hyper]))
    assert clock.history == [(3, ((0.8, 0.9),)), (1, ((0.9, 0.999),))]
    again = RuleClock(KIND, HYPER)
    again.replay(clock.history)
    assert (again.step, again.history) == (4, clock.history)
    values = []
    for one in (clock, again):
        param, moments = torch.full((100,), 0.3), [torch.full((100,), 0.1), torch.full((100,), 0.2)]
        one.prepare([HYPER]).rules[0].apply(param, torch.full((100,), 0.01), moments)
        values.append(param)
    assert torch.equal(*values)


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_a_schedule_of_betas_does_not_lengthen_the_history(num_groups: int) -> None:
    """1cycle changes them in every step. Neither does it change what a resumed run continues with."""

    def hypers(step: int) -> list[GroupHyper]:
        """In steps 60 to 79 they stay, so that running products count."""
        moved = 0.85 + 0.001 * min(step, 60)
        first = [moved - 0.1 * group for group in range(num_groups)]
        if num_groups == 3:  # the one between
            first = [0.9, moved, 0.9]
        return [GroupHyper(1e-3, (beta, 0.999), 1e-8, 0.0, True) for beta in first]

    clock = RuleClock(KIND, hypers(1)[0])
    for step in range(1, 80):
        clock.commit(clock.prepare(hypers(step)))
    assert len(clock.history) == 2
    again = RuleClock(KIND, hypers(1)[0])
    again.replay(clock.history)
    assert (again.step, again.history) == (79, clock.history)
    values = []
    for one in (clock, again):
        param, moments = torch.full((100,), 0.3), [torch.full((100,), 0.1), torch.full((100,), 0.2)]
        for rule in one.prepare(hypers(80)).rules:
            rule.apply(param, torch.full((100,), 0.01), moments)
        values.append(param)
    assert torch.equal(*values)


def test_late_parameters_continue_from_the_nearest_clock() -> None:
    """The rule after 41 updates is the same whether 1 or 40 were known before."""

    def updated(rule: object) -> torch.Tensor:
        param, moments = torch.full((64,), 0.3), [torch.full((64,), 0.1), torch.full((64,), 0.2)]
        rule.apply(param, torch.full((64,), 0.01), moments)
        return param

    fresh, stepped = RuleClock(KIND, HYPER), RuleClock(KIND, HYPER)
    for number in range(1, 101):
        stepped.rule_at(number, HYPER)
    assert torch.equal(updated(fresh.rule_at(41, HYPER)), updated(stepped.rule_at(41, HYPER)))
    assert not torch.equal(updated(fresh.rule_at(41, HYPER)), updated(fresh.rule_at(40, HYPER)))


class CountedClock:
    """How many steps clocks were advanced by, all together."""

    num_steps = 0

    def __init__(self, clock: Any) -> None:
        self._clock, self.rule = clock, clock.rule

    def advance(self, first: int, num_steps: int, betas: Sequence[tuple[float, float]]) -> None:
        CountedClock.num_steps += num_steps
        self._clock.advance(first, num_steps, betas)

    def clone(self) -> CountedClock:
        return CountedClock(self._clock.clone())


def test_clocks_of_late_parameters_go_on_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of which each missed another number of steps: a step a clock, and no more clocks than such experts."""
    num_params, num_steps = 300, 10_000
    layout = build_layout([[(f"e{index}", "", CUT_ELEMENTS, 0) for index in range(num_params)]])
    clock = RuleClock(KIND, HYPER)
    clock.replay([(num_steps, [HYPER.betas])])
    monkeypatch.setattr(clock, "_fresh", lambda: CountedClock(RuleClock(KIND, HYPER)._clock))
    missed = MissedSteps(layout, clock)
    missed.restore({f"e{index}": 17 * (num_params - index) for index in range(num_params)})
    advanced = []
    for number in range(6):
        rules, arrived = clock.prepare([HYPER]), {index for index in range(num_params) if (index + number) % 3}
        for chunk in layout.chunks:
            missed.segments(chunk, rules, missed.runs(chunk, arrived))
        clock.commit(rules)
        missed.count(arrived)
        advanced.append(CountedClock.num_steps)
        assert len(clock._late[HYPER.betas][1]) <= num_params
    assert advanced[0] <= num_steps, "the first time each from the nearest"
    assert advanced[-1] - advanced[2] <= 3 * num_params
    missed.restore({"e0": 1})
    rules = clock.prepare([replace(HYPER, betas=(0.8, 0.9))])
    clock.commit(rules)
    missed.count(set(range(num_params)))
    assert clock._late == {}, "of betas that no group has any more"


@pytest.mark.parametrize(
    ("masters", "fp32_states", "kept"),
    [("fp32", False, ("fp32", "fp32")), ("bf16", True, ("bf16", "fp32")), ("bf16", False, ("bf16", "bf16"))],
)
def test_moments_follow_masters_where_the_optimizer_is_told_so(
    masters: str, fp32_states: bool, kept: tuple[str, str]
) -> None:
    optimizer = DeepSpeedCPUAdam(parameters(), fp32_optimizer_states=fp32_states)
    assert optimizer_kind(optimizer, masters).kept_as == kept
