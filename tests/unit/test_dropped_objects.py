# SPDX-License-Identifier: Apache-2.0
"""What C++ threads work on outlives the Python object that is dropped; a forked child does not wait for them."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from ds_fuyou.host.memory import HostPool, aligned_tensor
from ds_fuyou.ops.core import load_core
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.store import Extent
from tests.unit.test_window import core  # noqa: F401

NUM_BYTES = 1 << 20


@pytest.fixture
def late(tmp_path: Path) -> Iterator[tuple[IoLane, list[Extent]]]:
    """A lane whose transfers begin late, and a file full of ones."""
    (tmp_path / "file").write_bytes(b"\x01" * NUM_BYTES)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    lane = IoLane(IoSettings(), lambda _: tmp_path / "file")
    kind = load_core()
    lane.engine.add_fault(kind.IoKind.READ, kind.IoFaultEffect.DELAY, delay_secs=0.3, count=1 << 40)
    yield lane, [Extent(fd, 0, NUM_BYTES)]
    lane.close()
    os.close(fd)


def test_memory_of_a_dropped_transfer_is_not_free_while_bytes_come(late: tuple[IoLane, list[Extent]]) -> None:
    lane, extents = late
    lane.read(extents, aligned_tensor(NUM_BYTES), "a read that nobody waits for")
    next_owners = [aligned_tensor(NUM_BYTES) for _ in range(4)]  # one of them may get the same addresses
    assert lane.engine.num_in_flight == 0
    assert not any(memory.any() for memory in next_owners)


def test_memory_of_a_transfer_that_an_exception_cuts_off_as_it_begins_is_not_free_while_bytes_come(
    late: tuple[IoLane, list[Extent]],
) -> None:
    """A signal handler may raise before any line: here where the transfer has begun and is nobody's yet."""
    lane, extents = late
    begun = IoLane._submit.__code__

    def interrupt(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code is begun and event == "line" and "ticket" in frame.f_locals:
            raise KeyboardInterrupt
        return interrupt if frame.f_code is begun else None

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        lane.read(extents, aligned_tensor(NUM_BYTES), "a read that is cut off")
    except KeyboardInterrupt:
        is_cut_off = True
    else:
        is_cut_off = False
    finally:
        sys.settrace(before)
    next_owners = [aligned_tensor(NUM_BYTES) for _ in range(4)]
    assert is_cut_off
    assert lane.engine.num_in_flight == 0
    assert not any(memory.any() for memory in next_owners)


def test_a_transfer_that_is_refused_is_not_waited_for(late: tuple[IoLane, list[Extent]]) -> None:
    lane, extents = late
    engine = lane.engine
    lane.close()
    lane.engine = engine
    with pytest.raises(RuntimeError, match=r"close\(\) was called"):
        lane.read(extents, aligned_tensor(NUM_BYTES), "a read that is refused")


def test_a_pass_over_states_that_is_given_up_leaves_nothing_in_flight(core) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    """As a save does when the disk is full: the next chunk is being read."""
    kind = load_core()
    core.io.engine.add_fault(kind.IoKind.READ, kind.IoFaultEffect.DELAY, delay_secs=0.3, first=1)
    states = core.states.read_all([0, 0])
    next(states)
    states.close()
    assert core.io.engine.num_in_flight == 0


def test_a_forked_child_does_not_wait_for_the_worker_it_has_not() -> None:
    module = load_core()
    engine = IoLane(IoSettings(), lambda _: Path()).engine
    pipeline = module.ChunkPipeline(engine, HostPool(4096).pool, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking beside threads: a DataLoader does it, too
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(300)
        del pipeline
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pipeline.stop(60.0)
