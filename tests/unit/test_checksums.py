# SPDX-License-Identifier: Apache-2.0
"""Bytes that the disk changed are noticed where they are read, whatever changed them and whoever reads."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
import torch

from ds_fuyou.checkpoint.recovery import recover_weights
from ds_fuyou.cli.main import main
from ds_fuyou.errors import FuyouChecksumError
from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from tests.harness.small_core import Disk, backward, small_core, step

ODD_PLACES = 0x9E3779B97F4A7C15
LAYOUT = build_layout(
    [[("a", "a", 3 * CUT_ELEMENTS, 0), ("b", "b", CUT_ELEMENTS + 77, 1)]],
    LayoutLimits(max_elements=2 * CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
)
PAGE = 4096


def place_sum(words: torch.Tensor, first: int = 0) -> int:
    return int(load_core().place_sum(words.data_ptr(), words.numel(), first))


def words_of(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 31, 32, 33, 1000])
@pytest.mark.parametrize("first", [0, 1, 1024, 2**31 + 7])
def test_the_sum_weighs_every_word_by_its_place(count: int, first: int) -> None:
    """The vectors of this processor give what the definition says."""
    words = words_of(count)
    expected = 0
    for place, word in enumerate(words.tolist(), start=first):
        weight = (place | 1) % 2**32
        expected += (word % 2**32) * (weight * ODD_PLACES if place % 2 else weight)
    assert place_sum(words, first) == expected % 2**64


def test_sums_of_neighbouring_runs_add_up_and_zeros_add_nothing() -> None:
    words = words_of(5000)
    parts = place_sum(words[:1999]) + place_sum(words[1999:2049], 1999) + place_sum(words[2049:], 2049)
    assert parts % 2**64 == place_sum(words)
    assert place_sum(torch.zeros(4096, dtype=torch.int32)) == 0


def test_one_and_two_flipped_bits_and_exchanged_runs_change_the_sum() -> None:
    words = words_of(8192)
    whole = place_sum(words)
    places = torch.randint(0, 8192, (400, 2), generator=torch.Generator().manual_seed(2))
    for one, other in places.tolist():
        for bit in (0, 17, 31):
            changed = words.clone()
            changed[one] ^= 1 << bit if bit < 31 else -(2**31)
            assert place_sum(changed) != whole
            if one != other:
                changed[other] ^= 1 << bit if bit < 31 else -(2**31)
                assert place_sum(changed) != whole
    for first, second in ((0, 1024), (1024, 7168), (1, 2), (64, 65)):
        size = 1024 if first % 1024 == 0 else 1
        changed = words.clone()
        changed[first : first + size], changed[second : second + size] = (
            words[second : second + size],
            words[first : first + size],
        )
        assert place_sum(changed) != whole


@pytest.mark.parametrize("part", [0, 1, 2])
def test_exchanged_pages_of_a_state_are_noticed(part: int, tmp_path: Path) -> None:
    """P32 and moments; both pages lie in one part, so a plain sum would be the same."""
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 1)
        begin = part * LAYOUT.chunks[0].numel * 4
        Disk(core, "state/0", core.pipeline.slot(0)).swap(begin, begin + PAGE)
        with pytest.raises(FuyouChecksumError, match=r"chunk 0 failed: the bytes read are not those"):
            step(core, 2)


def test_exchanged_moments_are_noticed_by_a_reader(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 1)
        size = LAYOUT.chunks[0].numel * 4
        Disk(core, "state/0", core.pipeline.slot(0)).swap(size, 2 * size, size)
        with pytest.raises(FuyouChecksumError, match="state of chunk 0"):
            core.states.read(0)


@pytest.mark.parametrize("written_by", ["initialisation", "loading", "one parameter"])
@pytest.mark.parametrize("read_by", ["update", "checkpoint"])
def test_the_first_read_is_compared_too(written_by: str, read_by: str, tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT) as core:
        if written_by != "initialisation":
            step(core, 1)
            state = [torch.full_like(part, 0.5) for part in core.states.read(0)]
            if written_by == "loading":
                core.states.write(0, state, torch.full((LAYOUT.chunks[0].numel,), 0.5, dtype=torch.bfloat16))
            else:
                core.states.write_param(LAYOUT.params[0], 1, torch.full((LAYOUT.params[0].numel,), 0.25))
        Disk(core, "state/0", core.pipeline.slot(0)).flip(100)
        with pytest.raises(FuyouChecksumError, match="state of chunk 0"):
            step(core, 2) if read_by == "update" else core.states.read(0)


def test_without_checksum_nothing_is_compared(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(0.0, 0.0, 0.0), checksum=False) as core:
        Disk(core, "state/0", 0).flip(100)
        Disk(core, "param16/0", 0).flip(100)
        step(core, 1)
        core.params.read(LAYOUT.params[0])


@pytest.mark.parametrize("written_by", ["initialisation", "update", "edit"])
def test_a_changed_bit_of_p16_on_storage_is_noticed(written_by: str, tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(0.0, 0.0, 1.0)) as core:
        span = LAYOUT.params[1]
        if written_by != "initialisation":
            step(core, 1)
        if written_by == "edit":
            core.params.write(span, torch.ones(span.numel, dtype=torch.bfloat16))
            assert torch.equal(core.params.read(span), torch.ones(span.numel, dtype=torch.bfloat16))
        chunk = LAYOUT.chunks_of_param[span.index][-1]
        begin = (max(span.begin, LAYOUT.chunks[chunk].begin) - LAYOUT.chunks[chunk].begin) * 2
        whole = core.params.read(span)
        Disk(core, f"param16/{chunk}", core.pipeline.slot(chunk)).flip(begin + 10)
        with pytest.raises(FuyouChecksumError, match="reading parameter b failed: the bytes read are not"):
            core.params.read(span)
        Disk(core, f"param16/{chunk}", core.pipeline.slot(chunk)).flip(begin + 10)
        assert torch.equal(core.params.read(span), whole)


def test_p16_of_a_dropped_update_is_not_mixed_up_with_what_is_published(tmp_path: Path) -> None:
    """Speculation writes the spare slot, is dropped, and done again."""
    with small_core(tmp_path, LAYOUT, residency=(0.0, 0.0, 0.0), clip_policy="speculate") as core:
        for seed in (1, 2, 3):
            done = core.pipeline.stats().num_updates
            backward(core, seed)
            while core.pipeline.stats().num_updates == done:
                time.sleep(0.001)
            core.forget_gradients()
            step(core, seed)
            for span in LAYOUT.params:
                core.params.read(span)


@pytest.mark.parametrize("read_by", ["update", "accumulation"])
def test_a_changed_bit_of_a_gradient_on_storage_is_noticed(read_by: str, tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT, residency=(1.0, 1.0, 0.0)) as core:
        backward(core, 1)
        for index in list(core.gradients._sealed):  # the buffers are wanted for others
            core.gradients._retire(index)
        Disk(core, "grad16/0", 0).flip(21)
        with pytest.raises(FuyouChecksumError, match="reading the gradient of chunk 0"):
            backward(core, 2) if read_by == "accumulation" else step(core, 1, without=["a", "b"])


def killed(tmp_path: Path, *, checksum: bool = True) -> tuple[Path, Disk]:
    """The state directory of a run of two steps, and the disk below its chunk 1."""
    with small_core(tmp_path, LAYOUT, keep=True, checksum=checksum) as core:
        step(core, 1)
        step(core, 2)
        disk = Disk(core, "state/1", core.pipeline.slot(1))
    return tmp_path / "ds_fuyou" / "run-rank0", disk


def test_recovery_refuses_a_chunk_that_is_not_what_was_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, disk = killed(tmp_path)
    out = tmp_path / "weights.pt"
    assert recover_weights([directory], out).verified
    out.unlink()
    disk.flip(5000)
    with pytest.raises(FuyouChecksumError, match=r"P32 of chunk 1 is not what the run wrote.*data at byte \d+"):
        recover_weights([directory], out)
    assert main(["recover", str(directory), "--weights", str(out)]) != 0
    assert "chunk 1" in capsys.readouterr().err
    assert not out.exists()
    disk.flip(5000)
    assert recover_weights([directory], out).verified


def test_recovery_says_what_it_could_not_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = killed(tmp_path, checksum=False)
    assert main(["recover", str(directory), "--weights", str(tmp_path / "weights.pt")]) == 0
    assert "not compared with checksums" in capsys.readouterr().out


def test_the_commit_record_holds_sixteen_bytes_a_chunk(tmp_path: Path) -> None:
    with small_core(tmp_path, LAYOUT) as core:
        step(core, 1)
        assert core.store is not None
        core.commits.settle()
        record = core.store.last_commit()
        assert record is not None
        sums = bytes.fromhex(str(record.meta["state_sums"]))
        assert len(sums) == 16 * len(LAYOUT.chunks)
        param, moments = struct.unpack_from("<2Q", sums)
        state = core.states.read(0)
        assert place_sum(state[0]) == param
        assert (place_sum(state[1]) + ODD_PLACES * place_sum(state[2])) % 2**64 == moments
