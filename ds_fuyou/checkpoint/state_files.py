# SPDX-License-Identifier: Apache-2.0
"""State files that a run left, read without an engine: kept (``keep_state``), or there because it was killed.

The states of the last committed step are whole on storage (two slots, see storage/store.py). They are read chunk by
chunk, and each is compared with the checksum that the commit record holds of it. No DeepSpeed, no model-sized memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ds_fuyou.checkpoint.contents import Contents, optimizer_step_of, state_sums_of
from ds_fuyou.errors import FuyouChecksumError, FuyouStateError, FuyouStorageError
from ds_fuyou.host.memory import aligned_tensor, round_up_to_page
from ds_fuyou.ops.core import load_core
from ds_fuyou.optimizer.coded_states import decode
from ds_fuyou.optimizer.layout import FlatLayout
from ds_fuyou.optimizer.placement import param_region, state_region
from ds_fuyou.state_layout import StateLayout
from ds_fuyou.storage.records import COMMIT_NAME, CONTENTS_NAME, typed, well_formed
from ds_fuyou.storage.store import CommitRecord, Extent, JsonValue, RunIdentity, SlotStore
from ds_fuyou.storage.store_files import read_directory_manifest

__all__ = ["RankFiles", "contents_of", "opened_ranks"]

_SECOND_MOMENT_WEIGHT = 0x9E3779B97F4A7C15  # as csrc/pipeline/state_block.cpp weighs its sum
_MODULUS = 1 << 64


def contents_of(
    layout: FlatLayout, shapes: Sequence[Sequence[int]], states: StateLayout | None = None
) -> dict[str, JsonValue]:
    """What a rank's files hold: ``shapes`` are those of the whole parameters, by index; ``states``: how blocks of
    states are laid out, fp32 without.
    """
    params: list[JsonValue] = [
        [span.name, list(shapes[span.index]), span.sub_group, span.begin, span.end] for span in layout.params
    ]
    chunks: list[JsonValue] = [[chunk.sub_group, chunk.begin, chunk.end] for chunk in layout.chunks]
    found: dict[str, JsonValue] = {"params": params, "chunks": chunks}
    said = None if states is None else states.said
    return found if said is None else {**found, "states": said}


class RankFiles:
    """One rank's files and what is in them.

    Attributes:
        params: ``(name, shape of the whole, sub-group, begin, end)``.
        chunks: ``(sub-group, begin, end)``.
        commit: which of :attr:`commits` is read.
        optimizer_step: steps applied to the states, those before a resume included, skipped ones not.
        is_verified: every read is compared with a checksum; False for a run with ``checksum: false``.
    """

    def __init__(self, store: SlotStore, identity: RunIdentity) -> None:
        self.store, self.identity, self.rank = store, identity, identity.rank
        contents = store.contents()
        with well_formed(store.directories[0] / CONTENTS_NAME):
            parsed = Contents.parse(contents, store.regions)
        self.params, self.chunks, self.layout = parsed.params, parsed.chunks, parsed.layout
        self._param_begins = parsed.param_begins
        self.commits = {commit.key: commit for commit in self._checked_commits()}
        self.take(next(iter(self.commits)))
        self._last_read: tuple[int, torch.Tensor] | None = None

    def take(self, key: tuple[int, ...]) -> None:
        """Which of :attr:`commits` is read from now on."""
        self.commit = self.commits[key]
        with well_formed(self.store.directories[0] / COMMIT_NAME):
            for index in range(len(self.chunks)):
                typed(self.commit.slots[state_region(index)], int)
            self.optimizer_step = optimizer_step_of(self.commit)
            self._sums = state_sums_of(self.commit, len(self.chunks))
        self.is_verified = self._sums is not None

    @property
    def meta(self) -> Any:
        return self.commit.meta

    @property
    def num_moments(self) -> int:
        return self.layout.num_moments

    @property
    def sub_group_numels(self) -> list[int]:
        """Elements of this rank's part of every sub-group."""
        ends: dict[int, int] = {}
        for sub_group, _, end in self.chunks:
            ends[sub_group] = max(end, ends.get(sub_group, 0))
        return [ends[sub_group] for sub_group in sorted(ends)]

    def _checked_commits(self) -> Sequence[CommitRecord]:
        where, commits = self.store.directories[0], self.store.commits()
        if not commits:
            raise FuyouStateError(
                f"{where}: the run ended before its states were written, or while they were replaced (a checkpoint "
                f"loaded, safe_set_full_*) and no step came after; use the last checkpoint"
            )
        if commits[0].lacks_states:
            missing: Any = commits[0].meta["states_in_memory"]
        else:
            regions = self.store.regions
            missing = sum(state_region(index) not in regions for index in range(len(self.chunks)))
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
                if self._last_read is None or self._last_read[0] != number:  # neighbours share a chunk
                    self._last_read = None
                    self._last_read = number, self.parts(number, 1)[0]
                yield self._last_read[1][low - chunk_begin : high - chunk_begin]

    def parts(self, chunk: int, num_parts: int) -> list[torch.Tensor]:
        """The first of ``[P32, moments...]`` of a chunk, fp32, 1-D, compared with their checksums: P32 alone, or all.
        Moments that no update has touched are zero, whatever lies there.
        """
        _, begin, end = self.chunks[chunk]
        part_bytes = round_up_to_page((end - begin) * 4)
        is_untouched = num_parts > 1 and chunk in self.meta["without_moments"]
        num_read = 1 if is_untouched else num_parts
        memory = aligned_tensor(num_parts * part_bytes)
        what = "P32" if num_parts == 1 else "the state"
        is_right = self._read_block(chunk, memory[: num_read * part_bytes], f"reading {what} of chunk {chunk}")
        memory[num_read * part_bytes :].zero_()
        values = [memory[i * part_bytes :].view(torch.float32)[: end - begin] for i in range(num_parts)]
        if not is_right or (self._sums is not None and self._sums[chunk][: min(num_parts, 2)] != _sums_of(values)):
            message = f"{what} of chunk {chunk} is not what the run wrote; the disk or its path is faulty"
            where = self.store.extents(state_region(chunk), self.commit.slots[state_region(chunk)])[0]
            path = str(self.store.paths_of_fd(where.fd))
            raise FuyouChecksumError(errno.EBADMSG, f"{message}; use the last checkpoint", path, where.offset)
        return values

    def _read_block(self, chunk: int, state: torch.Tensor, what: str) -> bool:
        """The begin of a whole block. False if P32 cannot be put together from what is there."""
        _, begin, end = self.chunks[chunk]
        name, numel = state_region(chunk), end - begin
        slot = self.commit.slots[name]
        if self.layout.is_whole:
            self._fill(state, self.store.range_extents(name, slot, 0, len(state)), what)
            return True
        has_moments = len(state) > round_up_to_page(numel * 4)
        layout = self.layout.of(self._param_begins[chunk]) if has_moments else self.layout.master_alone
        extents = self.store.range_extents(name, slot, 0, layout.num_bytes(numel))
        params = param_region(chunk)
        if layout.is_split and params in self.store.regions:
            extents += self.store.extents(params, slot)
        block = aligned_tensor(sum(extent.num_bytes for extent in extents))
        self._fill(block, extents, what)
        return decode(layout, numel, block, state)

    def _fill(self, memory: torch.Tensor, extents: Sequence[Extent], what: str) -> None:
        view, at = memoryview(memory.numpy()), 0
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


def _sums_of(parts: Sequence[torch.Tensor]) -> tuple[int, ...]:
    first, *moments = (int(load_core().place_sum(values.data_ptr(), len(values), 0)) for values in parts)
    weights = (1, _SECOND_MOMENT_WEIGHT)
    return (first, *([sum(map(int.__mul__, moments, weights)) % _MODULUS] if moments else []))


@contextmanager
def opened_ranks(directories: Sequence[Path]) -> Iterator[list[RankFiles]]:
    """The files of all ranks of one run, in order, at the newest commit that all have made.

    Args:
        directories: a state directory (``PATH/ds_fuyou/RUN-rankN``) of every rank; those in other paths are found. Of a
            rank whose directories were copied to elsewhere all are named.

    Raises:
        FuyouStateError: a rank is missing or of another run, a process holds the files, ranks committed different
            steps, no commit stands, there is one slot a chunk, or P32 of some chunks was in host memory.
        FuyouStorageError: a directory or file is missing or cannot be read.
        FuyouChecksumError: manifest or commit record is torn.
    """
    with ExitStack() as opened:
        ranks = _open_ranks(directories, opened)
        _take_common_step(ranks)
        yield ranks


def _open_ranks(directories: Sequence[Path], opened: ExitStack) -> list[RankFiles]:
    found: dict[str, tuple[RunIdentity, list[Path]]] = {}
    for directory in directories:
        manifest = read_directory_manifest(directory)
        written = [Path(path) for path in manifest.directories]
        _, places = found.setdefault(manifest.store_id, (manifest.identity, written))
        places[manifest.index] = Path(os.path.abspath(directory))
    ranks = []
    for identity, places in found.values():
        store = SlotStore.open(places, None)
        opened.callback(store.close, remove=False)
        ranks.append(RankFiles(store, identity))
    ranks.sort(key=lambda rank: rank.rank)
    if not ranks:
        raise FuyouStateError("at least one state directory must be named")
    first = ranks[0].identity
    wanted = [replace(first, rank=rank) for rank in range(min(first.world_size, len(ranks) + 1))]
    if [rank.identity for rank in ranks] != wanted:
        raise FuyouStateError(
            f"state directories of all {first.world_size} ranks of one run must be named, found "
            f"{', '.join(rank.identity.directory_name for rank in ranks)}"
        )
    return ranks


def _take_common_step(ranks: Sequence[RankFiles]) -> None:
    """See [Note: one generation of all ranks] in optimizer/commit.py."""
    common = set.intersection(*(set(rank.commits) for rank in ranks))
    if not common:
        said = ", ".join(f"rank {rank.rank}: step {rank.optimizer_step}" for rank in ranks)
        raise FuyouStateError(
            f"the ranks have no commit in common ({said}): their states were being replaced (a checkpoint loaded, "
            f"safe_set_full_*), or an older ds_fuyou trained them; use the last checkpoint"
        )
    for rank in ranks:
        rank.take(max(common))
