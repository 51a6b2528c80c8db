# SPDX-License-Identifier: Apache-2.0
"""Which outputs are kept, swapped or recomputed in mode "auto": the rule, and what a plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_fuyou.activations.auto import Choice, Counts, OutputCost, SwappedStep, choose, swap_allowance
from ds_fuyou.activations.blocks import find_blocks
from ds_fuyou.activations.calls import OperatorCall
from ds_fuyou.activations.named_outputs import by_planned_name, planned_choice, require_blocks
from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.errors import FuyouConfigError
from tests.activations.huggingface import TINY
from tests.activations.support import Plain, profile_blocks

DOWN, UP, GELU = (OperatorCall(f"aten.{name}.default", 0) for name in ("down", "up", "gelu"))
MEASURED = SwappedStep(
    num_blocks=12,
    block_bytes=100e6,
    input_bytes=10e6,
    outside_bytes=50e6,
    outputs=(
        OutputCost("up", UP, 40e9, 40e6),
        OutputCost("gelu", GELU, 0, 40e6),
        OutputCost("down", DOWN, 40e9, 10e6),
    ),
    swap_bytes=500e6,
    device_bytes=500e6,
)
KEPT, SWAPPED = BlockFate(Fate.KEEP), BlockFate(Fate.SWAP)


def chosen(**changes: object) -> Choice:
    return choose(replace(MEASURED, **changes))


def test_the_rule() -> None:
    """Room for five blocks less two to work on: three are kept. Of 500 MB, 140 go for what must be saved and 90 for
    "down", whose bytes save most; 270 are left for "up" in six of nine blocks.
    """
    found = chosen()
    assert found.inputs == Counts(9, 0, 3)
    assert list(found.outputs.items()) == [
        (("down", DOWN), Counts(9, 0, 3)),
        (("up", UP), Counts(6, 3, 3)),
        (("gelu", GELU), Counts(0, 9, 3)),
    ]
    fates = found.fates([str(index) for index in range(12)])
    assert fates["0"] == BlockFate(Fate.SWAP, {DOWN: Fate.SWAP, UP: Fate.SWAP})
    assert fates["8"] == BlockFate(Fate.SWAP, {DOWN: Fate.SWAP})
    assert fates["9"] == KEPT
    assert fates[""] == SWAPPED
    assert "up" in found.table()


def test_limits_of_the_rule() -> None:
    assert set(chosen(device_bytes=1250e6).fates(["0", "1"]).values()) == {KEPT}, "everything fits"
    everything = chosen(device_bytes=0, swap_bytes=1250e6).fates([str(index) for index in range(12)])
    assert set(everything.values()) == {SWAPPED}, "storage takes everything"
    unbounded = chosen(swap_bytes=None)
    assert (unbounded.inputs, unbounded.outputs) == (Counts(9, 0, 3), {})
    bound = chosen(swap_bytes=0)
    assert {counts.swapped for counts in bound.outputs.values()} == {0}, "storage is the bound already"
    spare = chosen(swap_bytes=0, device_bytes=575e6)
    assert spare.outputs["down", DOWN] == Counts(0, 2, 10), "75 MB less than a block keep the most worthy outputs"
    blind = chosen(outputs=())
    assert blind.inputs == Counts(4, 5, 3), "whole blocks where operators are not known"
    assert blind.fates(["0"] * 4 + ["4"])["4"] == BlockFate(Fate.SWAP, {})
    assert chosen(block_bytes=0.0, outside_bytes=0.0).inputs.kept == 12


def test_what_storage_can_take() -> None:
    assert swap_allowance(1.0, 2e9, 1e9, num_forwards=1) == 0.5e9
    assert swap_allowance(1.0, 2e9, 1e9, num_forwards=4) == 0.125e9
    assert swap_allowance(1.0, 2e9, 3e9, num_forwards=1) == 0


@pytest.mark.parametrize("device_bytes", [0, 3e8, 7e8, 2e9])
@pytest.mark.parametrize("swap_bytes", [None, 0, 2e8, 4e8])
def test_every_output_has_one_fate_in_every_block(device_bytes: float, swap_bytes: float | None) -> None:
    found = chosen(device_bytes=device_bytes, swap_bytes=swap_bytes)
    for counts in (found.inputs, *found.outputs.values()):
        assert counts.swapped + counts.recomputed + counts.kept == 12
        assert min(counts.swapped, counts.recomputed, counts.kept) >= 0
        assert [counts.fate(index) for index in range(12)].count(Fate.RECOMPUTE) == counts.recomputed


def outputs_of(name: str) -> list[OutputCost]:
    torch.manual_seed(0)
    if name == "plain":
        model, run = Plain(), torch.randint(300, (4, 33))
        profiles = profile_blocks(find_blocks(model), lambda: model(run))
    else:
        model, batch = TINY[name]()
        profiles = profile_blocks(find_blocks(model), lambda: model(**batch))
    return [
        OutputCost(output.name, output.call, output.flops, output.num_bytes)
        for output in profiles[0].outputs
        if output.call is not None and output.num_bytes and (output.flops or output.saved)
    ]


@pytest.mark.parametrize(
    ("name", "num_up", "num_qkv"), [("plain", 1, 1), ("llama", 2, 3), ("bert", 1, 3), ("vit", 1, 3)]
)
def test_the_planners_names_are_found_in_real_blocks(name: str, num_up: int, num_qkv: int) -> None:
    found = by_planned_name(outputs_of(name))
    assert found is not None
    assert (len(found["qkv"]), len(found["mlp_up"])) == (num_qkv, num_up)
    assert [len(found[single]) for single in ("attention_projection", "mlp_down")] == [1, 1]
    assert {"attention", "mlp_activation"} <= set(found)


def test_a_plan_decides() -> None:
    rows = {
        "block_input": {"keep": 1, "swap": 2, "recompute": 0},
        "mlp_up": {"keep": 1, "swap": 1, "recompute": 1},
        "mlp_activation": {"keep": 1, "swap": 0, "recompute": 2},
    }
    choice = planned_choice(rows, 3, outputs_of("plain"))
    assert choice is not None
    up = next(call for name, call in choice.outputs if name == "mlp_up (up/addmm)")
    fates = choice.fates(["a", "b", "c"])
    assert fates["a"] == BlockFate(Fate.SWAP, {up: Fate.SWAP})
    assert fates["b"] == BlockFate(Fate.SWAP, {})
    assert fates["c"] == KEPT
    with pytest.raises(FuyouConfigError, match=r"block_input is planned for 3 blocks, the model has 4"):
        require_blocks(rows, 4)
    assert planned_choice(rows, 3, ()) is None, "no block that the planner knows"
