# SPDX-License-Identifier: Apache-2.0
"""Waits of the training thread: they end for a signal soon, and what must not be cut short is not."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_fuyou.host import waiting
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.ops.core import load_core
from ds_fuyou.storage.io import IoLane, IoSettings, Transfer
from ds_fuyou.storage.store import Extent
from tests.harness.waits import Interrupts, interrupted_in, once_in

NUM_BYTES = 1 << 16


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[tuple[IoLane, list[Extent]]]:
    """A lane whose reads end when its faults are cleared, and a file."""
    (tmp_path / "file").write_bytes(b"\x01" * NUM_BYTES)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    lane = IoLane(IoSettings(engine="threads"), lambda _: tmp_path / "file")
    engine, kind = lane.engine, load_core()
    engine.add_fault(kind.IoKind.READ, kind.IoFaultEffect.HOLD, count=1 << 40)
    yield lane, [Extent(fd, 0, NUM_BYTES)]
    engine.clear_faults()
    lane.close()
    os.close(fd)


def test_ctrl_c_ends_a_wait_for_storage_that_stalls(stalled: tuple[IoLane, list[Extent]]) -> None:
    lane, extents = stalled
    transfer = lane.read(extents, aligned_tensor(NUM_BYTES), "a read that stalls")
    with interrupted_in(waiting.wait_reporting, Transfer.wait), pytest.raises(KeyboardInterrupt):
        transfer.wait()
    assert not transfer.done()
    lane.engine.clear_faults()
    transfer.wait()


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_closing_the_engine_is_not_cut_short(error: type[BaseException], stalled: tuple[IoLane, list[Extent]]) -> None:
    lane, extents = stalled
    transfer = lane.read(extents, aligned_tensor(NUM_BYTES), "a read that stalls")
    seen: list[bool] = []
    goes_on = threading.Thread(target=lane.engine.clear_faults)

    def go_on_later() -> None:
        seen.append(transfer.done())
        goes_on.start()

    with interrupted_in(waiting.wait_reporting, IoLane.close, then=go_on_later, error=error), pytest.raises(error):
        lane.close()
    goes_on.join()
    assert seen == [False]
    assert transfer.done()


def _drop(transfers: list[Transfer]) -> None:
    transfers.clear()


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_a_signal_while_a_transfer_is_dropped_comes_when_the_bytes_have(
    error: type[BaseException], stalled: tuple[IoLane, list[Extent]]
) -> None:
    """Before that memory would be free, and be another's when they come."""
    lane, extents = stalled
    transfers = [lane.read(extents, aligned_tensor(NUM_BYTES), "a read that nobody waits for")]
    seen: list[int] = []
    drops = _drop.__code__.co_firstlineno + 1

    def interrupt_and_go_on() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        lane.engine.clear_faults()

    before = signal.signal(signal.SIGINT, Interrupts(lambda: seen.append(lane.engine.num_in_flight), error))
    try:
        with (
            once_in(interrupt_and_go_on, _drop, when=lambda frame: frame.f_lineno == drops),
            pytest.raises(error),
        ):
            _drop(transfers)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [0]
    others = [aligned_tensor(NUM_BYTES) for _ in range(4)]
    assert not any(other.any() for other in others)


def test_a_drop_that_lasts_is_said(stalled: tuple[IoLane, list[Extent]], capfd: pytest.CaptureFixture[str]) -> None:
    lane, extents = stalled
    transfers = [lane.read(extents, aligned_tensor(NUM_BYTES), "a read that stalls")]
    transfers[0].ticket.report_secs = 0.05
    goes_on = threading.Timer(0.5, lane.engine.clear_faults)
    goes_on.start()
    _drop(transfers)
    goes_on.join()
    assert "still waiting for a read that stalls, which was given up" in capfd.readouterr().err


def test_what_a_wait_raises_itself_ends_it() -> None:
    asked: list[float] = []

    def fails(timeout_secs: float) -> bool:
        asked.append(timeout_secs)
        raise RuntimeError("it can no longer happen")

    with pytest.raises(RuntimeError, match="no longer"):
        waiting.wait_through(fails, lambda: "nothing")
    assert len(asked) == 2


@pytest.mark.parametrize("wait", [waiting.wait_reporting, waiting.wait_through])
def test_what_lasts_is_said_again_and_again(wait: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    ticks = itertools.count()
    monkeypatch.setattr(waiting, "time", SimpleNamespace(perf_counter=lambda: 31.0 * next(ticks)))
    monkeypatch.setattr(waiting, "logger", SimpleNamespace(warning=lambda text, *values: told.append(text % values)))
    answers = [False, False, True]
    asked: list[float] = []

    def is_over(timeout_secs: float) -> bool:
        asked.append(timeout_secs)
        return answers.pop(0)

    wait(is_over, lambda: "chunk 7")
    assert told == ["still waiting for chunk 7 (31 s)", "still waiting for chunk 7 (62 s)"]
    assert max(asked) <= 0.5  # a signal is handled between two of them
