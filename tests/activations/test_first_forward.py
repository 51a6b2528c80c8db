# SPDX-License-Identifier: Apache-2.0
"""Mode "auto" before it has decided: nothing leaves the device that fits, and it measures what swapping all would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_fuyou.activations.auto import Choice, Counts, SavedStep
from ds_fuyou.host.compute_clock import HostClock
from ds_fuyou.host.device import Device, HostDevice
from ds_fuyou.planner.cost import Placement
from ds_fuyou.zero.run.auto_activations import AutoActivations
from ds_fuyou.zero.run.step_clock import StepClock
from tests.activations.late import LateCopies
from tests.activations.support import MIB, Attached, Plain, attached, gradients
from tests.activations.test_measured_peak import CountedDevice

pytestmark = pytest.mark.usefixtures("only_rank")


class RecordedAuto(AutoActivations):
    """Told by a clock of the model what its first forward made, as in a run."""

    def __init__(self, swapped: Attached, device: Device, budget_bytes: int, planned: Any = None) -> None:
        super().__init__(swapped.session, swapped.swapper, device, budget_bytes, 0, planned)
        self._swapped, self._clock = swapped, StepClock(swapped.model, HostClock(), device)
        self._record_next()

    def _record_next(self) -> None:
        session, swapper = self._swapped.session, self._swapped.swapper
        self._clock.record_next(session.blocks, (swapper.pack, swapper.unpack), even_compiled=True)

    def step_applied(self, plan: Callable[[SavedStep], Choice]) -> None:
        blocks, once = self._clock.recorded()
        if blocks:
            self.recorded(blocks, once)
        super().step_applied(plan)

    def decide_anew(self) -> None:
        super().decide_anew()
        self._record_next()


def auto_of(swapped: Attached, budget_bytes: int, device: Device | None = None) -> AutoActivations:
    return RecordedAuto(swapped, device if device is not None else HostDevice(), budget_bytes)


@pytest.fixture
def model() -> Plain:
    torch.manual_seed(0)
    return Plain(num_layers=4).train()


IDS = torch.randint(300, (4, 33), generator=torch.Generator().manual_seed(1))


def planned(saved: SavedStep) -> Choice:
    """Nothing is computed twice."""
    return saved.planned(Placement(), lambda place: place.recompute_flops + 1e-9 * place.swapped_bytes)


def saved_by(model: Plain, directory: Path) -> tuple[float, float]:
    """Bytes that one forward saves, if all are swapped: all, and those around the blocks."""
    with attached(model, directory) as swapped:
        swapped.swapper.fates = None
        model(IDS).backward()
        found = swapped.swapper.saved_bytes
        assert found.total() == swapped.tier.counters.out_bytes
        model.zero_grad(set_to_none=True)
        return float(found.total()), float(found[""])


@pytest.mark.parametrize("share", [2.0, 0.5])
def test_what_fits_is_never_written_and_the_rest_is(share: float, model: Plain, tmp_path: Path) -> None:
    total, outside = saved_by(model, tmp_path)
    expected = gradients(copy.deepcopy(model), lambda model: model(IDS).backward())
    budget = int(share * total)
    with attached(model, tmp_path) as swapped:
        auto = auto_of(swapped, budget)
        measured: list[SavedStep] = []
        real = auto._saved_step
        auto._saved_step = lambda found: measured.append(real(found)) or measured[-1]  # type: ignore[method-assign,func-returns-value]
        for _ in range(2):
            loss = model(IDS)
            assert swapped.swapper.kept.now <= budget
            if share > 1:
                assert swapped.tier.counters.out_bytes == 0
            else:
                assert swapped.tier.counters.out_bytes > 0
                assert swapped.swapper.kept.now > 0.7 * budget, "it is filled"
            loss.backward()
            model.zero_grad(set_to_none=True)
            auto.step_applied(planned)
        found = gradients(model, lambda model: model(IDS).backward())
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        (step,) = measured
        assert step.outside_bytes == outside, "as if all were swapped"
        assert step.block_bytes * 4 + step.outside_bytes == total
        assert step.device_bytes == budget
        assert swapped.session.fates["blocks.3"].saved.name == ("KEEP" if share > 1 else "SWAP")


class _AsksTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient * ctx.saved_tensors[1], (gradient * ctx.saved_tensors[0]).sum(0)


class Awkward(nn.Module):
    """``torch.utils.checkpoint`` refuses what asks twice for what it saved, and what changes its input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear, self.weight = how, nn.Linear(64, 64), nn.Parameter(torch.linspace(0.5, 2.0, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "asks twice":
            return x + _AsksTwice.apply(self.linear(x), self.weight)
        hidden = torch.relu(self.linear(x.clone()) * self.weight)
        return x.add_(hidden) if self.how == "changes its input" else x + hidden


class AwkwardModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Awkward(how) for how in ("asks twice", "changes its input", "", "asks twice"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def test_blocks_that_cannot_be_computed_again_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = AwkwardModel().train(), torch.randn(32, 64)
    expected = gradients(copy.deepcopy(model), lambda model: model(x).backward())
    with attached(model, tmp_path) as swapped:
        auto = auto_of(swapped, 64 * MIB)
        for _ in range(4):
            found = gradients(model, lambda model: model(x).backward())
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            auto.step_applied(lambda saved: Choice(saved.num_blocks, Counts(0, saved.num_blocks, 0), {}, False))
        assert auto.is_decided
        assert [swapped.session.fates[f"blocks.{n}"].outputs for n in range(4)] == [None, None, {}, None]


def test_a_disk_for_the_states_alone_fails_no_forward(model: Plain, tmp_path: Path) -> None:
    """Nor does it where the device has no room either: it is asked, and says so itself if it must."""
    total, _ = saved_by(model, tmp_path)
    expected = gradients(copy.deepcopy(model), lambda model: model(IDS).backward())
    with attached(model, tmp_path, budget_bytes=0) as swapped:
        auto = auto_of(swapped, int(total / 4))
        for _ in range(3):
            found = gradients(model, lambda model: model(IDS).backward())
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            auto.step_applied(planned)
        assert swapped.tier.counters.out_bytes == 0
        assert swapped.space.num_bytes == 0


def test_storage_is_filled_before_the_device_is_asked(model: Plain, tmp_path: Path) -> None:
    total, _ = saved_by(model, tmp_path)
    room = 256 * 1024
    assert room < total / 2
    with attached(model, tmp_path, budget_bytes=room, arena_bytes=128 * 1024) as swapped:
        auto_of(swapped, 0)
        loss = model(IDS)
        assert 0 < swapped.tier.counters.out_bytes <= room
        loss.backward()


def test_half_of_what_is_free_when_the_forward_begins(model: Plain, tmp_path: Path) -> None:
    device = CountedDevice()
    with attached(model, tmp_path) as swapped:
        auto_of(swapped, 800 * MIB, device)
        device.hold(300 * MIB)
        model(IDS).backward()
        assert swapped.swapper.room_bytes == 250 * MIB


@pytest.mark.parametrize("taken", [100, 140])
def test_what_a_plan_keeps_is_kept_as_far_as_there_is_room(taken: int, model: Plain, tmp_path: Path) -> None:
    """Training takes ``taken`` MiB of 120 in backward; until that is known half of what a forward finds is for both."""
    names = ("block_input", "qkv", "attention", "attention_projection", "mlp_up", "mlp_activation", "mlp_down")
    rows = {name: {"keep": 2, "swap": 2, "recompute": 0} for name in names}
    expected = gradients(copy.deepcopy(model), lambda model: model(IDS).backward())
    device = CountedDevice()
    kept, budget = list[int](), 120 * MIB

    def backward(model: nn.Module) -> None:
        device.hold(100 * MIB)
        loss = model(IDS)
        kept.append(swapped.swapper.kept.now)
        device.hold(taken * MIB)
        loss.backward()

    with attached(model, tmp_path, copies=LateCopies(2)) as swapped:
        auto = RecordedAuto(swapped, device, budget, rows)
        for room in (10 * MIB, budget - taken * MIB, budget - taken * MIB):
            found = gradients(model, backward)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            decided = auto._decided_by
            working = 0 if decided is None else 2 * decided.block_bytes
            held = swapped.tier.held.peak
            assert max(0, room - working) <= swapped.swapper.room_bytes <= max(0, room + held - working)
            if decided is not None:
                assert swapped.swapper.room_bytes == max(0, decided.most_bytes - working), "backward brings two blocks"
            auto.step_applied(planned)
            assert auto.is_decided
            assert auto.measured is None
            assert auto.device_bytes == budget, "nothing else may fill it"
        assert (kept[1] > 0, kept[2] > 0) == (taken == 100,) * 2


def test_a_longer_batch_keeps_less(model: Plain, tmp_path: Path) -> None:
    """What training takes beside activations grows with it, but for what was there when the forward began."""
    device = CountedDevice()
    with attached(model, tmp_path, copies=LateCopies(2)) as swapped:
        auto = auto_of(swapped, 800 * MIB, device)

        def step(num_rows: int) -> float:
            device.hold(100 * MIB)
            loss = model(IDS.repeat(num_rows, 1))
            room = swapped.swapper.room_bytes
            device.hold(400 * MIB)
            loss.backward()
            auto.step_applied(planned)
            return room

        step(1)
        step(1)
        assert auto.is_decided
        measured = auto._decided_by
        assert measured is not None
        assert step(1) == measured.device_bytes > 390 * MIB
        grown = 2 * measured.block_bytes * measured.num_blocks + 2 * measured.outside_bytes
        assert grown < 100 * MIB, "all of it stays"
        assert step(2) == measured.device_bytes - (measured.beside_bytes - 100 * MIB)
        assert step(4) == max(0.0, measured.device_bytes - 3 * (measured.beside_bytes - 100 * MIB))
        assert step(1) == measured.device_bytes
        auto.decide_anew()
        step(4)
        step(4)
        assert auto._decided_by is not measured
        assert step(4) == auto._decided_by.device_bytes > 0


def test_what_was_kept_is_no_part_of_the_rest(model: Plain, tmp_path: Path) -> None:
    """The next choice may keep as much again, and what the budget has left beside the peak."""
    device = CountedDevice()
    with attached(model, tmp_path) as swapped:
        auto = auto_of(swapped, 800 * MIB, device)
        model(IDS).backward()
        kept = swapped.swapper.kept.peak_since_mark
        assert kept > MIB
        device.hold(300 * MIB)
        auto._peaks.end()
        assert (auto._peaks.beside_bytes(0.0), auto._peaks.passing_bytes(0.0)) == (300 * MIB - kept, 0.0)
