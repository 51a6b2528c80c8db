# SPDX-License-Identifier: Apache-2.0
"""What users do between steps, other optimizers and other models: equal to stock, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.runner import differences, ds_config, run_case, with_fuyou
from tests.parity.cases import block

LION = {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}
ADAGRAD = {"type": "Adagrad", "params": {"lr": 1e-2}}
UNMANAGED = {"managed_gradient_accumulation": False, "gradient_clipping": 0.5}
CASES: dict[str, dict] = {
    "edited-parameters": {"edit_before": [2, 4], "look_at": [3]},
    "inference-mode": {"eval_before": [0, 2, 3], "inference_mode": True, "model": {"frozen": ["blocks.1"]}},
    "inference-mode-2ranks": {"eval_before": [0, 2, 3], "inference_mode": True, "world_size": 2},
    "states-set": {"set_states_before": [3], "look_at": [0, 3, 5]},
    "gradients-set": {"set_gradient_in": [1, 4], "look_at": [2]},
    "gradients-set-locally": {"set_gradient_in": [1, 4], "set_states_before": [3], "local": True, "look_at": [2]},
    "user-managed-accumulation": {"config": ds_config(**UNMANAGED), "micro_batches": 2},
    "tied": {"model": {"tied": True}},
    "frozen": {"model": {"frozen": ["tokens", "blocks.1"]}},
    "zero-init": {"zero_init": True},
    "lion": {"config": ds_config(optimizer=LION)},
    "adagrad": {"config": ds_config(optimizer=ADAGRAD)},
}


def case_of(name: str) -> dict:
    return {"steps": 6, "model": {}, "groups": "two", "config": ds_config(gradient_clipping=0.5), **CASES[name]}


@pytest.mark.parametrize(
    ("name", "tiers"),
    [
        ("edited-parameters", "states"),
        ("edited-parameters", "half"),
        ("inference-mode", "all"),
        ("inference-mode-2ranks", "states"),
        ("inference-mode-2ranks", "all"),
        ("states-set", "half"),
        ("states-set", "none"),
        ("gradients-set", "states"),
        ("gradients-set", "half"),
        ("gradients-set-locally", "all"),
        ("user-managed-accumulation", "states"),
        ("user-managed-accumulation", "all"),
        ("tied", "all"),
        ("frozen", "all"),
        ("zero-init", "all"),
        ("lion", "states"),
        ("adagrad", "all"),
    ],
)
def test_equals_stock(name: str, tiers: str, must_equal, tmp_path: Path) -> None:
    must_equal(case_of(name), block(str(tmp_path / "swap"), tiers, small_param_bytes=2048))


@pytest.mark.parametrize(
    ("name", "tiers"), [("gradients-set", "states"), ("gradients-set", "all"), ("edited-parameters", "params_only")]
)
def test_equals_stock_where_no_clipping_redoes_the_step(name: str, tiers: str, must_equal, tmp_path: Path) -> None:
    """What backward prepared would be published as it is: it must not hide a gradient the script replaced."""
    case = case_of(name)
    case["config"] = {**case["config"], "gradient_clipping": 0.0}
    must_equal(case, block(str(tmp_path / "swap"), tiers, "speculate"))


@pytest.mark.parametrize(
    ("overlap", "threshold", "more"),
    [
        ("backward", 1000, {}),
        ("none", 1000, {}),
        ("backward_and_forward", 100_000, {}),
        ("backward_and_forward", 1000, {"model": {"frozen": ["weight"]}}),
        ("backward_and_forward", 1000, {"model": {"frozen": ["weight"]}, "world_size": 2, "groups": "one"}),
    ],
)
def test_small_parameters_can_be_read_after_a_step_that_waits_for_updates(
    overlap: str, threshold: int, more: dict, must_equal, tmp_path: Path
) -> None:
    """Stock gathers persistent parameters in every step, so scripts read them without GatheredParameters.

    So do we where step() waits for all updates, or where all that is trained is persistent: small adapters are saved by
    programs that do not gather them, one rank alone.
    """
    config = ds_config(gradient_clipping=0.5, zero_optimization={"stage3_param_persistence_threshold": threshold})
    case = {**case_of("tied"), **more, "config": config, "read_ungathered_after": [1, 4]}
    _, ours = must_equal(case, block(str(tmp_path / "swap"), "all", overlap=overlap))
    assert len(ours[0]["seen"]) == 2
    assert all(len(seen) > 3 for seen in ours[0]["seen"])


def test_an_optimizer_object_equals_the_configured_one(must_equal, stock_run, tmp_path: Path) -> None:
    """torch.optim.AdamW given by the script is updated by the arithmetic that JSON "AdamW" selects."""
    config = ds_config(gradient_clipping=0.5)
    configured = {"steps": 6, "model": {}, "groups": "two", "config": config}
    given = {**configured, "client_optimizer": "AdamW", "config": ds_config(optimizer=None, gradient_clipping=0.5)}
    (tmp_path / "swap").mkdir()
    ours = run_case(with_fuyou(given, block(str(tmp_path / "swap"), "states")), tmp_path, "ours")
    assert ours[0]["optimizer_class"] == "FuyouStage3Optimizer"
    assert differences(stock_run(configured), ours) == []


def test_a_parameter_without_a_gradient_is_left_alone(tmp_path: Path) -> None:
    """As plain PyTorch: no decay, no moments, no step. Stock would use an old gradient."""
    (tmp_path / "swap").mkdir()
    fuyou = block(str(tmp_path / "swap"), "half")
    case = {"steps": 3, "model": {"skip": 1, "skip_at": [0, 1, 2]}, "config": ds_config()}
    trained = run_case(with_fuyou(case, fuyou), tmp_path, "trained")[0]
    start = run_case(with_fuyou({**case, "steps": 0}, fuyou), tmp_path, "start")[0]
    for key in ("p16", "p32", "exp_avg", "exp_avg_sq"):
        for name, values in trained[key].items():
            is_same = bool((values == start[key][name]).all())
            assert is_same == name.startswith("blocks.1."), (key, name)


@pytest.mark.parametrize("tiers", ["all", "none"])
def test_a_step_may_leave_out_what_an_evaluation_in_inference_mode_used(tiers: str, tmp_path: Path) -> None:
    """(Stock would use an old gradient, so it is not compared.)"""
    config = ds_config()
    config["zero_optimization"]["stage3_max_live_parameters"] = 1  # so they are freed inside, also in host memory
    case = {"steps": 4, "eval_before": [0, 2, 3], "model": {"skip": 1, "skip_at": [2, 3]}, "config": config}
    (tmp_path / "swap").mkdir()
    fuyou = block(str(tmp_path / "swap"), tiers)
    expected = run_case(with_fuyou(case, fuyou), tmp_path, "no_grad")
    found = run_case(with_fuyou({**case, "inference_mode": True}, fuyou), tmp_path, "inference")
    assert differences(expected, found) == []
