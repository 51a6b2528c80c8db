# SPDX-License-Identifier: Apache-2.0
"""What fails on one rank is an error of all, in place of a wait."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.zero import agreement
from ds_fuyou.zero.agreement import all_or_none, least

FAILED = "OSError: no such disk"
Said = list[tuple[int, str] | None]


@pytest.fixture(params=[[None, None], [None, (1, FAILED)]])
def said(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Said:
    """Of two ranks; this is the first, and says what it has to say first."""
    found: Said = list(request.param)

    def of_every_rank(mine: tuple[int, str] | None, group: object) -> Said:
        found[0] = mine
        return found

    monkeypatch.setattr(agreement.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(agreement, "of_every_rank", of_every_rank)
    return found


def test_another_ranks_failure_is_raised_here(said: Said) -> None:
    if said[1] is None:
        with all_or_none("find its disk"):
            pass
        return
    told = f"rank 1 could not find its disk, so this rank .*: {FAILED}"
    with pytest.raises(FuyouStateError, match=told), all_or_none("find its disk"):
        pass


def test_ones_own_failure_is_told_and_stays_what_it_is(said: Said) -> None:
    with pytest.raises(KeyError, match="mine"), all_or_none("find its disk"):
        raise KeyError("mine")
    assert said[0] == (0, "KeyError: 'mine'")


def test_the_least_is_exact_where_a_device_has_no_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, for numbers of bytes and seconds of either sign."""
    numbers = [-math.inf, -(2.0**53) + 1, -1e-9, -5e-324, 0.0, 5e-324, 0.1, 1.0, 2.0**53 - 1, math.inf]
    pairs = list(itertools.product(numbers, repeat=2))
    sent: list[torch.Tensor] = []

    def all_reduce(tensor: torch.Tensor, op: object, group: object) -> None:
        assert tensor.dtype != torch.float64
        sent.append(tensor.clone())
        if len(sent) == 2:
            tensor.copy_(torch.minimum(*sent))

    monkeypatch.setattr(agreement.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(agreement.dist, "all_reduce", all_reduce)
    assert least(*(one for one, _ in pairs)) == [one for one, _ in pairs]
    assert least(*(other for _, other in pairs)) == [min(pair) for pair in pairs]
