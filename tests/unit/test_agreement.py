# SPDX-License-Identifier: Apache-2.0
"""What fails on one rank is an error of all, in place of a wait."""

from __future__ import annotations

import pytest

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.zero import agreement
from ds_fuyou.zero.agreement import all_or_none

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
