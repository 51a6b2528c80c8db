# SPDX-License-Identifier: Apache-2.0
"""Our kernels against stock's optimizer objects and torch's operators, bit by bit and without an engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion

from ds_fuyou.ops import load_core
from ds_fuyou.optimizer.layout import CUT_ELEMENTS

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1
SIZES = [1, 7, 8, 15, 16, 17, 127, 128, 129, 2047, 2048, 2049, 100003]


NARROW = {"adamw_bf16": "param", "adamw_bf16_states": "param_and_moments", "adam_bf16_states": "param_and_moments"}
"""Kinds whose states stock keeps in bfloat16, and the core's name of that."""


def dtype_of(kind: str) -> torch.dtype:
    return torch.bfloat16 if kind in NARROW else torch.float32


def gradient(numel: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + numel % 997)
    return torch.randn(numel, generator=generator) * 0.02


class Stock:
    """A stock CPU optimizer over flat fp32 sub-groups, stepped as stage 3 does: one sub-group at a time."""

    def __init__(self, kind: str, numels: list[int], betas: list[tuple[float, float]] | None = None) -> None:
        self.kind = kind
        self.dtype = dtype_of(kind)
        self.params = [torch.nn.Parameter(gradient(n, 10**6).to(self.dtype)) for n in numels]
        groups = [{"params": [p]} for p in self.params]
        for group, pair in zip(groups, betas or [], strict=False):
            group["betas"] = pair  # type: ignore[assignment]
        if kind.startswith("adam"):
            self.optimizer: Any = DeepSpeedCPUAdam(
                groups,
                lr=LR,
                betas=BETAS,
                eps=EPS,
                weight_decay=DECAY,
                adamw_mode=kind.startswith("adamw"),
                fp32_optimizer_states=kind not in NARROW or NARROW[kind] == "param",
            )
        elif kind == "lion":
            self.optimizer = DeepSpeedCPULion(groups, lr=LR, betas=BETAS, weight_decay=DECAY)
        else:
            self.optimizer = DeepSpeedCPUAdagrad(groups, lr=LR, eps=EPS, weight_decay=DECAY)

    def step(self, step: int) -> None:
        for param in self.params:
            for other in self.params:
                other.grad = gradient(param.numel(), step).to(self.dtype) if other is param else None
            self.optimizer.step()

    def moments(self, index: int) -> list[torch.Tensor]:
        """The moments that the arithmetic uses (stock's Lion allocates a second one and never touches it)."""
        names = {"lion": ("exp_avg",), "adagrad": ("exp_avg_sq",)}.get(self.kind, ("exp_avg", "exp_avg_sq"))
        return [self.optimizer.state[self.params[index]][name] for name in names]


def make_clock(kind: str) -> Any:
    core = load_core()
    if kind.startswith("adam"):
        narrow = getattr(core.NarrowStates, NARROW.get(kind, "none"))
        return core.make_adam_clock(LR, *BETAS, EPS, DECAY, kind.startswith("adamw"), narrow)
    if kind == "lion":
        return core.make_lion_clock(LR, *BETAS, DECAY)
    return core.make_adagrad_clock(LR, EPS, DECAY)


class Ours:
    """The same sub-groups, each cut at ``cuts`` and updated piece by piece with one shared clock."""

    def __init__(self, kind: str, numels: list[int], betas: list[tuple[float, float]] | None = None) -> None:
        self.betas = betas or [BETAS] * len(numels)
        self.clock = make_clock(kind)
        self.params = [gradient(n, 10**6).to(dtype_of(kind)).float() for n in numels]
        num_moments = 2 if kind.startswith("adam") else 1
        self.moments = [[torch.zeros(n) for _ in range(num_moments)] for n in numels]

    def step(self, step: int, cut: int = 1 << 60) -> None:
        for param, moments, betas in zip(self.params, self.moments, self.betas, strict=True):
            self.clock.increment(step, *betas)
            rule = self.clock.rule(LR, EPS, DECAY, True)
            grads = gradient(param.numel(), step)
            for at in range(0, param.numel(), min(cut, param.numel())):
                part = slice(at, min(at + cut, param.numel()))
                rule.apply(param[part], grads[part], [m[part] for m in moments])


def unequal(stock: Stock, ours: Ours) -> int:
    count = 0
    for index, param in enumerate(ours.params):
        count += int((param != stock.params[index].data).sum())
        for a, b in zip(ours.moments[index], stock.moments(index), strict=True):
            count += int((a != b).sum())
    return count


@pytest.mark.parametrize("kind", ["adamw", "adam", "lion", "adagrad", *NARROW])
def test_every_size_and_tail_equals_stock(kind: str) -> None:
    stock, ours = Stock(kind, SIZES), Ours(kind, SIZES)
    for step in range(1, 6):
        stock.step(step)
        ours.step(step)
    assert unequal(stock, ours) == 0


@pytest.mark.parametrize("kind", ["adamw", "adam", "lion", "adagrad", *NARROW])
@pytest.mark.parametrize("num_cuts", [1, 5])
def test_cuts_at_chunk_bounds_are_invisible(kind: str, num_cuts: int) -> None:
    numels = [100003, 65536, CUT_ELEMENTS + 1]
    stock, ours = Stock(kind, numels), Ours(kind, numels)
    for step in range(1, 6):
        stock.step(step)
        ours.step(step, cut=num_cuts * CUT_ELEMENTS)
    assert unequal(stock, ours) == 0


def test_a_cut_inside_a_vector_block_is_not_invisible() -> None:
    """That the comparison can fail, and why chunks are cut at multiples of CUT_ELEMENTS."""
    stock, ours = Stock("adamw", [100003]), Ours("adamw", [100003])
    for step in range(1, 6):
        stock.step(step)
        ours.step(step, cut=CUT_ELEMENTS + 5)
    assert unequal(stock, ours) > 0


@pytest.mark.parametrize(
    "betas",
    [
        [BETAS, BETAS],
        [BETAS, (0.8, 0.99)],
        [(0.95, 0.98), BETAS, (0.95, 0.98)],
    ],
)
def test_sixty_steps_with_one_shared_clock_equal_stock(betas: list[tuple[float, float]]) -> None:
    """Stock's sub-groups share one C++ object; where betas differ it recomputes its products."""
    numels = [3000 + 17 * i for i in range(len(betas))]
    stock, ours = Stock("adamw", numels, betas), Ours("adamw", numels, betas)
    for step in range(1, 61):
        stock.step(step)
        ours.step(step)
        assert unequal(stock, ours) == 0, f"after step {step}"


def test_a_clock_started_in_the_middle_departs() -> None:
    """Why the history is replayed: a fresh object computes powers of the betas, not running products."""
    stock, ours = Stock("adamw", [4096]), Ours("adamw", [4096])
    departed = 0
    for step in range(1, 61):
        stock.step(step)
        if step == 30:
            ours.clock = make_clock("adamw")
        ours.step(step)
        departed += unequal(stock, ours) > 0
    assert departed > 0


@pytest.mark.parametrize("kind", ["adamw", "lion", "adagrad"])
@pytest.mark.parametrize("betas", [[BETAS], [BETAS, BETAS], [BETAS, (0.8, 0.99), BETAS]])
def test_steps_in_one_call_are_as_many_calls(kind: str, betas: list[tuple[float, float]]) -> None:
    """Up to where the product of the smaller betas has left the normal numbers."""
    single, many, step = make_clock(kind), make_clock(kind), 0
    for num_steps in (1, 7, 0, 92, 1100):
        many.advance(step + 1, num_steps, betas)
        for _ in range(num_steps):
            step += 1
            for pair in betas:
                single.increment(step, *pair)
        found = []
        for clock in (single, many):
            param, moments = gradient(500, 10**6), [gradient(500, 1).abs(), gradient(500, 2).abs()]
            clock.rule(LR, EPS, DECAY, True).apply(param, gradient(500, 3), moments)
            found.append(torch.stack([param, *moments]))
        assert torch.equal(*found), f"after step {step}"


def test_two_learning_rates_in_parallel_threads_do_not_mix() -> None:
    numel, num_steps = 300_000, 12
    rates = (1e-3, 7e-4, 3e-5)

    def ours(lr: float) -> list[torch.Tensor]:
        clock, param = make_clock("adamw"), gradient(numel, 10**6)
        moments = [torch.zeros(numel), torch.zeros(numel)]
        for step in range(1, num_steps + 1):
            clock.increment(step, *BETAS)
            clock.rule(lr, EPS, DECAY, True).apply(param, gradient(numel, step), moments)
        return [param, *moments]

    with ThreadPoolExecutor(len(rates)) as threads:
        found = list(threads.map(ours, rates))
    for lr, tensors in zip(rates, found, strict=True):
        stock = Stock("adamw", [numel])
        for group in stock.optimizer.param_groups:
            group["lr"] = lr
        for step in range(1, num_steps + 1):
            stock.step(step)
        for a, b in zip(tensors, [stock.params[0].data, *stock.moments(0)], strict=True):
            assert torch.equal(a, b)


def test_a_rule_keeps_its_values_when_the_clock_moves_on() -> None:
    """An update that runs after step() uses what step() captured."""
    clock = make_clock("adamw")
    clock.increment(1, *BETAS)
    early = clock.rule(LR, EPS, DECAY, True)
    for step in range(2, 20):
        clock.increment(step, *BETAS)
    param, moments = gradient(5000, 10**6), [torch.zeros(5000), torch.zeros(5000)]
    early.apply(param, gradient(5000, 1), moments)
    stock = Stock("adamw", [5000])
    stock.step(1)
    assert torch.equal(param, stock.params[0].data)
