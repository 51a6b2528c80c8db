# SPDX-License-Identifier: Apache-2.0
"""Conversions and norms around an update, against the torch operators that they stand for."""

from __future__ import annotations

import pytest
import torch

from ds_fuyou.ops import load_core

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def element(dtype: torch.dtype) -> object:
    types = load_core().ElementType
    return {torch.float32: types.FLOAT32, torch.float16: types.FLOAT16, torch.bfloat16: types.BFLOAT16}[dtype]


def awkward_floats() -> torch.Tensor:
    """fp32 values around every rounding decision: ties, subnormals, overflow, zeros, infinities, NaN."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    ties = []
    for dtype, ulp_bits in ((torch.float16, 13), (torch.bfloat16, 16)):
        exact = halves.view(dtype).float().view(torch.int32)
        tie = 1 << (ulp_bits - 1)
        ties += [exact, exact + tie, exact + tie - 1, exact + tie + 1]
    generator = torch.Generator().manual_seed(1)
    random = torch.randint(-(1 << 31), (1 << 31) - 1, (200_003,), generator=generator, dtype=torch.int64)
    return torch.cat([*ties, random.to(torch.int32)]).view(torch.float32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit, where any NaN equals any other."""
    both_nan = a.isnan() & b.isnan()
    integers = torch.int16 if a.element_size() == 2 else torch.int32
    return bool(((a.view(integers) == b.view(integers)) | both_nan).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrowing_rounds_as_copy_does(dtype: torch.dtype) -> None:
    source = awkward_floats()
    for numel in (1, 7, 31, 4097, source.numel()):
        ours = torch.zeros(numel, dtype=dtype)
        load_core().narrow_parameter(element(dtype), source.data_ptr(), ours.data_ptr(), numel)
        assert same_bits(ours, source[:numel].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiplier", [1.0, 1 / 3, 2.0**-16, 1e-30, 0.73])
def test_scaling_is_a_rounding_of_its_own(dtype: torch.dtype, multiplier: float) -> None:
    source = awkward_floats().to(dtype)
    factor = float(torch.tensor(multiplier))
    for numel in (1, 9, 33, source.numel()):
        ours = torch.zeros(numel)
        load_core().scale_gradient(element(dtype), source.data_ptr(), ours.data_ptr(), numel, factor)
        assert same_bits(ours, source[:numel].float().mul_(factor))
