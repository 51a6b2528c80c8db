# SPDX-License-Identifier: Apache-2.0
"""A run whose measured steps say that states, P16 or G16 should be elsewhere moves them, and computes the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import deepspeed
import pytest
import torch

from ds_fuyou.planner.profile import RunProfile, StorageRates
from ds_fuyou.zero.run.run_plan import RunPlan
from tests.harness.forked import finish, start
from tests.harness.models import TinyGPT
from tests.harness.moving import train
from tests.harness.ports import free_port
from tests.harness.runner import ds_config, environment

MODEL = {"num_layers": 3, "width": 72, "vocabulary": 500}
SCRIPT = Path(__file__).with_name("moving_script.py")


def slow_storage(found: RunProfile, update_rate: float) -> RunProfile:
    """A device that computes by itself, behind storage that bounds its steps, and two micro-batches a step."""
    return replace(
        found,
        device_is_host=False,
        forward_secs=0.01,
        backward_secs=1.0,
        update_rate=update_rate,
        storage=StorageRates(3e6, 3e6, 3e6, 0.0, 0.0),
        link_up=1e12,
        link_down=1e12,
        accumulation=2,
    )


@pytest.mark.parametrize("resume", ["off", "auto"])
def test_what_was_measured_moves_every_class_unless_a_run_may_be_gone_on_from(resume: str, tmp_path: Path) -> None:
    env = {**environment(0, 1, free_port()), "DS_FUYOU_PROFILES": str(tmp_path / "profiles")}
    process = start(SCRIPT, [str(tmp_path), resume], env, tmp_path / "log")
    finish([process])
    log = (tmp_path / "log").read_text(errors="replace")
    assert process.exitcode == 0, log[-5000:]
    (line,) = [line for line in log.splitlines() if line.startswith("RESULT ")]
    found = json.loads(line.removeprefix("RESULT "))
    before, after = found["planned"]
    if resume == "auto":  # what is in host memory would be lost with the run
        assert (before, found["moved"]) == (after, 0)
        return
    assert after + 0.3 < before < 1
    assert found["resident"] == pytest.approx(after, abs=0.1)
    assert found["moved"] > 0
    assert found["host_bytes"][1] < found["host_bytes"][0]
    assert log.count("P32 and moments move over the next steps") == 3, "once in one engine, twice in the other"
    assert len(set(found["losses"])) == 8
    roomy, *losses = found["roomy"]
    assert roomy == pytest.approx(after, abs=0.05), "the next run begins where this one moved to"
    assert losses == found["losses"][:3]
    every = found["all"]
    assert every["losses"][:8] == found["losses"]
    knows_nothing, read_often, *_, scarce = every["planned"]
    assert (knows_nothing[0], read_often[0]) == (0.0, 1.0), "P16 comes"
    assert read_often[1] < knows_nothing[1] - 0.15, "when states have left"
    assert read_often[2] == knows_nothing[2] > 0, "staging holds the sums of the rest of G16"
    assert scarce == [0.0, 0.0, 0.0], "all leave"
    for planned, resident in zip(every["planned"], every["resident"], strict=True):
        assert resident == pytest.approx(planned, abs=0.12)
    num_stored = [[12 - round(12 * share) for share in (params, grads)] for params, _, grads in every["resident"]]
    for regions, stored in zip(every["regions"], num_stored, strict=True):
        assert regions == pytest.approx(stored, abs=1), "what is in memory has no room on storage any more"
    first, often, slow, *_ = every["starts"]
    assert (first, often) == ([2, "speculate"], [1, "defer"]), "of P16 that is read often one version does"
    assert slow == [2, "speculate"], "updates that take as long as backward begin there again"
    assert every["watched"]
    assert every["slower"] == [], "of lanes that work beside something else now"
    assert log.count("P16 has moved in") == 3, "the second time it gets its other version"
    assert log.count("from now on updates wait") == log.count("from now on updates begin") == 1
    assert log.count("G16 moves with the next step") == 1, "when memory is scarce"
    assert log.count("host memory is scarce") == 3
    small, *losses = found["small"]
    assert small == pytest.approx(before), "two slots of that do not fit the budget: placed as if nothing were known"
    assert losses == found["losses"][:3]


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("often", [True, False])
def test_a_run_that_clips_otherwise_than_was_planned_with_is_placed_anew(
    often: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once enough steps say so: updates that backward begins in vain need no second version of P16."""
    monkeypatch.setattr(RunPlan, "_compare", lambda *_: False)  # no other reason to plan anew

    def trained(resume: str, directory: Path) -> list[float]:
        directory.mkdir()
        fuyou = {
            "nvme_path": str(directory),
            "dram_budget_bytes": 2_600_000,
            "plan": {"chunk_bytes": 65536, "staging_bytes": 1 << 20},
            "resume": resume,
        }
        config = ds_config(gradient_clipping=1e-3 if often else 0.0, fuyou=fuyou)
        for name in ("offload_optimizer", "offload_param"):  # they would say where classes are
            config["zero_optimization"].pop(name, None)
        torch.manual_seed(0)
        model = TinyGPT(**MODEL)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        plan, policy = engine.optimizer.run_plan, engine.optimizer.rank_state.core.policy
        losses = train(engine, MODEL, 0, 3)
        profile = slow_storage(plan.profile, 1e7 if often else 1e6)
        planned_with = replace(profile, redo_share=0.0 if often else 1.0)
        plan.profile, plan._measured_rates = planned_with, planned_with.storage
        plan.moves.move(planned_with)
        plan._moved()
        losses += train(engine, MODEL, 3, 7)
        before = policy.waits
        losses += train(engine, MODEL, 7, 26)
        if resume == "off":
            assert (before, policy.waits) == (not often, often)
            assert plan.profile.redo_share == float(often)
        else:
            assert before == policy.waits, "where a run may be gone on from nothing moves"
        engine.destroy()
        return losses

    assert trained("off", tmp_path / "moved") == trained("auto", tmp_path / "stayed")


@pytest.mark.usefixtures("only_rank")
def test_p16_that_takes_the_same_room_in_one_version_is_placed(tmp_path: Path) -> None:
    """Half of it twice becomes all of it once, updates wait from then on, and every bit is the same."""

    def trained(moves: bool, directory: Path) -> list[float]:
        directory.mkdir()
        fuyou = {"nvme_path": str(directory), "optimizer": {"tier": "nvme"}, "plan": {"chunk_bytes": 65536}}
        config = ds_config(gradient_clipping=0.0, fuyou=fuyou)
        for name in ("offload_optimizer", "offload_param"):  # they would say where P16 is
            config["zero_optimization"].pop(name, None)
        torch.manual_seed(0)
        model = TinyGPT(**MODEL)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        plan, core = engine.optimizer.run_plan, engine.optimizer.rank_state.core
        losses = train(engine, MODEL, 0, 3)
        if moves:
            core.wait_all()
            mover, now = plan.moves, plan.moves._as_it_is
            assert (now.params, now.num_versions, now.waits) == (1.0, 2, False)
            for target in (replace(now, params=0.5), replace(now, params=1.0, num_versions=1, waits=True)):
                mover._better = lambda profile, arena, target=target: target
                mover.move(plan.profile)
                assert mover._as_it_is.param_place == target.param_place
            assert all(core.place.residency.params)
        losses += train(engine, MODEL, 3, 6)
        engine.destroy()
        return losses

    assert trained(True, tmp_path / "moved") == trained(False, tmp_path / "stayed")
