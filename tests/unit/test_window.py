# SPDX-License-Identifier: Apache-2.0
"""The accumulation window of a step: when a chunk is prepared, dropped and prepared again; edits that steps keep."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer.clip_policy import ClipPolicy, Overlap
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, build_layout
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.placement import regions_for
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.optimizer.rules import GroupHyper, OptimizerKind
from ds_fuyou.optimizer.updates import WindowUpdates
from ds_fuyou.storage.io import IoSettings
from ds_fuyou.storage.store import RunIdentity, SlotStore
from tests.harness.small_core import small_core

KIND = OptimizerKind("adam", ("exp_avg", "exp_avg_sq"))
HYPERS = (GroupHyper(1e-2, (0.9, 0.999), 1e-8, 0.0, True),)
LAYOUT = build_layout([[("block.a", "block", CUT_ELEMENTS, 0), ("block.b", "block", CUT_ELEMENTS + 10, 1)]])
A, B = LAYOUT.params


@pytest.fixture(params=["cpu", "nvme"])
def core(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutOfCoreOptimizer]:
    """One chunk of two parameters; its state is on storage, P16 and gradients are where the parameter says."""
    rest = {"cpu": 1.0, "nvme": 0.0}[request.param]
    options = CoreOptions(
        residency=ChunkResidency.of_shares(LAYOUT, rest, 0.0, rest),
        num_slots=2,
        overlap=Overlap.BACKWARD_AND_FORWARD,
        clip_policy="speculate",
        param_dtype=torch.bfloat16,
        grad_dtype=torch.bfloat16,
        staging_bytes=1 << 20,
        num_update_threads=1,
        io=IoSettings(engine="threads"),
    )
    regions = regions_for(LAYOUT, options, 2, 2)
    store = SlotStore.create([tmp_path], regions, RunIdentity("test", 0, 1, "run"), budget_bytes=None)
    made = OutOfCoreOptimizer(LAYOUT, options, KIND, HYPERS, store)
    made.initialize(lambda span: torch.ones(span.numel, dtype=torch.bfloat16), lambda count: None)
    yield made
    made.close()
    store.close()


def arrive(core: OutOfCoreOptimizer, *spans: object) -> list[bool]:
    """A backward delivers gradients of one; says after each whether the chunk is prepared."""
    core.open_window(HYPERS, 1.0, managed=True)
    prepared = []
    for span in spans:
        core.add_gradients([(span, torch.ones(span.numel, dtype=torch.bfloat16))])
        prepared.append(0 in core.window.prepared)
    core.end_micro_batch()
    return prepared


def step(core: OutOfCoreOptimizer) -> None:
    core.apply(HYPERS, 1.0, expected_multiplier=1.0)
    core.wait_all()


def test_a_second_backward_prepares_when_the_chunk_is_complete_again(core: OutOfCoreOptimizer) -> None:
    assert arrive(core, B, A) == [False, True]
    assert arrive(core, B, A) == [False, True]
    assert float(core.gradient(A)[0]) == 2.0
    step(core)
    assert core.num_redone_chunks == 0


def test_a_gradient_that_comes_alone_leaves_the_update_to_the_step(core: OutOfCoreOptimizer) -> None:
    arrive(core, B, A)
    assert arrive(core, A) == [False]
    step(core)
    assert float(core.states.read_param(A, 1)[0]) == pytest.approx(0.2)  # 0.1 times the sum
    assert float(core.states.read_param(B, 1)[0]) == pytest.approx(0.1)


def test_parameters_read_one_after_another_read_their_chunk_once(core: OutOfCoreOptimizer) -> None:
    """As scripts do that look at each parameter's state, or replace it: until the next step, or another forward."""
    arrive(core, B, A)
    step(core)
    read = load_core().IoKind.READ

    def chunks_read() -> float:
        num_bytes: int = core.io.engine.stats(read).num_bytes - before
        return num_bytes / core.place.stored_of(LAYOUT.chunks[0]).num_bytes(LAYOUT.chunks[0].numel)

    before = core.io.engine.stats(read).num_bytes
    first = [core.states.read_param(span, part) for span in (A, B) for part in (1, 2, 0)]
    assert chunks_read() == 1
    assert [float(values[0]) for values in first[:2]] == pytest.approx([0.1, 0.001], rel=1e-4)
    first[0].zero_()  # the script's own
    core.states.write_param(A, 1, torch.full((A.numel,), 0.25))
    core.states.write_param(B, 2, torch.full((B.numel,), 0.5))
    found = [core.states.read_param(span, part) for span in (A, B) for part in (1, 2, 0)]
    assert chunks_read() == 1
    assert [float(values[-1]) for values in found] == pytest.approx([0.25, 0.001, 0.99, 0.1, 0.5, 0.99], rel=1e-4)
    core.states.forget()
    again = [core.states.read_param(span, part) for span in (A, B) for part in (1, 2, 0)]
    assert chunks_read() == 2, "they are on storage, too"
    assert all(map(torch.equal, found, again))
    arrive(core, B, A)
    step(core)
    assert float(core.states.read_param(A, 1)[0]) == pytest.approx(0.9 * 0.25 + 0.1)
    assert float(core.states.read_param(B, 2)[0]) == pytest.approx(0.999 * 0.5 + 0.001)


def test_forgotten_gradients_change_nothing(core: OutOfCoreOptimizer) -> None:
    arrive(core, B, A)
    core.forget_gradients()
    step(core)
    assert set(core.params.read(A).tolist()) == {1.0}
    arrive(core, B)
    step(core)
    assert set(core.params.read(A).tolist()) == {1.0}
    assert core.missed.by_name()["block.a"] == 2


def test_an_edit_lasts_until_its_parameter_is_updated(core: OutOfCoreOptimizer) -> None:
    core.params.edited(A)
    core.params.write(A, torch.full((A.numel,), 5.0))
    for _ in range(2):
        arrive(core, B)
        step(core)
        assert set(core.params.read(A).tolist()) == {5.0}
    arrive(core, B, A)
    step(core)
    assert set(core.params.read(A).tolist()) == {float(torch.tensor(0.99).bfloat16())}


def test_a_state_set_by_the_script_reaches_p16_in_the_next_step(core: OutOfCoreOptimizer) -> None:
    """Also where the parameter has no gradient, as in stock."""
    core.states.write_param(A, 0, torch.full((A.numel,), 3.0))
    assert set(core.params.read(A).tolist()) == {1.0}
    step(core)
    assert set(core.params.read(A).tolist()) == {3.0}
    assert set(core.params.read(B).tolist()) == {1.0}


def test_a_gradient_is_not_overwritten_before_its_update_has_read_it(core: OutOfCoreOptimizer) -> None:
    """Also where the next window reads the chunk's state ahead, and no forward waited for the update."""
    module = load_core()
    core.policy = ClipPolicy("defer", possible=True)
    core.io.engine.add_fault(module.IoKind.READ, module.IoFaultEffect.DELAY, delay_secs=0.3)
    arrive(core, B, A)
    core.apply(HYPERS, 1.0, expected_multiplier=1.0)
    core.open_window(HYPERS, 1.0, managed=True)
    core.add_gradients([(A, torch.full((A.numel,), 3.0, dtype=torch.bfloat16))])
    core.forget_gradients()
    assert float(core.states.read_param(A, 1)[0]) == pytest.approx(0.1)


def test_a_failure_after_the_last_call_is_told(core: OutOfCoreOptimizer, told: Callable[[], str]) -> None:
    module = load_core()
    core.policy = ClipPolicy("defer", possible=True)  # nothing is written before the step
    arrive(core, B, A)
    core.close_window()
    while core.io.engine.num_in_flight:  # gradients on their way to storage
        time.sleep(0.01)
    core.io.engine.add_fault(module.IoKind.WRITE, module.IoFaultEffect.ERROR, count=1 << 40)
    core.apply(HYPERS, 1.0, expected_multiplier=1.0)
    with pytest.raises(RuntimeError, match="has failed"):
        core.pipeline.wait_durable(core.generation, 60.0)
    core.close()
    assert "closed after a failure: writing the state of chunk 0 failed" in told()


def test_a_gradient_set_before_any_came_is_not_added_to_old_memory(core: OutOfCoreOptimizer) -> None:
    """The next backward of the window replaces it, as in stock: G16 holds nothing of this step yet."""
    arrive(core, B, A)
    step(core)
    core.override_gradient(A, torch.full((A.numel,), 7.0))
    core.add_gradients([(A, torch.full((A.numel,), 3.0, dtype=torch.bfloat16))])
    assert set(core.gradient(A).tolist()) == {3.0}


def test_an_interrupt_while_an_update_is_prepared_leaves_no_job_behind(
    core: OutOfCoreOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = WindowUpdates._start

    def interrupted(*arguments: Any) -> None:
        start(*arguments)
        raise KeyboardInterrupt

    core.open_window(HYPERS, 1.0, managed=True)
    gradients = [(span, torch.ones(span.numel, dtype=torch.bfloat16)) for span in (B, A)]
    with monkeypatch.context() as patched:
        patched.setattr(WindowUpdates, "_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            core.add_gradients(gradients)
    core.forget_gradients()
    arrive(core, B, A)
    step(core)
    assert core.generation == 1


def test_a_step_compares_its_hyperparameters_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one a sub-group, and a chunk a sub-group at least: each chunk that compares all of them is quadratic."""
    num = 40
    layout = build_layout([[(f"p{i}", f"p{i}", CUT_ELEMENTS, i)] for i in range(num)])
    hypers = [GroupHyper(1e-2 + i, (0.9, 0.999), 1e-8, 0.0, True) for i in range(num)]
    num_compared, equal = 0, GroupHyper.__eq__

    def counted(one: GroupHyper, other: object) -> bool:
        nonlocal num_compared
        num_compared += 1
        return equal(one, other)

    with small_core(tmp_path, layout, kind=KIND, residency=(1.0, 0.0, 1.0), clip_policy="speculate") as core:
        for _ in range(3):
            core.open_window(hypers, 1.0, managed=True)
            for span in reversed(layout.params):
                core.add_gradients([(span, torch.ones(span.numel, dtype=torch.bfloat16))])
            core.end_micro_batch()
            assert len(core.window.prepared) == num
            same = [dataclasses.replace(hyper) for hyper in hypers]  # as the engine reads them: others, and equal
            with monkeypatch.context() as patched:
                patched.setattr(GroupHyper, "__eq__", counted)
                core.apply(same, 1.0, expected_multiplier=1.0)
            core.wait_all()
            assert core.num_redone_chunks == 0
        assert num_compared == 3 * num


def test_a_parameter_that_missed_a_step_is_prepared_again(core: OutOfCoreOptimizer) -> None:
    """Its own clock runs behind from then on; that is known before the step, too."""
    arrive(core, B)
    step(core)
    for _ in range(3):
        assert arrive(core, B, A) == [False, True]
        step(core)
    assert core.num_redone_chunks == 0
    assert core.missed.by_name() == {"block.a": 1}
    found = [core.states.read_param(span, part) for span in (A, B) for part in range(3)]

    core.missed.restore({})
    core.clock.replay([])
    for span in (A, B):
        for part, value in enumerate((1.0, 0.0, 0.0)):
            core.states.write_param(span, part, torch.full((span.numel,), value))
    core.policy = ClipPolicy("defer", possible=True)
    arrive(core, B)
    step(core)
    for _ in range(3):
        assert arrive(core, B, A) == [False, False]
        step(core)
    again = [core.states.read_param(span, part) for span in (A, B) for part in range(3)]
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("where", ["params", "missed", "_end_window"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_step_that_was_cut_short_is_the_last(
    where: str, error: type[BaseException], core: OutOfCoreOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is half applied. A script that catches the exception and goes on would train on that."""

    def cut(*_: object) -> None:
        raise error(5, "no more") if error is OSError else error

    target, name = {"params": (core.params, "after_step"), "missed": (core.missed, "count")}.get(where, (core, where))
    arrive(core, B, A)
    monkeypatch.setattr(target, name, cut)
    with pytest.raises(error):
        core.apply(HYPERS, 1.0, expected_multiplier=1.0)
    monkeypatch.undo()
    with pytest.raises((RuntimeError, OSError), match="step 1 was cut short"):
        core.check()
    with pytest.raises((RuntimeError, OSError), match="step 1 was cut short"):
        core.apply(HYPERS, 1.0, expected_multiplier=1.0)


@pytest.mark.parametrize("core", ["nvme"], indirect=True)
def test_a_failed_read_of_a_parameter_ends_the_run(core: OutOfCoreOptimizer) -> None:
    module = load_core()
    arrive(core, B, A)
    core.forget_gradients()
    assert core.pipeline.wait_idle(0, 60.0)  # the dropped update may still read its state: that is not the read meant
    core.io.engine.add_fault(module.IoKind.READ, module.IoFaultEffect.ERROR)
    with pytest.raises(OSError, match=r"reading parameter block\.a failed"):
        core.params.read(A)
    with pytest.raises(OSError, match=r"reading parameter block\.a failed"):
        core.apply(HYPERS, 1.0, expected_multiplier=1.0)


def fail_gradient_writes(core: OutOfCoreOptimizer) -> None:
    module = load_core()
    extent = core.place.grad_extents(0)[0]
    end = extent.offset + extent.num_bytes
    where = {"fd": extent.fd, "offset_begin": extent.offset, "offset_end": end}
    core.io.engine.add_fault(module.IoKind.WRITE, module.IoFaultEffect.ERROR, count=1 << 40, **where)


@pytest.mark.parametrize("core", ["nvme"], indirect=True)
def test_a_failed_write_of_a_gradient_is_told_by_the_step(core: OutOfCoreOptimizer) -> None:
    fail_gradient_writes(core)
    arrive(core, B, A)
    core.gradients._sealed[0].writing.wait_ended()
    with pytest.raises(OSError, match="writing the gradient of chunk 0 failed"):
        core.close_window()
    with pytest.raises(OSError, match="writing the gradient of chunk 0 failed"):
        core.check()


@pytest.mark.parametrize("core", ["nvme"], indirect=True)
def test_a_failed_write_of_the_last_gradient_is_told(core: OutOfCoreOptimizer, told: Callable[[], str]) -> None:
    fail_gradient_writes(core)
    arrive(core, B, A)
    core.close()
    assert "closed after a failure: writing the gradient of chunk 0 failed" in told()


def test_memory_and_threads_go_with_close(core: OutOfCoreOptimizer) -> None:
    arrive(core, B, A)
    core.close()
    core.close()
    with pytest.raises(RuntimeError, match="closed"):
        core.wait_all()
    with pytest.raises(RuntimeError, match="closed"):
        core.params.read(A)


@pytest.mark.parametrize("core", ["nvme"], indirect=True)
@pytest.mark.parametrize("during", ["updates", "commits", "transfers"])
def test_ctrl_c_while_it_is_closed_keeps_nothing_open(
    during: str, core: OutOfCoreOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are closed next: nothing may be written to their descriptors then."""
    arrive(core, B, A)
    owner, name = {
        "updates": (core._worker, "stop"),
        "commits": (core.commits, "stop"),
        "transfers": (core.io, "close"),
    }[during]
    end = getattr(owner, name)

    def interrupted() -> None:
        end()
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        core.close()
    assert core.pipeline is None
    assert core.io.engine is None


def test_rates_that_change_behind_backward_make_updates_wait(tmp_path: Path) -> None:
    """A loop that sets them between backward and step would have everything done twice, in every step."""

    def stepped(core: OutOfCoreOptimizer, number: int, *, late: bool) -> str:
        before, now = (dataclasses.replace(HYPERS[0], lr=1e-2 / (number + each)) for each in (1, 2))
        core.open_window((before if late else now,), 1.0, managed=True)
        for span in (B, A):
            core.add_gradients([(span, torch.full((span.numel,), 0.5, dtype=torch.bfloat16))])
        core.end_micro_batch()
        start = core.policy.choose().value
        core.apply((now,), 1.0, expected_multiplier=1.0)
        core.wait_all()
        return start

    with small_core(tmp_path, LAYOUT, clip_policy="auto") as core:
        starts = [stepped(core, number, late=True) for number in range(8)]
        redone = core.num_redone_chunks
        assert starts[0] == "speculate"
        assert starts[3:] == ["defer"] * 5
        assert redone <= 3
        starts = [stepped(core, 8 + number, late=False) for number in range(12)]
        assert starts[-1] == "speculate", "it goes back when they are set before"
        assert core.num_redone_chunks == redone


def test_a_gradient_that_was_not_copied_has_not_arrived(core: OutOfCoreOptimizer) -> None:
    """What stands in its memory is the last step's: a script that goes on must not have it."""
    arrive(core, A, B)
    core.apply(HYPERS, 1.0, expected_multiplier=1.0)
    core.wait_all()
    core.open_window(HYPERS, 1.0, managed=True)
    with pytest.raises(RuntimeError):
        core.add_gradients([(A, torch.ones(A.numel + 1, dtype=torch.bfloat16))])
    assert A.index not in core.window.arrived
    assert A.index not in core.window.summed
