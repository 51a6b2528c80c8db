# SPDX-License-Identifier: Apache-2.0
"""Single steps of an engine on the stand-in device: what the host waits for, what a failing copy does, what must be
over when memory goes.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.utils.checkpoint import checkpoint

import ds_fuyou
import ds_fuyou.activations.arena as arena_module
import ds_fuyou.planner.plan as plan_module
from ds_fuyou.activations.calls import OperatorCall
from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.cli import main
from ds_fuyou.host.compute_clock import Phase
from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.gradients import StoredGradients
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.planner.hardware import ThreadSecs
from ds_fuyou.planner.profile import StorageRates, load_profile
from ds_fuyou.planner.watch import LASTING, Cause
from ds_fuyou.storage.io import Transfer
from ds_fuyou.units import shown_bytes
from ds_fuyou.zero.device import rank_device
from ds_fuyou.zero.parameters.gather_handles import copying_stream
from ds_fuyou.zero.run.run_moves import RunMoves
from ds_fuyou.zero.run.run_plan import RunPlan
from tests.device import faults
from tests.device.accelerator import StandinAccelerator
from tests.device.parity import fuyou_of
from tests.harness.models import build_model, make_batch
from tests.harness.runner import ds_config
from tests.harness.small_core import hypers, small_core, values
from tests.harness.waits import once_in

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("only_rank")]

PACKAGE = re.escape(str(Path(ds_fuyou.__file__).parent))


@pytest.fixture(autouse=True)
def sound() -> Iterator[None]:
    """Each test finds the device at rest, and leaves it sound."""
    device = torch.standin
    device.take_trips()
    yield
    faults.leave_out("")
    device.core.fail_copy(-1)
    device.core.clear_failure()
    device.core.configure({"slow_down_secs": 0.0, "slow_compute_secs": 0.0})
    device.synchronize()
    assert device.take_trips() == []


def make_engine(
    swap: Path,
    tiers: str,
    activations: str,
    *,
    is_gathered: bool = False,
    accumulation: int = 1,
    ahead: int | None = None,
    spec: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Three small blocks, or as ``spec`` says, updates behind the next forward. ``is_gathered``: all parameters, from
    step to step; ``ahead``: elements that DeepSpeed gathers before they are used; ``more`` is added to the block.
    """
    swap.mkdir()
    zero: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    zero |= {"offload_param": {"device": "cpu", "pin_memory": True}}
    if is_gathered:
        zero["stage3_param_persistence_threshold"] = 1_000_000
    if ahead is not None:
        zero["stage3_prefetch_bucket_size"] = ahead
    config = ds_config(gradient_clipping=1.0, gradient_accumulation_steps=accumulation, zero_optimization=zero)
    config["fuyou"] = fuyou_of(swap, tiers, "auto", "backward_and_forward", 2, activations) | more
    torch.manual_seed(0)
    model = build_model(spec or {})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def batches(number: int) -> list[dict]:
    return [make_batch({}, index, 0) for index in range(number)]


def train(engine: Any, batch: dict) -> torch.Tensor:
    loss = engine(**batch)
    engine.backward(loss)
    engine.step()
    return loss


# ---- what the host waits for ----------------------------------------------------------------------------------

STEADY = 3
"""Steps after which orders are recorded and nothing is measured any more."""

# step() up to the norm: gradients on their way end, then their norms are read, combined and clipped by.
TO_THE_NORM = (
    r"zero/gradient_flow\.py:\d+ in finish",
    r"zero/stage3\.py:\d+ in _overflow_check_and_loss_scale_update_compat",
    r"zero/stage3\.py:\d+ in _multiplier",
)
# Both streams, and the copies by which the norm of the one sub-group is read and reduced.
BESIDE_GRADIENTS = 6


def is_for_the_norm(stack: str) -> bool:
    return any(re.search(rf"  {PACKAGE}/{place}\n", stack) for place in TO_THE_NORM)


@pytest.mark.parametrize(("tiers", "activations"), [("states", "none"), ("states", "recompute"), ("all", "swap-nvme")])
def test_between_forwards_the_host_waits_for_the_norm_alone(tiers: str, activations: str, tmp_path: Path) -> None:
    """From the begin of step() to the next forward, whoever waits."""
    engine = make_engine(tmp_path / "swap", tiers, activations)
    num_gradients = sum(param.requires_grad for param in engine.module.parameters())
    for step, batch in enumerate(batches(STEADY + 4)):
        loss = engine(**batch)
        engine.backward(loss)
        torch.standin.take_waits()
        engine.step()
        waits = torch.standin.take_waits()
        if step < STEADY:
            continue
        needless = [f"{wait.what} at\n{wait.stack}" for wait in waits if not is_for_the_norm(wait.stack)]
        assert not needless, "\n".join(needless)
        assert 0 < len(waits) <= num_gradients + BESIDE_GRADIENTS, [wait.what for wait in waits]
    engine.destroy()


def test_waits_for_memory_of_gradients_are_no_backward(tmp_path: Path) -> None:
    """They are what a slow disk does to a step, which the planner knows by itself. Here it takes no gradient until the
    host has waited for it."""
    engine = make_engine(tmp_path / "swap", "all", "none", plan={"chunk_bytes": 4096})
    state, (first, *rest) = engine.optimizer.rank_state, batches(3)
    train(engine, first)
    core, clock, memory, io = load_core(), state.clock, state.core.gradients, state.core.io.engine

    def is_held(wait: FrameType) -> bool:
        return not wait.f_locals["self"].done()

    def go_on_late() -> None:
        torch.standin.synchronize()  # what the device had before it comes to the wait
        time.sleep(0.3)
        io.clear_faults()

    for batch in rest:
        state.core.wait_all()
        clock.settle(wait=True)
        before, waited = {phase: clock.secs(phase) for phase in Phase}, memory.waited_secs
        begin = time.perf_counter()
        loss = engine(**batch)
        io.add_fault(core.IoKind.WRITE, core.IoFaultEffect.HOLD, count=1 << 40)
        with once_in(go_on_late, Transfer.wait, StoredGradients.pieces, when=is_held):
            engine.backward(loss)
        clock.settle(wait=True)
        passed, waited = time.perf_counter() - begin, memory.waited_secs - waited
        since = {phase: clock.secs(phase) - secs for phase, secs in before.items()}
        assert waited >= 0.3, "the disk held back gradients"
        assert since[Phase.GRADIENTS] >= 0.3
        assert sum(secs for phase, secs in since.items() if phase not in (Phase.OUTSIDE, Phase.STEP)) <= passed
        engine.step()
    engine.destroy()


# ---- mode auto, begun as an earlier run ended -----------------------------------------------------------------


@pytest.mark.parametrize("batch", ["alike", "longer", "failing", "failing, then longer"])
def test_what_one_run_decided_the_next_begins_with(
    batch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[], str]
) -> None:
    """In the same state, step by step to the bit; one whose first step fails leaves the next one to decide anew."""
    monkeypatch.setenv("DS_FUYOU_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setattr(RunPlan, "_drop_kept", lambda self, findings: None)  # other work on the machine drops none
    made = {"alike": batches(6), "longer": [{**one, "ids": one["ids"].repeat(2, 1)} for one in batches(6)]}

    def kept() -> dict[str, Any]:
        (file,) = (tmp_path / "profiles").iterdir()
        return json.loads(file.read_text())

    def run(name: str, given: list[dict]) -> tuple[list[float], list[Any], list[bool]]:
        """Losses; fates and whether activations are kept for others, before each step and at the end."""
        engine = make_engine(tmp_path / name, "all", "auto", gpu_budget_bytes=500_000)
        session, losses, fates, has_kept = engine.optimizer.rank_state.activations, [], [], []
        for one in given:
            fates.append(dict(session.fates))
            has_kept.append((tmp_path / "profiles").exists() and kept()["activations"] is not None)
            losses.append(float(train(engine, one).detach()))
        engine.destroy()
        return losses, [*fates, dict(session.fates)], [*has_kept, kept()["activations"] is not None]

    first, fates, has_kept = run("first", made["alike"])
    assert fates[:2] == [{}, {}]
    assert set(map(repr, fates[-1].values())) != {repr(BlockFate(Fate.KEEP))}, "something leaves"
    assert has_kept == [False] * 3 + [True] * 4, "decided after the second step, under which a third was applied"
    assert run("none", [])[1:] == ([fates[-1]], [True]), "no step was asked for"
    if batch.startswith("failing"):
        engine = make_engine(tmp_path / "failing", "all", "auto", gpu_budget_bytes=500_000)
        with pytest.raises(RuntimeError):
            engine(ids=torch.zeros(2, 4))
        engine.destroy()
        assert kept()["activations"] is None
        if batch == "failing":
            assert run("second", made["alike"])[1:] == (fates, has_kept)
            return
        _, *begun = run("second", made["longer"])
        assert begun[0][:3] == [{}] * 3, "of the first step nothing is known, and two more are measured"
        assert begun[1] == [False] * 4 + [True] * 3
        assert kept()["shape"] == list(made["longer"][0]["ids"].shape)
        return
    second, *begun = run("second", made[batch])
    assert begun[0][0] == fates[-1]
    if batch == "alike":
        assert second == first
        assert begun == [[fates[-1]] * 7, [True] * 7]
    else:
        assert begun[0][1:3] == [{}, {}], "measured anew in two steps"
        assert begun[1] == [True, True, True, False, True, True, True], "decided after them"
        assert kept()["shape"] == list(made["longer"][0]["ids"].shape)
    assert run("third", made[batch])[1:] == ([begun[0][-1]] * 7, [True] * 7)
    assert told().count("activations, decided before step 1, as an earlier run measured: of 3 blocks") == 3


def test_more_of_the_device_in_use_than_in_the_measured_run_leaves_less_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of reference, say, that was not there."""
    monkeypatch.setenv("DS_FUYOU_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setattr(RunPlan, "_drop_kept", lambda self, findings: None)
    rooms = []
    for name, more in (("first", 0), ("second", 0), ("third", 200_000)):
        engine = make_engine(tmp_path / name, "all", "auto", gpu_budget_bytes=1_500_000)
        other = torch.empty(more, dtype=torch.uint8, device=get_accelerator().current_device_name())
        for one in batches(4):
            train(engine, one)
        rooms.append(engine.optimizer.rank_state.activations.swapper.room_bytes)
        engine.destroy()
        del other
        gc.collect()
    assert rooms[1] == rooms[0]
    assert rooms[2] <= rooms[1] - 100_000, "of the device more may be free before the first step than after it"


def test_a_profile_that_cannot_be_taken_back_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[], str]
) -> None:
    """Of a cache that is only read: what no longer fits would fail every start."""
    monkeypatch.setenv("DS_FUYOU_PROFILES", str(tmp_path / "profiles"))
    for name in ("first", "second"):
        engine = make_engine(tmp_path / name, "all", "auto", gpu_budget_bytes=500_000)
        for one in batches(4):
            train(engine, one)
        engine.destroy()
        monkeypatch.setattr("ds_fuyou.zero.run.run_plan.save_profile", lambda profile: None)
    assert told().count("activations, decided after step 2") == 2


# ---- mode auto, before it decides -----------------------------------------------------------------------------


@pytest.mark.parametrize("gpu_budget", ["auto", 20_000])
def test_a_disk_for_the_states_alone_fails_no_forward(gpu_budget: str | int, tmp_path: Path) -> None:
    """What fits the device never leaves it; what does not has no room anywhere else, and stays."""
    engine = make_engine(tmp_path / "swap", "states", "auto", gpu_budget_bytes=gpu_budget)
    session = engine.optimizer.rank_state.activations
    session.swapper.tier.storage.space._budget = lambda: 0  # the states took all of it
    for number, batch in enumerate(batches(6)):
        loss = engine(**batch)
        if number == 0:
            assert session.swapper.kept.now > 20_000
        engine.backward(loss)
        engine.step()
    assert engine.optimizer.run_plan.auto.is_decided
    assert (session.counters.out_bytes, session.swapper.tier.storage.space.num_bytes) == (0, 0)
    engine.destroy()


@pytest.mark.parametrize(
    ("tiers", "activations", "gpu_budget"),
    [("all", "auto", 500_000), ("states", "recompute", "auto")],
)
def test_steps_hold_as_much_of_the_device_as_is_planned(
    tiers: str,
    activations: str,
    gpu_budget: str | int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: Callable[[], str],
) -> None:
    """The device's allocator counts bytes; what is planned comes from the first steps. Updates beside a device are
    slower than in the one step in which they are timed alone, or faster: their rate there is kept.
    """
    monkeypatch.setenv("DS_FUYOU_PROFILES", str(tmp_path / "profiles"))
    engine = make_engine(tmp_path / "swap", tiers, activations, gpu_budget_bytes=gpu_budget)
    state = engine.optimizer.rank_state
    for batch in batches(6 + LASTING):
        train(engine, batch)
    planned, held = state.planned_device_bytes, state.device.peak_bytes()
    assert 0.8 * planned <= held <= 1.2 * planned, "delays drawn at random: gradients on their way vary"
    plan = engine.optimizer.run_plan
    (file,) = (tmp_path / "profiles").iterdir()
    plan._kept = replace(plan._kept, update_rate=1e15)
    reached = plan._watch.usual()[Cause.UPDATES]
    engine.destroy()
    assert f"device memory: at most {shown_bytes(held)} in use, planned were {shown_bytes(planned)}" in told()
    assert json.loads(file.read_text())["update_rate"] == reached < 1e12


def test_what_threads_do_themselves_is_kept_of_steps_that_record_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured step still takes down orders, which costs them time."""
    monkeypatch.setattr(get_accelerator(), "waits_block", True, raising=False)  # where it is known
    monkeypatch.setenv("DS_FUYOU_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setattr("ds_fuyou.planner.watch.GAP", 100.0)  # other work on the machine drops no profile

    def kept_after(num_steps: int, name: str) -> ThreadSecs:
        engine = make_engine(tmp_path / name, "states", "none")
        for batch in batches(num_steps):
            train(engine, batch)
        plan = engine.optimizer.run_plan
        assert plan._kept is not None
        plan._kept = replace(plan._kept, thread=ThreadSecs(8.0, 8.0, 8.0))
        facts = plan._facts
        engine.destroy()
        profile = load_profile(facts.machine, facts.model)
        assert profile is not None
        return profile.thread

    assert kept_after(4, "short").forward < 8.0, "as it was measured"
    long = kept_after(12, "long")
    assert all(0.0 <= secs < 4.0 for secs in (long.forward, long.backward, long.between))
    assert long.forward > 0.0


def test_swapping_has_half_of_what_the_device_has_left(tmp_path: Path) -> None:
    """For what has not left it: the host launches a forward before the device has computed it."""
    budget = 1 << 30
    engine = make_engine(tmp_path / "swap", "all", "swap-nvme", gpu_budget_bytes=budget)
    swapper = engine.optimizer.rank_state.activations.swapper
    (batch,) = batches(1)
    for beside in (0, budget // 4, 2 * budget):
        ballast = torch.empty(beside, dtype=torch.uint8, device=get_accelerator().current_device_name())
        there = torch.standin.memory_allocated()
        train(engine, batch)
        assert swapper.room_bytes == max(0, budget - there) // 2
        del ballast
    engine.destroy()


def test_steps_before_anything_is_measured_leave_room_for_the_loss(tmp_path: Path) -> None:
    """Of a vocabulary that takes more than half of the device: as much less stays there."""
    spec = {"num_layers": 20, "vocabulary": 1500}
    engine = make_engine(tmp_path / "swap", "all", "auto", spec=spec, gpu_budget_bytes=1 << 30)
    device, swapper = engine.optimizer.rank_state.device, engine.optimizer.rank_state.activations.swapper
    auto = engine.optimizer.run_plan.auto
    batch = make_batch(spec, 0, 0)
    batch = {**batch, "ids": batch["ids"].repeat(8, 1)}
    tokens = batch["ids"].numel()
    at, loss = device.allocated_bytes(), 14 * 1500 * tokens
    for left, room in ((4 * loss, 2 * loss), (3 * loss // 2, loss // 2), (loss, 0), (loss // 2, 0)):
        auto._budget_bytes = at + left
        auto._forward_begins(((), batch))
        assert swapper.room_bytes == room
    auto._budget_bytes = at + 3 * loss // 2
    device.reset_peak()
    engine.backward(engine(**batch))
    assert device.peak_bytes() <= auto._budget_bytes
    engine.step()
    engine.destroy()


def test_a_longer_batch_than_the_measured_ones_fits_the_device(tmp_path: Path) -> None:
    """Logits need more of it then, so less is kept."""
    gc.collect()  # engines before
    budget = 1_000_000  # 0.83 of it are in use before
    engine = make_engine(tmp_path / "swap", "all", "auto", gpu_budget_bytes=budget)
    device = engine.optimizer.rank_state.device
    for batch in batches(3):
        train(engine, batch)
    device.reset_peak()
    for batch in batches(3):
        train(engine, {**batch, "ids": batch["ids"].repeat(2, 1)})
    assert budget / 2 < device.peak_bytes() <= budget
    engine.destroy()


def test_where_the_allocator_has_to_ask_twice_less_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[], str]
) -> None:
    budget = 1 << 30
    engine = make_engine(tmp_path / "swap", "all", "auto", gpu_budget_bytes=budget)
    swapper, device = engine.optimizer.rank_state.activations.swapper, engine.optimizer.rank_state.device
    assert device.num_retries() == torch.standin.memory_stats()["num_alloc_retries"]
    rooms = []
    found = [3]
    monkeypatch.setattr(type(device), "num_retries", lambda self: found[0])
    for number, batch in enumerate(batches(12)):
        found[0] += 5  # an evaluation's
        loss = engine(**batch)
        rooms.append(swapper.room_bytes)
        found[0] += number not in (2, 4)
        engine.backward(loss)
        engine.step()
    whole = rooms[2]  # decided after the second
    assert rooms[3:6] == [whole, whole - budget / 50, whole - budget / 50]
    assert rooms[6] == pytest.approx(whole - 2 * budget / 50)
    assert rooms[-1] == pytest.approx(whole - budget / 10), "no more than a tenth"
    assert told().count("2 % of the budget less stays there from now on") == 1
    engine.destroy()


def first_run(swap: Path, gpu_budget: int) -> tuple[list[Any], list[int], list[float]]:
    """Plans before the first step and after the fourth, bytes of the arena then, and losses."""
    swap.mkdir()
    config = ds_config(gradient_clipping=1.0)
    for name in ("offload_optimizer", "offload_param"):  # they would say where states are
        config["zero_optimization"].pop(name, None)
    config["fuyou"] = {
        "nvme_path": str(swap),
        "dram_budget_bytes": 2_200_000,
        "gpu_budget_bytes": gpu_budget,
        "parameters": {"tier": "cpu"},
        "gradients": {"tier": "cpu"},
        "plan": {"chunk_bytes": 16384, "smallest_swapped_bytes": 1024},
    }
    torch.manual_seed(0)
    model = build_model({})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    state = engine.optimizer.rank_state
    plans, arenas = [state.plan], [state.swap_tier.arena_bytes]
    losses = [float(train(engine, batch).detach()) for batch in batches(5)]
    state.core.wait_all()
    moved = state.layout.share_of(state.core.place.residency.states)
    assert moved == pytest.approx(state.plan.residency.optimizer, abs=0.03)
    plans.append(state.plan)
    arenas.append(state.swap_tier.arena_bytes)
    engine.destroy()
    return plans, arenas, losses


def test_an_arena_that_nothing_passes_becomes_memory_for_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first run knows no blocks and gives activations an eighth of its memory. Where all of them stay on the device
    states come there, since storage turns out to be slow; where some leave, nothing comes.
    """
    small, move = 10 * 4096, RunMoves.move
    for name in ("_ARENA_BYTES", "_ARENA_PATH_BYTES"):
        monkeypatch.setattr(plan_module, name, small)
    monkeypatch.setattr(arena_module, "_SEGMENT_BYTES", small)
    slow = StorageRates(1e6, 1e6, 1e6, 0.0, 0.0)
    monkeypatch.setattr(RunMoves, "move", lambda self, found: move(self, found and replace(found, storage=slow)))
    (before, after), arenas, losses = first_run(tmp_path / "kept", 1 << 30)
    assert before.activation_bytes == 2_200_000 // 8
    assert (after.activation_bytes, arenas) == (small, [68 * 4096, small])
    assert after.residency.optimizer > before.residency.optimizer + 0.1
    (before, after), arenas, others = first_run(tmp_path / "swapped", 800_000)
    assert before == after
    assert arenas == [68 * 4096] * 2
    assert others == losses


def test_gradients_of_a_micro_batch_are_let_go_in_the_next_forward(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "swap", "all", "none", accumulation=2)
    flow = engine.optimizer.gradient_flow
    first, second = batches(2)
    train(engine, first)
    assert flow._reducing
    torch.standin.synchronize()
    loss = engine(**second)
    assert not flow._reducing
    engine.backward(loss)
    engine.step()
    engine.destroy()


# ---- a copy that fails ----------------------------------------------------------------------------------------

# (what fails, the direction, activations, whether parameters are gathered before: then nothing else is copied)
FAILING = {
    "parameter": ("up", "none", False),
    "gradient": ("down", "none", True),
    "activation": ("down", "swap-nvme", True),
}


def train_until_a_copy_fails(engine: Any, batch: dict, what: str) -> None:
    if what != "gradient":
        torch.standin.core.fail_copy(1)
    loss = engine(**batch)
    if what == "gradient":
        torch.standin.synchronize()
        torch.standin.core.fail_copy(1)
    engine.backward(loss)
    engine.step()


@pytest.mark.parametrize("what", FAILING)
def test_a_copy_that_fails_raises_in_its_step(what: str, tmp_path: Path, told) -> None:
    way, activations, is_gathered = FAILING[what]
    engine = make_engine(tmp_path / "swap", "states", activations, is_gathered=is_gathered)
    first, second, third = batches(3)
    train(engine, first)
    train(engine, second)
    torch.standin.synchronize()
    with pytest.raises(RuntimeError, match=f"stand-in device: the device failed in a copy {way}"):
        train_until_a_copy_fails(engine, third, what)
    assert engine.global_steps == 2
    directories = list(engine.optimizer.rank_state.store.directories)
    engine.destroy()
    assert [thread for thread in threading.enumerate() if thread.name.startswith("fuyou")] == []
    assert "the device failed in a copy" in told()

    # The run has failed: its state stays as of the last step, and nothing else does.
    left = {path.parent for path in (tmp_path / "swap").glob("**/*") if path.is_file()}
    assert left == set(directories)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["recover", *map(str, directories), "--weights", str(tmp_path / "weights.pt")]) == 0
    assert "as of step 2 (" in said.getvalue()

    assert torch.standin.take_trips() == []
    torch.standin.core.clear_failure()
    other = make_engine(tmp_path / "other", "states", activations)  # the process is sound
    train(other, third)
    other.destroy()


# ---- what must be over ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "device.synchronize at optimizer/core.py:close"])
def test_nothing_is_unpinned_while_it_is_copied(fault: str, tmp_path: Path) -> None:
    """The optimizer is closed in the middle of backward: gradients are on their way to host memory. They go on when it
    begins to close, or not before it is closed.
    """
    limits = LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS)
    layout = build_layout([[(name, name, CUT_ELEMENTS, 0) for name in "abc"]], limits)
    torch.standin.core.configure({"slow_down_secs": 0.05})
    gates: list[Callable[[], None]] = []
    goes_on = contextlib.nullcontext() if fault else once_in(lambda: gates.pop()(), OutOfCoreOptimizer.close)
    with goes_on, small_core(tmp_path, layout, device=rank_device()) as core:
        kept = list(core._locks._locked.values())  # a fault shows as a trip, not as a write into memory that is gone
        core.intake.norms.take_by(lambda gradient: gradient.double().norm(2))
        core.open_window(hypers(layout), 1.0, managed=True)
        gradients = [(span, values(span, 1).to("standin")) for span in layout.params]
        torch.standin.synchronize()
        gates.append(torch.standin.core.hold(torch.standin.current_stream().stream_id))
        for gradient in gradients:
            core.add_gradients([gradient])
        assert torch.standin.core.num_flights() > 0
        faults.leave_out(fault)
    for let_go in gates:
        let_go()
    torch.standin.synchronize()
    trips = torch.standin.take_trips()
    assert any("unregistered while a copy of it was in flight" in trip for trip in trips) == bool(fault)
    assert bool(trips) == bool(fault), trips
    del kept


@pytest.mark.parametrize("residency", [(1.0, 0.0, 1.0), (0.0, 0.0, 0.0)])
def test_no_update_begins_before_the_last_gradient_has_come(residency: tuple[float, ...], tmp_path: Path) -> None:
    """When the last micro-batch begins the device still copies, and the host adds, what the one before left."""
    limits = LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS)
    layout = build_layout([[(name, name, CUT_ELEMENTS, 0) for name in "abc"]], limits)
    stream = torch.standin.current_stream()
    with small_core(tmp_path, layout, device=rank_device(), clip_policy="speculate", residency=residency) as core:
        core.intake.norms.take_by(lambda gradient: gradient.double().norm(2))
        first, second, last = (
            [(span, values(span, seed).to("standin")) for span in layout.params] for seed in range(3)
        )
        core.add_gradients(first, last=False)
        core.end_micro_batch()
        core.intake.settle(wait=True)
        torch.standin.synchronize()
        with torch.standin.held(stream):
            core.add_gradients(second, last=False)
            core.end_micro_batch()
            assert len(core.intake._in_flight) == 3
            core.open_window(hypers(layout), 1.0, managed=True)
        torch.standin.synchronize()
        for in_flight in core.intake._in_flight:
            in_flight[1].wait()
        core.add_gradients(last[:1])
        assert set(core.window.prepared) <= {0}
        core.add_gradients(last[1:])
        core.intake.settle(wait=True)
        assert set(core.window.prepared) == {0, 1, 2}
        core.close_window()
        core.apply(hypers(layout), 1.0, expected_multiplier=1.0)
        core.wait_all()
        assert core.pipeline.stats().num_updated_elements == layout.numel


@pytest.mark.parametrize("fault", ["", "stream.wait_event at zero/parameters/gather_handles.py:wait"])
def test_who_waits_for_a_gather_of_another_stream_gets_its_values(fault: str, tmp_path: Path) -> None:
    """DeepSpeed's coordinator waits on the stream that copies; what is unpacked in backward, and the end of a step
    after a forward that raised, wait on the one that computes.
    """
    engine = make_engine(tmp_path / "swap", "states", "none")
    param = engine.module.blocks[0].up.weight
    expected = param.ds_tensor.data.clone()
    side = torch.standin.Stream()
    torch.standin.synchronize()
    faults.leave_out(fault)
    with torch.standin.held(copying_stream()):
        with torch.standin.stream(side):
            handle = param.all_gather_coalesced([param])
        handle.wait()
        seen = param.data.view(-1).clone()
        if fault:
            torch.standin.current_stream().synchronize()  # nothing orders it after the copies
    torch.standin.synchronize()
    assert torch.equal(seen.cpu(), expected) == (not fault)
    param.partition()
    engine.destroy()


def test_a_module_waits_for_no_gather_of_a_later_one(tmp_path: Path) -> None:
    """As DeepSpeed's coordinator does it: gathers on one stream, for which the computing one waits at every module."""
    engine = make_engine(tmp_path / "swap", "states", "none")
    now, later = engine.module.blocks[0].up.weight, engine.module.blocks[0].down.weight
    expected = [param.ds_tensor.data.clone() for param in (now, later)]
    gathering = torch.standin.Stream()
    with torch.standin.stream(gathering):
        handle = now.all_gather_coalesced([now])
    torch.standin.synchronize()
    with torch.standin.held(copying_stream()):
        with torch.standin.stream(gathering):
            later_handle = later.all_gather_coalesced([later])
            handle.wait()
        torch.standin.current_stream().wait_stream(gathering)
        seen = now.data.view(-1).clone()
        is_computed, until = rank_device().record_event(), time.monotonic() + 100
        while not is_computed.query() and time.monotonic() < until:
            time.sleep(0.001)
        assert is_computed.query()
        assert not later_handle._copied.query()
    with torch.standin.stream(gathering):
        later_handle.wait()
    torch.standin.current_stream().wait_stream(gathering)
    assert torch.equal(seen.cpu(), expected[0])
    assert torch.equal(later.data.view(-1).cpu(), expected[1])
    for param in (now, later):
        param.partition()
    engine.destroy()


# ---- sleep ------------------------------------------------------------------------------------------------------


def weights(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = param.detach().cpu().clone()
    return found


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes by address that are registered with the device."""
    found: dict[int, int] = {}
    register, unregister = StandinAccelerator.register_host_memory, StandinAccelerator.unregister_host_memory

    def noted(self: Any, address: int, num_bytes: int) -> bool:
        found[address] = num_bytes
        return register(self, address, num_bytes)

    def forgotten(self: Any, address: int) -> None:
        del found[address]
        unregister(self, address)

    monkeypatch.setattr(StandinAccelerator, "register_host_memory", noted)
    monkeypatch.setattr(StandinAccelerator, "unregister_host_memory", forgotten)
    return found


@pytest.mark.parametrize("tiers", ["all", "half", "none"])
def test_asleep_nothing_is_on_the_device_and_nothing_is_pinned(
    tiers: str, pinned: dict[int, int], tmp_path: Path
) -> None:
    """Not even where all parameters stay gathered from step to step, nor in the middle of a step."""
    given = batches(4)
    awake = make_engine(tmp_path / "awake", tiers, "swap-nvme", is_gathered=True)
    for batch in given:
        train(awake, batch)
    expected = weights(awake)
    awake.destroy()
    del awake
    gc.collect()
    assert not pinned
    device = torch.standin
    device.synchronize()
    before = device.memory_allocated()
    engine = make_engine(tmp_path / "swap", tiers, "swap-nvme", is_gathered=True)
    assert pinned
    for batch in given:
        loss = engine(**batch)
        engine.backward(loss)
        del loss
        for at in ("in a step", "after it"):
            assert device.memory_allocated() - before > 100_000, "the model is gathered"
            held = device.memory_reserved()
            for pin_memory in (True, False):
                registered = dict(pinned)
                engine.offload_states(pin_memory=pin_memory)
                device.synchronize()  # memory that a stream still uses is not free
                left = device.memory_allocated() - before
                assert device.memory_reserved() < held, "another process is to have it"
                assert left < 65_536, f"{at}: blocks of 512 bytes, for norms and scales; the model has 400 kB"
                assert pinned == (registered if pin_memory else {})
                engine.reload_states()
                assert pinned == registered
            if at == "in a step":
                engine.step()
                engine.eval()
                with torch.no_grad():
                    engine(**batch)
                engine.train()
    assert all(torch.equal(value, expected[name]) for name, value in weights(engine).items())
    engine.offload_states(pin_memory=False)
    engine.destroy()
    assert not pinned, "and an engine may end asleep"


def test_an_engine_that_only_infers_sleeps_too(pinned: dict[int, int], tmp_path: Path) -> None:
    swap, config = tmp_path / "swap", ds_config(optimizer=None)
    swap.mkdir()
    config["fuyou"] = fuyou_of(swap, "all", "auto", "backward_and_forward", 2, "none")
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build_model({})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    device, (batch,) = torch.standin, batches(1)
    device.synchronize()
    before, losses = device.memory_allocated(), []
    for pin_memory in (True, False):
        for _ in range(2):
            with torch.no_grad():
                losses.append(float(engine(**batch)))
        registered = dict(pinned)
        assert registered
        engine.offload_states(pin_memory=pin_memory)
        device.synchronize()
        assert device.memory_allocated() - before < 4096, "only small things: norms' blocks of 512 bytes"
        assert pinned == (registered if pin_memory else {})
        engine.reload_states()
        assert pinned == registered
    with torch.no_grad():
        losses.append(float(engine(**batch)))
    assert len(set(losses)) == 1
    engine.offload_states(pin_memory=False)
    engine.destroy()
    assert not pinned


def test_memory_of_a_gradient_goes_behind_the_stream_that_it_belongs_to(tmp_path: Path) -> None:
    """Which need not be the one that computes when it goes: a model may have branches on streams of their own."""
    device, numel = torch.standin, 1 << 16
    flow = make_engine(tmp_path / "swap", "all", "none").optimizer.gradient_flow
    own, other = device.current_stream(), device.Stream()
    came = SimpleNamespace(ds_id=-1, grad=torch.full((numel,), 3.0, device="standin"))
    flow._streams[came.ds_id] = own
    flow._most_reducing = 0
    copied = torch.zeros(numel).pin_memory()
    flow._stream.wait_stream(own)
    with device.held(flow._stream):
        with device.stream(flow._stream):
            copied.copy_(came.grad, non_blocking=True)
            flow._let_go([came])
        with device.stream(other):
            flow.sweep()
        assert not flow._reducing
        again = torch.full((numel,), 7.0, device="standin")
    device.synchronize()
    assert bool((again.cpu() == 7.0).all())
    assert bool((copied == 3.0).all())


def test_an_output_leaves_behind_the_stream_that_made_it(tmp_path: Path) -> None:
    """What ends the waiting for its completion may be a copy of the next module's parameters, on a stream that gathers,
    long before a slow device has made the output."""

    torch.standin.core.configure({"slow_compute_secs": 0.002})
    plan = {"chunk_bytes": 16384, "smallest_swapped_bytes": 1}
    made = ("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.gelu.default", "aten.add.Tensor")
    calls = {OperatorCall(each, number): Fate.SWAP for each in made for number in range(8)}
    losses: dict[str, list[float]] = {"auto": [], "none": []}
    for mode, found in losses.items():
        engine = make_engine(tmp_path / mode, "all", mode, gpu_budget_bytes=500_000, plan=plan)
        session = engine.optimizer.rank_state.activations
        for one in batches(4):
            if mode == "auto":
                session.decide({block.name: BlockFate(Fate.SWAP, calls) for block in session.blocks})
            found.append(float(train(engine, one).detach()))
        if mode == "auto":
            assert session.swapper.tier.counters.out_bytes > 0
        engine.destroy()
    assert losses["auto"] == losses["none"]


class Tiled(torch.nn.Module):
    """DeepSpeed computes its MLP in two parts, of which the first leaves a gradient that is not ready."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64, bias=False)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        params = [*self.up.parameters(), *self.down.parameters()]
        x = TiledMLP.apply(lambda _, part: self.down(self.up(part).relu()), self, self.embed(ids), 2, params)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


class Twice(torch.nn.Module):
    """One weight in two re-entrant checkpoints, each of which is a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64, bias=False)
        self.embed.weight.requires_grad_(False)
        self.shared = torch.nn.Linear(32, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda y: self.shared(y).relu(), x, use_reentrant=True)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def many_times_more(param: torch.nn.Parameter) -> None:
    for _ in range(30):
        param.grad.mul_(1.5)


def many_times_more_at_once(param: torch.nn.Parameter) -> None:
    many_times_more(param)
    torch.standin.synchronize()


@pytest.mark.parametrize(("kind", "name"), [(Tiled, "head"), (Twice, "shared")])
def test_what_a_hook_leaves_of_a_gradient_is_reduced_behind_it(
    kind: Callable[[], torch.nn.Module], name: str, tmp_path: Path
) -> None:
    """Also where what comes next is not ready, or it comes once more, and a slow device has not made it yet. (Stock
    loses some of it.)
    """
    norms = []
    for slow, hook in ((0.0, many_times_more_at_once), (0.003, many_times_more)):
        torch.standin.core.configure({"slow_compute_secs": slow})
        config = ds_config(zero_optimization={"stage3_param_persistence_threshold": 0})
        config["fuyou"] = fuyou_of(tmp_path, "states", "auto", "backward_and_forward", 2, "none")
        torch.manual_seed(0)
        model = kind()
        trained = [param for param in model.parameters() if param.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        model.get_submodule(name).weight.register_post_accumulate_grad_hook(hook)
        train(engine, {"ids": torch.arange(24, device=engine.device).view(2, 12)})
        norms.append(float(engine.get_global_grad_norm()))
        engine.destroy()
    assert norms[0] == norms[1]


def test_gradients_of_a_large_block_do_not_fill_the_device(tmp_path: Path) -> None:
    """As of one with many experts: all of them would be there, as the host launches backward before any has left."""
    width, depth, budget = 128, 16, 2 << 20
    numel = width * width

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(depth))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    config = ds_config(zero_optimization={"overlap_comm": True})
    (tmp_path / "swap").mkdir()
    config["fuyou"] = fuyou_of(tmp_path / "swap", "none", "auto", "backward_and_forward", 2, "none")
    config["fuyou"]["gpu_budget_bytes"] = budget
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(2)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    flow, most = engine.optimizer.gradient_flow, 0
    collect = flow.collect

    def counted(param: torch.nn.Parameter) -> None:
        nonlocal most
        collect(param)
        most = max(most, sum(gradient.nbytes for one in flow._reducing for gradient in one.gradients))

    flow.collect = counted
    loss = engine(torch.ones(4, width, dtype=torch.bfloat16, device="standin")).float().sum()
    with torch.standin.held(flow._stream):
        engine.backward(loss)
    engine.step()
    assert budget // 16 <= most <= budget // 16 + 2 * numel
    engine.destroy()


@pytest.mark.parametrize("pins", [False, True])
def test_an_engine_that_only_infers_pins_where_it_may(pins: bool, tmp_path: Path) -> None:
    config = ds_config(optimizer=None, zero_optimization={"offload_param": {"device": "cpu", "pin_memory": pins}})
    (tmp_path / "swap").mkdir()
    config["fuyou"] = fuyou_of(tmp_path / "swap", "all", "auto", "backward_and_forward", 2, "none")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build_model({})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for size_class in engine.optimizer.fuyou_reads.parameters._size_classes:
        assert torch.standin.core.is_pinned(size_class.memory.pool.pool.base, 1) is pins
    engine.destroy()


def test_parameters_of_an_engine_that_only_infers_are_pinned_in_host_memory(tmp_path: Path) -> None:
    """Until an engine that trains has them."""

    def pinned() -> list[bool]:
        return [torch.standin.core.is_pinned(param.ds_tensor.data_ptr(), 1) for param in model.parameters()]

    config = ds_config(optimizer=None)
    (tmp_path / "swap").mkdir()
    config["fuyou"] = fuyou_of(tmp_path / "swap", "none", "auto", "backward_and_forward", 2, "none")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build_model({})
    before = [param.ds_tensor.clone() for param in model.parameters()]
    assert not any(pinned())
    engine, *_ = deepspeed.initialize(model=model, config=config)
    reads = engine.optimizer.fuyou_reads
    assert all(pinned())
    assert all(torch.equal(old, param.ds_tensor) for old, param in zip(before, model.parameters(), strict=True))
    scores = engine(**batches(1)[0])
    reads.sleep()
    assert not any(pinned())
    reads.wake()
    assert all(pinned())
    assert torch.equal(scores, engine(**batches(1)[0]))
    trained = {**ds_config(), "fuyou": config["fuyou"]}
    actor, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=trained)
    assert not reads.pinned
    train(actor, batches(1)[0])
    actor.destroy()
    engine.destroy()
    assert not any(pinned())


def test_collectives_take_nothing_of_the_host() -> None:
    """As NCCL's."""
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        deepspeed.comm.all_reduce(torch.ones(1))
    deepspeed.comm.all_reduce(torch.ones(1, device="standin"))


@pytest.mark.parametrize("tiers", ["all", "none"])
def test_a_script_may_name_a_device_and_a_type_for_what_it_makes(tiers: str, tmp_path: Path) -> None:
    """What is in host memory stays there."""
    found = []
    for device, dtype in (("cpu", torch.float32), ("standin", torch.bfloat16)):
        given = batches(3)
        engine = make_engine(tmp_path / device, tiers, "swap-nvme")
        torch.set_default_device(device)
        torch.set_default_dtype(dtype)
        try:
            losses = [train(engine, batch) for batch in given]
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        found.append([loss.item() for loss in losses])
        engine.destroy()
    assert found[0] == found[1]


@pytest.mark.parametrize("tiers", ["states", "all"])
def test_what_a_script_gathers_is_there_on_every_stream(tiers: str, tmp_path: Path) -> None:
    """As in stock. Behind work of the computing stream, which copies of other gathers do not wait for."""
    engine = make_engine(tmp_path / "swap", tiers, "none")
    params = list(engine.module.parameters())[:3]
    with deepspeed.zero.GatheredParameters(params):
        expected = [param.detach().cpu() for param in params]
    stream = torch.standin.current_stream()
    threading.Timer(0.3, torch.standin.core.hold(stream.stream_id)).start()
    with deepspeed.zero.GatheredParameters(params), torch.standin.stream(torch.standin.Stream()):
        found = [param.detach().cpu() for param in params]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    engine.destroy()


def test_what_a_forward_has_gathered_is_there_for_a_script_that_gathers_it(tmp_path: Path) -> None:
    """A small parameter stays gathered behind its module, its copy may still be on DeepSpeed's gathering stream."""
    engine = make_engine(tmp_path / "swap", "all", "none", ahead=0)
    for batch in batches(STEADY):
        train(engine, batch)
    last = engine.module.norm.weight
    with deepspeed.zero.GatheredParameters([last]):
        expected = last.detach().cpu()
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    gathering = coordinator._PartitionedParameterCoordinator__allgather_stream

    def hold(*_: object) -> None:
        threading.Timer(0.4, torch.standin.core.hold(gathering.stream_id)).start()

    engine.module.blocks[2].down.register_forward_pre_hook(hold)
    engine(**batches(1)[0])
    assert last.ds_status is ZeroParamStatus.AVAILABLE
    with torch.standin.stream(torch.standin.Stream()), deepspeed.zero.GatheredParameters([last]):
        found = last.detach().cpu()
    assert torch.equal(found, expected)
    engine.destroy()
