# SPDX-License-Identifier: Apache-2.0
"""Where state files say that chunks are. What a run makes of it: tests/durability/test_resume.py."""

from __future__ import annotations

import pytest

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.optimizer.layout import CUT_ELEMENTS, LayoutLimits, build_layout
from ds_fuyou.optimizer.placement import grad_region, param_region, state_region
from ds_fuyou.storage.types import RegionSpec
from ds_fuyou.zero.run.taken_design import _residency_in

LAYOUT = build_layout(
    [[("a", "a", 3 * CUT_ELEMENTS, 0)]], LayoutLimits(max_elements=CUT_ELEMENTS, min_elements=CUT_ELEMENTS)
)


def regions(*names: str) -> dict[str, RegionSpec]:
    return {name: RegionSpec(name, 4096, 2) for name in names}


def test_what_has_no_region_is_in_host_memory() -> None:
    states = regions(*map(state_region, range(3)))
    found = _residency_in(LAYOUT, {**states, **regions(param_region(1), grad_region(0), grad_region(2))})
    assert found.params == (True, False, True)
    assert found.grads == (False, True, False)
    assert not any(found.states)
    assert not any(found.spares)


def test_files_that_lack_states_do_not_serve_whatever_their_record_says() -> None:
    with pytest.raises(FuyouStateError, match="P32 and moments of 2 chunks are not in it"):
        _residency_in(LAYOUT, regions(state_region(1), param_region(0)))
