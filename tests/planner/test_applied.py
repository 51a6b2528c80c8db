# SPDX-License-Identifier: Apache-2.0
"""A saved plan given back in the block: its placement is used where the block says "auto", and it must fit the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.config import FuyouConfig, load_block
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.applied import require_params
from ds_fuyou.planner.document import PlanDocument, Residency, Subject, save
from ds_fuyou.planner.plan import PlanInput, handles_activations, under_block
from ds_fuyou.planner.profiled import placed_under
from ds_fuyou.state_layout import WHOLE, layout_of
from tests.harness.runner import ds_config, run_case, with_fuyou

OPERATORS = ("block_input", "qkv", "mlp_up")


def _plan(num_params: int = 1000, world_size: int = 1, swap: int = 0, recompute: int = 0) -> PlanDocument:
    counts = {"keep": 3 - swap - recompute, "swap": swap, "recompute": recompute}
    return PlanDocument(
        model=Subject("tiny", num_params, 3, "0" * 16),
        world_size=world_size,
        residency=Residency(parameters=1.0, optimizer=0.5, gradients=0.0),
        activations=dict.fromkeys(OPERATORS, counts),
        settings={"chunk_bytes": 1 << 20},
    )


def _loaded(plan: PlanDocument, tmp_path: Path, **block: Any) -> FuyouConfig:
    path = tmp_path / "plan.json"
    save(plan, path)
    found = load_block({"fuyou": {"nvme_path": "/nvme", "plan": str(path), **block}})
    assert found is not None
    return found


def test_classes_go_where_the_plan_says_as_a_whole_or_in_part(tmp_path: Path) -> None:
    found = _loaded(_plan(), tmp_path)
    assert (found.parameters.tier, found.optimizer.tier, found.gradients.tier) == ("cpu", "auto", "nvme")
    assert found.plan is not None
    assert found.plan.resident_shares() == {"optimizer": 0.5}
    assert found.plan.chunk_bytes == 1 << 20
    assert found.plan.document == _plan()


def test_the_block_has_the_last_word(tmp_path: Path) -> None:
    found = _loaded(
        _plan(), tmp_path, optimizer={"tier": "cpu", "overlap": "none"}, gradients={"tier": "auto"}, parameters={}
    )
    assert (found.optimizer.tier, found.optimizer.overlap) == ("cpu", "none")
    assert found.plan is not None
    assert found.plan.resident_shares() == {}
    assert (found.gradients.tier, found.parameters.tier) == ("nvme", "cpu")


@pytest.mark.parametrize(
    ("swap", "recompute", "mode"), [(0, 0, "auto"), (3, 0, "swap"), (0, 3, "recompute"), (1, 1, "auto")]
)
def test_a_fate_planned_for_all_activations_is_the_mode(swap: int, recompute: int, mode: str, tmp_path: Path) -> None:
    assert _loaded(_plan(swap=swap, recompute=recompute), tmp_path).activations.mode == mode


@pytest.mark.parametrize("swap", [0, 1])
def test_whether_all_activations_fit_the_device_a_run_sees_for_itself(swap: int, tmp_path: Path) -> None:
    """A plan that keeps all is none of activations: mode "auto" does what it does without one."""
    found = _loaded(_plan(swap=swap), tmp_path)
    assert handles_activations(found, device_is_host=True) == bool(swap)
    assert handles_activations(found, device_is_host=False)
    assert found.plan is not None
    assert found.plan.document is not None
    assert bool(found.plan.document.fates) == bool(swap)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "ds_fuyou.plan/0"}, "schema must be"),
        ({"settings": {"chunk_byts": 1}}, 'did you mean "fuyou.plan'),
        ({"settings": {"slots": 4}}, "slots"),
        ({"world_size": "1"}, "world_size must be a whole number"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_it(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**_plan().to_json(), **change}), encoding="utf-8")
    with pytest.raises(FuyouConfigError) as raised:
        load_block({"fuyou": {"nvme_path": "/nvme", "plan": str(path)}})
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


def test_another_world_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _loaded(_plan(world_size=2), tmp_path).plan is not None
    with pytest.raises(FuyouConfigError, match=r"is for 1 ranks, 2 run.*--num-gpus 2"):
        _loaded(_plan(), tmp_path)


def test_another_model_is_refused_but_small_differences_are_not() -> None:
    require_params(_plan(1000), 1040)
    for found in (900, 1100):
        with pytest.raises(FuyouConfigError, match=f"1000 parameters, this model has {found}"):
            require_params(_plan(1000), found)


def test_a_plan_that_needs_more_memory_than_a_run_has_is_named(tmp_path: Path) -> None:
    given = PlanInput(10**9, 2, 2, layout_of(WHOLE, 2), 10**8, 4 << 30)
    config = _loaded(_plan(10**9), tmp_path)
    with pytest.raises(FuyouConfigError, match=r"fuyou\.plan places more in .*4096 MiB.*fuyou plan --pinned-gb 4, or"):
        placed_under(config, under_block(given, config, True), None)
    with pytest.raises(FuyouConfigError, match=r"^the smallest placement"):
        placed_under(config.model_copy(update={"plan": None}), replace(given, optimizer_tier="cpu"), None)


def test_a_run_takes_its_placement_from_the_plan(tmp_path: Path) -> None:
    """In part as in whole, with weights of the paths; and refuses one that was made for another model."""
    case = {"steps": 3, "model": {}, "groups": "one"}
    plan = tmp_path / "plan.json"
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        path.mkdir()
    settings = {"chunk_bytes": 65536, "shares": [3, 1], "small_param_bytes": "1MB"}
    residency = Residency(parameters=0.25, optimizer=0.5, gradients=1.0)
    save(replace(_plan(300_000), residency=residency, settings=settings), plan)
    wanted = with_fuyou({**case, "config": ds_config()}, {"nvme_path": [str(p) for p in paths], "plan": str(plan)})
    with pytest.raises(AssertionError, match=r"300000 parameters, this model has (\d+)") as raised:
        run_case(wanted, tmp_path, "other")
    assert "make a plan for it with fuyou plan" in str(raised.value)
    real = int(str(raised.value).split("this model has ")[1].split(";")[0])
    save(replace(_plan(real), residency=residency, settings=settings), plan)
    (result,) = run_case(wanted, tmp_path, "same")
    output = result["output"]
    assert "parameters 25% in host memory, optimizer 50% in host memory, gradients cpu" in output
    assert "zero_optimization.offload_param.device (fuyou.plan decides" in output
    lines = [
        next(line for line in output.splitlines() if line.startswith(f"  {t} ")) for t in ("host memory", "storage")
    ]
    names = ("P16 (", "G16 (", "P32 (", "exp_avg ")
    in_memory, on_storage = ([name for name in names if name in line] for line in lines)
    assert sorted(in_memory) == sorted(names)
    assert sorted(on_storage) == sorted({*names} - {"G16 ("})
    assert result["shares"] == {
        "parameters": pytest.approx(0.25, abs=0.12),
        "optimizer": pytest.approx(0.5, abs=0.12),
        "gradients": 1.0,
    }
    first, second = result["file_bytes"]
    assert second == pytest.approx((first + second) / 4, abs=2 * 65536), "units of 64 KiB"
    (first_reads, num_stored), (reads, _) = result["param_reads"][0], result["param_reads"][-1]
    assert num_stored
    # In the first step also what the script had gathered before: it might have written to that memory.
    assert reads - first_reads == (case["steps"] - 1) * num_stored, "small parameters are read once a step, not a pass"
    assert num_stored <= first_reads < 2 * num_stored
