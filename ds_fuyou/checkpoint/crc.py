# SPDX-License-Identifier: Apache-2.0
"""CRC-32 of bytes that are summed in pieces, in any order.

A CRC is linear over the bits of its message: that of ``A`` followed by ``n`` zero bytes is a linear map of that of
``A``, and that of ``A + B`` is its sum (xor) with the one of ``B``. The map of ``n`` zero bytes is a matrix over GF(2),
32 columns of 32 bits: the map of one zero bit, doubled and multiplied.
"""

from __future__ import annotations

import functools
import zlib

import torch

from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer.layout import own_numel

__all__ = ["crc32_of", "crc32_of_both", "sum_of_part"]

_POLYNOMIAL = 0xEDB88320  # of zlib.crc32, bits reversed

_Matrix = tuple[int, ...]
"""Column by column: the images of single bits, the lowest first."""


def crc32_of(values: torch.Tensor) -> int:
    """``zlib.crc32`` of a contiguous tensor on the host; at the speed of memory where the processor multiplies
    polynomials."""
    core = load_core()
    if core.crc32_is_fast:
        return int(core.crc32(values.data_ptr(), values.nbytes))
    return zlib.crc32(memoryview(values.view(-1).view(torch.uint8).numpy()))


def sum_of_part(head: torch.Tensor, part: int, numel: int, rank: int) -> tuple[int, int]:
    """``(part, CRC-32 of head)``, by which frozen parameters are told apart. ``head``: the first values of ``rank``'s
    part of a parameter, on the host, 1-D; of the part's elements those beyond ``numel``, the parameter's, are padding
    and are left out.
    """
    return part, crc32_of(head[: own_numel(part, numel, rank)])


def crc32_of_both(first: int, second: int, num_bytes: int) -> int:
    """``zlib.crc32(A + B)`` of ``zlib.crc32(A)``, ``zlib.crc32(B)`` and the length of B."""
    return _times(_zeros(num_bytes), first) ^ second


def _times(matrix: _Matrix, vector: int) -> int:
    image = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            image ^= column
        vector >>= 1
    return image


def _product(one: _Matrix, other: _Matrix) -> _Matrix:
    return tuple(_times(one, column) for column in other)


@functools.lru_cache(maxsize=1024)
def _zeros(num_bytes: int) -> _Matrix:
    """The map of that many zero bytes. Milliseconds; chunks have few different lengths."""
    bit: _Matrix = (_POLYNOMIAL, *(1 << n for n in range(31)))
    power = bit
    for _ in range(3):
        power = _product(power, power)  # of one byte
    result: _Matrix = tuple(1 << n for n in range(32))
    while num_bytes:
        if num_bytes & 1:
            result = _product(power, result)
        power = _product(power, power)
        num_bytes >>= 1
    return result
