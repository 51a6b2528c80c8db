# SPDX-License-Identifier: Apache-2.0
"""What is saved and what is repeated, in blocks that are recomputed, saved whole, and in between."""

from __future__ import annotations

import pytest

from ds_fuyou.planner.activations import costs_of, plan_activations
from ds_fuyou.planner.cost import Placement, Workload
from ds_fuyou.simulator.systems import find_policy
from tests.planner.support import model


def planned(mode: str, secs_per_byte: float = 0.0) -> tuple[Workload, Placement]:
    work = Workload(model("13B"), 8)

    def secs(place: Placement) -> float:
        return place.recompute_flops + secs_per_byte * place.swapped_bytes

    return work, plan_activations(costs_of(work, find_policy("ds_fuyou")), Placement(), 0.0, 0.0, secs, mode)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_block_is_repeated_with_its_last_product_or_saved_without(mode: str) -> None:
    work, place = planned(mode)
    tokens, spec = work.model.layers * work.tokens, work.model
    whole = mode == "swap"
    assert place.recompute_flops == (0.0 if whole else tokens * spec.block_flops(work.seq))
    assert place.swapped_bytes == tokens * (spec.saved_bytes if whole else spec.input_bytes)


def test_the_last_product_is_worth_most_and_comes_first() -> None:
    spec = model("13B")
    down = next(op for op in spec.operators if op.name == "mlp_down")
    price = 0.999 * down.flops(1024) / down.output_bytes
    work, place = planned("auto", price)
    tokens = spec.layers * work.tokens
    assert {name: again for name, _, _, again in place.fates if again < spec.layers} == {
        "block_input": 0,
        "mlp_down": 0,
    }
    assert place.swapped_bytes == tokens * (spec.input_bytes + down.output_bytes)
    assert place.recompute_flops == pytest.approx(tokens * (spec.block_flops(1024) - down.flops(1024)))
