# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters of a step, frozen, with the bias-correction history that a stock optimizer would have.

A stock CPU optimizer keeps one C++ object for all parameter groups. Its running products of the betas depend
on every call made so far, so the history is replayed on a clock of our own, call by call in stock's order
(one call a sub-group and step), and every update gets an immutable copy.
"""

from __future__ import annotations

import ctypes
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.ops.core import load_core
from ds_fuyou.state_layout import BF16, FP32

__all__ = ["GroupHyper", "OptimizerKind", "RuleClock", "Segment", "StepRules", "optimizer_kind"]

_SUPPORTED = (
    "DeepSpeedCPUAdam, FusedAdam, torch Adam and AdamW, DeepSpeedCPUAdagrad, torch Adagrad, DeepSpeedCPULion, FusedLion"
)


@dataclass(frozen=True)
class OptimizerKind:
    """Which arithmetic: ``name`` is adam, lion or adagrad; ``moments`` are the state names stock saves. ``kept_as``:
    how stock keeps masters and moments, which is what its kernel takes and gives.
    """

    name: str
    moments: tuple[str, ...]
    adamw_mode: bool = True
    kept_as: tuple[str, str] = (FP32, FP32)


@dataclass(frozen=True)
class GroupHyper:
    """The values of one parameter group that enter the arithmetic."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> GroupHyper:
        betas = group.get("betas", (0.0, 0.0))
        return cls(
            lr=float(group["lr"]),
            betas=(float(betas[0]), float(betas[1])),
            eps=float(group.get("eps", 0.0)),
            weight_decay=float(group.get("weight_decay", 0.0)),
            bias_correction=bool(group.get("bias_correction", True)),
        )


def optimizer_kind(optimizer: Any, masters: str = FP32) -> OptimizerKind:
    """Maps a client or configured optimizer object to the CPU arithmetic that updates it. ``masters``: as stock would
    keep them, for its own Adam, which keeps moments in the same type if it is told to.

    Raises :class:`FuyouConfigError` for anything else, with the list of what works.
    """
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    for flag in ("amsgrad", "maximize", "nesterov"):
        if any(group.get(flag) for group in groups):
            raise FuyouConfigError(f"{name} with {flag}=True has no out-of-core arithmetic; set it to False")
    if name in ("DeepSpeedCPUAdam", "ZenFlowCPUAdam", "FusedAdam"):
        mode = getattr(optimizer, "adam_w_mode", 1)
        moments = FP32 if getattr(optimizer, "fp32_optimizer_states", True) else masters
        return OptimizerKind("adam", ("exp_avg", "exp_avg_sq"), bool(mode), (masters, moments))
    if name in ("AdamW", "Adam"):
        # torch.optim.Adam has the arithmetic of AdamW as an option of its groups.
        decoupled = {bool(group.get("decoupled_weight_decay", name == "AdamW")) for group in groups}
        if len(decoupled) > 1:
            raise FuyouConfigError(f"{name} must have one decoupled_weight_decay for all of its groups, found both")
        return OptimizerKind("adam", ("exp_avg", "exp_avg_sq"), decoupled == {True})
    if name in ("DeepSpeedCPULion", "FusedLion"):
        return OptimizerKind("lion", ("exp_avg",))
    if name in ("DeepSpeedCPUAdagrad", "Adagrad"):
        if any(group.get("lr_decay") or group.get("initial_accumulator_value") for group in groups):
            raise FuyouConfigError(f"{name} with lr_decay or initial_accumulator_value is not supported")
        return OptimizerKind("adagrad", ("exp_avg_sq",))
    raise FuyouConfigError(f"optimizer {name} cannot be updated out of core; these can: {_SUPPORTED}")


_NARROW = {(FP32, FP32): "none", (BF16, FP32): "param", (BF16, BF16): "param_and_moments"}
"""By :attr:`OptimizerKind.kept_as`, the core's name of it."""

Segment = tuple[int, int, Any]
"""Elements [begin, end) of a chunk, and the C++ rule object that updates them; None: they stay as they are."""


@dataclass(frozen=True)
class StepRules:
    """What one step does to every sub-group. ``rules[i]`` is the C++ rule object of sub-group i."""

    step: int
    hypers: tuple[GroupHyper, ...]
    rules: tuple[Any, ...]
    clock: Any = field(compare=False, repr=False)


def _as_stored(betas: tuple[float, float]) -> tuple[float, float]:
    """As a stock optimizer keeps and compares them: in fp32."""
    return ctypes.c_float(betas[0]).value, ctypes.c_float(betas[1]).value


class RuleClock:
    """The bias-correction history of one optimizer; replays stock's calls. Not thread-safe."""

    def __init__(self, kind: OptimizerKind, first: GroupHyper) -> None:
        self.kind = kind
        self.step = 0
        self.history: list[tuple[int, tuple[tuple[float, float], ...]]] = []
        self._first = first
        self._clock = self._fresh()
        self._late: dict[tuple[float, float], tuple[list[int], dict[int, Any]]] = {}
        """By betas: clocks of parameters that missed steps, and after how many updates, in order, there is one."""

    def _fresh(self) -> Any:
        core, hyper = load_core(), self._first
        if self.kind.name == "adam":
            return core.make_adam_clock(
                hyper.lr,
                *hyper.betas,
                hyper.eps,
                hyper.weight_decay,
                self.kind.adamw_mode,
                getattr(core.NarrowStates, _NARROW[self.kind.kept_as]),
            )
        if self.kind.name == "lion":
            return core.make_lion_clock(hyper.lr, hyper.betas[0], hyper.betas[1], hyper.weight_decay)
        return core.make_adagrad_clock(hyper.lr, hyper.eps, hyper.weight_decay)

    def prepare(self, hypers: Sequence[GroupHyper]) -> StepRules:
        """The rules of the step after the last committed one; changes nothing until :meth:`commit`."""
        clock = self._clock.clone()
        rules = []
        for hyper in hypers:
            clock.increment(self.step + 1, *hyper.betas)
            rules.append(clock.rule(hyper.lr, hyper.eps, hyper.weight_decay, hyper.bias_correction))
        return StepRules(self.step + 1, tuple(hypers), tuple(rules), clock)

    def commit(self, rules: StepRules) -> None:
        """Makes ``rules`` history: the step was applied."""
        self._clock = rules.clock
        self.step = rules.step
        self._record(tuple(hyper.betas for hyper in rules.hypers))

    def _record(self, betas: tuple[tuple[float, float], ...], num_steps: int = 1) -> None:
        """Adds the last steps. A stock optimizer that meets other betas than it has starts its products anew, by
        ``pow``: then nothing matters of what came before, but its length. So a schedule of betas does not lengthen the
        history.
        """
        if self.history and self.history[-1][1] == betas:
            self.history[-1] = (self.history[-1][0] + num_steps, betas)
            return
        calls = (self.history[-1][1][-1], *betas) if self.history else ()
        if len(self.history) > 1 and len({_as_stored(pair) for pair in calls}) > 1:
            self.history = [(self.step - num_steps, self.history[-1][1])]
        self.history.append((num_steps, betas))

    def rule_at(self, step: int, hyper: GroupHyper) -> Any:
        """The rule of a parameter that was updated ``step`` times, this one included (it missed some steps)."""
        return self._clock_at(step, hyper.betas).rule(hyper.lr, hyper.eps, hyper.weight_decay, hyper.bias_correction)

    def _clock_at(self, step: int, betas: tuple[float, float]) -> Any:
        """A clock after ``step`` increments with ``betas``: continued from the nearest earlier one that is kept."""
        numbers, clocks = self._late.setdefault(betas, ([], {}))
        if step not in clocks:
            at = bisect(numbers, step)
            nearest = numbers[at - 1] if at else 0
            clock = clocks[nearest].clone() if at else self._fresh()
            clock.advance(nearest + 1, step - nearest, [betas])
            numbers.insert(at, step)
            clocks[step] = clock
        return clocks[step]

    def keep_late(self, missed: Iterable[int]) -> None:
        """Of the late parameters' clocks only those stay that the next step may go on from: of parameters that missed
        so many of the steps up to now, with betas of the last one.
        """
        wanted, late = {self.step - number for number in missed}, self._late
        self._late = {}
        for betas in late.keys() & set(self.history[-1][1]):
            numbers, clocks = late[betas]
            kept = [number for number in numbers if number in wanted]
            self._late[betas] = kept, {number: clocks[number] for number in kept}

    def replay(self, history: Sequence[tuple[int, Sequence[Sequence[float]]]]) -> None:
        """Restores a saved history by making its calls again: (number of steps, betas of every sub-group)."""
        self._clock, self.step, self.history = self._fresh(), 0, []
        for num_steps, betas in history:
            if num_steps < 1:
                continue
            frozen = tuple((float(b[0]), float(b[1])) for b in betas)
            self._clock.advance(self.step + 1, num_steps, frozen)
            self.step += num_steps
            self._record(frozen, num_steps)
