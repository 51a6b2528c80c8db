# SPDX-License-Identifier: Apache-2.0
"""What backward used last stays on the device for the next micro-batch, and is what it would have been without."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fuyou.parameters.partition import Presence
from ds_fuyou.planner.blocks import OPERATORS
from ds_fuyou.zero.parameters.param_swapper import PARTITION_TENSORS, partition_of
from tests.device.parity import fuyou_of
from tests.harness.models import build_model, make_batch
from tests.harness.plans import plan_document
from tests.harness.runner import ds_config

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("only_rank")]

ACCUMULATION = 3
STREAMED = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


@pytest.fixture(autouse=True)
def sound() -> Iterator[None]:
    torch.standin.take_trips()
    yield
    torch.standin.synchronize()
    assert torch.standin.take_trips() == []


def make_engine(swap: Path, tiers: str, most_live: int, ahead: int = 0, activations: str = "none", **more: Any) -> Any:
    """Nothing but what stays between micro-batches is gathered for more than one module, or ``ahead``. ``more``: of
    the block."""
    swap.mkdir()
    memory = {"device": "cpu", "pin_memory": True}
    zero = STREAMED | {"offload_optimizer": memory, "offload_param": memory, "stage3_max_live_parameters": most_live}
    zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": ahead}
    config = ds_config(gradient_accumulation_steps=ACCUMULATION, zero_optimization=zero)
    config["fuyou"] = fuyou_of(swap, tiers, "auto", "backward_and_forward", 2, activations) | more
    torch.manual_seed(0)
    model = build_model({})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def micro_batch(engine: Any, index: int) -> int:
    """Bytes that went up to the device for one."""
    counters = torch.standin.core.counters
    before = counters()["bytes up"]
    engine.backward(engine(**make_batch({}, index, 0)))
    engine.step()
    torch.standin.synchronize()
    return counters()["bytes up"] - before


@pytest.mark.parametrize("tiers", ["states", "all"])
def test_the_next_micro_batch_begins_with_what_stayed(tiers: str, tmp_path: Path) -> None:
    model = build_model({})
    first = [*model.tokens.parameters(), *model.blocks[0].parameters()]  # in the order of forward
    most_live = sum(param.numel() for param in first)
    sizes = {}
    for live in (0, most_live):
        engine = make_engine(tmp_path / str(live), tiers, live)
        for index in range(2 * ACCUMULATION):  # orders are recorded
            micro_batch(engine, index)
        sizes[live] = [micro_batch(engine, index) for index in range(2 * ACCUMULATION)]
        assert not engine.optimizer._across_batches._staying
        engine.destroy()
    saved = [without - with_it for without, with_it in zip(sizes[0], sizes[most_live], strict=True)]
    assert saved == [0, 2 * most_live, 2 * most_live] * 2


def staying(engine: Any, num_micro_batches: int) -> set[int]:
    for index in range(num_micro_batches):
        micro_batch(engine, index)
    return {param.ds_id for param in engine.optimizer._across_batches._staying}


def test_no_more_stays_than_there_is_room_for(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "swap", "all", 1_000_000)
    first, second, *_ = engine.module.parameters()
    assert staying(engine, ACCUMULATION - 1) == set(), "what a step holds is not known yet"
    assert len(staying(engine, 2)) == len([*engine.module.parameters()])
    across, both = engine.optimizer._across_batches, 2 * (first.ds_numel + second.ds_numel)
    for room, expected in ((both, {first.ds_id, second.ds_id}), (both - 1, {first.ds_id}), (0, set())):
        staying(engine, 2)
        across.allow(room)
        assert staying(engine, 1) == expected
        assert across.most_bytes == sum(2 * param.ds_numel for param in (first, second) if param.ds_id in expected)
    engine.destroy()


@pytest.mark.parametrize("budget", [1 << 12, 1 << 30])
def test_the_budget_of_the_device_bounds_what_stays(budget: int, tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "swap", "all", 1_000_000, gpu_budget_bytes=budget)
    assert bool(staying(engine, 2 * ACCUMULATION - 1)) == (budget > 1 << 12)
    engine.destroy()


def test_the_plan_counts_what_stays(tmp_path: Path) -> None:
    """Mode "auto" measures a step in which nothing does; what its choice leaves of the budget is for that."""
    budget = 1 << 30
    engine = make_engine(tmp_path / "swap", "all", 1_000_000, activations="auto", gpu_budget_bytes=budget)
    plan, across = engine.optimizer.run_plan, engine.optimizer._across_batches
    while not plan.auto.is_decided:
        assert staying(engine, 1) == set()
    assert across._room_bytes == budget - plan.auto.device_bytes
    staying(engine, ACCUMULATION)
    assert across.most_bytes == 2 * sum(param.ds_numel for param in engine.module.parameters())
    assert plan._device_bytes() == plan.auto.device_bytes + across.most_bytes
    engine.destroy()


def test_what_a_plan_keeps_of_activations_may_fill_the_budget(tmp_path: Path) -> None:
    """The same room is not for both."""
    model, budget = build_model({}), 1 << 30
    num_params, num_blocks = sum(param.numel() for param in model.parameters()), len(model.blocks)
    planned = dict.fromkeys(("block_input", *OPERATORS), (1, num_blocks - 1, 0))
    more = {"gpu_budget_bytes": budget, "plan": plan_document(num_params, num_blocks, planned)}
    engine = make_engine(tmp_path / "swap", "all", 1_000_000, activations="auto", **more)
    assert staying(engine, 3 * ACCUMULATION) == set()
    plan = engine.optimizer.run_plan
    assert plan.auto.is_decided
    assert plan.auto.measured is None
    assert plan._device_bytes() == budget
    engine.destroy()


def test_what_stays_does_not_end_gathers_ahead(tmp_path: Path) -> None:
    """While the first module runs, with what stayed, what comes behind is on its way up: also out of storage."""
    model = build_model({})
    first = [*model.tokens.parameters(), *model.blocks[0].parameters()]
    behind = sum(param.numel() for param in model.blocks[1].parameters())
    engine = make_engine(tmp_path / "swap", "all", behind + sum(param.numel() for param in first), ahead=behind)
    front = [*engine.module.tokens.parameters(), *engine.module.blocks[0].parameters()]
    assert staying(engine, 2 * ACCUMULATION + 1) == {param.ds_id for param in front}
    seen = {}

    def look(module: torch.nn.Module, _: object) -> None:
        seen.update({name: param.ds_status for name, param in engine.module.blocks[1].named_parameters()})

    engine.module.tokens.register_forward_pre_hook(look)
    micro_batch(engine, 0)
    assert ZeroParamStatus.INFLIGHT in seen.values()
    engine.destroy()


def test_what_stays_is_not_offered_to_be_gathered(tmp_path: Path) -> None:
    """Host memory may have its values still, on one rank and not on another: what is offered must be the same."""
    engine = make_engine(tmp_path / "swap", "all", 1_000_000)
    assert staying(engine, 2 * ACCUMULATION + 1)
    store = engine.optimizer.rank_state.parameters
    partitions = [partition_of(param) for param in engine.module.parameters()]
    assert {PARTITION_TENSORS.is_idle(partition) for partition in partitions} == {False}
    store.move_on()
    assert not store._offered
    assert not {Presence.HERE, Presence.READING} & {partition.presence for partition in partitions}
    engine.optimizer._across_batches.forget()
    assert {PARTITION_TENSORS.is_idle(partition) for partition in partitions} == {True}
    engine.destroy()


def test_a_compiled_model_has_what_stayed(tmp_path: Path) -> None:
    """DeepSpeed's hooks run within what is compiled; ours in their place are left out of it, as its own are."""
    found = {}
    for name in ("eager", "compiled"):
        engine = make_engine(tmp_path / name, "all", 1_000_000)
        if name == "compiled":
            engine.compile(backend="eager")
        losses = []
        for index in range(3 * ACCUMULATION - 1):
            loss = engine(**make_batch({}, index, 0))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        assert engine.optimizer._across_batches._staying
        found[name] = losses
        engine.destroy()
    assert found["compiled"] == found["eager"]


def test_in_between_parameters_are_partitioned_and_edits_count(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "swap", "all", 1_000_000)
    for index in range(ACCUMULATION + 1):
        micro_batch(engine, index)
    assert engine.optimizer._across_batches._staying
    params = dict(engine.module.named_parameters())
    assert {param.ds_status for param in params.values()} == {ZeroParamStatus.NOT_AVAILABLE}
    assert {param.numel() for param in params.values()} == {0}
    edited, read = params["tokens.weight"], params["blocks.0.down.weight"]
    with deepspeed.zero.GatheredParameters([edited], modifier_rank=0):
        edited.data.fill_(0.5)
    with deepspeed.zero.GatheredParameters([read]):
        before = read.data.clone()
    seen = {}

    def look(module: torch.nn.Module, _: object) -> None:
        seen[module] = module.weight.detach().clone()

    for module in (engine.module.tokens, engine.module.blocks[0].down):
        module.register_forward_pre_hook(look)
    micro_batch(engine, 0)
    assert bool((seen[engine.module.tokens] == 0.5).all())
    assert torch.equal(seen[engine.module.blocks[0].down], before)
    engine.destroy()


def test_nothing_stays_behind(tmp_path: Path) -> None:
    """After a step, a sleep or the engine's end no gathered values are left."""
    engine = make_engine(tmp_path / "swap", "states", 1_000_000)
    for index in range(ACCUMULATION):
        micro_batch(engine, index)
    params = list(engine.module.parameters())
    all_bytes = 2 * sum(param.ds_numel for param in params)  # what else is held between steps was seen to be 0.4 of it

    def held() -> int:
        gc.collect()  # tensors of graphs that are part of a cycle
        torch.standin.synchronize()  # memory that a stream still uses is not free
        return torch.standin.memory_allocated()

    least = held()

    def stay(num_micro_batches: int) -> bool:
        """Whether all of them do, or none."""
        for index in range(num_micro_batches):
            micro_batch(engine, index)
        staying = [param.nvme_swapper.is_aside(param) for param in params]
        assert all(staying) or (not any(staying) and held() - least < all_bytes)
        return all(staying)

    assert stay(1)
    engine.offload_states()
    engine.reload_states()
    assert not stay(0)
    assert stay(1)
    assert not stay(1), "the step"
    assert stay(1)
    engine.destroy()
    assert held() - least < all_bytes


def test_a_step_of_another_engine_counts(tmp_path: Path) -> None:
    """Two engines train parts of one model by turns; in the other's backward the first one's hooks release, too."""

    def losses(swap: Path | None) -> list[float]:
        torch.manual_seed(0)
        model = build_model({})
        parts = [[*model.tokens.parameters()], [*model.blocks[0].parameters(), *model.blocks[1].parameters()]]

        def chosen(number: int) -> list[torch.nn.Parameter]:
            for param in model.parameters():
                param.requires_grad_(False)
            for param in parts[number]:
                param.requires_grad_(True)
            return parts[number]

        engines = []
        for number, accumulation in enumerate((2, 1)):
            memory = {"device": "cpu", "pin_memory": True}
            zero = STREAMED | {"offload_optimizer": memory, "offload_param": memory}
            zero |= {"stage3_max_live_parameters": 1_000_000, "stage3_param_persistence_threshold": 0}
            config = ds_config(gradient_accumulation_steps=accumulation, zero_optimization=zero)
            if swap is not None:
                path = swap / str(number)
                path.mkdir(parents=True)
                config["fuyou"] = fuyou_of(path, "states", "auto", "backward_and_forward", 2, "none")
            engine, *_ = deepspeed.initialize(model=model, model_parameters=chosen(number), config=config)
            engines.append(engine)
        found = []
        for index in range(12):
            number = int(index % 3 == 1)
            chosen(number)
            loss = engines[number](**make_batch({}, index, 0))
            engines[number].backward(loss)
            engines[number].step()
            found.append(float(loss.detach()))
        for engine in reversed(engines):
            engine.destroy()
        return found

    assert losses(tmp_path / "swap") == losses(None)
