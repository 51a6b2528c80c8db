# SPDX-License-Identifier: Apache-2.0
"""Which gradients share a message: stock's buckets, or a block's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ds_fuyou.zero.gradient_cuts import BlockCut, BucketCut, GradientCut, Messages, why_updates_wait

NAMES = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "c"}


def param(ds_id: int, numel: int, dtype: torch.dtype = torch.bfloat16, group: str = "all") -> Any:
    return SimpleNamespace(ds_id=ds_id, ds_numel=numel, dtype=dtype, group=group)


def messages_of(cut: GradientCut, params: list[Any]) -> list[list[int]]:
    """What is sent, as lists of ``ds_id``, when these gradients come in order and backward ends."""
    sent = []
    for each in params:
        assert each not in cut
        sent.append(cut.displaced_by(each))
        cut.add(each)
        assert each in cut
    sent += cut.take_all()
    assert not any(each in cut for each in params)
    return [[each.ds_id for each in message] for message in sent if message]


def messages(most_numel: int) -> Messages:
    return Messages(most_numel, lambda each: each.dtype, lambda each: each.group)


def test_a_bucket_goes_when_the_next_parameter_does_not_fit() -> None:
    params = [param(5, 4), param(4, 4), param(3, 2), param(2, 1), param(1, 30), param(0, 10)]
    assert messages_of(BucketCut(messages(10)), params) == [[5, 4, 3], [2], [1], [0]]
    assert messages_of(BucketCut(messages(100)), params) == [[5, 4, 3, 2, 1, 0]]


def test_each_dtype_has_a_bucket_and_a_group_has_it_for_itself() -> None:
    wide = torch.float32
    params = [param(5, 4), param(4, 9, wide), param(3, 4), param(2, 4, group="some"), param(1, 2, wide), param(0, 1)]
    assert messages_of(BucketCut(messages(10)), params) == [[5, 3], [4], [2], [0], [1]]


def test_what_is_not_ready_makes_room_and_takes_none() -> None:
    """A gradient that comes in parts: stock sends the bucket when the first part does not fit."""
    cut = BucketCut(messages(10))
    cut.add(param(5, 6))
    part = param(4, 6)
    assert [each.ds_id for each in cut.displaced_by(part)] == [5]
    assert part not in cut
    assert cut.displaced_by(part) == []
    assert cut.take_all() == []


def test_a_block_goes_when_the_next_begins_or_a_message_is_full() -> None:
    params = [param(5, 4), param(4, 4), param(3, 2), param(2, 4), param(1, 30), param(0, 1, torch.float32)]
    assert messages_of(BlockCut(messages(10), NAMES), params) == [[5], [4, 3], [2], [1], [0]]


def test_buckets_that_leave_backward_nothing_are_told_with_both_ways_out() -> None:
    assert why_updates_wait(1_000, 4_001) is None
    said = why_updates_wait(500_000_000, 124_000)
    assert said is not None
    assert "set reduce_bucket_size to 15500 or less" in said
    assert '"gradients": {"reduce_by": "block"}' in said
