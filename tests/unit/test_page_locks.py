# SPDX-License-Identifier: Apache-2.0
"""Host memory is registered with a device that pins, once, until it is released."""

from __future__ import annotations

import pytest

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.memory import PageLocks, aligned_tensor


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
