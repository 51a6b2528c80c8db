# SPDX-License-Identifier: Apache-2.0
"""New states come from the file that they lie in, not through mapped memory."""

from __future__ import annotations

import errno
import faulthandler
import io
import os
import signal
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ds_fuyou.checkpoint import mapped
from ds_fuyou.checkpoint.file_sums import FileSums, Place, compare_file
from ds_fuyou.checkpoint.mapped import MappedFiles, check_readable
from ds_fuyou.checkpoint.reading import naming
from ds_fuyou.checkpoint.streamed_file import StandIns, save
from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.optimizer.state_access import ROUNDED, NewState
from ds_fuyou.storage.types import Extent
from ds_fuyou.zero.saving.checkpoint_state import CheckpointState, _Saved
from tests.harness.small_core import small_core, step

if TYPE_CHECKING:
    from ds_fuyou.zero.run.rank_state import RankState

LAYOUT = build_layout(
    [[(name, name, 3 * CUT_ELEMENTS, place) for place, name in enumerate("abcd")], [("e", "e", 77, 5)]],
    LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS),
)


class Full(io.BytesIO):
    """A read of it fails, with this error."""

    def read(self, size: int | None = -1, /) -> bytes:
        raise OSError(errno.ENOSPC, "full")


def flats(seed: int) -> list[list[torch.Tensor]]:
    """By sub-group: P32 and two moments."""
    torch.manual_seed(seed)
    return [[torch.rand(numel) for _ in range(3)] for numel in LAYOUT.sub_group_numels]


def written(tree: list[list[torch.Tensor]], path: Path, *, is_aligned: bool) -> list[list[torch.Tensor]]:
    """As ours are written, or stock's; as they are loaded."""
    if is_aligned:
        stand_ins = StandIns()
        made = [[stand_ins.add(t.shape, t.dtype, lambda t=t: iter([(0, t)])) for t in part] for part in tree]
        save(made, path, stand_ins)
    else:
        torch.save(tree, path)
    loaded: list[list[torch.Tensor]] = torch.load(path, mmap=True)
    return loaded


def bytes_of(extents: list[Extent]) -> bytes:
    found = b""
    for extent in extents:
        fd = os.open(f"/proc/self/fd/{extent.fd}", os.O_RDONLY)
        found += os.pread(fd, extent.num_bytes, extent.offset)
        os.close(fd)
    return found


@pytest.mark.parametrize("is_aligned", [True, False])
def test_where_a_tensor_lies(is_aligned: bool, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    tree = flats(1)
    loaded = written(tree, path, is_aligned=is_aligned)
    with MappedFiles({str(path)}) as files:
        for part, expected in zip(loaded, tree, strict=True):
            for values, given in zip(part, expected, strict=True):
                extents = files.extents(values)
                assert extents is not None
                assert bytes_of(extents) == given.numpy().tobytes()
        tail = files.extents(loaded[0][1][CUT_ELEMENTS:])
        assert tail is not None
        assert bytes_of(tail) == tree[0][1][CUT_ELEMENTS:].numpy().tobytes()
        assert files.extents(loaded[0][0][::2]) is None, "not in one run"
        assert files.extents(torch.zeros(8)) is None, "in memory"
    with MappedFiles(set()) as files:
        assert files.extents(loaded[0][0]) is None, "somebody may have written to it"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_file_that_another_one_has_replaced(is_late: bool, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    loaded = written(flats(1), path, is_aligned=True)
    other = tmp_path / "other.pt"
    written(flats(2), other, is_aligned=True)
    before = len(os.listdir("/proc/self/fd"))
    if not is_late:
        os.replace(other, path)
    with MappedFiles({str(path)}) as files:
        if is_late:
            os.replace(other, path)
        for _ in range(2):
            assert files.extents(loaded[0][0]) is None
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("residency", [(0.0, 0.0, 0.0), (0.5, 0.5, 1.0)])
def test_states_are_read_from_the_file(residency: tuple[float, float, float], is_aligned: bool, tmp_path: Path) -> None:
    path, tree = tmp_path / "file.pt", flats(3)
    loaded = written(tree, path, is_aligned=is_aligned)
    with small_core(tmp_path, LAYOUT, residency=residency) as core, MappedFiles({str(path)}) as files:
        step(core, 0)
        before = core.io.stats()["read"].num_bytes
        core.states.write_all(
            NewState(c.index, [files.extents(t[c.begin : c.end]) for t in loaded[c.sub_group][:2]] + [None], ROUNDED)
            for c in LAYOUT.chunks
        )
        assert core.io.stats()["read"].num_bytes - before == 2 * 4 * LAYOUT.numel
        for chunk, parts in core.states.read_all(range(len(LAYOUT.chunks))):
            expected = [t[chunk.begin : chunk.end] for t in tree[chunk.sub_group]]
            assert torch.equal(parts[0], expected[0])
            assert torch.equal(parts[1], expected[1])
            assert not parts[2].any()
        for span in LAYOUT.params:
            flat = tree[span.sub_group][0][span.begin : span.end]
            assert torch.equal(core.params.read(span), flat.bfloat16())
        step(core, 1)


def test_a_file_that_ends_before_it_should_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    loaded = written(flats(3), path, is_aligned=True)
    with small_core(tmp_path, LAYOUT) as core, MappedFiles({str(path)}) as files:
        chunk = LAYOUT.chunks[1]
        parts = [files.extents(t[chunk.begin : chunk.end]) for t in loaded[0]]
        os.truncate(path, 4096)
        with pytest.raises(FuyouStorageError, match=rf"reading chunk 1 of a checkpoint failed.*{path} at byte \d+"):
            core.states.write_all([NewState(1, parts, ROUNDED)], files.path_of)
        del loaded
        step(core, 0)  # nothing was replaced


def test_what_cannot_be_read_is_an_error_before_somebody_touches_it(tmp_path: Path) -> None:
    """Without that the process is killed: by SIGBUS."""
    path = tmp_path / "file.pt"
    loaded = written(flats(3), path, is_aligned=True)
    for values in loaded[0]:
        check_readable(values)
    os.truncate(path, 4096)
    with pytest.raises(FuyouStorageError, match="shorter than when it was opened") as caught:
        check_readable(loaded[0][1])
    assert caught.value.filename == str(path)
    check_readable(torch.zeros(5000))
    check_readable(torch.empty(0))
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        loaded[0][1].sum()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGBUS


def test_of_rounded_states_each_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go through mapped memory, a chunk at a time: to look at all of a file for each takes it through the cache
    as often as there are chunks.
    """
    path = tmp_path / "file.pt"
    tree = [[values.bfloat16() for values in part] for part in flats(3)]
    loaded = written(tree, path, is_aligned=True)
    looked_at: list[int] = []

    def check(at: int, num_bytes: int) -> None:
        looked_at.append(num_bytes)

    monkeypatch.setattr(mapped, "_check_readable", check)
    with small_core(tmp_path, LAYOUT) as core:
        activation = SimpleNamespace(config=SimpleNamespace(checksum=False))
        rank_state = SimpleNamespace(core=core, activation=activation, step_applied=lambda: None)
        state = CheckpointState(cast("RankState", rank_state), cast("torch.optim.Optimizer", None), [0, 1], list)
        state._write_all([part[0] for part in loaded], _Saved([part[1:] for part in loaded], {}))
    assert sum(looked_at) == sum(values.nbytes for part in tree for values in part)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_is_made_of_other_tensors_can_be_read(tmp_path: Path) -> None:
    """Scripts put it into the client state of a checkpoint."""
    path = tmp_path / "file.pt"
    many = torch.sparse_coo_tensor(torch.arange(9000).expand(2, -1), torch.rand(9000))
    small = torch.eye(8)
    others = small.to_sparse_csr(), small.to_sparse_csc(), small.to_sparse_bsr((2, 2)), small.to_sparse_bsc((2, 2))
    torch.save([many, *others, TwoTensor(torch.rand(3), torch.rand(3))], path)
    loaded = torch.load(path, mmap=True, weights_only=False)
    for values in loaded:
        check_readable(values)
    os.truncate(path, 4096)
    with pytest.raises(FuyouStorageError, match="shorter than when it was opened"):
        check_readable(loaded[0])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Reads of memory that is not there fail as those of a faulty disk; a file that is missing is named by Python. What
    torch says by errors of its own, and what an object in a file raises.
    """
    failed = r"reading a checkpoint failed.*Input/output error.*/proc/self/mem"
    with pytest.raises(FuyouStorageError, match=failed), naming("/proc/self/mem"):
        torch.load("/proc/self/mem", weights_only=False)
    with pytest.raises(FileNotFoundError) as missing, naming(tmp_path / "none"):
        torch.load(tmp_path / "none", weights_only=False)
    assert not isinstance(missing.value, FuyouStorageError)
    torch.save(torch.rand(3000), path := tmp_path / "cut")
    os.truncate(path, 4096)
    with pytest.raises(FuyouStorageError, match=r"reading a checkpoint failed.*cut"), naming(path):
        torch.load(path, mmap=True, weights_only=False)
    with pytest.raises(FuyouStorageError, match=r"reading a checkpoint failed.*Input/output error.*cut"), naming(path):
        zipfile.ZipFile(path)
    with pytest.raises(FuyouStorageError, match=r"No space left.*/a/b"), naming("/a/b"):
        zipfile.ZipFile(Full())
    said = "unable to open file </a/b> in read-only mode: No space left on device (28)"
    with pytest.raises(FuyouStorageError, match=r"No space left.*/a/b") as full, naming("/a/b"):
        raise RuntimeError(said)
    assert full.value.errno == 28
    with pytest.raises(RuntimeError, match="own") as own, naming(path):
        raise RuntimeError("an object's own")
    assert not isinstance(own.value, FuyouStorageError)


@pytest.mark.parametrize("num_left", [0, 5000])
def test_a_file_that_became_shorter_is_named_where_its_sums_are_looked_up(num_left: int, tmp_path: Path) -> None:
    """After it was mapped: what is read of it then is the list of what is in it."""
    torch.save(torch.rand(3000), path := tmp_path / "cut")
    place = Place(str(path), path.stat().st_ino, 64)
    os.truncate(path, num_left)
    with pytest.raises(FuyouStorageError, match=r"reading a checkpoint failed.*cut"):
        FileSums().add(place, torch.rand(10))
    with pytest.raises(FuyouStorageError, match=r"reading a checkpoint failed.*cut"):
        compare_file(str(path), with_tensors=True)
