# SPDX-License-Identifier: Apache-2.0
"""Going on from the commit of an earlier run, where it lies.

[Note: what a resume reads]
Nothing but P32 of chunks whose P16 is in memory, to make that of it. The record's checksums are handed to the pipeline
and the I/O engine; whoever reads a state or P16 first, an update as a rule, compares it. What differs fails the
pipeline, so nothing made of it is committed, and the slots of the commit that was taken over are still those of that
commit: updates write into the others. P16 has one number a chunk and is read by parameters, so a chunk is compared when
its last page is read ([Note: pages that an earlier run wrote] in csrc/io/page_sums.h). What a step has used of a chunk
in part (experts) is made good in ``apply()``, before anything becomes final.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.optimizer.chunk_values import ChunkValues
from ds_fuyou.storage.store import CommitRecord

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["TakenOver"]

_UNKNOWN = 2**64 - 1  # the digest of P16 of which nothing is known


class TakenOver:
    """What a run has of an earlier one's states, and has not compared yet: nothing, if it began by itself."""

    def __init__(self, core: OutOfCoreOptimizer) -> None:
        self._core = core
        self.unread: set[int] = set()
        """Chunks whose P16 was taken over on storage, and may not have been read yet."""

    def take(self, commit: CommitRecord, values: ChunkValues, progress: Callable[[int], None]) -> None:
        """Hands a commit's slots to the pipeline, and makes P16 in memory.

        Raises:
            FuyouChecksumError: P32 that was read is not what was written.
        """
        core, meta = self._core, cast("Mapping[str, Any]", commit.meta)
        chunks, checksum, in_memory = core.layout.chunks, core.options.checksum, core.place.residency.params
        sums = [*struct.iter_unpack("<2Q", bytes.fromhex(meta["state_sums"]))]
        digests = [number for (number,) in struct.iter_unpack("<Q", bytes.fromhex(meta.get("param_digests", "")))]
        untouched = set(meta["without_moments"])
        for index in range(len(chunks)):
            if index not in untouched:
                core.states.updated(index)
            core.pipeline.take_over(
                index,
                has_moments=index not in untouched,
                sums=sums[index] if sums else None,
                param_digest=digests[index] if digests else _UNKNOWN,
            )
        if checksum:
            self.unread = {index for index in range(len(digests)) if not in_memory[index]}
        lacks_sums = checksum and not sums
        to_read = [chunk.index for chunk in chunks if lacks_sums or in_memory[chunk.index]]
        progress(core.layout.numel - sum(chunks[index].numel for index in to_read))
        for chunk, parts in core.states.read_all(to_read, with_moments=lacks_sums):
            if lacks_sums:
                has_moments = chunk.index not in untouched
                core.pipeline.replace_state(chunk.index, parts[0].data_ptr(), has_moments=has_moments)
            if in_memory[chunk.index]:
                values.put_params(chunk, parts[0].to(core.options.param_dtype))
            progress(chunk.numel)

    def compare_rest(self) -> None:
        """Of P16 that was taken over, the rest of chunks that were read in part."""
        for index in self._core.pipeline.half_read_params() if self.unread else ():
            self._compare(index)

    def compare_before_edit(self, chunks: Iterable[int]) -> None:
        """P16 of these chunks is about to be edited in place: what they hold besides must be known."""
        for index in self.unread.intersection(chunks):
            self._compare(index)
            self.unread.discard(index)

    def written(self, chunks: Iterable[int]) -> None:
        """A step writes them whole."""
        self.unread.difference_update(chunks)

    def _compare(self, index: int) -> None:
        """Reads all P16 of a chunk on storage."""
        core = self._core
        extents = core.place.param_extents(index, core.slot(index))
        memory = aligned_tensor(sum(extent.num_bytes for extent in extents))
        core.io.read(extents, memory, f"reading P16 of chunk {index}").wait()
