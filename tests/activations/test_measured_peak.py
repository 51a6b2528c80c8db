# SPDX-License-Identifier: Apache-2.0
"""Room on the device for mode "auto": what one step left of it, not what the process ever took."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from ds_fuyou.activations.tier import SOON_BYTES
from ds_fuyou.config import FuyouConfig
from ds_fuyou.host.device import HostDevice
from ds_fuyou.planner.activations import WORKING_BLOCKS
from ds_fuyou.zero.run.auto_activations import AutoActivations
from ds_fuyou.zero.run.budgets import device_budget
from tests.activations.late import LateCopies
from tests.activations.support import MIB, Plain, attached


class Moment:
    """An event of a device that computes when it is told to."""

    def __init__(self) -> None:
        self.secs = time.perf_counter()

    def synchronize(self) -> None:
        """It is over."""

    def elapsed_time(self, later: Moment) -> float:
        return 1000 * (later.secs - self.secs)


class CountedDevice(HostDevice):
    """Memory of its own, which a test fills."""

    is_host = False

    def __init__(self) -> None:
        self.now = self.peak = 0

    def record_event(self, *, timed: bool = False, blocking: bool = False) -> Moment:
        return Moment()

    def total_bytes(self) -> int:
        return 1000 * MIB

    def hold(self, num_bytes: int) -> None:
        self.now = num_bytes
        self.peak = max(self.peak, num_bytes)

    def allocated_bytes(self) -> int:
        return self.now

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.now


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("budget", ["auto", 800 * MIB])
def test_the_peak_is_that_of_the_measured_step(budget: int | str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    device = CountedDevice()
    model = Plain().train()
    with attached(model, tmp_path, copies=LateCopies(2)) as swapped:
        device.hold(700 * MIB)  # building the model, say
        budget_bytes = device_budget(FuyouConfig.model_validate({"gpu_budget_bytes": budget}), device)
        auto = AutoActivations(swapped.session, swapped.swapper, device, budget_bytes, 0, None)
        swapped.swapper.fates = None  # what was kept is told by test_first_forward.py
        device.hold(600 * MIB)
        device.hold(100 * MIB)
        auto.step_skipped()  # a new step begins
        loss = model(torch.randint(300, (4, 33)))
        device.hold(300 * MIB)
        loss.backward()
        held = swapped.tier.held.peak_since_mark
        assert held > 0
        peaks = auto._peaks
        peaks.end()
        assert peaks.beside_bytes(MIB) == 300 * MIB - min(held, WORKING_BLOCKS * MIB), "it counts once"
        assert peaks.beside_bytes(1024.0) == 300 * MIB - WORKING_BLOCKS * 1024
        assert peaks.passing_bytes(1024.0) == WORKING_BLOCKS * 1024
        assert peaks.passing_bytes(1 << 30) == SOON_BYTES, "so much may pass by in other steps"
        step = {"saved": 4.0 * MIB, "outside": 0.0, "forwards": 1.0}
        measured = auto._saved_step(auto._measured(step))
        assert measured.device_bytes + measured.beside_bytes == (900 if budget == "auto" else 800) * MIB
        assert abs(measured.staying_bytes - measured.device_bytes) <= WORKING_BLOCKS * MIB, "one peak"
        device.hold(999 * MIB)
        assert auto._saved_step(auto._measured(step)).device_bytes == 0


@pytest.mark.usefixtures("only_rank")
def test_what_the_loss_needs_is_told_from_what_blocks_do(tmp_path: Path) -> None:
    """What stays is there for both, what backward works on for the blocks alone."""
    torch.manual_seed(0)
    device = CountedDevice()
    model = Plain().train()
    with attached(model, tmp_path, copies=LateCopies(2)) as swapped:
        auto = AutoActivations(swapped.session, swapped.swapper, device, 800 * MIB, 0, None)
        told: list[int] = []

        def in_backward(grad: torch.Tensor) -> None:
            device.hold(told.pop() * MIB)
            device.hold(100 * MIB)

        model.blocks[0].register_forward_hook(lambda block, args, out: out.register_hook(in_backward) and None)
        for loss, blocks in ((500, 200), (300, 400)):  # two micro-batches
            device.hold(100 * MIB)
            out = model(torch.randint(300, (4, 33)))
            out.register_hook(lambda grad, most=loss: device.hold(most * MIB) or device.hold(100 * MIB))
            told.append(blocks)
            out.backward()
            assert not told
        measured = auto._saved_step(auto._measured({"saved": 8.0 * MIB, "outside": 0.0, "forwards": 2.0}))
        loss, blocks = 800 * MIB - measured.staying_bytes, measured.beside_bytes
        assert 490 * MIB < loss <= 500 * MIB, "beside what is held there for backward"
        assert 390 * MIB < blocks <= 400 * MIB
        assert measured.most_bytes == measured.staying_bytes < measured.device_bytes
