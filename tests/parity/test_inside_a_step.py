# SPDX-License-Identifier: Apache-2.0
"""What scripts do between forward, backward and step. Equal to stock, bit by bit; where stock departs from PyTorch,
equal to PyTorch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.forked import accelerator
from tests.harness.runner import differences, differences_seen, ds_config, run_case, with_fuyou
from tests.parity.cases import block

# Every step something else, under clipping that comes and goes.
BUSY: dict = {
    "steps": 9,
    "model": {},
    "groups": "two",
    "config": ds_config(gradient_clipping=1.0, gradient_accumulation_steps=2),
    "loss_factors": [1.5, 0.05],
    "eval_within": [1, 6],
    "edit_within": [2, 5],
    "lr_changes_in": [3, 4],
    "zero_grad_in": [4, 7],
    "pairs_in": [5, 6],
    "raise_in": [3, 6],
    "look_at": [2, 5, 7],
}
# The same without clipping or accumulation: what backward prepared is published unless it was dropped.
PLAIN: dict = {**BUSY, "config": ds_config()}


@pytest.mark.parametrize(
    ("case", "tiers", "policy"),
    [
        (BUSY, "all", "speculate"),
        (BUSY, "none", "auto"),
        (PLAIN, "states", "speculate"),
        (PLAIN, "grads_cpu", "defer"),
    ],
)
def test_a_busy_script_equals_stock(case: dict, tiers: str, policy: str, must_equal, tmp_path: Path) -> None:
    stock, _ = must_equal(case, block(str(tmp_path / "swap"), tiers, policy))
    clip = case["config"]["gradient_clipping"]
    if clip:
        assert {norm > clip for norm in stock[0]["norms"]} == {True, False}


BOUNDARY = {"config": ds_config(gradient_accumulation_steps=3), "set_boundary": True}
BATCH = {"config": ds_config(gradient_clipping=0.5), "batch_size_at": {"2": 6, "4": 2}}
REDUCED_IN_FP32 = ds_config(communication_data_type="fp32")
CASES: dict[str, dict] = {
    "boundary-set-by-the-script": BOUNDARY,
    "coalesced-reduction": {"coalesce": True, "pairs_in": [0, 2, 3]},
    "loss.backward": {"torch_backward": True, "pairs_in": [2]},
    "train-batch-size-changes": BATCH,
    "experts-as-leaf-modules": {"model": {"experts": True}, "leaf": True},
    "weights-tied-across-blocks": {"model": {"tied_blocks": True}, "pairs_in": [2]},
    "gradients-of-a-skipped-step": {"loss_factors": [1.0, 1.0, 1e30], "look_at": [1, 2, 3]},
    "hooks-before-deepspeed's": {"hooks_of_gradients": "before"},
    "hooks-behind-deepspeed's": {"hooks_of_gradients": "behind"},
    "hooks-before-deepspeed's-on-two-ranks": {"hooks_of_gradients": "before", "world_size": 2},
    "hooks-behind-deepspeed's-reduced-in-fp32": {
        "hooks_of_gradients": "behind",
        "config": {**REDUCED_IN_FP32, "data_types": {"grad_accum_dtype": "fp32"}},
    },
    "hooks-behind-deepspeed's-reduced-in-fp32-on-two-ranks": {
        "hooks_of_gradients": "behind",
        "config": REDUCED_IN_FP32,
        "world_size": 2,
    },
}


def case_of(name: str) -> dict:
    return {"steps": 5, "model": {}, "groups": "two", "config": ds_config(), **CASES[name]}


@pytest.mark.parametrize(
    ("name", "tiers"),
    [
        ("boundary-set-by-the-script", "states"),
        ("coalesced-reduction", "all"),
        ("loss.backward", "states"),
        ("train-batch-size-changes", "all"),
        ("experts-as-leaf-modules", "all"),
        ("weights-tied-across-blocks", "states"),
        ("gradients-of-a-skipped-step", "all"),
        ("hooks-before-deepspeed's", "all"),
        ("hooks-behind-deepspeed's", "all"),
        ("hooks-before-deepspeed's-on-two-ranks", "states"),
        ("hooks-behind-deepspeed's-reduced-in-fp32", "states"),
        ("hooks-behind-deepspeed's-reduced-in-fp32-on-two-ranks", "all"),
    ],
)
def test_equals_stock(name: str, tiers: str, must_equal, tmp_path: Path) -> None:
    if "behind" in name and accelerator() != "cpu":
        pytest.skip("stock copies the gradient on another stream meanwhile, and waits for neither")
    must_equal(case_of(name), block(str(tmp_path / "swap"), tiers, "speculate"))


# Everything at once on two ranks: each step reads or replaces something that both ranks hold a part of.
SHARED: dict = {
    **BUSY,
    "world_size": 2,
    "zero_init": True,
    "model_parallel": 1,
    "no_sync_in": [0],
    "eval_before": [1],
    "edit_before": [3],
    "set_states_before": [4, 6],
    "set_gradient_in": [2, 8],
    "look_at": [2, 4, 5, 8],
    "batch_size_at": {"5": 4, "7": 8},
}
LEAVES: dict = {
    "steps": 4,
    "groups": "one",
    "config": ds_config(),
    "world_size": 2,
    "coalesce": True,
    "pairs_in": [0, 2],
    "model": {"experts": True},
    "leaf": True,
}


@pytest.mark.parametrize(
    ("case", "tiers"),
    [(SHARED, "all"), (SHARED, "none"), (LEAVES, "all")],
    ids=["everything", "everything-in-memory", "coalesced-leaf-modules"],
)
def test_equals_stock_on_two_ranks(case: dict, tiers: str, must_equal, tmp_path: Path) -> None:
    must_equal(case, block(str(tmp_path / "swap"), tiers, "speculate"))


@pytest.mark.parametrize(("world_size", "tiers"), [(1, "states"), (2, "all")])
def test_a_backward_that_raised_leaves_nothing(world_size: int, tiers: str, stock_run, tmp_path: Path) -> None:
    """The script catches it, calls zero_grad() and goes on, as if it had not tried. (Stock fails there, on the CPU.)"""
    case = {"steps": 5, "model": {}, "groups": "two", "config": ds_config(), "world_size": world_size}
    (tmp_path / "swap").mkdir()
    tried = with_fuyou({**case, "raise_in_backward": [1, 3]}, block(str(tmp_path / "swap"), tiers, "speculate"))
    ours = run_case(tried, tmp_path, "ours")
    assert differences(stock_run(case), ours) == []
    assert CUT_SHORT not in ours[0]["output"]


CUT_SHORT = "a backward of this step ended with an exception"


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_a_backward_left_are_told_of(world_size: int, tmp_path: Path) -> None:
    """engine.zero_grad() knows nothing of what ZeRO has taken; stock's next backward fails then. So does ours where
    gradients that it dropped would be missing in a message to other ranks.
    """
    (tmp_path / "swap").mkdir()
    case = {"steps": 3, "model": {}, "config": ds_config(), "world_size": world_size, "engine_zero_grad": True}
    tried = with_fuyou({**case, "raise_in_backward": [1]}, block(str(tmp_path / "swap"), "states"))
    if world_size == 1:
        assert run_case(tried, tmp_path, "ours")[0]["output"].count(CUT_SHORT) == 1
    else:
        with pytest.raises(AssertionError, match="a gradient that waits to be reduced with others was dropped"):
            run_case(tried, tmp_path, "ours")


def test_states_of_parameters_that_two_ranks_cannot_halve_are_set(tmp_path: Path) -> None:
    """Stock fails for them on the second rank: it takes its part without the padding."""
    (tmp_path / "swap").mkdir()
    case = {"steps": 3, "model": {}, "config": ds_config(), "world_size": 2, "odd": True}
    case |= {"set_states_before": [2], "set_gradient_in": [2], "look_at": [1, 2]}
    first, second = run_case(with_fuyou(case, block(str(tmp_path / "swap"), "all")), tmp_path, "ours")
    after_one, between_two = first["seen"][1], first["seen"][2]
    assert "blocks.1.up.bias" in after_one
    for name, values in after_one.items():
        if name.endswith("grad"):
            continue
        assert torch.equal(between_two[name], values * (0.5 if "exp_avg" in name else 0.75)), name
    assert differences_seen(first["seen"], second["seen"]) == []


def test_ranks_that_share_a_model_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    case = {"steps": 1, "model": {}, "config": ds_config(), "world_size": 2, "model_parallel": 2}
    with pytest.raises(AssertionError, match=r"cannot be combined with: mpu \(model parallelism over 2 ranks\)"):
        run_case(with_fuyou(case, block(str(tmp_path / "swap"), "states")), tmp_path, "ours")
    assert not [path for path in (tmp_path / "swap").glob("**/*") if path.is_file()]


def test_ranks_that_share_nothing_do_not_go_on_together(tmp_path: Path) -> None:
    """Each may be killed at another step."""
    (tmp_path / "swap").mkdir()
    case = {"steps": 1, "model": {}, "config": ds_config(), "world_size": 2, "model_parallel": 0}
    with pytest.raises(AssertionError, match=r"mpu \(a model for every 1 ranks\) with"):
        run_case(with_fuyou(case, {**block(str(tmp_path / "swap"), "states"), "resume": "auto"}), tmp_path, "ours")
    run_case(with_fuyou(case, block(str(tmp_path / "swap"), "states")), tmp_path, "alone")


def test_two_backwards_on_one_forward_equal_two_pairs(stock_run, tmp_path: Path) -> None:
    """PyTorch sums the two gradients. Stock keeps the last one only: the pairs are its way to the sum.

    (Stock's hooks free parameters that are not persistent too early for it when the order of modules changed before; so
    do they here.)
    """
    config = ds_config(zero_optimization={"stage3_param_persistence_threshold": 100_000})
    case = {"steps": 4, "model": {}, "groups": "two", "config": config}
    (tmp_path / "swap").mkdir()
    twice = with_fuyou({**case, "twice_in": [1, 2]}, block(str(tmp_path / "swap"), "all", "speculate"))
    assert differences(stock_run({**case, "pairs_in": [1, 2]}), run_case(twice, tmp_path, "ours")) == []


IN_STEPS = {
    "model": {"skip": 1, "skip_at": [1, 2, 5]},
    "config": ds_config(bf16=None, gradient_clipping=1.0),
    "forget_in": [3],
    "pairs_in": [4],
}
IN_MICRO_BATCHES = {
    "model": {"skip": 1, "skip_at": [3, 8, 9, 10]},  # the first of a step, the last of one, two of three
    "config": ds_config(bf16=None, gradient_clipping=1.0, gradient_accumulation_steps=3),
    "ahead_in": [4, 6],
    "grad_of_inputs_in": [5, 7],
}


@pytest.mark.parametrize(
    ("missing", "tiers"),
    [(IN_STEPS, "states"), (IN_STEPS, "all"), (IN_MICRO_BATCHES, "states"), (IN_MICRO_BATCHES, "all")],
    ids=["steps-states", "steps-all", "micro-batches-states", "micro-batches-all"],
)
def test_missing_gradients_equal_pytorch(missing: dict, tiers: str, tmp_path: Path) -> None:
    """Parameters unused in some steps or micro-batches, a step whose gradients the script threw away, forwards and
    backwards that stock counts otherwise: as plain PyTorch.

    PyTorch's AdamW rounds otherwise than DeepSpeed's: equal to a few units in the last place, far from a lost update.
    """
    case = {"steps": 8, "groups": "two", **missing}
    (tmp_path / "swap").mkdir()
    plain = run_case({**case, "plain": True}, tmp_path, "plain")[0]
    ours = run_case(with_fuyou(case, block(str(tmp_path / "swap"), tiers)), tmp_path, "ours")[0]
    torch.testing.assert_close(ours["losses"], plain["losses"], rtol=1e-5, atol=0)
    torch.testing.assert_close(ours["norms"], plain["norms"], rtol=1e-4, atol=0)
    for name, values in plain["p32"].items():
        torch.testing.assert_close(ours["p32"][name], values, rtol=1e-4, atol=2e-6)


def test_an_edit_of_an_unused_parameter_stays(tmp_path: Path) -> None:
    """Its chunk is written for the sake of the parameters beside it, its own 16-bit values are the script's."""
    case = {
        "steps": 3,
        "model": {"skip": 1, "skip_at": [1, 2]},
        "config": ds_config(),
        "edit_within": [1],
    }
    for tiers in ("states", "all"):
        swap = tmp_path / tiers
        swap.mkdir()
        # Chunks that hold several blocks: the unused one shares its chunk.
        ours = run_case(with_fuyou(case, block(str(swap), tiers, chunk_bytes=1 << 20)), tmp_path, tiers)[0]
        bias = "blocks.1.up.bias"
        assert torch.equal(ours["p16"][bias], (ours["p32"][bias].bfloat16() * 0.5)), tiers
        assert not torch.equal(ours["p16"][bias], ours["p32"][bias].bfloat16())
        used = "blocks.0.down.weight"
        assert torch.equal(ours["p16"][used], ours["p32"][used].bfloat16()), "an update overwrites an edit, as in stock"
