# SPDX-License-Identifier: Apache-2.0
"""The checksum of files of checkpoints is zlib's, whatever the length and place of the bytes."""

from __future__ import annotations

import random
import zlib

import torch

from ds_fuyou.checkpoint.crc import crc32_of, crc32_of_both
from ds_fuyou.ops.core import load_core


def test_the_checksum_is_that_of_zlib() -> None:
    values = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    chance = random.Random(2)
    cuts = [(begin, begin + length) for begin in range(17) for length in range(1, 200)]
    cuts += [(begin, chance.randint(begin + 1, 1 << 20)) for begin in chance.sample(range(1 << 19), 50)]
    for begin, end in cuts:
        piece = values[begin:end]
        expected = zlib.crc32(piece.numpy())
        assert crc32_of(piece) == expected, (begin, end)
        assert load_core().crc32(piece.data_ptr(), piece.nbytes) == expected, "also where zlib is preferred"
    zeros = torch.zeros(1000)
    assert crc32_of(zeros) == zlib.crc32(bytes(4000))


def test_checksums_of_pieces_add_up() -> None:
    values = torch.rand(5000)
    for cut in (0, 1, 17, 4999):
        first, second = values[:cut], values[cut:]
        ahead = crc32_of(first) if cut else 0
        assert crc32_of_both(ahead, crc32_of(second), second.nbytes) == zlib.crc32(values.numpy())
