# SPDX-License-Identifier: Apache-2.0
"""fp32 weights out of the state files that a run left: kept (``keep_state``), or there because it was killed.

The state of the last committed step is whole on storage (two slots, see storage/store.py). It is not a checkpoint:
learning rate, loss scale, the place in the data and what was in host memory are gone. So what is taken out is P32,
parameter by parameter, as a state dictionary that any script can load. No DeepSpeed, and no model-sized memory. Every
chunk is compared with the checksum that the commit record holds of it.
"""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from ds_fuyou.checkpoint import atomic, streamed_file
from ds_fuyou.errors import FuyouChecksumError, FuyouStateError, FuyouStorageError
from ds_fuyou.host.memory import aligned_tensor, round_up_to_page
from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer.layout import FlatLayout
from ds_fuyou.optimizer.placement import state_region
from ds_fuyou.storage.store import CommitRecord, Extent, JsonValue, RunIdentity, SlotStore
from ds_fuyou.storage.store_files import read_directory_manifest

__all__ = ["Recovered", "contents_of", "recover"]


@dataclass(frozen=True)
class Recovered:
    """What was taken out.

    Attributes:
        step: optimizer steps applied to the weights, those before a resume included, skipped ones not.
        num_params: tensors in the file.
        verified: every chunk was compared with its checksum; False for a run with ``checksum: false``.
    """

    step: int
    num_params: int
    verified: bool


def contents_of(layout: FlatLayout, shapes: Sequence[Sequence[int]]) -> dict[str, JsonValue]:
    """What a rank's files hold: ``shapes`` are those of the whole parameters, by index."""
    params: list[JsonValue] = [
        [span.name, list(shapes[span.index]), span.sub_group, span.begin, span.end] for span in layout.params
    ]
    chunks: list[JsonValue] = [[chunk.sub_group, chunk.begin, chunk.end] for chunk in layout.chunks]
    return {"params": params, "chunks": chunks}


def recover(directories: Sequence[Path], out: Path) -> Recovered:
    """Writes ``{name: fp32 tensor}`` of the trainable parameters to ``out``, which appears whole or not at all.

    Args:
        directories: a state directory (``PATH/ds_fuyou/RUN-rankN``) of every rank; those in other paths are found.

    Raises:
        FuyouStateError: a rank is missing or of another run, a process holds the files, ranks committed different
            steps, no commit stands, there is one slot a chunk, or P32 of some chunks was in host memory.
        FuyouStorageError: a directory or file is missing or cannot be read.
        FuyouChecksumError: manifest or commit record is torn, or a chunk is not what the run wrote.
    """
    with ExitStack() as opened:
        ranks = _open_ranks(directories, opened)
        step = _common_step(ranks)
        stand_ins = streamed_file.StandIns()
        state = {}
        for index, (name, shape, *_) in enumerate(ranks[0].params):
            pieces = _Param(ranks, index, math.prod(shape))
            state[name] = stand_ins.add(shape, torch.float32, pieces)
        part = out.with_name(f".{out.name}.part-{os.getpid()}")
        try:
            streamed_file.save(state, part, stand_ins)
            os.replace(part, out)
            atomic.flush(out.parent)  # `fuyou clean` may come next
        finally:
            part.unlink(missing_ok=True)
    return Recovered(step, len(state), all(rank.sums is not None for rank in ranks))


class _Rank:
    """One rank's files and what is in them."""

    def __init__(self, store: SlotStore, identity: RunIdentity) -> None:
        self.store, self.identity, self.rank = store, identity, identity.rank
        contents = store.contents()
        self.params: list[tuple[str, list[int], int, int, int]] = [(*entry,) for entry in contents["params"]]
        self.chunks: list[tuple[int, int, int]] = [(*entry,) for entry in contents["chunks"]]
        self.commits = {commit.key: commit for commit in self._checked_commits()}
        self.take(next(iter(self.commits)))
        self._last_read: tuple[int, torch.Tensor] | None = None

    def take(self, key: tuple[int, ...]) -> None:
        """Which of :attr:`commits` is read from now on."""
        self.commit = self.commits[key]
        self.optimizer_step = cast("int", self.commit.meta["optimizer_step"])
        self.sums = _param_sums(cast("str", self.commit.meta["state_sums"]), len(self.chunks))

    def _checked_commits(self) -> Sequence[CommitRecord]:
        where, commits = self.store.directories[0], self.store.commits()
        if not commits:
            raise FuyouStateError(
                f"{where}: the run ended before its states were written, or while they were replaced (a checkpoint "
                f"loaded, safe_set_full_*) and no step came after; use the last checkpoint"
            )
        missing = sum(state_region(index) not in self.store.regions for index in range(len(self.chunks)))
        if missing:
            raise FuyouStateError(
                f"{where}: P32 of {missing} of {len(self.chunks)} chunks was in host memory and is lost; use the last "
                f'checkpoint. To be able to recover, set optimizer.tier to "nvme"'
            )
        if not commits[0].intact:
            raise FuyouStateError(
                f"{where}: the run had one slot a chunk, so its files may be a mixture of two steps; use the last "
                f"checkpoint"
            )
        return commits

    def values(self, index: int) -> Iterator[torch.Tensor]:
        """P32 of this rank's part of a parameter, chunk by chunk."""
        _, _, sub_group, begin, end = self.params[index]
        for number, (group, chunk_begin, chunk_end) in enumerate(self.chunks):
            low, high = max(begin, chunk_begin), min(end, chunk_end)
            if group == sub_group and low < high:
                yield self._read(number)[low - chunk_begin : high - chunk_begin]

    def _read(self, chunk: int) -> torch.Tensor:
        """P32 of a chunk, compared with its checksum. Parameters that share a chunk come one after another."""
        if self._last_read is None or self._last_read[0] != chunk:
            self._last_read = None
            _, begin, end = self.chunks[chunk]
            memory = aligned_tensor(round_up_to_page((end - begin) * 4))
            name = state_region(chunk)
            extents = self.store.range_extents(name, self.commit.slots[name], 0, len(memory))
            self._fill(memoryview(memory.numpy()), extents, f"reading P32 of chunk {chunk}")
            values = memory.view(torch.float32)[: end - begin]
            if self.sums is not None and load_core().place_sum(values.data_ptr(), len(values), 0) != self.sums[chunk]:
                message = f"P32 of chunk {chunk} is not what the run wrote; the disk or its path is faulty"
                where = extents[0]
                path = str(self.store.paths_of_fd(where.fd))
                raise FuyouChecksumError(errno.EBADMSG, f"{message}; use the last checkpoint", path, where.offset)
            self._last_read = (chunk, values)
        return self._last_read[1]

    def _fill(self, view: memoryview, extents: Sequence[Extent], what: str) -> None:
        at = 0
        for extent in extents:
            path, done = str(self.store.paths_of_fd(extent.fd)), 0
            while done < extent.num_bytes:
                offset = extent.offset + done
                try:
                    taken = os.preadv(extent.fd, [view[at + done : at + extent.num_bytes]], offset)
                except OSError as error:
                    raise FuyouStorageError(error.errno or errno.EIO, f"{what} failed", path, offset) from error
                if taken == 0:
                    raise FuyouStorageError(errno.ENODATA, f"{what} failed: the file ends there", path, offset)
                done += taken
            at += extent.num_bytes


def _param_sums(written: str, num_chunks: int) -> list[int] | None:
    """The checksum of every chunk's P32 out of a commit record, see :class:`ds_fuyou.optimizer.commit.Committer`."""
    if not written:
        return None
    numbers = struct.unpack(f"<{2 * num_chunks}Q", bytes.fromhex(written))
    return list(numbers[::2])


class _Param:
    """Pieces of one parameter over all ranks; the last rank's padding is left out."""

    def __init__(self, ranks: Sequence[_Rank], index: int, numel: int) -> None:
        self._ranks, self._index, self._numel = ranks, index, numel

    def __call__(self) -> Iterator[tuple[int, torch.Tensor]]:
        at = 0
        for rank in self._ranks:
            for values in rank.values(self._index):
                kept = values[: self._numel - at]
                if kept.numel():
                    yield at, kept
                at += kept.numel()


def _open_ranks(directories: Sequence[Path], opened: ExitStack) -> list[_Rank]:
    """All ranks of one run, in order."""
    found: dict[str, _Rank] = {}
    for directory in directories:
        manifest = read_directory_manifest(directory)
        if manifest.store_id in found:
            continue
        store = SlotStore.open([Path(path) for path in manifest.directories], None)
        opened.callback(store.close, remove=False)
        found[manifest.store_id] = _Rank(store, manifest.identity)
    ranks = sorted(found.values(), key=lambda rank: rank.rank)
    if not ranks:
        raise FuyouStateError("at least one state directory must be named")
    first = ranks[0].identity
    if [rank.identity for rank in ranks] != [replace(first, rank=rank) for rank in range(first.world_size)]:
        raise FuyouStateError(
            f"state directories of all {first.world_size} ranks of one run must be named, found "
            f"{', '.join(rank.identity.directory_name for rank in ranks)}"
        )
    return ranks


def _common_step(ranks: Sequence[_Rank]) -> int:
    """Has every rank take the newest commit that all have made; see [Note: one generation of all ranks] there."""
    common = set.intersection(*(set(rank.commits) for rank in ranks))
    if not common:
        said = ", ".join(f"rank {rank.rank}: step {rank.optimizer_step}" for rank in ranks)
        raise FuyouStateError(
            f"the ranks have no commit in common ({said}): their states were being replaced (a checkpoint loaded, "
            f"safe_set_full_*), or an older ds_fuyou trained them; use the last checkpoint"
        )
    for rank in ranks:
        rank.take(max(common))
    return ranks[0].optimizer_step
