# SPDX-License-Identifier: Apache-2.0
"""A device that refuses to lock pages: an error that says what to do, a smaller arena, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

from ds_fuyou.activations import arena
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.zero.device import rank_device
from ds_fuyou.zero.run import run_moves
from tests.device.accelerator import StandinAccelerator
from tests.device.test_training import batches, make_engine, train
from tests.harness.models import build_model, masters_digest
from tests.harness.runner import ds_config

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("only_rank")]


class Locks:
    """What is locked, by address; the ``refused``-th that is asked for is not."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.held: dict[int, int] = {}
        self.num_asked = 0
        self.refused = -1
        register, unregister = StandinAccelerator.register_host_memory, StandinAccelerator.unregister_host_memory

        def asked(accelerator: Any, address: int, num_bytes: int) -> bool:
            number, self.num_asked = self.num_asked, self.num_asked + 1
            if number == self.refused:
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
    locks: Locks, monkeypatch: pytest.MonkeyPatch, told: Callable[[], str]
) -> None:
    """Where its second part is refused; the first is used on."""
    monkeypatch.setattr(arena, "_SEGMENT_BYTES", 1 << 14)
    device = rank_device()
    assert device.pins
    found = arena.Arena(1 << 17, device, lambda segment: None, lambda segment: None)
    memory = found.try_allocate(1 << 14)
    assert memory is not None
    locks.refused = locks.num_asked
    assert found.try_allocate(1 << 14) is None
    assert found.capacity_bytes == sum(locks.held.values()) == 1 << 14
    assert "stays at 16384 bytes, of 131072 that were planned" in told()
    del memory
    assert found.try_allocate(1 << 14) is not None
    assert found.try_allocate(1 << 14) is not None, "what was let go is there again"
    found.give_back()
    assert locks.held == {}


def test_a_large_arena_grows_by_what_is_registered_in_a_forward(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by its eighth, which would be seconds of a machine with 128 GB."""
    monkeypatch.setattr(arena, "_SEGMENT_BYTES", 1 << 14)
    monkeypatch.setattr(arena, "_MOST_SEGMENT_BYTES", 1 << 15)
    found = arena.Arena(1 << 20, rank_device(), lambda segment: None, lambda segment: None)
    taken = [found.try_allocate(1 << 14) for _ in range(6)]
    assert None not in taken
    assert sorted(locks.held.values()) == [1 << 14, 1 << 15, 1 << 15, 1 << 15]
    taken.clear()
    found.give_back()


def test_a_narrower_arena_gives_back_what_came_last(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_SEGMENT_BYTES", 1 << 14)
    known: list[Any] = []
    found = arena.Arena(1 << 17, rank_device(), known.append, known.remove)
    taken = [found.try_allocate(1 << 14) for _ in range(4)]
    assert None not in taken
    assert len(known) == len(locks.held) == 4
    taken.clear()
    found.narrow(1 << 15)
    assert (found.capacity_bytes, len(known), len(locks.held)) == (1 << 15, 1, 1)
    taken = [found.try_allocate(1 << 14) for _ in range(3)]
    assert [memory is None for memory in taken] == [False, False, True], "what is left is used, and no more"
    assert sum(locks.held.values()) == 1 << 15
    taken.clear()
    found.narrow(4096)
    assert found.capacity_bytes == sum(locks.held.values()) == 1 << 14, "the first part stays"
    found.give_back()
    assert locks.held == {}


def test_a_frozen_base_that_leaves_gives_back_its_locks(
    locks: Locks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies from it have ended then; and what is trained beside it is what it would have been."""
    unplaced = {name: {"device": "none"} for name in ("offload_param", "offload_optimizer")}

    def trained(swap: Path, scarce_at: int) -> tuple[list[float], list[list[float]], int]:
        swap.mkdir()
        config = ds_config(zero_optimization=unplaced, fuyou={"nvme_path": str(swap)})
        torch.manual_seed(0)
        model = build_model({"frozen": ["blocks", "tokens"]})
        params = [param for param in model.parameters() if param.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
        losses, before = [], sum(locks.held.values())
        with monkeypatch.context() as patch:
            for index, batch in enumerate(batches(6)):
                if index == scarce_at:
                    patch.setattr(run_moves, "free_memory_of_rank", lambda: 0)
                losses.append(train(engine, batch).item())
        state = engine.optimizer.rank_state
        held = state.frozen_bytes()
        assert (held["nvme"] > held["cpu"]) == (scarce_at == 2)
        grew = sum(locks.held.values()) - before
        if scarce_at == 2:
            assert state.place_frozen(1.0)
            assert sum(locks.held.values()) - before > grew, "what has come is locked again"
        losses += [train(engine, batch).item() for batch in batches(2)]
        masters = [safe_get_full_fp32_param(param).flatten().tolist() for param in params]
        engine.destroy()
        return losses, masters, grew

    *expected, grew = trained(tmp_path / "enough", -1)
    *found, gone = trained(tmp_path / "scarce", 2)
    assert found == expected
    assert gone < grew
    assert locks.held == {}


@pytest.mark.parametrize("activations", ["none", "swap-nvme"])
def test_a_forward_that_finds_no_device_memory_can_be_made_again(activations: str, tmp_path: Path) -> None:
    """In whatever it wants the memory for, parameters that are gathered among it: the script drops gradients, and goes
    on."""
    found, failed = [], 0
    for slack in (None, 3000, 10000, 30000, 100000):
        swap = tmp_path / str(slack)
        engine = make_engine(swap, "all", activations)
        first, *others = batches(3)
        train(engine, first)
        torch.standin.synchronize()
        torch.standin.empty_cache()
        if slack is not None:
            torch.standin.core.configure({"capacity": float(torch.standin.memory_reserved() + slack)})
            try:
                train(engine, others[0])
            except torch.OutOfMemoryError:
                failed += 1
                engine.optimizer.zero_grad()
                engine.zero_grad()
            else:
                others = others[1:]
            finally:
                torch.standin.core.configure({"capacity": float(1 << 40)})
        for batch in others:
            train(engine, batch)
        found.append(masters_digest(engine))
        engine.destroy()
    assert failed >= 3
    assert len(set(found)) == 1
