# SPDX-License-Identifier: Apache-2.0
"""What the host waits for when a device falls behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_fuyou.host.device import HostDevice
from ds_fuyou.host.run_ahead import RunAhead, run_ahead

MIB = 1 << 20


class Event:
    def __init__(self, number: int, waited: list[int]) -> None:
        self.number, self.waited = number, waited

    def synchronize(self) -> None:
        self.waited.append(self.number)


class Recorder(HostDevice):
    """Events by their numbers, from 1 on."""

    torch_device = torch.device("meta")

    def __init__(self, total_bytes: int) -> None:
        self.total, self.num_events, self.waited = total_bytes, 0, list[int]()

    def total_bytes(self) -> int:
        return self.total

    def record_event(self, *, timed: bool = False, blocking: bool = False) -> Any:
        assert blocking, "a core is the optimizer's"
        self.num_events += 1
        return Event(self.num_events, self.waited)


def test_all_but_the_last_bytes_are_waited_for() -> None:
    device = Recorder(16 * 80 * MIB)
    ahead = RunAhead(device)
    assert ahead.most_bytes == 80 * MIB
    for number in range(1, 21):
        ahead.let_go(10 * MIB)
        assert device.waited == list(range(1, number - 8 + 1))


def test_small_ones_share_an_event() -> None:
    device = Recorder(16 * 80 * MIB)
    ahead = RunAhead(device)
    for _ in range(39):
        ahead.let_go(MIB // 4)
    assert device.num_events == 0
    for _ in range(200):
        ahead.let_go(MIB // 4)
    assert device.num_events == 5
    assert device.waited == []


def test_the_newest_is_never_waited_for() -> None:
    """However large it is: a device has work while the host waits."""
    device = Recorder(16 * 80 * MIB)
    ahead = RunAhead(device)
    for number in range(1, 6):
        ahead.let_go(1000 * MIB)
        assert device.waited == list(range(1, number))
    ahead.let_go(10 * MIB)
    assert device.waited == [1, 2, 3, 4, 5]


def test_a_gib_on_large_devices() -> None:
    assert RunAhead(Recorder(80 << 30)).most_bytes == 1 << 30


@pytest.mark.parametrize("is_host", [True, False])
def test_one_of_a_device(is_host: bool) -> None:
    device = HostDevice() if is_host else Recorder(1 << 30)
    device.is_host = is_host  # type: ignore[misc]
    assert run_ahead(device) is run_ahead(device)
    assert (run_ahead(device) is None) == is_host
