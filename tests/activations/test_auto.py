# SPDX-License-Identifier: Apache-2.0
"""Which outputs are kept, swapped or recomputed in mode "auto": the rule, and what a plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_fuyou.activations.auto import Choice, Counts, SavedStep
from ds_fuyou.activations.blocks import find_blocks
from ds_fuyou.activations.calls import OperatorCall
from ds_fuyou.activations.named_outputs import by_planned_name, planned_choice, require_blocks
from ds_fuyou.activations.policy import BlockFate, Fate
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.cost import Placement
from ds_fuyou.planner.profile import OperatorCost
from tests.activations.huggingface import TINY
from tests.activations.support import Plain, profile_blocks

DOWN, UP, GELU = (OperatorCall(f"aten.{name}.default", 0) for name in ("down", "up", "gelu"))
MEASURED = SavedStep(
    num_blocks=12,
    block_bytes=100e6,
    block_flops=80e9,
    input_bytes=10e6,
    outside_bytes=50e6,
    outputs={
        UP: OperatorCost("up", 40e9, 40e6, True, UP),
        GELU: OperatorCost("gelu", 0, 40e6, True, GELU),
        DOWN: OperatorCost("down", 40e9, 10e6, True, DOWN),
    },
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
    sizes = [output.num_bytes for output in MEASURED.outputs.values()]
    outputs = sum(counts.swapped * size for counts, size in zip(found.outputs.values(), sizes, strict=True))
    return found.inputs.swapped * MEASURED.input_bytes + outputs + MEASURED.outside_bytes


def test_what_crosses_the_lane_beside_computing_is_swapped_and_the_rest_is_computed_again() -> None:
    """The two blocks that backward begins with stay where it works. Of 330 MB, 150 go for what must be saved of the
    others and 100 for "down", whose bytes save most; what the device has room for beside two blocks, 300 MB, stays
    there. What takes no work is computed again.
    """
    found = chosen(lane=330e6)
    assert found.inputs == Counts(10, 0, 2)
    assert dict(found.outputs) == {
        ("up", UP): Counts(2, 1, 9),
        ("gelu", GELU): Counts(0, 10, 2),
        ("down", DOWN): Counts(8, 0, 4),
    }
    assert swapped_bytes(found) <= 330e6
    assert found.device_bytes == found.kept_bytes == 2 * 100e6 + 7 * 40e6 + 2 * 10e6
    fates = found.fates([str(index) for index in range(12)])
    assert fates["0"] == BlockFate(Fate.SWAP, {DOWN: Fate.SWAP, UP: Fate.SWAP})
    assert fates["2"] == BlockFate(Fate.SWAP, {DOWN: Fate.SWAP})
    assert fates["5"] == BlockFate(Fate.SWAP, {DOWN: Fate.SWAP, UP: Fate.KEEP})
    assert fates["10"] == fates["11"] == KEPT
    assert fates[""] == SWAPPED
    assert "up" in found.table()


def test_limits_of_the_choice() -> None:
    assert set(map(repr, chosen(device_bytes=1250e6).fates(["0", "1"]).values())) == {repr(KEPT)}, "everything fits"
    dear = {call: replace(output, flops=1e12) for call, output in MEASURED.outputs.items()}
    fates = chosen(lane=1250e6, device_bytes=0.0, outputs=dear, block_flops=3e12).fates([str(n) for n in range(12)])
    assert set(map(repr, fates.values())) == {repr(SWAPPED)}, "nothing is computed again that crosses in time"
    bound = chosen(lane=1.0)
    assert {counts.swapped for counts in bound.outputs.values()} == {0}, "the lane is the bound already"
    assert bound.inputs.kept == 5, "whole blocks are kept: they spare the lane their inputs"
    spare = chosen(lane=1.0, device_bytes=575e6)
    assert spare.outputs["down", DOWN].kept == 12, "75 MB less than a block keep the most worthy outputs"
    blind = chosen(lane=500e6, block_flops=0.0)
    assert blind.inputs.kept == 5
    assert blind.inputs.swapped > 0
    assert not blind.outputs, "whole blocks where operators are not known"
    assert chosen(block_bytes=0.0, outside_bytes=0.0, input_bytes=0.0).inputs.kept == 12
    logits = chosen(device_bytes=1500e6, outside_bytes=500e6)  # all blocks fit, what is around does not
    assert (logits.inputs, logits.swaps_outside) == (Counts(0, 0, 12), True)
    assert chosen(block_bytes=0.0, outside_bytes=1e6, input_bytes=0.0, device_bytes=0.0).inputs.kept == 12


def test_no_more_stays_than_the_measured_peak_had_room_for() -> None:
    """What passed by at the peak, gradients of a head say, may meet all that stays."""
    found = chosen(lane=1.0, passing_bytes=150e6)
    assert (found.inputs.kept, found.device_bytes) == (3, 350e6)
    assert chosen(lane=1.0, passing_bytes=150e6, device_bytes=1250e6).inputs.kept == 12, "nothing passes by then"


@pytest.mark.parametrize(("device_bytes", "kept"), [(0.0, 0), (199e6, 0), (200e6, 2), (299e6, 2), (300e6, 3)])
def test_blocks_that_backward_works_on_stay_or_have_room(device_bytes: float, kept: int) -> None:
    found = chosen(lane=1.0, device_bytes=device_bytes)
    assert found.inputs.kept == kept
    assert found.device_bytes - found.kept_bytes == (0 if kept else 2 * 100e6)
    assert found.device_bytes <= max(device_bytes, 200e6)


@pytest.mark.parametrize(
    ("staying_bytes", "kept"), [(0.0, 0), (99e6, 0), (100e6, 1), (200e6, 2), (250e6, 2), (900e6, 5)]
)
def test_what_the_loss_needs_is_not_kept_but_worked_with(staying_bytes: float, kept: int) -> None:
    """A loss that takes the device leaves little to what stays; blocks, whose backward comes later, have it again."""
    found = chosen(lane=1.0, device_bytes=500e6, staying_bytes=staying_bytes)
    assert found.inputs.kept == kept
    assert found.kept_bytes <= min(staying_bytes, 500e6)
    assert found.device_bytes == found.kept_bytes + max(0, 2 - kept) * 100e6


def test_longer_batches_leave_room_for_what_comes_back() -> None:
    """500 MB, of which 450 stay, beside 100; what is twice as long has four blocks of room for two."""
    measured = replace(MEASURED, beside_bytes=100e6, passing_bytes=20e6)
    assert measured.room_for(1.05, 1.0, 0.0, 450e6) == 500e6, "it still fits"
    assert measured.room_for(1.1, 1.0, 0.0, 450e6) == pytest.approx(500e6 - 1.1 * 200e6)
    assert measured.room_for(2.0, 2.0, 100e6, 450e6) == 500e6 - 400e6
    assert measured.room_for(2.0, 2.0, 0.0, 450e6) == 0.0
    assert measured.room_for(2.0, 2.0, 0.0, 150e6) == 400e6
    assert measured.room_for(1.0, 1.5, 0.0, 400e6) == 450e6
    loss = replace(measured, staying_bytes=300e6)  # it takes 300
    assert loss.room_for(1.0, 1.0, 0.0, 200e6) == 300e6
    assert loss.room_for(1.0, 1.5, 0.0, 100e6) == 300e6 - 150e6
    assert loss.room_for(2.0, 1.5, 0.0, 150e6) == 500e6 - 50e6 - 400e6


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


def outputs_of(name: str) -> dict[OperatorCall, OperatorCost]:
    torch.manual_seed(0)
    if name == "plain":
        model, run = Plain(), torch.randint(300, (4, 33))
        profiles = profile_blocks(find_blocks(model), lambda: model(run))
    else:
        model, batch = TINY[name]()
        profiles = profile_blocks(find_blocks(model), lambda: model(**batch))
    return {
        OperatorCall(*output.call): output
        for output in profiles[0].operators
        if output.call is not None and output.num_bytes and (output.flops or output.saved)
    }


@pytest.mark.parametrize(
    ("name", "num_up", "num_qkv"), [("plain", 1, 1), ("llama", 2, 3), ("bert", 1, 3), ("vit", 1, 3)]
)
def test_the_planners_names_are_found_in_real_blocks(name: str, num_up: int, num_qkv: int) -> None:
    found = by_planned_name(list(outputs_of(name)))
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
    # By addmm, or, once DeepSpeed's linear layers are in, by mm.
    up = next(call for name, call in choice.outputs if name.startswith("mlp_up (up/"))
    fates = choice.fates(["a", "b", "c"])
    assert fates["a"] == BlockFate(Fate.SWAP, {up: Fate.SWAP})
    assert fates["b"] == BlockFate(Fate.SWAP, {})
    assert fates["c"] == KEPT
    with pytest.raises(FuyouConfigError, match=r"block_input is planned for 3 blocks, the model has 4"):
        require_blocks(rows, 4)
    assert planned_choice(rows, 3, {}) is None, "no block that the planner knows"
