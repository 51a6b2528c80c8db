# SPDX-License-Identifier: Apache-2.0
"""Masters, gradients and moments in bfloat16, as DeepSpeed's own keys have them: every bit is that of stock's CPU tier,
and checkpoints go both ways.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.runner import differences, run_case, with_fuyou
from tests.parity.cases import STOCK, block

MASTERS = {"bf16_master_weights_and_grads": True}
BOTH = {**MASTERS, "bf16_optimizer_states": True}
KEYS = {"masters": MASTERS, "both": BOTH}


def narrow(name: str, keys: str, **more: Any) -> dict:
    """A stock case with these keys."""
    case: dict = {**copy.deepcopy(STOCK[name]), **more}
    case["config"]["bf16"].update(KEYS[keys])
    return case


# (stock case, keys, tiers, clip_policy, overlap, slots)
ROWS = [
    ("bf16-off-1-one", "both", "states", "speculate", "backward_and_forward", 2),
    ("bf16-off-1-one", "masters", "none", "auto", "backward_and_forward", 2),
    ("bf16-always-1-two", "both", "all", "speculate", "none", 2),
    ("bf16-always-1-two", "masters", "params_only", "auto", "backward_and_forward", 2),
    ("bf16-rarely-3-two_lrs", "both", "half", "speculate", "backward_and_forward", 2),
    ("bf16-rarely-3-two_lrs", "masters", "all", "auto", "backward_and_forward", 2),
    ("bf16-rarely-3-two_lrs", "both", "params_only", "defer", "backward", 1),
    ("bf16-rarely-3-two_lrs", "masters", "most", "defer", "none", 1),
    ("bf16-rarely-1-two-2ranks", "both", "quarter", "speculate", "backward_and_forward", 2),
    ("bf16-rarely-1-two-2ranks", "masters", "states", "defer", "backward_and_forward", 1),
]


@pytest.mark.parametrize(("name", "keys", "tiers", "policy", "overlap", "slots"), ROWS)
def test_equals_stock(
    name: str, keys: str, tiers: str, policy: str, overlap: str, slots: int, must_equal: Any, tmp_path: Path
) -> None:
    stock, _ = must_equal(narrow(name, keys), block(str(tmp_path / "swap"), tiers, policy, overlap, slots))
    assert {tensor.dtype for tensor in stock[0]["p32"].values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("keys", "tiers"), [("both", "all"), ("masters", "states"), ("both", "params_only"), ("masters", "half")]
)
def test_edits_equal_stock(keys: str, tiers: str, must_equal: Any, tmp_path: Path) -> None:
    """Of P16, states and gradients, which are rounded to what is kept; ``zero.Init`` besides."""
    case = narrow(
        "bf16-rarely-3-two_lrs",
        keys,
        steps=7,
        edit_before=[2, 5],
        set_states_before=[3],
        set_gradient_in=[1, 4],
        look_at=[0, 2, 3, 4, 6],
        zero_init=True,
    )
    must_equal(case, block(str(tmp_path / "swap"), tiers))


def test_gradients_that_are_summed_in_fp32_are_rounded_once_before_they_are_scaled(
    must_equal: Any, tmp_path: Path
) -> None:
    case = narrow("bf16-rarely-3-two_lrs", "both", set_gradient_in=[1], look_at=[1, 3])
    case["config"]["data_types"] = {"grad_accum_dtype": "fp32"}
    must_equal(case, block(str(tmp_path / "swap"), "states"))


def test_moments_follow_the_optimizer_as_in_stock(must_equal: Any, tmp_path: Path) -> None:
    """Without checksums, too."""
    case = narrow("bf16-off-1-one", "masters", steps=5, edit_before=[3])
    case["config"]["optimizer"]["params"]["fp32_optimizer_states"] = False
    must_equal(case, {**block(str(tmp_path / "swap"), "states"), "checksum": False})


def test_fp32_masters_keep_fp32_moments_whatever_the_optimizer_is_told(must_equal: Any, tmp_path: Path) -> None:
    case = {**copy.deepcopy(STOCK["bf16-off-1-one"]), "steps": 4}
    case["config"]["optimizer"]["params"]["fp32_optimizer_states"] = False
    must_equal(case, block(str(tmp_path / "swap"), "states"))


SAVED = 4
PER_STEP = ("losses", "norms", "applied", "scales", "rates")


def tail(results: list[dict]) -> list[dict]:
    """What was recorded after the save."""
    return [{k: v[SAVED:] if k in PER_STEP else v for k, v in result.items()} for result in results]


def types_in(folder: Path) -> set[tuple[torch.dtype, ...]]:
    """Of masters and moments, by rank and sub-group."""
    found = set()
    for file in folder.glob("**/*_optim_states.pt"):
        state = torch.load(file, weights_only=False)["optimizer_state_dict"]
        for flat, of in zip(state["fp32_flat_groups"], state["optimizer_state_dict"]["state"].values(), strict=True):
            found.add((flat.dtype, of["exp_avg"].dtype, of["exp_avg_sq"].dtype))
    return found


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bf16-rarely-3-two_lrs", "both"),
        ("bf16-rarely-3-two_lrs", "masters"),
        ("bf16-rarely-1-two-2ranks", "both"),
    ],
)
def test_checkpoints_go_both_ways(name: str, keys: str, tmp_path: Path) -> None:
    """What stock loads is the same whoever saved it. Here a run goes on as though nothing had happened, from either;
    stock's optimizer rounds fp32 moments to the type of their masters when it loads them, so stock's does not.
    """
    case, swap = narrow(name, keys, steps=8), tmp_path / "swap"
    swap.mkdir()
    by = {who: tmp_path / who for who in ("stock", "ours")}
    stock = run_case({**case, "save_after": SAVED, "save_to": str(by["stock"])}, tmp_path, "a")
    saving = {**case, "save_after": SAVED, "save_to": str(by["ours"])}
    ours = run_case(with_fuyou(saving, block(str(swap), "half")), tmp_path, "b")
    assert differences(stock, ours) == []
    moments = torch.bfloat16 if keys == "both" else torch.float32
    assert types_in(by["stock"]) == types_in(by["ours"]) == {(torch.bfloat16, moments, moments)}
    for who, tiers in (("stock", "states"), ("ours", "none")):
        loading = with_fuyou({**case, "load": str(by[who])}, block(str(swap), tiers))
        assert differences(tail(stock), run_case(loading, tmp_path, f"c_{who}")) == [], who
    again = tmp_path / "again"
    continued = [run_case({**case, "load": str(by[who]), "save": str(again)}, tmp_path, f"d_{who}") for who in by]
    assert differences(*continued) == []
    assert types_in(again) == {(torch.bfloat16,) * 3}


@pytest.mark.parametrize("tiers", ["states", "none"])
@pytest.mark.parametrize("is_narrowed", [True, False])
def test_checkpoints_of_the_other_layout_are_loaded_as_stock_loads_them(
    tiers: str, is_narrowed: bool, tmp_path: Path
) -> None:
    plain = copy.deepcopy(STOCK["bf16-rarely-3-two_lrs"])
    both = narrow("bf16-rarely-3-two_lrs", "both")
    saving, loading = (plain, both) if is_narrowed else (both, plain)
    run_case({**saving, "steps": SAVED, "save": str(tmp_path / "saved")}, tmp_path, "saved_by")
    loading = {**loading, "steps": SAVED + 3, "load": str(tmp_path / "saved")}
    (tmp_path / "swap").mkdir()
    stock = run_case(loading, tmp_path, "stock")
    ours = run_case(with_fuyou(loading, block(str(tmp_path / "swap"), tiers)), tmp_path, "ours")
    assert differences(stock, ours) == []


def test_deepspeeds_tools_take_what_was_saved(run_python: Any, tmp_path: Path) -> None:
    """Of two ranks: fp32 weights, and a universal checkpoint, loaded on one rank by stock and here."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    case, swap = narrow("bf16-rarely-1-two-2ranks", "both", steps=SAVED, groups="one"), tmp_path / "swap"
    swap.mkdir()
    run_case({**case, "save": str(tmp_path / "stock")}, tmp_path, "saved_by_stock")
    run_case(with_fuyou({**case, "save": str(tmp_path / "ours")}, block(str(swap), "all")), tmp_path, "saved_by_us")
    weights = [get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / who)) for who in ("stock", "ours")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(values, weights[1][name]) for name, values in weights[0].items())

    folder = tmp_path / "ours" / f"global_step{SAVED}"
    convert = ["-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(folder), "--no_strict"]
    convert += ["--output_folder", f"{folder}_universal", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = run_python(convert)
    assert done.returncode == 0, done.stderr
    (tmp_path / "ours" / "latest_universal").write_text(f"{folder.name}_universal")
    alone = {**case, "world_size": 1, "steps": SAVED + 3, "load": str(tmp_path / "ours")}
    alone["config"] = {**case["config"], "checkpoint": {"load_universal": True}}
    stock = run_case(alone, tmp_path, "stock_alone")
    assert differences(stock, run_case(with_fuyou(alone, block(str(swap), "states")), tmp_path, "alone")) == []


def test_8_bit_moments_beside_bfloat16_masters_are_the_same_everywhere(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    found = []
    for tiers in ("none", "all"):
        fuyou = block(str(tmp_path / "swap"), tiers)
        fuyou["optimizer"]["moments"] = "int8"
        case = narrow("bf16-always-1-two", "masters", steps=5, eval_before=[])
        found.append(run_case(with_fuyou(case, fuyou), tmp_path, tiers))
    assert differences(*found) == []
