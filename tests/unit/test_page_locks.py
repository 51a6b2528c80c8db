# SPDX-License-Identifier: Apache-2.0
"""Host memory is registered with a device that pins, once, until it is released."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.device import HostDevice
from ds_fuyou.host.memory import PageLocks, aligned_tensor
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from tests.harness.small_core import backward, small_core, step


@pytest.mark.gpu
def test_locked_pages_are_pinned_until_released() -> None:
    from ds_fuyou.zero.device import rank_device

    locks = PageLocks(rank_device())
    memory = locks.lock(aligned_tensor(1 << 20))
    assert memory.is_pinned()
    with pytest.raises(FuyouStateError, match="registering 1048576 bytes of host memory"):
        locks.lock(memory)
    values = torch.ones(4, device=rank_device().torch_device)
    assert float(values.sum()) == 4, "what was refused is nothing that a kernel is told"
    locks.release()
    assert not memory.is_pinned()


class Pinning(HostDevice):
    """Takes every page."""

    pins = True


def seen_by_a_child(memory: torch.Tensor) -> int:
    child = os.fork()
    if not child:
        os._exit(int(memory[0]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_has_no_part_in_registered_memory() -> None:
    """The system would copy all of it for each of a data loader's workers."""
    locks, memory = PageLocks(Pinning()), aligned_tensor(1 << 20).fill_(7)
    assert seen_by_a_child(memory) == 7
    locks.lock(memory)
    assert seen_by_a_child(memory) == 0
    locks.pause()
    assert seen_by_a_child(memory) == 7
    locks.resume()
    assert seen_by_a_child(memory) == 0
    locks.release()
    assert seen_by_a_child(memory) == 7
    assert int(memory[-1]) == 7


LAYOUT = build_layout(
    [[("a", "a", 3 * CUT_ELEMENTS, 0), ("b", "b", CUT_ELEMENTS + 77, 1)]],
    LayoutLimits(max_elements=2 * CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
)


@pytest.mark.parametrize("residency", [(0.0, 1.0, 1.0), (0.0, 0.0, 1.0)], ids=["there", "moved"])
def test_a_forked_child_has_no_part_in_states_and_gradients(residency: tuple[float, ...], tmp_path: Path) -> None:
    """Steps change all of them: the system would copy them for workers of a data loader, for as long as these live."""
    with small_core(tmp_path, LAYOUT, residency=residency) as core:
        if not residency[1]:
            core.mover.move_to((True,) * len(LAYOUT.chunks), 1 << 30)
        for seed in range(3):
            step(core, seed)
        assert core.mover.is_idle
        backward(core, 3)
        found = [core.place.state(chunk.index) for chunk in LAYOUT.chunks]
        found += [piece.values.view(torch.uint8) for span in LAYOUT.params for piece in core.gradients.pieces(span)]
        assert len(found) == 5
        for memory in found:
            assert memory is not None
            memory[0] = 7
            assert seen_by_a_child(memory) == 0
