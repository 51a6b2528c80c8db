# SPDX-License-Identifier: Apache-2.0
"""Parameters without a gradient do not touch the bits of their neighbours, however the model is cut into chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds_fuyou.optimizer.layout import CUT_ELEMENTS, FlatLayout, LayoutLimits, build_layout
from ds_fuyou.optimizer.rules import OptimizerKind
from tests.harness.small_core import small_core, step

PARAMS = [("a", "a", 20011, 0), ("gate", "a", 3, 1), ("b", "b", 30007, 2), ("bias", "b", 131, 3), ("c", "c", 15013, 4)]
KINDS = {
    "adamw": OptimizerKind("adam", ("exp_avg", "exp_avg_sq")),
    "adam": OptimizerKind("adam", ("exp_avg", "exp_avg_sq"), adamw_mode=False),
    "lion": OptimizerKind("lion", ("exp_avg",)),
    "adagrad": OptimizerKind("adagrad", ("exp_avg_sq",)),
}
MISSING = {2: ["b"], 3: ["gate", "c"], 5: ["bias"], 6: ["b", "bias"]}
"""Parameters that get no gradient, by step."""


def layout(chunk_elements: int) -> FlatLayout:
    return build_layout([PARAMS], LayoutLimits(max_elements=chunk_elements, min_elements=chunk_elements))


def train(path: Path, kind: str, chunk_elements: int, missing: dict[int, list[str]]) -> dict[str, list[torch.Tensor]]:
    """P32 and moments of every parameter after eight steps."""
    path.mkdir()
    made = layout(chunk_elements)
    with small_core(path, made, kind=KINDS[kind]) as core:
        for number in range(1, 9):
            step(core, number, missing.get(number, []))
        parts = range(1 + len(KINDS[kind].moments))
        return {span.name: [core.states.read_param(span, part) for part in parts] for span in made.params}


def differences(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]], *names: str) -> int:
    return sum(
        int((x.view(torch.int32) != y.view(torch.int32)).sum())
        for name in names
        for x, y in zip(one[name], other[name], strict=True)
    )


@pytest.mark.parametrize("kind", list(KINDS))
def test_bits_do_not_depend_on_the_size_of_chunks(kind: str, tmp_path: Path) -> None:
    small = train(tmp_path / "small", kind, CUT_ELEMENTS, MISSING)
    large = train(tmp_path / "large", kind, 1 << 22, MISSING)
    assert differences(small, large, *small) == 0


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_parameter_that_is_present_does_not_feel_its_neighbours(kind: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", kind, 1 << 22, {})
    missing = {number: ["gate", "b", "bias"] for number in (2, 3, 5)}
    apart = train(tmp_path / "apart", kind, 1 << 22, missing)
    assert differences(whole, apart, "a", "c") == 0
    assert differences(whole, apart, "b") > 0
