# SPDX-License-Identifier: Apache-2.0
"""A device that refuses to lock pages: an error that says what to do, a smaller arena, and nothing left behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from ds_fuyou.activations import arena
from ds_fuyou.errors import FuyouStateError
from tests.device.accelerator import StandinAccelerator
from tests.device.test_training import batches, make_engine, train
from tests.harness.ports import free_port

pytestmark = pytest.mark.standin


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """This process is the only rank."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (rank | {"MASTER_PORT": str(free_port())}).items():
            patch.setenv(name, value)
        deepspeed.init_distributed("gloo")
        yield
        torch.distributed.destroy_process_group()


class Locks:
    """What is locked, by address; the ``refused``-th and, if ``for_ever``, all after it are not."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.held: dict[int, int] = {}
        self.num_asked = 0
        self.refused, self.for_ever = -1, False
        register, unregister = StandinAccelerator.register_host_memory, StandinAccelerator.unregister_host_memory

        def asked(accelerator: Any, address: int, num_bytes: int) -> bool:
            number, self.num_asked = self.num_asked, self.num_asked + 1
            if number == self.refused or (self.for_ever and number > self.refused >= 0):
                raise RuntimeError("out of memory")
            register(accelerator, address, num_bytes)
            self.held[address] = num_bytes
            return True

        def given_back(accelerator: Any, address: int) -> None:
            unregister(accelerator, address)
            del self.held[address]

        patch.setattr(StandinAccelerator, "register_host_memory", asked)
        patch.setattr(StandinAccelerator, "unregister_host_memory", given_back)


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Locks:
    return Locks(monkeypatch)


@pytest.mark.parametrize("tiers", ["all", "none"])
def test_a_refused_lock_is_told_with_what_to_do_and_leaves_nothing(tiers: str, locks: Locks, tmp_path: Path) -> None:
    told = []
    for number in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144):
        locks.num_asked, locks.refused = 0, number
        swap, engine = tmp_path / str(number), None
        try:
            engine = make_engine(swap, tiers, "swap-nvme")
            for batch in batches(2):
                train(engine, batch)
        except FuyouStateError as error:
            told.append(str(error))
        if engine is not None:
            engine.destroy()
        assert locks.held == {}
        if locks.num_asked <= number:
            break
    assert len(told) >= 3
    assert all("registering" in said and "ulimit -l" in said for said in told)
    assert locks.num_asked <= number, "a run asks for fewer"


def test_the_arena_stays_as_small_as_it_is(
    locks: Locks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Where its second part is refused: training goes on with the first, bits are the same."""
    monkeypatch.setattr(arena, "_SEGMENT_BYTES", 1 << 14)
    grown = []
    grow = arena.Arena._grow

    def growing(self: arena.Arena) -> Any:
        if self._segments and not grown:
            locks.refused, locks.for_ever = locks.num_asked if is_refused else -1, True
        grown.append(self)
        return grow(self)

    monkeypatch.setattr(arena.Arena, "_grow", growing)
    logger = logging.getLogger("ds_fuyou")
    logger.addHandler(caplog.handler)
    plan = {"chunk_bytes": 65536, "slots": 2, "activation_bytes": 1 << 17}
    found = []
    for is_refused in (False, True):
        grown.clear()
        engine = make_engine(tmp_path / str(is_refused), "states", "swap-nvme", plan=plan)
        grown.clear()
        losses = [float(train(engine, batch)) for batch in batches(3)]
        tier = engine.optimizer.rank_state.activations.tier
        found.append((losses, tier.arena_bytes))
        engine.destroy()
        locks.refused, locks.for_ever = -1, False
    logger.removeHandler(caplog.handler)
    assert found[0][0] == found[1][0]
    assert found[0][1] > found[1][1] > 0
    assert any("stays at" in record.getMessage() for record in caplog.records)
    assert locks.held == {}
