# SPDX-License-Identifier: Apache-2.0
"""Short probes measure the lanes they are given, and leave nothing behind."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.host.device import HostDevice
from ds_fuyou.ops.core import load_core
from ds_fuyou.profiling import lane_rates
from ds_fuyou.profiling.lane_rates import probe_link, probe_storage
from ds_fuyou.storage.io import IoLane, IoSettings

RATE = 16 << 20


def test_storage_is_measured_through_the_engine_it_is_given(tmp_path: Path) -> None:
    io = IoLane(IoSettings(), lambda fd: tmp_path)
    io.engine.set_throttle(RATE, 2 * RATE)
    rates = probe_storage(io, [tmp_path], 4 << 20, 256 << 10)
    assert 0 < rates.read <= 1.05 * RATE
    assert 0 < rates.write <= 1.05 * 2 * RATE
    assert 0 < rates.mixed <= 1.05 * 2 * RATE
    assert rates.cpu_secs_per_byte >= 0
    with pytest.raises(FuyouStorageError, match="cannot measure storage"):
        probe_storage(io, [tmp_path / "none"], 4 << 20, 256 << 10)
    io.close()
    assert list(tmp_path.iterdir()) == []


def test_paths_are_measured_at_once_and_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io, second, both_move = IoLane(IoSettings(), lambda fd: tmp_path), tmp_path / "second", threading.Barrier(2)
    second.mkdir()

    def moved(*_: object) -> float:
        both_move.wait(20)
        return 1e9

    monkeypatch.setattr(lane_rates, "_moved", moved)
    both = probe_storage(io, [tmp_path, second], 1 << 20, 256 << 10)
    assert (both.read, both.write, both.mixed) == (2e9, 2e9, 2e9)
    io.close()


def test_paths_do_the_same_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow one of them is."""
    io, second, lock = IoLane(IoSettings(), lambda fd: tmp_path), tmp_path / "second", threading.Lock()
    second.mkdir()
    running: dict[int, list[str]] = {}

    def moved(kinds: Any, _lane: object, _blocks: object, extents: Any) -> float:
        fd = extents[0].fd
        with lock:
            running[fd] = [kind.__name__ for kind in kinds]
            assert all(names == running[fd] for names in running.values())
        time.sleep(0.01 * (fd == files[0]))
        with lock:
            del running[fd]
        return 1e9

    files, opened = list[int](), lane_rates.open_anonymous
    monkeypatch.setattr(lane_rates, "open_anonymous", lambda *asked: files.append(opened(*asked)) or files[-1])
    monkeypatch.setattr(lane_rates, "_moved", moved)
    probe_storage(io, [tmp_path, second], 1 << 20, 256 << 10)
    io.close()


def test_the_link_is_a_copy_where_the_device_is_the_host() -> None:
    up, down = probe_link(HostDevice(), 1 << 20)
    assert min(up, down) > 0


def test_after_a_failed_transfer_the_others_are_waited_for(tmp_path: Path) -> None:
    core = load_core()
    io = IoLane(IoSettings(), lambda fd: tmp_path)
    io.engine.add_fault(core.IoKind.WRITE, core.IoFaultEffect.ERROR, error=errno.EIO, first=0, count=1)
    io.engine.set_throttle(RATE, RATE)
    with pytest.raises(FuyouStorageError, match="measuring storage failed"):
        probe_storage(io, [tmp_path], 4 << 20, 256 << 10)
    assert io.engine.num_in_flight == 0, "nobody uses the memory and the descriptor any more"
    io.close()
