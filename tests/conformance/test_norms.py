# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients against stock's own function, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_fuyou.host.device import HostDevice
from ds_fuyou.optimizer import norms
from ds_fuyou.optimizer.norms import GradientNorms, host_squares, rounds_safely

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of torch: its sum must not depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def stock(values: torch.Tensor) -> float:
    return float(DeepSpeedZeroOptimizer_Stage3._constant_buffered_norm2(None, values))


def ours(pieces: list[torch.Tensor]) -> float:
    taken = GradientNorms(HostDevice())
    taken.take(0, pieces)
    return float(taken.settle([0], lambda param: pieces[param])[0])


def spread(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values of many sizes, as gradients are: nearly every addition rounds."""
    sizes = torch.rand(numel, generator=generator) * 12 - 10
    return (torch.randn(numel, generator=generator) * 2.0**sizes).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_stocks_to_the_bit(dtype: torch.dtype, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(num_threads)
    for numel in (1, 2, 3, 4, 5, 7, 127, 4_099, 32_768, 100_003, 1_300_007):
        values = spread(numel, dtype, generator)
        assert ours([values]) == stock(values), numel


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_in_several_pieces_has_the_same_norm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    values = spread(300_007, dtype, generator)
    for sizes in ([100_000, 200_007], [1, 2, 3, 300_001], [150_001, 150_003, 3], [0, 300_007]):
        assert ours(list(values.split(sizes))) == stock(values), sizes


def test_a_large_gradient_is_taken_in_stocks_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_PART_NUMEL", 10_000)
    generator = torch.Generator().manual_seed(6)
    for numel in (9_999, 10_000, 10_001, 45_678):
        values = spread(numel, torch.bfloat16, generator)
        expected = float(DeepSpeedZeroOptimizer_Stage3._constant_buffered_norm2(None, values, 10_000))
        assert ours([values]) == expected
        assert ours(list(values.split(3_001))) == expected


def test_torch_is_asked_where_its_order_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_torch_lanes", lambda: None)
    values = spread(50_001, torch.float32, torch.Generator().manual_seed(7))
    assert ours(list(values.split(20_000))) == stock(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 4097, 9998])
def test_one_element_that_is_not_finite_shows(dtype: torch.dtype, bad: float, place: int) -> None:
    values = torch.ones(9999, dtype=dtype)
    values[place] = bad
    assert not math.isfinite(host_squares([values]))
    taken = GradientNorms(HostDevice())
    taken.take(0, [torch.ones(5)])
    assert taken.all_finite()
    taken.take(1, [values])
    assert not taken.all_finite()


def test_rounds_safely_refuses_only_sums_near_a_rounding_boundary() -> None:
    boundary = 1.0 + 2.0**-24  # half way between two fp32 numbers
    assert not rounds_safely([boundary], [1000])
    assert not rounds_safely([boundary * (1 + 2.0**-50)], [1000])
    assert rounds_safely([boundary * (1 + 2.0**-30)], [1000])
    assert rounds_safely([boundary], [0])
    assert rounds_safely([1.0], [1000])
    assert rounds_safely([], [])
    assert rounds_safely([math.inf, 1.0], [10, 10])
    assert rounds_safely([math.nan], [10])


def test_sums_made_on_the_host_are_retaken_from_the_widest_until_they_are_safe() -> None:
    """One large gradient whose sum lies near a rounding boundary; the small ones need not be looked at again."""
    boundary = 1.0 + 2.0**-24
    large, small = torch.tensor([math.sqrt(boundary)], dtype=torch.float64), torch.tensor([2.0**-40])
    taken = GradientNorms(HostDevice())
    taken.take_by(lambda values: values.double().norm(2) * 0 + math.sqrt(1.0 + 2.0**-23))
    taken.take_sum(0, boundary, 1000)
    for param in range(1, 6):
        taken.take_sum(param, float(small**2), 10)
    found = taken.settle(range(6), lambda param: large if param == 0 else small)
    assert taken.num_retaken == 1
    assert float(found[0]) == math.sqrt(1.0 + 2.0**-23)
    assert list(found) == list(range(6))
