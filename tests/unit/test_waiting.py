# SPDX-License-Identifier: Apache-2.0
"""Waits of the training thread: they end for a signal soon, and what must not be cut short is not."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_fuyou.host import waiting
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.ops.core import load_core
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.store import Extent

NUM_BYTES = 1 << 16


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[tuple[IoLane, list[Extent]]]:
    """A lane whose reads take as long as a test may, and a file."""
    (tmp_path / "file").write_bytes(b"\x01" * NUM_BYTES)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    lane = IoLane(IoSettings(engine="threads"), lambda _: tmp_path / "file")
    kind = load_core()
    lane.engine.add_fault(kind.IoKind.READ, kind.IoFaultEffect.DELAY, delay_secs=2.0)
    yield lane, [Extent(fd, 0, NUM_BYTES)]
    lane.close()
    os.close(fd)


def interrupt_soon() -> threading.Timer:
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_ctrl_c_ends_a_wait_for_storage_that_stalls(stalled: tuple[IoLane, list[Extent]]) -> None:
    lane, extents = stalled
    transfer = lane.read(extents, aligned_tensor(NUM_BYTES), "a read that stalls")
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        transfer.wait()
    timer.join()
    assert not transfer.done()  # it was not the end of the read that ended the wait
    transfer.wait()


def test_closing_the_engine_is_not_cut_short(stalled: tuple[IoLane, list[Extent]]) -> None:
    lane, extents = stalled
    transfer = lane.read(extents, aligned_tensor(NUM_BYTES), "a read that stalls")
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        lane.close()
    timer.join()
    assert transfer.done()


def test_a_signal_while_a_transfer_is_dropped_is_not_lost(stalled: tuple[IoLane, list[Extent]]) -> None:
    """And the memory stays until the bytes have come."""
    lane, extents = stalled
    memory = aligned_tensor(NUM_BYTES)
    transfer = lane.read(extents, memory, "a read that nobody waits for")
    timer = interrupt_soon()

    def drop_and_go_on() -> None:
        nonlocal transfer
        del transfer
        for _ in range(100):
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        drop_and_go_on()
    timer.join()
    assert lane.engine.num_in_flight == 1
    lane.close()
    assert memory.all()


@pytest.mark.parametrize("wait", [waiting.wait_reporting, waiting.wait_through])
def test_what_lasts_is_said_again_and_again(wait: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(waiting, "REPORT_SECS", 0.0)
    monkeypatch.setattr(waiting, "logger", SimpleNamespace(warning=lambda text, *values: told.append(text % values)))
    answers = [False, False, True]
    asked: list[float] = []

    def is_over(timeout_secs: float) -> bool:
        asked.append(timeout_secs)
        return answers.pop(0)

    wait(is_over, lambda: "chunk 7")
    assert told == ["still waiting for chunk 7 (0 s)"] * 2
    assert max(asked) <= 0.5  # a signal is handled between two of them
