# SPDX-License-Identifier: Apache-2.0
"""Chunks cover every element once, are cut where kernels do not notice, and know their deadlines."""

from __future__ import annotations

import random

import pytest

from ds_fuyou.optimizer.layout import CUT_ELEMENTS, FlatLayout, LayoutLimits, build_layout

LIMITS = LayoutLimits(max_elements=8 * CUT_ELEMENTS, min_elements=2 * CUT_ELEMENTS)


def random_model(seed: int) -> list[list[tuple[str, str, int, int]]]:
    chosen = random.Random(seed)
    groups, position = [], 0
    for group in range(chosen.randint(1, 3)):
        entries = []
        for block in range(chosen.randint(1, 6)):
            for part in range(chosen.randint(1, 4)):
                numel = chosen.choice([1, 7, 128, 2047, 2048, 5000, 70_001])
                entries.append((f"{group}.{block}.{part}", f"block{block}", numel, position))
                position += 1
        groups.append(entries)
    return groups


def check(layout: FlatLayout, groups: list[list[tuple[str, str, int, int]]]) -> None:
    for group, entries in enumerate(groups):
        numel = sum(entry[2] for entry in entries)
        assert layout.sub_group_numels[group] == numel
        chunks = [chunk for chunk in layout.chunks if chunk.sub_group == group]
        assert [c.begin for c in chunks] == [0, *(c.end for c in chunks[:-1])]
        assert chunks[-1].end == numel
        assert all(c.begin % CUT_ELEMENTS == 0 and 0 < c.numel <= LIMITS.max_elements for c in chunks)
    for chunk in layout.chunks:
        spans = [layout.params[i] for i in chunk.params]
        assert all(s.begin < chunk.end and chunk.begin < s.end for s in spans)
        assert min(s.begin for s in spans) <= chunk.begin
        assert max(s.end for s in spans) >= chunk.end
    for span in layout.params:
        held = layout.chunks_of_param[span.index]
        assert held == tuple(c.index for c in layout.chunks if span.index in c.params)
        assert layout.chunks[held[0]].begin <= span.begin
        assert layout.chunks[held[-1]].end >= span.end


@pytest.mark.parametrize("seed", range(30))
def test_every_element_is_in_one_chunk(seed: int) -> None:
    groups = random_model(seed)
    check(build_layout(groups, LIMITS), groups)


def test_a_chunk_begins_with_its_block_where_the_block_is_large_enough() -> None:
    large = 3 * CUT_ELEMENTS
    layout = build_layout([[("a", "first", large, 0), ("b", "second", large, 1)]], LIMITS)
    assert [(c.begin, c.end, c.position) for c in layout.chunks] == [(0, large, 0), (large, 2 * large, 1)]


def test_a_cut_near_a_bound_is_rounded_up() -> None:
    layout = build_layout([[("a", "first", 3 * CUT_ELEMENTS + 1, 0), ("b", "second", 4 * CUT_ELEMENTS, 1)]], LIMITS)
    assert layout.chunks[0].end == 4 * CUT_ELEMENTS
    assert layout.chunks[0].params == (0, 1)
    assert layout.chunks[0].position == 0


def test_small_blocks_are_merged_and_large_ones_split() -> None:
    small = [(f"s{i}", f"block{i}", 100, i) for i in range(5)]
    assert len(build_layout([small], LIMITS).chunks) == 1
    huge = build_layout([[("tokens", "tokens", 100 * CUT_ELEMENTS + 3, 0)]], LIMITS)
    assert len(huge.chunks) == 13
    assert huge.chunks_of_param[0] == tuple(range(13))


def test_sub_groups_never_share_a_chunk() -> None:
    layout = build_layout([[("a", "x", 10, 0)], [("b", "x", 10, 1)]], LIMITS)
    assert [(c.sub_group, c.begin, c.end) for c in layout.chunks] == [(0, 0, 10), (1, 0, 10)]
    assert layout.numel == 20
