# SPDX-License-Identifier: Apache-2.0
"""What a record holds beside the states, and what is refused before anything is put back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from torch.optim.lr_scheduler import StepLR

from ds_fuyou import log
from ds_fuyou.checkpoint.training_record import SMALL_BUFFERS, TrainingRecord, from_bytes, raw, text, to_bytes
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.zero.saving.training_state import TrainingState
from tests.harness.models import TinyCount


class Model(torch.nn.Module):
    """Of large and small persistent buffers, and one that is not persistent."""

    def __init__(self, mask_numel: int = 300_000) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("mask", torch.zeros(mask_numel))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(300_000), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Run:
    """What TrainingState asks of an engine and of stage 3, without either."""

    def __init__(
        self,
        *,
        scheduler: bool = True,
        num_groups: int = 1,
        mask_numel: int = 300_000,
        accumulation: int = 1,
        frozen: str = "",
    ) -> None:
        self.model = Model(mask_numel)
        params = list(self.model.parameters())
        adam = torch.optim.Adam([{"params": params[i::num_groups]} for i in range(num_groups)], lr=1.0)
        self.stock = SimpleNamespace(optimizer=adam, loss_scaler=None, dynamic_loss_scale=False)
        self.engine: Any = SimpleNamespace(global_steps=0, global_samples=0, skipped_steps=0, micro_steps=0)
        self.engine.lr_scheduler = StepLR(adam, 1, 0.5) if scheduler else None
        self.engine.gradient_accumulation_steps = lambda: accumulation
        self.engine.training_dataloader = None
        self.engine.random_ltd_enabled = self.engine.curriculum_learning_enabled = lambda: False
        self.state = TrainingState(self.stock, self.model, all_generators=False)
        self.state.attach(self.engine, frozen)

    def take(self) -> Any:
        return self.state.take(self.engine)


@contextmanager
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The package's logger hands nothing on to the root's. What was said before may be said again."""
    log._told.clear()
    logger = logging.getLogger("ds_fuyou")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def buffers_of(taken: Any) -> set[str]:
    return set(TrainingRecord.decode(taken).buffers)


def test_a_step_that_a_load_came_into_is_begun_anew_by_who_goes_on() -> None:
    """Its gradients are in no file."""
    run, other = Run(accumulation=2), Run(accumulation=2)
    run.engine.micro_steps = 7
    other.state.put_back(other.engine, run.state.take(run.engine, begins_step=True))
    assert other.engine.micro_steps == 6
    assert run.engine.micro_steps == 7
    other.state.put_back(other.engine, run.take())
    assert other.engine.micro_steps == 7, "who counts micro-batches in another way"


def test_of_large_buffers_those_that_changed_are_recorded() -> None:
    run = Run()
    small = len(run.take()["pickled"])
    assert small < 10_000
    assert buffers_of(run.take()) == {"count"}
    run.model.mask += 1
    taken = run.take()
    assert buffers_of(taken) == {"mask", "count"}
    other = Run()
    other.state.put_back(other.engine, taken)
    assert other.model.mask.eq(1).all()
    assert buffers_of(other.take()) == {"mask", "count"}, "what was put back is recorded on"
    run = Run()
    run.model.mask = torch.ones(300_000)
    assert buffers_of(run.take()) == {"mask", "count"}


def test_a_buffer_that_comes_late_is_recorded_and_told_and_not_gone_on_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, other = Run(), Run()
    with heard(caplog):
        run.model.linear.register_buffer("late", torch.ones(3))
        taken = run.take()
    assert buffers_of(taken) == {"count", "linear.late"}
    assert "buffer linear.late was not there, or had another shape, when the engine was built" in caplog.text
    with pytest.raises(FuyouStateError, match=r"no buffer linear.late of shape \(3,\) when it is built"):
        other.state.put_back(other.engine, taken)
    other.model.linear.register_buffer("late", torch.zeros(3))
    other.state.put_back(other.engine, taken)
    assert other.model.linear.late.eq(1).all()


def test_extra_states_of_modules_are_put_back_where_there_is_one_to_take_them() -> None:
    run, other = Run(), Run()
    run.model.counted = run.model.again = TinyCount()
    run.model.counted.calls = 5
    taken = run.take()
    five = {"calls": 5}
    assert TrainingRecord.decode(taken).extra == {"counted._extra_state": five, "again._extra_state": five}
    other.model.counted = other.model.again = torch.nn.Module()
    other.model.counted.register_buffer("seen", torch.zeros((), dtype=torch.long))
    with pytest.raises(FuyouStateError, match=r"no module of this run's model takes again\._extra_state, counted"):
        other.state.put_back(other.engine, taken)
    other.model.counted, other.model.again = TinyCount(), TinyCount()
    other.state.put_back(other.engine, taken)
    assert other.model.counted.calls == other.model.again.calls == 5
    other.model.counted.set_extra_state = None  # what the script's own raises
    with pytest.raises(FuyouStateError, match=r"again\._extra_state is not taken|counted\._extra_state is not taken"):
        other.state.put_back(other.engine, taken)


@pytest.mark.parametrize(("recorded_by", "then", "begun"), [(3, 3, 7), (3, 4, 4), (None, 4, 7)])
def test_micro_batches_are_counted_on_under_the_number_that_they_were_counted_by(
    recorded_by: int | None, then: int, begun: int
) -> None:
    """Seven of them: the script told DeepSpeed itself where steps end. Older records do not say the number."""
    run, other = Run(accumulation=recorded_by or 3), Run(accumulation=then)
    run.engine.micro_steps = 7
    taken = run.take()
    if recorded_by is None:
        del taken["accumulation"]
    other.state.put_back(other.engine, taken)
    assert other.engine.micro_steps == begun


def test_a_large_buffer_is_copied_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, copied = Run(), []
    save = torch.save

    def saved(value: Any, memory: Any) -> None:
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            copied.append(value)
        save(value, memory)

    monkeypatch.setattr(torch, "save", saved)
    run.state._told_large = True
    for at in (0, 1, 1, 1, 2):
        if run.model.mask[at] != at:
            run.model.mask[at] = at
        run.take()
    assert len(copied) == 2
    monkeypatch.undo()
    other = Run()
    other.state.put_back(other.engine, run.take())
    assert other.model.mask[:3].tolist() == [0, 1, 2]


def test_large_records_are_told_once_by_what_is_large(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    with heard(caplog):
        for number in range(4):
            run.engine.fuyou_client_state = bytes(2_000_000 + 100 * number)
            run.take()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "most of them what the script handed over (engine.fuyou_client_state)" in said


class Stateless:
    """A scheduler of the script's own."""

    def step(self) -> None: ...


class Refusing:
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("not now")


@pytest.mark.parametrize("scheduler", [Stateless(), Refusing()])
def test_a_scheduler_without_state_is_named_and_nothing_is_recorded(
    scheduler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(scheduler=False)
    run.engine.lr_scheduler = scheduler
    with heard(caplog):
        assert run.take() is None
    assert "the learning-rate scheduler cannot be pickled" in caplog.text


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Run(scheduler=False), "had a learning-rate scheduler: one; this one: none"),
        (Run(num_groups=2), "had 1 parameter groups, this one has 2"),
        (Run(mask_numel=200_000), r"no buffer mask of shape \(300000,\)"),
        (Run(frozen="another"), "frozen parameters with other values"),
    ],
)
def test_what_differs_is_told_before_anything_is_put_back(other: Run, why: str) -> None:
    run = Run()
    run.engine.global_steps, run.engine.fuyou_client_state = 7, "mine"
    run.model.mask += 1
    run.stock.optimizer.step()
    run.engine.lr_scheduler.step()
    with pytest.raises(FuyouStateError, match=why):
        other.state.put_back(other.engine, run.take())
    assert (other.engine.global_steps, other.engine.fuyou_client_state) == (0, None)
    assert other.stock.optimizer.param_groups[0]["lr"] == 1.0
    assert not other.model._forward_pre_hooks


def test_a_record_from_before_digests_of_frozen_parameters_is_taken() -> None:
    run, other = Run(frozen="one"), Run(frozen="another")
    run.engine.global_steps = 7
    taken = run.take()
    del taken["frozen"]
    other.state.put_back(other.engine, taken)
    assert other.engine.global_steps == 7


@pytest.mark.parametrize(
    ("how", "are_put_back"),
    [
        ("called", True),
        ("forward", True),
        ("forward, seeded as the run before", True),
        ("forward, seeded otherwise", False),
        ("called, seeded otherwise", True),
        ("forgotten", False),
    ],
)
def test_generators_are_put_back_once_where_the_script_says_so(how: str, are_put_back: bool) -> None:
    run, other = Run(), Run()
    torch.manual_seed(3)
    taken = run.take()
    expected = torch.rand(3)
    torch.manual_seed(5)  # as a script does that seeds when it has its engine
    other.state.put_back(other.engine, taken)
    x = torch.ones(1, 2)
    if "seeded" in how:
        torch.manual_seed(3 if how.endswith("before") else 4)
    if how.startswith("called"):
        other.engine.fuyou_restore_random_states()
    elif how == "forgotten":
        other.state.loaded_over(other.engine)
    else:
        other.model.eval()(x)
        other.model.train()(x)
    assert torch.equal(torch.rand(3), expected) == are_put_back
    left = torch.get_rng_state()
    other.model(x)
    other.engine.fuyou_restore_random_states()
    assert torch.equal(torch.get_rng_state(), left)


def test_a_run_that_begins_has_what_scripts_ask_for() -> None:
    run = Run()
    before = torch.get_rng_state()
    run.engine.fuyou_restore_random_states()
    assert torch.equal(torch.get_rng_state(), before)
    assert run.engine.fuyou_client_state is None


class OfTheScript:
    """Handed over by a script, and not there without it."""


def test_what_only_the_script_can_read_does_not_hide_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.engine.global_steps, run.engine.fuyou_client_state = 7, OfTheScript()
    taken = run.take()
    assert isinstance(TrainingRecord.decode(taken).client(), OfTheScript)
    monkeypatch.delitem(globals(), "OfTheScript")
    record = TrainingRecord.decode(taken)
    assert (record.counters["global_steps"], len(record.groups)) == (7, 1)
    with pytest.raises(AttributeError):
        record.client()


@pytest.mark.parametrize("given", ["text", {}, {"pickled": "AAAA"}, {"counters": 3}, {"pickled": text(b"a pickle")}])
def test_what_cannot_be_read_is_refused_in_one_line(given: Any) -> None:
    run, other = Run(), Run()
    taken = {**run.take(), **given} if given and isinstance(given, dict) else given
    with pytest.raises(FuyouStateError, match="cannot go on from the state files in nvme_path") as told:
        other.state.put_back(other.engine, taken)
    assert "\n" not in str(told.value)


def test_small_buffers_that_are_views_of_one_memory_are_recorded_each_by_itself() -> None:
    """torch saves no two views of it together that differ in type, and of one view all that it lies in."""
    run, large = Run(), torch.ones(1 << 20)
    run.model.linear.register_buffer("some", large[:3])
    run.model.linear.register_buffer("as_bytes", large[:3].view(torch.uint8))
    taken = run.take()
    assert len(taken["pickled"]) < 20_000
    found = TrainingRecord.decode(taken).buffers
    assert found["linear.some"].eq(1).all()
    assert torch.equal(found["linear.as_bytes"].view(torch.float32), torch.ones(3))


def test_small_buffers_of_format_3_are_read() -> None:
    """Each was pickled by itself, as large ones are."""
    run = Run()
    taken = run.take()
    parts = from_bytes(raw(taken["pickled"]))
    kept = from_bytes(parts["buffers"].pop(SMALL_BUFFERS))
    assert kept
    each = {name: to_bytes(buffer) for name, buffer in kept.items()}
    older = {**taken, "version": 3, "pickled": text(to_bytes({**parts, "buffers": {**parts["buffers"], **each}}))}
    found, expected = (TrainingRecord.decode(one).buffers for one in (older, taken))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_record_of_format_1_is_read_and_a_newer_one_refused() -> None:
    run, other = Run(), Run()
    run.engine.global_steps, run.engine.fuyou_client_state = 7, {"epoch": 3}
    taken = run.take()
    parts = from_bytes(raw(taken["pickled"]))
    del parts["extra"]  # came later
    older = {**taken, "version": 1, "pickled": text(to_bytes({**parts, "client": from_bytes(parts["client"])}))}
    other.state.put_back(other.engine, older)
    assert (other.engine.global_steps, other.engine.fuyou_client_state) == (7, {"epoch": 3})
    with pytest.raises(FuyouStateError, match="is of format 5, 4 is known; use the ds_fuyou that wrote it"):
        other.state.put_back(other.engine, {**taken, "version": 5})


TOKENS = {"min_value": 8, "max_value": 64, "schedule_type": "fixed_linear"}
ROUTING = {
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "global_batch_size": 2,
    "random_ltd_schedule": {**TOKENS, "schedule_config": {"require_steps": 10, "seq_per_step": 8}},
    "layer_token_lr_schedule": {"enabled": False},
}


def with_schedules(folder: Path) -> Run:
    """With DeepSpeed's own random-LTD schedule and curriculum sampler."""
    difficulty = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear"}
    steps = {"schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8}}
    metric = {**difficulty, **steps, "difficulty_type": "value", "clustering_type": "single_cluster"}
    learning = {"enabled": True, "data_cluster_path": str(folder), "curriculum_metrics": {"seqlen": metric}}
    config = {"seed": 1, "data_sampling": {"num_epochs": 1, "curriculum_learning": learning}}
    run = Run()
    run.engine.random_ltd_enabled = run.engine.curriculum_learning_enabled = lambda: True
    run.engine.random_ltd_scheduler = RandomLTDScheduler(ROUTING)
    sampler = DeepSpeedDataSampler(config, 100, 2, 0, 1, None, 1, global_rank=1)  # rank 0 has the samples' files
    run.engine.training_dataloader = SimpleNamespace(data_sampler=sampler)
    return run


def test_schedules_of_the_data_pipeline_are_recorded_as_checkpoints_hold_them(tmp_path: Path) -> None:
    run, other = with_schedules(tmp_path), with_schedules(tmp_path)
    for step in range(6):
        run.engine.random_ltd_scheduler.update_seq(step)
    sampler = run.engine.training_dataloader.data_sampler
    sampler.consumed_samples, sampler.curriculum_step, sampler.batch = 12, 6, [5, 3]
    taken = run.take()
    assert TrainingRecord.decode(taken).schedules["random_ltd"] == run.engine.random_ltd_scheduler.state_dict()
    other.state.put_back(other.engine, taken)
    assert other.engine.random_ltd_scheduler.get_current_seq() == run.engine.random_ltd_scheduler.get_current_seq() > 8
    assert other.engine.random_ltd_scheduler.state_dict() == run.engine.random_ltd_scheduler.state_dict()
    found = other.engine.training_dataloader.data_sampler
    assert (found.consumed_samples, found.curriculum_step, found.batch) == (12, 6, [5, 3])
    plain = Run()
    with pytest.raises(FuyouStateError, match=r"it recorded \['data_sampler', 'random_ltd'\] of the data pipeline"):
        plain.state.put_back(plain.engine, taken)


@pytest.mark.parametrize(("engines_own", "told"), [(False, 1), (True, 0)])
def test_a_scheduler_that_the_script_steps_itself_is_told_of(
    engines_own: bool, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in no record: who resumes would begin with the rates of the step before."""
    run = Run(scheduler=engines_own)
    own = run.engine.lr_scheduler or StepLR(run.stock.optimizer, 1, 0.5)
    run.stock.optimizer.step()  # torch's schedulers ask for one
    with heard(caplog):
        run.state.step_begins(run.engine)
        run.state.step_begins(run.engine)
        assert not caplog.records, "nothing changed"
        own.step()
        run.state.step_begins(run.engine)
        own.step()
        run.state.step_begins(run.engine)
    assert [("scheduler" in record.getMessage()) for record in caplog.records] == [True] * told


def test_rates_of_a_checkpoint_are_not_warned_of_nor_what_a_script_may_have_handed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(scheduler=False)
    group = run.stock.optimizer.param_groups[0]
    with heard(caplog):
        run.state.step_begins(run.engine)
        group["lr"] = 0.5
        run.state.loaded_over(run.engine)
        run.state.step_begins(run.engine)
        assert not caplog.records
        group["lr"], run.engine.fuyou_client_state = 0.4, {"epoch": 1}
        run.state.step_begins(run.engine)
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_micro_batches_are_counted_by_the_accumulation_of_now() -> None:
    """``engine.set_train_batch_size()`` changes it."""
    run = Run(accumulation=2)
    run.engine.gradient_accumulation_steps, run.engine.micro_steps = lambda: 4, 6
    taken = run.state.take(run.engine, begins_step=True)
    assert (taken["counters"]["micro_steps"], taken["accumulation"]) == (4, 4)
