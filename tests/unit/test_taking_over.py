# SPDX-License-Identifier: Apache-2.0
"""What a run goes on from is not read for its own sake, and compared with the record where it is read first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ds_fuyou.errors import FuyouChecksumError, FuyouError
from ds_fuyou.optimizer.core import OutOfCoreOptimizer
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.storage.store import SlotStore
from tests.harness.small_core import ADAMW, Disk, backward, hypers, options_of, small_core, step

LAYOUT = build_layout(
    [[("a", "x", 3 * CUT_ELEMENTS, 0), ("b", "x", 2 * CUT_ELEMENTS, 1), ("c", "y", 2 * CUT_ELEMENTS + 77, 2)]],
    LayoutLimits(max_elements=8 * CUT_ELEMENTS, min_elements=2 * CUT_ELEMENTS),
)
STORED, IN_MEMORY = (0.0, 0.0, 1.0), (1.0, 0.0, 1.0)


def left_by_a_run(path: Path, residency: tuple[float, float, float], *, edited: bool = False) -> list[torch.Tensor]:
    """After two steps: every parameter's P16."""
    with small_core(path, LAYOUT, residency=residency, keep=True) as core:
        step(core, 1)
        step(core, 2)
        core.commits.settle()
        if edited:
            core.params.write(LAYOUT.params[0], torch.full((LAYOUT.params[0].numel,), 0.5, dtype=torch.bfloat16))
        return [core.params.read(span) for span in LAYOUT.params]


@contextmanager
def taken_over(
    path: Path, residency: tuple[float, float, float], *, checksum: bool = True
) -> Iterator[OutOfCoreOptimizer]:
    store = SlotStore.open([path / "ds_fuyou" / "run-rank0"], None)
    commit = store.last_commit()
    assert commit is not None
    options = options_of(LAYOUT, residency=residency, checksum=checksum)
    core = OutOfCoreOptimizer(LAYOUT, options, ADAMW, hypers(LAYOUT), store, commit)
    try:
        core.resume(lambda count: None)
        yield core
    finally:
        core.close()
        store.close()


def num_bytes_read(core: OutOfCoreOptimizer) -> int:
    return int(core.io.stats()["read"].num_bytes)


def last_step(path: Path) -> int:
    store = SlotStore.open([path / "ds_fuyou" / "run-rank0"], None)
    commit = store.last_commit()
    store.close()
    return -1 if commit is None else commit.step


def test_nothing_is_read_where_all_is_on_storage(tmp_path: Path) -> None:
    expected = left_by_a_run(tmp_path, STORED)
    with taken_over(tmp_path, STORED) as core:
        assert num_bytes_read(core) == 0
        assert all(map(torch.equal, expected, (core.params.read(span) for span in LAYOUT.params)))
        step(core, 3)
        assert core.generation == 3
    assert last_step(tmp_path) == 3


def test_p32_alone_is_read_to_make_p16_in_memory(tmp_path: Path) -> None:
    expected = left_by_a_run(tmp_path, IN_MEMORY)
    with taken_over(tmp_path, IN_MEMORY) as core:
        part = sum(-(-chunk.numel * 4 // 4096) * 4096 for chunk in LAYOUT.chunks)
        assert num_bytes_read(core) == part
        assert all(map(torch.equal, expected, (core.params.read(span) for span in LAYOUT.params)))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_state_that_changed_ends_its_first_update_and_the_commit_stays(part: int, tmp_path: Path) -> None:
    left_by_a_run(tmp_path, STORED)
    last = LAYOUT.chunks[-1]
    with taken_over(tmp_path, STORED) as core:
        disk = Disk(core, f"state/{last.index}", core.slot(last.index))
        disk.flip(part * -(-last.numel * 4 // 4096) * 4096 + 8)
        with pytest.raises(FuyouChecksumError, match=f"verifying the state of chunk {last.index} failed"):
            step(core, 3)
    assert last_step(tmp_path) == 2
    disk.flip(part * -(-last.numel * 4 // 4096) * 4096 + 8)
    with taken_over(tmp_path, STORED) as core:
        step(core, 3)
    assert last_step(tmp_path) == 3


def test_p32_that_changed_is_named_where_it_is_read_at_once(tmp_path: Path) -> None:
    left_by_a_run(tmp_path, IN_MEMORY)
    store = SlotStore.open([tmp_path / "ds_fuyou" / "run-rank0"], None)
    commit = store.last_commit()
    assert commit is not None
    (extent,) = store.extents("state/0", commit.slots["state/0"])
    path, at = store.paths_of_fd(extent.fd), extent.offset + 40
    store.close()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 2]))
    with pytest.raises(FuyouChecksumError, match="reading the state of chunk 0"), taken_over(tmp_path, IN_MEMORY):
        pass
    assert last_step(tmp_path) == 2


def chunk_with_two_parameters() -> int:
    (index,) = {*LAYOUT.chunks_of_param[0]}.intersection(LAYOUT.chunks_of_param[1])
    return index


@pytest.mark.parametrize("fault", ["bit", "exchanged pages"])
def test_p16_that_changed_is_noticed_when_a_chunk_was_read(fault: str, tmp_path: Path) -> None:
    left_by_a_run(tmp_path, STORED)
    with taken_over(tmp_path, STORED) as core:
        index = LAYOUT.chunks_of_param[0][0]
        disk = Disk(core, f"param16/{index}", core.slot(index))
        disk.flip(100) if fault == "bit" else disk.swap(0, 4096)
        with pytest.raises(FuyouChecksumError, match=r"reading parameter .* failed: the bytes read"):
            [core.params.read(span) for span in LAYOUT.params]
        with pytest.raises(FuyouError):
            step(core, 3)
    assert last_step(tmp_path) == 2


def test_a_chunk_that_was_used_in_part_is_read_whole_before_a_step_is_final(tmp_path: Path) -> None:
    """As where the other part is of an expert that no token came to."""
    left_by_a_run(tmp_path, STORED)
    index = chunk_with_two_parameters()
    with taken_over(tmp_path, STORED) as core:
        Disk(core, f"param16/{index}", core.slot(index)).flip(10)
        core.params.read(LAYOUT.params[0])
        assert core.pipeline.half_read_params() == [index]
        backward(core, 3)
        with pytest.raises(FuyouChecksumError, match=f"reading P16 of chunk {index} failed"):
            core.apply(hypers(LAYOUT), 1.0, expected_multiplier=1.0)
        assert core.generation == 2
    assert last_step(tmp_path) == 2


def test_an_edit_of_p16_says_so_in_the_record_first(tmp_path: Path) -> None:
    expected = left_by_a_run(tmp_path, STORED, edited=True)
    with taken_over(tmp_path, STORED) as core:
        assert all(map(torch.equal, expected, (core.params.read(span) for span in LAYOUT.params)))
        Disk(core, "param16/0", core.slot(0))
        step(core, 3)
    with taken_over(tmp_path, STORED) as core:
        assert core._taken_over.unread, "compared again"
        core.params.write(LAYOUT.params[0], torch.zeros(LAYOUT.params[0].numel, dtype=torch.bfloat16))
        assert not core.pipeline.half_read_params()
        assert core.store is not None
        assert [commit.meta["param_digests"] for commit in core.store.commits()] == [""]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_an_edit_between_a_step_and_the_order_of_its_commit(is_ordered: bool, tmp_path: Path) -> None:
    """As of a callback within ``engine.step()``: the commit that follows holds it; without, the step before stays."""
    edit = torch.full((LAYOUT.params[0].numel,), 0.5, dtype=torch.bfloat16)
    with small_core(tmp_path, LAYOUT, residency=STORED, keep=True) as core:
        core.commits.holds_orders = True
        for seed in (1, 2):
            step(core, seed)
            core.commits.order({"of": seed})
        before = core.params.read(LAYOUT.params[0])
        step(core, 3)
        core.params.write(LAYOUT.params[0], edit)
        if is_ordered:
            core.commits.order({"of": 3})
    assert last_step(tmp_path) == (3 if is_ordered else 2)
    with taken_over(tmp_path, STORED) as core:
        assert core.store is not None
        assert core.store.commits()[0].meta["training"] == {"of": core.generation}
        assert torch.equal(core.params.read(LAYOUT.params[0]), edit if is_ordered else before)
        step(core, 4)
        core.commits.settle()


def test_an_edit_does_not_hide_what_changed_before(tmp_path: Path) -> None:
    left_by_a_run(tmp_path, STORED)
    index = chunk_with_two_parameters()
    with taken_over(tmp_path, STORED) as core:
        last = LAYOUT.chunks[index].numel * 2 - 2
        Disk(core, f"param16/{index}", core.slot(index)).flip(last)
        with pytest.raises(FuyouChecksumError, match=f"reading P16 of chunk {index} failed"):
            core.params.write(LAYOUT.params[0], torch.zeros(LAYOUT.params[0].numel, dtype=torch.bfloat16))


@pytest.mark.parametrize("lacks", ["param_digests", "state_sums"])
def test_records_without_these_sums_are_gone_on_from(lacks: str, tmp_path: Path) -> None:
    """Of older versions, or of a run without checksums: states are read once, to know what they are."""
    expected = left_by_a_run(tmp_path, STORED)
    store = SlotStore.open([tmp_path / "ds_fuyou" / "run-rank0"], None)
    store.amend({lacks: ""})
    store.close(remove=False)
    with taken_over(tmp_path, STORED) as core:
        whole = sum(-(-chunk.numel * 4 // 4096) * 4096 * 3 for chunk in LAYOUT.chunks)
        assert num_bytes_read(core) == (whole if lacks == "state_sums" else 0)
        assert all(map(torch.equal, expected, (core.params.read(span) for span in LAYOUT.params)))
        step(core, 3)
        assert core.store is not None
        core.commits.settle()
        commit = core.store.last_commit()
        assert commit is not None
        assert commit.meta["state_sums"]
        assert commit.meta["param_digests"]


def test_without_checksum_nothing_is_compared_either(tmp_path: Path) -> None:
    left_by_a_run(tmp_path, STORED)
    with taken_over(tmp_path, STORED, checksum=False) as core:
        Disk(core, "state/0", core.slot(0)).flip(10)
        Disk(core, "param16/0", core.slot(0)).flip(10)
        for span in LAYOUT.params:
            core.params.read(span)
        step(core, 3)
