# SPDX-License-Identifier: Apache-2.0
"""Host memory goes back to its pool only when the device is done with it."""

from __future__ import annotations

import pytest

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.device import HostDevice
from ds_fuyou.host.fence import ReleaseFence
from ds_fuyou.host.memory import HostPool, PageLocks, aligned_tensor


class Recorded:
    """An event of a device that runs until told otherwise."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_memory_is_kept_until_the_event_has_passed() -> None:
    pool = HostPool(8192)
    events: list[Recorded] = []

    class Device(HostDevice):
        is_host = False

        def record_event(self, *, timed: bool = False) -> Recorded:
            events.append(Recorded())
            return events[-1]

    fence = ReleaseFence(Device())
    for _ in range(2):
        block = pool.try_allocate(4096)
        assert block is not None
        fence.hold(block)
        del block
    assert pool.try_allocate(4096) is None
    events[1].passed = True  # the older copy still runs
    fence.sweep()
    assert len(fence) == 2
    events[0].passed = True
    fence.sweep()
    assert len(fence) == 0
    assert pool.used_bytes == 0


def test_where_copies_end_before_they_return_nothing_is_kept() -> None:
    pool = HostPool(4096)
    block = pool.try_allocate(4096)
    assert block is not None
    ReleaseFence(HostDevice()).hold(block)
    del block
    assert pool.used_bytes == 0


@pytest.mark.gpu
def test_locked_pages_are_pinned_until_released() -> None:
    from ds_fuyou.zero.device import rank_device

    locks = PageLocks(rank_device())
    memory = locks.lock(aligned_tensor(1 << 20))
    assert memory.is_pinned()
    with pytest.raises(FuyouStateError, match="registering 1048576 bytes of host memory"):
        locks.lock(memory)
    locks.release()
    assert not memory.is_pinned()
