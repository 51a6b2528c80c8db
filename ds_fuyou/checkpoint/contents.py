# SPDX-License-Identifier: Apache-2.0
"""What a rank's state files hold, taken out of their description and commit record, every value looked at."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_fuyou.errors import shown
from ds_fuyou.optimizer.placement import state_region
from ds_fuyou.state_layout import FP32, WHOLE, StateLayout, layout_of
from ds_fuyou.storage.records import typed
from ds_fuyou.storage.types import CommitRecord, RegionSpec

__all__ = ["Contents", "check_resumable", "optimizer_step_of", "state_sums_of"]


@dataclass(frozen=True)
class Contents:
    """``params``: (name, shape of the whole, sub-group, begin, end) of this rank's part; ``chunks``: (sub-group, begin,
    end); ``param_begins``: by chunk, where parameters begin in it, counted from its begin; ``layout``: what the blocks
    of states have in common."""

    params: list[tuple[str, list[int], int, int, int]]
    chunks: list[tuple[int, int, int]]
    param_begins: list[list[int]]
    layout: StateLayout

    @classmethod
    def parse(cls, contents: Mapping[str, Any], regions: Mapping[str, RegionSpec]) -> Contents:
        """Raises what :func:`ds_fuyou.storage.records.well_formed` turns into an error of the file."""
        params = [_param(entry) for entry in typed(contents["params"], list)]
        chunks = [_chunk(entry) for entry in typed(contents["chunks"], list)]
        begins = _param_begins(params, chunks)
        found = cls(params, chunks, begins, _layout(contents.get("states"), chunks, begins, regions))
        if not found.params or not found.chunks:
            raise ValueError("no parameter, or no chunk")
        if len({name for name, *_ in found.params}) != len(found.params):
            raise ValueError("two parameters have one name")
        for name, _, sub_group, begin, end in found.params:
            held = sum(max(0, min(end, e) - max(begin, b)) for group, b, e in found.chunks if group == sub_group)
            if held != end - begin:
                raise ValueError(f"{held} elements of {name[:60]} lie in chunks, not {end - begin}")
        return found


def _param_begins(
    params: list[tuple[str, list[int], int, int, int]], chunks: list[tuple[int, int, int]]
) -> list[list[int]]:
    by_group: dict[int, list[int]] = {}
    for _, _, sub_group, begin, _ in sorted(params, key=lambda param: param[3]):
        by_group.setdefault(sub_group, []).append(begin)
    found = []
    for sub_group, begin, end in chunks:
        all_begins = by_group.get(sub_group, [])
        inside = all_begins[bisect_right(all_begins, begin) : bisect_left(all_begins, end)]
        found.append([at - begin for at in inside])
    return found


def _layout(
    said: Any, chunks: list[tuple[int, int, int]], begins: list[list[int]], regions: Mapping[str, RegionSpec]
) -> StateLayout:
    """As the contents name it. Those of version 1 do not: then by the sizes of the regions, if there are any."""
    found = (regions.get(state_region(index)) for index in range(len(chunks)))
    sizes = {index: region.num_bytes for index, region in enumerate(found) if region is not None}
    numels = {index: chunks[index][2] - chunks[index][1] for index in sizes}
    if said is not None:
        moments = typed(said.get("moment_type", FP32), str)
        layout = layout_of(typed(said["masters"], str), typed(said["moments"], int), moments)
        if said.get("version") != layout.version:
            raise ValueError(f"states of layout {shown(said, 60)}: another version of ds_fuyou reads that")
        if said != layout.as_json() or any(sizes[i] != layout.of(begins[i]).num_bytes(numels[i]) for i in sizes):
            raise ValueError(f"states of layout {shown(said, 60)}, which their regions have not")
        return layout
    for num_moments in (2, 1, 0):
        layout = StateLayout(WHOLE, num_moments)
        if all(layout.num_bytes(numels[index]) <= num_bytes for index, num_bytes in sizes.items()):
            return layout
    raise ValueError("regions of states are smaller than P32 of their chunks")


def _param(entry: Any) -> tuple[str, list[int], int, int, int]:
    name, shape, sub_group, begin, end = typed(entry, list)
    sizes = [typed(size, int) for size in typed(shape, list)]
    if len(sizes) > 64 or any(size < 0 for size in sizes) or math.prod(sizes) >= 2**60:
        raise ValueError(f"{str(name)[:60]} has shape {sizes[:8]}")
    return (typed(name, str), sizes, *_range(sub_group, begin, end))


def _chunk(entry: Any) -> tuple[int, int, int]:
    return _range(*typed(entry, list))


def _range(sub_group: Any, begin: Any, end: Any) -> tuple[int, int, int]:
    found = typed(sub_group, int), typed(begin, int), typed(end, int)
    if not (found[0] >= 0 and 0 <= found[1] <= found[2]):
        raise ValueError(f"{found} is no part of a sub-group")
    return found


def optimizer_step_of(commit: CommitRecord) -> int:
    return typed(commit.meta["optimizer_step"], int)


def state_sums_of(commit: CommitRecord, num_chunks: int) -> list[tuple[int, int]] | None:
    """Checksums of every chunk's P32 and moments, see :class:`ds_fuyou.optimizer.commit.Committer`; None if none were
    made."""
    written = typed(commit.meta["state_sums"], str)
    if not written:
        return None
    try:
        numbers = struct.unpack(f"<{2 * num_chunks}Q", bytes.fromhex(written))
    except struct.error as error:
        raise ValueError(f"checksums of {num_chunks} chunks: {error}") from error
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def check_resumable(commit: CommitRecord, contents: Mapping[str, Any]) -> None:
    """What a run that goes on from a commit takes from it beside the training's state, which is pickled. Raises as
    :meth:`Contents.parse`.
    """
    meta, num_chunks = commit.meta, len(typed(contents["chunks"], list))
    typed(meta["edition"], int)
    state_sums_of(commit, num_chunks)
    num_digest_bytes = len(bytes.fromhex(typed(meta.get("param_digests", ""), str)))
    if num_digest_bytes not in (0, 8 * num_chunks):
        raise ValueError(f"{num_digest_bytes} bytes of digests of {num_chunks} chunks")
    without = [typed(index, int) for index in typed(meta["without_moments"], list)]
    if not all(0 <= index < num_chunks for index in without):
        raise ValueError(f"chunks without moments, of {num_chunks}: {shown(without, 60)}")
    names = {name for name, *_ in typed(contents["params"], list)}
    missed = typed(meta["missed_steps"], dict)
    if not missed.keys() <= names or any(typed(number, int) < 0 for number in missed.values()):
        raise ValueError(f"missed steps by parameter: {shown(missed, 60)}")
    num_steps = 0
    for entry in typed(meta["clock"], list):
        number, betas = typed(entry, list)
        num_steps += typed(number, int)
        for pair in typed(betas, list):
            _, _ = (typed(beta, float) for beta in typed(pair, list))
    if num_steps != optimizer_step_of(commit):
        raise ValueError(f"a history of {num_steps} steps, of {optimizer_step_of(commit)}")
