# SPDX-License-Identifier: Apache-2.0
"""Device seconds come from the device: what the host waits for is not what the device idles for, nor the other way."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_fuyou.activations.blocks import find_blocks
from ds_fuyou.host.compute_clock import DeviceClock, HostClock, Phase, compute_clock
from ds_fuyou.host.device import HostDevice
from ds_fuyou.telemetry.lane_times import read_trace, sum_lanes
from ds_fuyou.telemetry.report import LaneTimes
from ds_fuyou.telemetry.trace import Lane, LaneTrace
from ds_fuyou.zero.compute_spans import computed
from ds_fuyou.zero.run.step_clock import StepClock, StepTimes
from tests.harness.timed_device import TimedDevice


class Model(nn.Module):
    """Whose forward does what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.work = lambda: None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.work()
        return batch


class Run:
    """Steps of a model whose parts take as long as said, watched as an engine watches them."""

    def __init__(self, device: TimedDevice, clock: DeviceClock) -> None:
        self.device, self.clock = device, clock
        self.model = Model()
        self.watch = StepClock(self.model, clock)

    def fetch(self, *, host_secs: float = 0.0, copied: float = 0.0) -> None:
        """Parameters: the host may wait for storage, then the computing stream for the copy."""
        with self.clock.within(Phase.PARAMETERS):
            self.device.host_works(host_secs)
            self.device.wait_for_copy(copied)

    def step(self, forward: Callable[[], None], backward: Callable[[], None]) -> StepTimes:
        self.model.work = forward
        self.model(torch.zeros(2, 3))
        backward()
        self.watch.backward_ended()
        self.clock.enter(Phase.STEP)
        self.device.host_waits_for_norm()
        times = self.watch.end_step()
        self.device.host_works(0.5)  # the rest of step()
        self.clock.enter(Phase.OUTSIDE)
        return times


def lane_times(clock) -> LaneTimes:
    core = SimpleNamespace(
        io=SimpleNamespace(stats=lambda: dict.fromkeys(("read", "write"), SimpleNamespace(busy_secs=5.0, num_bytes=1))),
        pipeline=SimpleNamespace(stats=lambda: SimpleNamespace(update_busy_secs=0.0)),
        num_redone_chunks=0,
    )
    return LaneTimes.of(SimpleNamespace(core=core, clock=clock, activations=None, num_tokens=0))


def test_what_the_host_waits_for_while_the_device_computes_is_not_exposed() -> None:
    device = TimedDevice()
    clock = DeviceClock(device)
    run = Run(device, clock)

    def forward() -> None:
        run.fetch()
        device.compute(4.0)
        run.fetch(host_secs=3.0)  # a read from storage; the device has a second left when it ends
        device.compute(2.0)

    times = run.step(forward, lambda: device.compute(7.0))
    assert (times.forward_secs, times.backward_secs) == (6.0, 7.0), "not less by the seconds in which the host waited"
    assert clock.exposed_secs == 0.0
    assert device.num_host_waits == 0, "no event was waited for"


def test_a_device_that_waits_for_a_copy_idles_though_the_host_does_not() -> None:
    device = TimedDevice()
    clock = DeviceClock(device)
    run = Run(device, clock)

    def forward() -> None:
        device.compute(1.0)
        run.fetch(copied=3.0)
        device.compute(1.0)

    def backward() -> None:
        device.compute(2.0)
        with clock.within(Phase.ACTIVATIONS):
            device.wait_for_copy(10.0)
            with clock.within(Phase.PARAMETERS):
                device.wait_for_copy(11.0)  # part of the same gap
        device.compute(2.0)

    times = run.step(forward, backward)
    assert (times.forward_secs, times.backward_secs) == (2.0, 4.0)
    assert clock.secs(Phase.PARAMETERS) == 2.0
    assert clock.secs(Phase.ACTIVATIONS) == 5.0
    now = lane_times(clock)
    assert (now.device_secs, now.exposed_secs, now.swap_wait_secs) == (6.0, 7.0, 5.0)
    assert now.compute_of(13.5) == 6.0
    assert now.bound_lane(13.5) == "storage"
    run.step(lambda: device.compute(1.0), lambda: device.compute(1.0))
    assert clock.secs(Phase.STEP) == 0.5, "step() itself is known in the next step"
    assert clock.exposed_secs == 7.5
    assert device.num_host_waits == 0


def test_what_a_script_does_outside_of_steps_is_told_apart() -> None:
    device = TimedDevice()
    clock = DeviceClock(device)
    run = Run(device, clock)
    for between in (0.0, 30.0):
        device.host_works(between)
        times = run.step(lambda: device.compute(1.0), lambda: device.compute(2.0))
        assert times.outside_secs == between
    assert clock.exposed_secs == 0.5, "the rest of the first step()"


def test_a_host_that_is_late_leaves_the_device_idle_in_the_wait_alone() -> None:
    device = TimedDevice()
    clock = DeviceClock(device)
    run = Run(device, clock)

    def forward() -> None:
        device.compute(1.0)
        run.fetch(host_secs=4.0)
        device.compute(1.0)

    times = run.step(forward, lambda: None)
    assert times.forward_secs == 2.0
    assert clock.secs(Phase.PARAMETERS) == 3.0, "the first of the four seconds passed beside computing"


def test_a_measured_step_may_wait_and_others_count_what_is_late_in_the_next() -> None:
    device = TimedDevice()
    clock = DeviceClock(device)
    watch = StepClock(nn.Identity(), clock)
    for wait, expected in ((False, 0.0), (False, 3.0), (True, 6.0)):
        clock.enter(Phase.FORWARD)
        device.compute(3.0)
        clock.enter(Phase.BACKWARD)
        clock.enter(Phase.OUTSIDE)
        assert watch.end_step(wait=wait).forward_secs == expected
        device.host_secs = device.stream_secs
    assert device.num_host_waits == 1


@pytest.mark.parametrize("even_compiled", [False, True])
def test_the_next_forward_is_recorded_a_compiled_one_where_that_is_asked_for(even_compiled: bool) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)))
    watch = StepClock(model, HostClock())
    watch.record_next(find_blocks(model, ["Sequential"]), None, even_compiled=even_compiled)
    batch = torch.ones(2, 3)
    copy.deepcopy(model)(batch)
    assert watch.recorded() == ((), {}), "a copy is not the model"
    model[0].compile(backend="eager")
    model(batch)
    blocks, _ = watch.recorded()
    assert [block.name for block in blocks] == (["0", ""] if even_compiled else [])
    assert watch.recorded_elements == (6 if even_compiled else 0)
    model(batch)
    assert watch.recorded() == ((), {}), "one forward alone"


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_forward_that_an_interrupt_ended_is_as_if_it_had_not_begun(evaluates: bool) -> None:
    device = TimedDevice()
    clock = DeviceClock(device)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3)) for _ in range(2)))
    watch = StepClock(model, clock)
    watch.record_next(find_blocks(model, ["Sequential"]), None, even_compiled=False)
    model[1].register_forward_hook(lambda *_: device.compute(1.0))

    def interrupt(*_: object) -> None:
        device.compute(5.0)
        raise KeyboardInterrupt

    def interrupted() -> None:
        handle = model[1].register_forward_pre_hook(interrupt)
        with torch.set_grad_enabled(not evaluates), pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 3))
        handle.remove()
        device.host_works(60.0)

    for _ in range(2):
        interrupted()
        model(torch.ones(2, 3))
        clock.enter(Phase.OUTSIDE)
    interrupted()
    clock.enter(Phase.STEP)
    times = watch.end_step(wait=True)
    assert (times.num_forwards, times.num_elements, times.forward_secs) == (2, 6.0, 2.0)
    assert times.outside_secs > 110.0
    blocks, _ = watch.recorded()
    assert [block.name for block in blocks] == ["0", "1", ""]


@pytest.mark.parametrize("following", [Phase.FORWARD, Phase.STEP])
def test_a_backward_that_never_ended_is_not_counted(following: Phase) -> None:
    device = TimedDevice()
    for clock in (DeviceClock(device), HostClock()):
        clock.enter(Phase.FORWARD)
        clock.enter(Phase.BACKWARD)
        device.compute(5.0)
        clock.enter(following)
        clock.settle(wait=True)
        assert clock.secs(Phase.BACKWARD) == 0.0


def test_a_mark_of_another_stream_may_be_passed_before_the_one_ahead_of_it() -> None:
    """Branches of a model may compute on streams of their own."""
    device = TimedDevice()
    clock = DeviceClock(device)
    device.compute(5.0)
    clock.enter(Phase.FORWARD)
    device.stream_secs = 0.0
    clock.enter(Phase.OUTSIDE)
    clock.settle()
    device.host_secs = 6.0
    clock.settle()
    assert clock.secs(Phase.FORWARD) == 0.0
    assert len(clock._marks) == 1


def test_marks_of_an_evaluation_behind_a_forward_without_backward_do_not_grow() -> None:
    device = TimedDevice()
    clock = DeviceClock(device)
    clock.enter(Phase.FORWARD)
    clock.enter(Phase.BACKWARD)
    for _ in range(10_000):
        with clock.within(Phase.PARAMETERS):
            device.wait_for_copy(device.stream_secs + 1.0)
        device.host_waits_for_norm()
    assert len(clock._marks) <= 1024
    clock.settle()
    assert clock.secs(Phase.PARAMETERS) == 10_000.0


def test_waits_outside_of_training_are_not_timed() -> None:
    device = TimedDevice()
    clock = DeviceClock(device)
    with clock.within(Phase.PARAMETERS):  # an evaluation
        device.wait_for_copy(5.0)
    clock.settle(wait=True)
    assert clock.exposed_secs == 0.0
    assert not clock._marks


def test_the_host_keeps_its_own_seconds() -> None:
    waited = 0.0
    clock = compute_clock(HostDevice(), lambda: waited, None)
    assert isinstance(clock, HostClock)
    clock.enter(Phase.FORWARD)
    waited = 1000.0
    clock.enter(Phase.OUTSIDE)
    assert clock.secs(Phase.FORWARD) == 0.0, "less what was waited"
    assert clock.exposed_secs == 1000.0
    assert lane_times(clock).compute_of(1500.0) == 500.0
    time.sleep(0.01)
    waited = 2000.0
    clock.enter(Phase.FORWARD)
    assert clock.secs(Phase.OUTSIDE) >= 0.01, "waits for an evaluation's parameters are the script's"


def worked(secs: float) -> None:
    """This thread computes for so many seconds of its own."""
    end = time.thread_time() + secs
    while time.thread_time() < end:
        pass


def test_what_threads_do_themselves_is_told_without_their_waits() -> None:
    clock = DeviceClock(TimedDevice())
    begin = time.thread_time()
    clock.enter(Phase.FORWARD)
    worked(0.02)
    with clock.within(Phase.PARAMETERS):
        time.sleep(0.2)
        worked(0.02)
    clock.enter(Phase.BACKWARD)
    most = time.thread_time() - begin  # much less than it slept

    def backward() -> None:  # as autograd runs it, in a thread of its own that lives on
        with clock.within(Phase.PARAMETERS):
            worked(0.03)
        computed.set()
        ends.wait()

    computed, ends = threading.Event(), threading.Event()
    other = threading.Thread(target=backward)
    other.start()
    computed.wait()
    clock.enter(Phase.OUTSIDE)
    ends.set()
    other.join()
    worked(0.02)  # the script's own
    clock.enter(Phase.STEP)
    worked(0.02)
    assert 0.04 <= clock.thread_secs(Phase.FORWARD) <= most
    assert clock.thread_secs(Phase.BACKWARD) >= 0.03
    assert clock.thread_secs(Phase.STEP) >= 0.02, "of an open phase what has passed"
    assert clock.thread_secs(Phase.PARAMETERS) == 0.0
    clock.enter(Phase.FORWARD)
    assert clock.thread_secs(Phase.STEP) >= 0.02
    assert clock.thread_secs(Phase.BACKWARD) >= 0.03, "though its thread has ended"


def test_where_waits_poll_nothing_is_known_of_threads() -> None:
    device = TimedDevice()
    device.waits_block = False
    clock = DeviceClock(device)
    clock.enter(Phase.FORWARD)
    worked(0.02)
    clock.enter(Phase.OUTSIDE)
    assert clock.thread_secs(Phase.FORWARD) == 0.0


def test_a_trace_shows_blocks_and_gaps_by_the_device_s_own_clock(tmp_path: Path) -> None:
    trace = LaneTrace(str(tmp_path / "trace.json"))
    device = TimedDevice()
    clock = DeviceClock(device, computed(trace))
    clock.enter(Phase.FORWARD)
    for block, copied in (("one", 0.0), ("two", 5.0)):
        clock.name(f"forward {block}")
        with clock.within(Phase.PARAMETERS):
            device.wait_for_copy(copied)
        device.compute(2.0)
    clock.enter(Phase.OUTSIDE)
    clock.settle(wait=True)
    origin = trace._origin_ns + int(1000 * min(event["ts"] for event in trace.events() if event["ph"] == "X"))
    trace.add(Lane.STORAGE_READ, "x", origin, origin + 10**9)
    trace.close()
    assert json.loads((tmp_path / "trace.json").read_text())
    content = read_trace(tmp_path / "trace.json")
    assert {s.name: (s.begin, s.end) for s in content.spans if s.lane == "compute" and s.end > s.begin} == {
        "forward one": (pytest.approx(0.0), pytest.approx(2.0)),
        "forward two": (pytest.approx(5.0), pytest.approx(7.0)),
    }
    compute, read = (next(s for s in sum_lanes(content) if s.lane == lane) for lane in ("compute", "storage read"))
    assert compute.busy_secs == pytest.approx(4.0)
    assert read.exposed_secs == pytest.approx(0.0)
