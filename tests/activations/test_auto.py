# SPDX-License-Identifier: Apache-2.0
"""Which outputs are kept, swapped or recomputed in mode "auto": the rule, and what a plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_fuyou.activations.auto import Choice, Counts, OutputCost, SavedStep
from ds_fuyou.activations.blocks import find_blocks
from ds_fuyou.activations.calls import OperatorCall
from ds_fuyou.activations.named_outputs import by_planned_name, planned_choice, require_blocks
from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.cost import Placement
from tests.activations.huggingface import TINY
from tests.activations.support import Plain, profile_blocks

DOWN, UP, GELU = (OperatorCall(f"aten.{name}.default", 0) for name in ("down", "up", "gelu"))
MEASURED = SavedStep(
    num_blocks=12,
    block_bytes=100e6,
    block_flops=80e9,
    input_bytes=10e6,
    outside_bytes=50e6,
    outputs=(
        OutputCost("up", UP, 40e9, 40e6),
        OutputCost("gelu", GELU, 0, 40e6),
        OutputCost("down", DOWN, 40e9, 10e6),
    ),
    device_bytes=500e6,
    host_bytes=0.0,
    stored_bytes=1e12,
)
KEPT, SWAPPED = BlockFate(Fate.KEEP), BlockFate(Fate.SWAP)


def chosen(lane: float = float("inf"), **changes: object) -> Choice:
    """Where what is swapped moves at ``lane`` bytes a second beside 1 s of computing, and 1e12 FLOP are a second."""
    secs = lambda place: max(1.0, place.swapped_bytes / lane) + place.recompute_flops / 1e12  # noqa: E731
    return replace(MEASURED, **changes).planned(Placement(), secs)


def swapped_bytes(found: Choice) -> float:
    """Of one forward, where some of every block is computed again."""
    sizes = [output.num_bytes for output in MEASURED.outputs]
    outputs = sum(counts.swapped * size for counts, size in zip(found.outputs.values(), sizes, strict=True))
    return found.inputs.swapped * MEASURED.input_bytes + outputs + MEASURED.outside_bytes


def test_what_crosses_the_lane_beside_computing_is_swapped_and_the_rest_is_computed_again() -> None:
    """Of 500 MB, 170 go for what must be saved and 120 for "down", whose bytes save most; what the device has
    room for beside the two blocks to work on, 300 MB, stays there. What takes no work is computed again.
    """
    found = chosen(lane=500e6)
    assert found.inputs == Counts(12, 0, 0)
    assert dict(found.outputs) == {
        ("up", UP): Counts(5, 0, 7),
        ("gelu", GELU): Counts(0, 12, 0),
        ("down", DOWN): Counts(10, 0, 2),
    }
    assert swapped_bytes(found) <= 500e6
    fates = found.fates([str(index) for index in range(12)])
    assert fates["0"] == BlockFate(Fate.SWAP, {DOWN: Fate.SWAP, UP: Fate.SWAP})
    assert fates["5"] == BlockFate(Fate.SWAP, {DOWN: Fate.SWAP, UP: Fate.KEEP})
    assert fates[""] == SWAPPED
    assert "up" in found.table()


def test_limits_of_the_choice() -> None:
    assert set(map(repr, chosen(device_bytes=1250e6).fates(["0", "1"]).values())) == {repr(KEPT)}, "everything fits"
    dear = tuple(replace(output, flops=1e12) for output in MEASURED.outputs)
    fates = chosen(lane=1250e6, device_bytes=0.0, outputs=dear, block_flops=3e12).fates([str(n) for n in range(12)])
    assert set(map(repr, fates.values())) == {repr(SWAPPED)}, "nothing is computed again that crosses in time"
    bound = chosen(lane=1.0)
    assert {counts.swapped for counts in bound.outputs.values()} == {0}, "the lane is the bound already"
    assert bound.inputs.kept == 3, "whole blocks are kept: they spare the lane their inputs"
    spare = chosen(lane=1.0, device_bytes=575e6)
    assert spare.outputs["down", DOWN].kept == 10, "75 MB less than a block keep the most worthy outputs"
    blind = chosen(lane=500e6, block_flops=0.0)
    assert blind.inputs.kept == 3
    assert blind.inputs.swapped > 0
    assert not blind.outputs, "whole blocks where operators are not known"
    assert chosen(block_bytes=0.0, outside_bytes=0.0, input_bytes=0.0).inputs.kept == 12
    logits = chosen(device_bytes=1500e6, outside_bytes=500e6)  # all blocks fit beside two more, what is around does not
    assert (logits.inputs, logits.swaps_outside) == (Counts(0, 0, 12), True)
    assert chosen(block_bytes=0.0, outside_bytes=1e6, input_bytes=0.0, device_bytes=0.0).inputs.kept == 12


def test_a_cheap_lane_is_bounded_by_the_disk_and_by_host_memory() -> None:
    disk = chosen(stored_bytes=400e6, device_bytes=0.0)
    memory = chosen(stored_bytes=0.0, host_bytes=400e6, device_bytes=0.0)
    assert disk == memory
    assert disk.outputs["down", DOWN] == Counts(12, 0, 0)
    assert disk.outputs["up", UP] == Counts(2, 10, 0)
    assert swapped_bytes(disk) == 170e6 + 120e6 + 2 * 40e6


@pytest.mark.parametrize("device_bytes", [0, 3e8, 7e8, 2e9])
@pytest.mark.parametrize("lane", [1e12, 1.0, 2e8, 4e8])
def test_every_output_has_one_fate_in_every_block(device_bytes: float, lane: float) -> None:
    found = chosen(lane=lane, device_bytes=device_bytes)
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
