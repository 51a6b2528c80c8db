# SPDX-License-Identifier: Apache-2.0
"""A device that is slower than the host that launches its work: how much of its memory that takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_fuyou.activations.blocks import find_blocks
from ds_fuyou.activations.copies import copy_lane
from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.activations.session import ActivationSession
from ds_fuyou.activations.swapper import Swapper
from ds_fuyou.activations.tier import StorageHome, SwapTier
from ds_fuyou.host.run_ahead import RunAhead, run_ahead
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.swap_space import SwapSpace
from ds_fuyou.zero.device import rank_device
from tests.activations.support import MIB, Plain, ResidentParameters
from tests.harness.runner import ds_config

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("only_rank")]

WIDTH, NUM_LAYERS = 256, 24
MATRIX_BYTES = 2 * WIDTH * WIDTH
FAST = {"flops": 1e15, "memory_rate": 1e15, "up_rate": 1e15, "down_rate": 1e15}


@pytest.fixture
def slow() -> Iterator[None]:
    """Every kernel takes 2 ms, and is not computed."""
    device = torch.standin
    device.synchronize()
    capacity = device.core.memory()["capacity"]
    device.core.configure(FAST | {"timed": 1, "skip": 1, "delay_secs": 0, "launch_secs": 2e-3})
    yield
    device.synchronize()
    device.core.configure({"timed": 0, "skip": 0, "capacity": capacity})
    device.empty_cache()


class Stack(nn.Module):
    """Matrices of one size, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def make_engine(swap: Path, *, trains: bool) -> Any:
    """Parameters come from host memory, one matrix at a time."""
    swap.mkdir()
    memory = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"offload_param": memory, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    zero |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    block: dict[str, Any] = {"nvme_path": str(swap), "parameters": {"tier": "cpu"}, "activations": {"mode": "none"}}
    if trains:
        zero["offload_optimizer"] = memory
        block["optimizer"] = {"tier": "cpu"}
    config = ds_config(zero_optimization=zero) | {"fuyou": block}
    model = Stack()
    if not trains:
        del config["optimizer"]
    given = {"model_parameters": model.parameters()} if trains else {}
    engine, *_ = deepspeed.initialize(model=model, config=config, **given)
    return engine


def most_beside(engine: Any, *, trains: bool) -> int:
    """Bytes that were active on the device at most, beside those of tensors."""
    x = torch.randn(8, WIDTH).bfloat16().to(get_accelerator().current_device_name())
    most = 0
    for _ in range(4):
        torch.standin.synchronize()
        torch.standin.reset_peak_memory_stats()
        if trains:
            engine.backward(engine(x))
            engine.step()
        else:
            with torch.no_grad():
                engine(x)
        stats = torch.standin.memory_stats()
        most = max(most, stats["active_bytes.all.peak"] - stats["allocated_bytes.all.peak"])
    torch.standin.synchronize()
    return most


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
def test_gathered_parameters_of_a_few_modules_are_there_at_once(
    trains: bool, slow: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 24 that host memory could give at once."""
    ahead = run_ahead(rank_device())
    assert ahead is not None
    monkeypatch.setattr(ahead, "most_bytes", 4 * MATRIX_BYTES)
    engine = make_engine(tmp_path / "swap", trains=trains)
    try:
        assert most_beside(engine, trains=trains) <= 6 * MATRIX_BYTES
    finally:
        engine.destroy()


@pytest.mark.parametrize("fates", ["swap", "swap-and-keep"])
@pytest.mark.parametrize("on_storage", [False, True], ids=["cpu", "nvme"])
def test_what_is_swapped_may_be_larger_than_the_device(
    on_storage: bool, fates: str, slow: None, tmp_path: Path
) -> None:
    """Host memory has room for all of it, so nothing else makes the host wait. What is kept in the end takes the room
    of what has left by then."""
    device = rank_device()
    model = Plain(num_layers=12, width=256).to(device.torch_device).train()
    ids = torch.randint(300, (6, 257), device=device.torch_device)
    ahead = RunAhead(device)
    ahead.most_bytes = 8 * MIB
    with ExitStack() as stack:
        space = SwapSpace([tmp_path])
        stack.callback(space.close)
        io = IoLane(IoSettings(), space.path_of)
        stack.callback(io.close)
        home = StorageHome(io, space, kept_bytes=512 * MIB) if on_storage else None
        tier = SwapTier(512 * MIB, copy_lane(device), home, device)
        stack.callback(tier.close)
        tier._soon_bytes = 8 * MIB
        index = ResidentParameters(model.parameters())
        swapper = Swapper(tier, index, device=device.torch_device, smallest_bytes=4096, ahead=ahead)
        session = ActivationSession(model, find_blocks(model), swapper)
        stack.callback(session.close)
        if fates == "swap-and-keep":
            names = [block.name for block in session.blocks]
            session.decide({name: BlockFate(Fate.SWAP if name in names[:9] else Fate.KEEP) for name in ("", *names)})
        torch.standin.synchronize()
        torch.standin.empty_cache()
        room, swapper.room_bytes = 160 * MIB, 88 * MIB
        torch.standin.core.configure({"capacity": torch.standin.memory_allocated() + room})
        for _ in range(2):
            before, swapper.kept.peak = tier.counters.out_bytes, 0
            loss = model(ids)
            torch.standin.synchronize()
            torch.standin.reset_peak_memory_stats()
            loss.backward()
            stats = torch.standin.memory_stats()
            assert stats["active_bytes.all.peak"] - stats["allocated_bytes.all.peak"] <= ahead.most_bytes
            model.zero_grad()
            assert tier.counters.out_bytes - before > room
            assert (swapper.kept.peak > 32 * MIB) == (fates == "swap-and-keep")
