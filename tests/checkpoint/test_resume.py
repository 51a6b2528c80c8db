# SPDX-License-Identifier: Apache-2.0
"""What is saved and loaded in a fresh process continues like the uninterrupted run, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.runner import differences, ds_config, run_case, with_fuyou
from tests.parity.cases import FP16, WARMUP, block

SAVED = 4
STEPS = 8
PER_STEP = ("losses", "norms", "applied", "scales", "rates")


def case_of(dtype: str, world_size: int, **more: object) -> dict:
    changes: dict = {"fp16": {"bf16": None, "fp16": {**FP16, "loss_scale_window": 2}}, "bf16": {}}[dtype]
    config = ds_config(gradient_clipping=0.8, gradient_accumulation_steps=2, scheduler=WARMUP, **changes)
    return {"steps": STEPS, "model": {}, "groups": "two_lrs", "config": config, "world_size": world_size, **more}


def ours_of(case: dict, directory: Path, tiers: str, **more: object) -> dict:
    (directory / "swap").mkdir(exist_ok=True)
    return with_fuyou({**case, **more}, block(str(directory / "swap"), tiers))


def tail(results: list[dict]) -> list[dict]:
    """What was recorded after the save."""
    return [{k: v[SAVED:] if k in PER_STEP else v for k, v in result.items()} for result in results]


@pytest.mark.parametrize(
    ("dtype", "saved_at", "loaded_at", "world_size"),
    [
        ("fp16", "half", ("all", "none"), 1),
        ("bf16", "params_only", ("quarter", "twice"), 1),
        ("bf16", "states", ("most",), 2),
        ("fp16", "all", ("all",), 2),
    ],
)
def test_a_fresh_process_continues_the_run(
    dtype: str, saved_at: str, loaded_at: tuple[str, ...], world_size: int, tmp_path: Path
) -> None:
    """Where a class lives, as a whole or in part, is no property of a checkpoint."""
    case = case_of(dtype, world_size)
    saved = str(tmp_path / "saved")
    whole = run_case(ours_of(case, tmp_path, saved_at, save_after=SAVED, save_to=saved), tmp_path, "whole")
    assert [p.name for p in Path(saved).iterdir() if p.name.startswith(".")] == []
    for tiers in loaded_at:
        resumed = run_case(ours_of(case, tmp_path, tiers, load=saved), tmp_path, f"resumed_{tiers}")
        assert differences(tail(whole), resumed) == [], tiers


def test_checkpoints_pass_between_stock_and_ours(tmp_path: Path) -> None:
    """Ours continues a stock run as if it had not been interrupted; stock continues ours as it does its own."""
    case = case_of("bf16", 1)
    by = {name: str(tmp_path / name) for name in ("stock", "ours")}
    stock = run_case({**case, "save_after": SAVED, "save_to": by["stock"]}, tmp_path, "a")
    ours = run_case(ours_of(case, tmp_path, "all", save_after=SAVED, save_to=by["ours"]), tmp_path, "b")
    assert differences(stock, ours) == []
    assert differences(tail(stock), run_case(ours_of(case, tmp_path, "states", load=by["stock"]), tmp_path, "c")) == []
    continued = [run_case({**case, "load": by[name]}, tmp_path, f"from_{name}") for name in by]
    assert differences(*continued) == []


def test_stock_continues_a_run_with_an_optimizer_of_torch(tmp_path: Path) -> None:
    """As Accelerate hands one over, which it makes stock's own of where the JSON offloads the optimizer."""
    configured, saved = (
        {"steps": STEPS, "model": {}, "config": ds_config(gradient_clipping=0.8)},
        str(tmp_path / "saved"),
    )
    given = {**configured, "client_optimizer": "AdamW", "config": ds_config(gradient_clipping=0.8, optimizer=None)}
    whole = run_case(ours_of(given, tmp_path, "states", save_after=SAVED, save_to=saved), tmp_path, "whole")
    continued = run_case({**configured, "load": saved}, tmp_path, "stock")
    ours = run_case(ours_of(configured, tmp_path, "all", load=saved), tmp_path, "ours")
    assert differences(tail(whole), ours) == []
    assert [result["losses"][0] for result in continued] == [result["losses"][0] for result in ours]
    assert len(continued[0]["losses"]) == STEPS - SAVED


def test_exports_of_two_ranks_hold_the_trained_values(run_python, tmp_path: Path) -> None:
    """zero_to_fp32, save_16bit_model, and the universal checkpoint loaded by one rank, frozen parameters included."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    model = {"frozen": ["blocks.0.down"]}
    case = {**case_of("bf16", 2), "steps": SAVED, "model": model, "groups": "one"}
    case["config"]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    saved, export = str(tmp_path / "saved"), str(tmp_path / "export")
    trained = run_case(ours_of(case, tmp_path, "all", save=saved, export=export, zero_init=True), tmp_path, "trained")[
        0
    ]
    fp32 = get_fp32_state_dict_from_zero_checkpoint(saved)
    for name, values in trained["p32"].items():
        assert torch.equal(fp32[name], values), name
    weights = torch.load(Path(export, "pytorch_model.bin"))
    for name, values in trained["p16"].items():
        assert torch.equal(weights[name], values), name
        assert torch.equal(fp32[name].to(torch.bfloat16), values), name

    folder = Path(saved, f"global_step{SAVED}")
    universal = Path(saved, f"global_step{SAVED}_universal")
    convert = ["-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(folder), "--no_strict"]
    convert += ["--output_folder", str(universal), "--num_extract_workers", "1", "--num_merge_workers", "1"]
    converted = run_python(convert)
    assert converted.returncode == 0, converted.stderr
    Path(saved, "latest_universal").write_text(universal.name)
    alone = {**case, "world_size": 1, "load": saved, "zero_init": True}
    alone["config"] = {**case["config"], "checkpoint": {"load_universal": True}}
    for tiers in ("all", "none"):
        loaded = run_case(ours_of(alone, tmp_path, tiers), tmp_path, tiers)[0]
        for key in ("p32", "exp_avg", "exp_avg_sq"):
            for name, values in trained[key].items():
                assert torch.equal(loaded[key][name], values), (tiers, key, name)
    stock = run_case({**alone, "steps": SAVED + 2}, tmp_path, "stock")
    ours = run_case(ours_of({**alone, "steps": SAVED + 2}, tmp_path, "all"), tmp_path, "ours")
    assert differences(stock, ours) == []
