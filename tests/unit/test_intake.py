# SPDX-License-Identifier: Apache-2.0
"""Gradients from a device whose copies end late: who may touch what before, and who waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from ds_fuyou.host.device import HostDevice
from ds_fuyou.host.memory import PageLocks
from ds_fuyou.optimizer.gradients import DramGradients
from ds_fuyou.optimizer.host_sums import Helpers
from ds_fuyou.optimizer.intake import GradientIntake
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.optimizer.window import Window
from tests.harness.limits import HANG_SECS

LAYOUT = build_layout(
    [
        [
            ("block0.a", "block0", CUT_ELEMENTS - 10, 0),
            ("block0.b", "block0", 10, 1),
            ("block1.c", "block1", CUT_ELEMENTS, 2),
        ]
    ],
    LayoutLimits(max_elements=2 * CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
)
A, B, C = LAYOUT.params


class Late:
    """An event that passes when the test says so."""

    def __init__(self, current: threading.local) -> None:
        self.passed = threading.Event()
        self.error: Exception | None = None
        self.num_waits = 0
        self._current = current

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        if not hasattr(self._current, "is_made"):
            raise RuntimeError("the device is not this thread's")
        self.num_waits += not self.passed.is_set()
        if not self.passed.wait(HANG_SECS):
            raise TimeoutError("nobody let the event pass")
        if self.error is not None:
            raise self.error


class LateDevice(HostDevice):
    """Has the host's memory, and events of its own. Copies are made at once, so values are right before the events."""

    is_host = False

    def __init__(self) -> None:
        self.events: list[Late] = []
        self._current = threading.local()
        self.make_current()

    def make_current(self) -> None:
        self._current.is_made = True

    def record_event(self, *, timed: bool = False, blocking: bool = False) -> Late:
        self.events.append(Late(self._current))
        return self.events[-1]


class Taken:
    """A door with everything behind it, and what came out."""

    def __init__(self) -> None:
        self.device = LateDevice()
        locks = PageLocks(self.device)
        self.memory = DramGradients(LAYOUT, torch.bfloat16, locks)
        self.window = Window(LAYOUT)
        self.complete: list[int] = []
        self.intake = GradientIntake(
            LAYOUT,
            self.memory,
            self.window,
            self.device,
            torch.bfloat16,
            locks,
            num_helpers=2,
            reopen=lambda chunk: None,
            complete=self.complete.append,
        )
        self.intake.norms.take_by(lambda values: values.double().norm(2))


@pytest.fixture
def taken() -> Iterator[Taken]:
    made = Taken()
    yield made
    for event in made.device.events:
        event.passed.set()
    made.intake.close()


def values(numel: int, value: float) -> torch.Tensor:
    return torch.full((numel,), value, dtype=torch.bfloat16)


def test_a_chunk_is_complete_when_its_copies_have_ended(taken: Taken) -> None:
    intake, events = taken.intake, taken.device.events
    intake.add([(C, values(C.numel, 1.0))], last=True)
    intake.add([(B, values(B.numel, 2.0)), (A, values(A.numel, 3.0))], last=True)
    intake.end_micro_batch()
    assert taken.complete == []
    events[0].passed.set()
    intake.settle(wait=False)
    assert taken.complete == [1]
    events[1].passed.set()
    intake.settle(wait=False)
    assert taken.complete == [1], "the chunk's other gradient, of the same message, is on its way"
    events[2].passed.set()
    intake.settle(wait=False)
    assert taken.complete == [1, 0]
    assert [event.num_waits for event in events] == [0, 0, 0]


@pytest.mark.parametrize("last", [True, False])
def test_what_is_added_behind_the_last_micro_batch_leaves_no_norm_of_before(last: bool, taken: Taken) -> None:
    """A script may say that a micro-batch is the last one, and then have another, while sums are on their way."""
    intake = taken.intake
    for value, is_last in ((1.0, False), (2.0, True), (4.0, last)):
        intake.add([(A, values(A.numel, value))], last=is_last)
        intake.end_micro_batch()
    for event in taken.device.events:
        event.passed.set()
    intake.close_window()
    assert (A.index in intake.norms) == last, "else it is taken of what there is, when it is asked for"
    intake.take_missing_norms(lambda span: [piece.values for piece in taken.memory.pieces(span)])
    norm = intake.norms.settle([A.index], lambda index: taken.memory.values(LAYOUT.params[index])[0])[A.index]
    assert float(norm) == pytest.approx(7.0 * A.numel**0.5, rel=1e-15)


def test_a_further_micro_batch_is_added_behind_its_copy(taken: Taken) -> None:
    """Nothing waits for it but the end of the window; its norm is of the sum."""
    intake, events = taken.intake, taken.device.events
    intake.add([(A, values(A.numel, 1.0))], last=False)
    intake.end_micro_batch()
    intake.add([(A, values(A.numel, 2.0))], last=True)
    intake.end_micro_batch()
    assert float(taken.memory.values(A)[0][0]) == 1.0
    assert A.index not in intake.norms
    assert intake.added == (0.0, 0)
    for event in events:
        event.passed.set()
    intake.close_window()
    secs, number = intake.added
    assert (secs > 0, number) == (True, A.numel), "the first micro-batch was copied"
    assert float(taken.memory.values(A)[0][-1]) == 3.0
    norm = intake.norms.settle([A.index], lambda index: taken.memory.values(LAYOUT.params[index])[0])[A.index]
    assert float(norm) == pytest.approx(3.0 * A.numel**0.5, rel=1e-15)
    assert taken.complete == []  # of the chunk's other parameter nothing came
    intake.add([(B, values(B.numel, 1.0))], last=True)
    events[-1].passed.set()
    intake.settle(wait=True)
    assert taken.complete == [0]


def test_a_gradient_that_comes_twice_is_complete_once_both_are_there(taken: Taken) -> None:
    intake, events = taken.intake, taken.device.events
    intake.add([(C, values(C.numel, 1.0))], last=True)
    intake.add([(C, values(C.numel, 1.0))], last=True)
    events[0].passed.set()
    intake.settle(wait=False)
    assert taken.complete == []
    events[1].passed.set()
    intake.settle(wait=True)
    assert taken.complete == [1]
    assert float(taken.memory.values(C)[0][0]) == 2.0


@pytest.mark.parametrize("adds", [False, True])
def test_a_copy_that_fails_raises_in_its_step(adds: bool, taken: Taken) -> None:
    """Also where another thread met it."""
    intake, events = taken.intake, taken.device.events
    for _ in range(1 + adds):
        intake.add([(C, values(C.numel, 1.0))], last=True)
    events[-1].error = RuntimeError("the copy failed")
    for event in events:
        event.passed.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the copy failed"):
            intake.close_window()
    assert (1 in taken.complete) is False


def test_dropped_gradients_end_and_count_for_nothing(taken: Taken) -> None:
    intake, events = taken.intake, taken.device.events
    intake.add([(A, values(A.numel, 1.0)), (B, values(B.numel, 1.0))], last=True)
    for event in events:
        event.passed.set()
    intake.drop()
    taken.window.reset()
    intake.end_window()
    assert taken.complete == []
    intake.add([(A, values(A.numel, 5.0))], last=True)
    events[-1].passed.set()
    intake.settle(wait=True)
    assert float(taken.memory.values(A)[0][0]) == 5.0


def test_copies_run_ahead_of_sums_by_a_bounded_number_of_bytes(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one is waited for, not what is computed."""
    from ds_fuyou.optimizer import host_sums
    from ds_fuyou.optimizer import intake as intake_module

    monkeypatch.setattr(intake_module, "PIECE_ELEMENTS", CUT_ELEMENTS // 8)
    taken.intake._sums._bytes = 4096
    monkeypatch.setattr(host_sums, "STAGING_BYTES", 3 * 4096)
    intake, events = taken.intake, taken.device.events
    intake.add([(A, values(A.numel, 1.0))], last=False)

    def add() -> None:
        taken.device.make_current()
        intake.add([(A, values(A.numel, 1.0))], last=False)

    adding = threading.Thread(target=add)
    adding.start()
    while len(events) < 4:  # one straight copy, three pieces: the fourth piece finds no staging memory
        assert adding.is_alive()
    assert len(events) == 4
    seen = 0
    while adding.is_alive():
        for event in events[seen:]:
            event.passed.set()
            seen += 1
    assert len(events) == 1 + 8
    for event in events:
        event.passed.set()
    intake.settle(wait=True)
    assert float(taken.memory.values(A)[0].min()) == 2.0
    assert intake._sums._num_buffers == 3


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("of_torch", [1, 2])
def test_helpers_add_as_torch_does_and_square_every_value_once(num_threads: int, of_torch: int) -> None:
    """Launchers of several ranks leave torch one thread."""
    generator = torch.Generator().manual_seed(0)
    first, other = (torch.randn(1_000_003, generator=generator).bfloat16() for _ in range(2))
    expected = first + other
    pieces = [expected[:3], expected[3:700_000], expected[700_000:]]
    exact = float(expected.double().square().sum())
    before = torch.get_num_threads()
    torch.set_num_threads(of_torch)
    helpers = Helpers(num_threads)
    try:
        helpers.add(first, other)
        found = helpers.squares(pieces)
        with pytest.raises(ValueError, match="shorter than"):
            helpers._each(lambda part: [*zip(part, [1], strict=True)], [[1], [1, 2], [1]])
    finally:
        helpers.close()
        torch.set_num_threads(before)
    assert torch.equal(first, expected)
    assert abs(found - exact) <= expected.numel() * 2.0**-53 * exact
