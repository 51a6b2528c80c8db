# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters on storage: read ahead in the recorded order, never overwritten while in use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.parameters.frozen import FrozenParameters, StagedParam
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.staging_file import StagingFile

NUMEL = 150_000  # 300,000 bytes in bf16: above SMALL_BYTES, and not a whole number of pages


@pytest.fixture
def file(tmp_path: Path) -> Iterator[StagingFile]:
    staging = StagingFile(tmp_path, lambda: IoLane(IoSettings(), lambda fd: tmp_path))
    yield staging
    staging.close()


def stage(file: StagingFile, values: torch.Tensor) -> StagedParam:
    num_bytes = -(-values.nbytes // 4096) * 4096
    memory = aligned_tensor(num_bytes)
    param = StagedParam(file, file.reserve(num_bytes), values.numel(), num_bytes, values.dtype)
    param.view(memory).copy_(values)
    file.write(param.offset, memory)
    return param


def many(number: int) -> dict[int, torch.Tensor]:
    return {100 + i: torch.full((NUMEL,), i, dtype=torch.bfloat16) for i in range(number)}


def run_through(frozen: FrozenParameters, values: dict[int, torch.Tensor]) -> int:
    """Uses every parameter once, in order, one at a time; returns how many were read ahead for it."""
    before = frozen.num_ahead_reads
    resident: set[int] = set()
    for key, expected in values.items():
        frozen.trace.use(key)
        resident = {key}
        got = frozen.fetch(key)
        frozen.look_ahead(resident.__contains__)
        assert torch.equal(got, expected), key
        del got
    frozen.trace.end_step()
    return frozen.num_ahead_reads - before


def test_the_second_round_is_read_ahead(file: StagingFile) -> None:
    values = many(8)
    frozen = FrozenParameters({key: stage(file, value) for key, value in values.items()}, pool_bytes=700_000)
    assert frozen.num_bytes == 8 * 303_104
    assert frozen.pool_bytes < 8 * 303_104
    assert run_through(frozen, values) == 0
    for _ in range(2):
        assert run_through(frozen, values) >= 7
    frozen.close()


def test_memory_in_use_is_not_read_into(file: StagingFile) -> None:
    values = many(6)
    frozen = FrozenParameters({key: stage(file, value) for key, value in values.items()}, pool_bytes=1)
    run_through(frozen, values)
    held = {}
    for key in values:  # autograd keeps every one of them
        frozen.trace.use(key)
        held[key] = frozen.fetch(key)
        frozen.look_ahead(held.__contains__)
    assert all(torch.equal(held[key], values[key]) for key in values)
    frozen.close()


def test_other_dtypes_and_sizes(file: StagingFile) -> None:
    values = {
        1: torch.randint(0, 255, (400_001,), dtype=torch.uint8),
        2: torch.arange(7, dtype=torch.int8),
        3: torch.randn(NUMEL),
    }
    frozen = FrozenParameters({key: stage(file, value) for key, value in values.items()}, pool_bytes=1 << 20)
    for _ in range(3):
        run_through(frozen, values)
    assert 9 not in frozen
    frozen.close()


def test_a_rewritten_parameter_is_read_again(file: StagingFile) -> None:
    values = many(4)
    staged = {key: stage(file, value) for key, value in values.items()}
    frozen = FrozenParameters(staged, pool_bytes=1 << 20)
    run_through(frozen, values)
    frozen.look_ahead(lambda key: False)  # old values are on their way
    values[101] = torch.full((NUMEL,), 55, dtype=torch.bfloat16)
    frozen.forget(101)
    memory = aligned_tensor(staged[101].num_bytes)
    staged[101].view(memory).copy_(values[101])
    file.write(staged[101].offset, memory)
    run_through(frozen, values)
    frozen.close()
