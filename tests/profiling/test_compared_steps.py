# SPDX-License-Identifier: Apache-2.0
"""What a run compares with its plan, step by step, and what follows. On one rank; others are answered for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch

import ds_fuyou.zero.run.run_plan as run_plan
from ds_fuyou.planner.watch import LASTING, Cause, Finding, StepMeasurement, slowed
from tests.harness.models import TinyGPT
from tests.harness.runner import ds_config

pytestmark = pytest.mark.usefixtures("only_rank")

MODEL = {"num_layers": 2, "width": 72, "vocabulary": 500}
PLANNED = 3  # steps, until the next one is compared


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("DS_FUYOU_PROFILES", str(tmp_path / "profiles"))
    swap = tmp_path / "swap"
    swap.mkdir()
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    fuyou = {"nvme_path": str(swap), "optimizer": {"tier": "nvme"}, "dram_budget_bytes": 4 << 30}
    plan = {"smallest_swapped_bytes": 1024, "activation_bytes": 65536}
    auto = {"activations": {"mode": "auto"}, "gpu_budget_bytes": 150_000, "plan": plan}
    config = ds_config(gradient_clipping=0.0, fuyou={**fuyou, **auto})
    made, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    yield made
    made.destroy()


def train(engine: Any, count: int, length: int = 17) -> Any:
    for _ in range(count):
        engine.backward(engine(torch.ones(2, length, dtype=torch.int64)))
        engine.step()
    return engine.optimizer.run_plan


def kept(directory: Path, name: str = "forward_secs") -> list[float]:
    """Of each profile."""
    return [json.loads(path.read_text())[name] for path in (directory / "profiles").glob("*")]


def test_what_a_script_does_between_steps_is_told_apart(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[StepMeasurement] = []
    monkeypatch.setattr(train(engine, PLANNED)._watch, "step", lambda measured: told.append(measured) or [])
    for _ in range(2):
        time.sleep(0.05)
        train(engine, 1)
    for step in told:
        assert step.outside_secs >= 0.05
        assert 0 < step.compute_secs <= step.secs - 0.05


def compiled_in_the_second_step(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward and a backward take a second, in that step a hundred."""
    clock, secs = engine.optimizer.run_plan.clock, iter([1.0, 100.0])
    end_step: Callable[..., Any] = clock.end_step

    def timed(**options: bool) -> Any:
        took = next(secs, 1.0)
        return replace(end_step(**options), forward_secs=took, backward_secs=took)

    monkeypatch.setattr(clock, "end_step", timed)


def test_a_step_that_compiled_is_measured_again_and_not_kept(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_in_the_second_step(engine, monkeypatch)
    plan = train(engine, PLANNED)
    assert plan.profile.forward_secs == 100.0
    assert kept(tmp_path) == [100.0]
    train(engine, LASTING)
    assert [found.cause for found in plan.findings] == [Cause.LESS_COMPUTE]
    assert kept(tmp_path) == []
    assert not plan.auto.is_decided
    train(engine, PLANNED)
    assert plan.profile.forward_secs == 1.0
    assert kept(tmp_path) == [1.0]
    assert plan.auto.is_decided
    plan._watch.told.add(Cause.LESS_COMPUTE)
    train(engine, 1)
    assert plan.auto.is_decided, "once in a run"


def test_nothing_is_measured_again_for_a_rank_that_computes_less_than_the_slowest_one(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_in_the_second_step(engine, monkeypatch)
    monkeypatch.setattr(run_plan, "least", lambda *asked: [*asked[:-1], 0.0])
    plan = train(engine, PLANNED + 2 * LASTING)
    assert Cause.LESS_COMPUTE in {found.cause for found in plan.findings}
    assert plan.profile.forward_secs == 100.0
    assert plan.auto.is_decided
    assert kept(tmp_path) == [100.0], "on this rank no more than on the slowest one"


@pytest.mark.parametrize("world_size", [1, 2])
def test_where_nothing_can_follow_the_next_run_measures_again(
    world_size: int, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_in_the_second_step(engine, monkeypatch)
    plan = train(engine, PLANNED)
    plan.auto = None
    monkeypatch.setattr(type(plan.moves), "may_place", False)
    monkeypatch.setattr(run_plan, "dist", SimpleNamespace(get_world_size=lambda: world_size))
    train(engine, LASTING)
    assert plan.profile.forward_secs == 100.0
    assert kept(tmp_path) == [100.0] * (world_size - 1), "what other ranks compute is not known"


def test_a_longer_batch_that_computes_less_than_in_proportion_is_measured_for_this_run_alone(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept profile is right for its own batch."""
    compiled_in_the_second_step(engine, monkeypatch)
    plan = train(engine, PLANNED)
    plan._watch.told.add(Cause.LESS_COMPUTE)
    plan._may_measure_anew = False
    shorter = kept(tmp_path, "num_elements")
    train(engine, LASTING, 68)
    assert [found.cause for found in plan.findings] == [Cause.WORKLOAD]
    assert plan.profile.forward_secs == 400.0
    plan._may_measure_anew = True
    train(engine, 2 * PLANNED + LASTING, 68)
    assert plan.profile.forward_secs == 1.0
    assert (kept(tmp_path), kept(tmp_path, "num_elements")) == ([100.0], shorter)
    assert plan.profile.num_elements == 4 * shorter[0]


def test_a_failed_probe_leaves_the_plan_that_there_was(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_in_the_second_step(engine, monkeypatch)
    plan = train(engine, PLANNED + LASTING)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(run_plan, "probe_storage", full)
    train(engine, PLANNED)
    assert plan.auto.is_decided
    assert plan.profile.forward_secs == 100.0
    assert plan._watch is not None
    assert kept(tmp_path) == []


def test_what_is_timed_beside_a_checkpoint_is_not_kept(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_in_the_second_step(engine, monkeypatch)
    plan = train(engine, PLANNED + LASTING + 1)
    engine.optimizer.rank_state.core.snapshot().close()
    train(engine, PLANNED - 1)
    assert plan.profile.forward_secs == 1.0
    assert kept(tmp_path) == []


def test_ranks_begin_their_probes_together(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("barrier", "probe_storage", "probe_link"):
        call = partial(lambda name, call, *given: calls.append(name) or call(*given), name, getattr(run_plan, name))
        monkeypatch.setattr(run_plan, name, call)
    train(engine, 1)
    calls.clear()
    train(engine, 1)
    assert calls[:3] == ["barrier", "probe_storage", "probe_link"]


def finds(plan: Any, monkeypatch: pytest.MonkeyPatch, cause: Cause, ratio: float) -> None:
    monkeypatch.setattr(plan._watch, "step", lambda _: [Finding(cause, 1e9, ratio * 1e9, "")])


@pytest.mark.parametrize("left_of_another", [1.0, 0.7])
def test_all_plan_by_the_slowest_disk_until_it_is_as_fast_as_it_was_measured(
    left_of_another: float, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = train(engine, PLANNED)
    measured = plan.profile.storage
    other = replace(plan.profile, storage=slowed(measured, {Cause.WRITES: left_of_another}))
    monkeypatch.setattr(run_plan, "of_every_rank", lambda mine: [mine, other])
    finds(plan, monkeypatch, Cause.WRITES, 0.5)
    train(engine, 1 + PLANNED)
    assert plan.profile.storage == slowed(measured, {Cause.WRITES: 0.5})
    assert plan._watch._slowed == [Cause.WRITES]
    finds(plan, monkeypatch, Cause.WRITES_AGAIN, 3.0)
    train(engine, 1 + PLANNED)
    assert plan.profile.storage == other.storage
    assert plan._watch._slowed == []
    assert plan._watch._lasting[Cause.WRITES_AGAIN] == 4 * LASTING


def test_steps_beside_which_a_checkpoint_is_written_are_not_compared(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = train(engine, PLANNED)
    finds(plan, monkeypatch, Cause.WRITES, 0.5)
    core = engine.optimizer.rank_state.core
    core.snapshot().close()
    train(engine, 1)
    assert not plan.findings, "it began and ended within the step"
    core.num_snapshots += 1
    with monkeypatch.context() as patch:
        patch.setattr(type(core), "has_snapshot", True)
        train(engine, 1)
        assert not plan.findings, "it has not ended"
    train(engine, 1)
    assert not plan.findings, "it was there when the step began"
    train(engine, 1)
    assert plan.findings
