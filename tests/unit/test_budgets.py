# SPDX-License-Identifier: Apache-2.0
"""Budgets that the machine does not have are refused before anything is built; what is not free is warned about."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ds_fuyou.config import FuyouConfig
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.host_memory import available_host_bytes, total_host_bytes
from ds_fuyou.zero.budgets import check_budgets


def test_more_than_the_machine_has() -> None:
    total = total_host_bytes()
    with pytest.raises(FuyouConfigError, match=rf"fuyou.dram_budget_bytes must not .* the machine has {total}; lower"):
        check_budgets(FuyouConfig(dram_budget_bytes=total + 1), 1)
    with pytest.raises(FuyouConfigError, match="for the 3 ranks here"):
        check_budgets(FuyouConfig(dram_budget_bytes=total // 2), 3)
    with pytest.raises(
        FuyouConfigError, match=r"fuyou\.gpu_budget_bytes must not exceed .* the device has \d+; lower it"
    ):
        check_budgets(FuyouConfig(gpu_budget_bytes=2 * total), 1)


def test_more_than_is_free_is_warned_about(told: Callable[[], str]) -> None:
    check_budgets(FuyouConfig(), 1)
    check_budgets(FuyouConfig(dram_budget_bytes=available_host_bytes() // 2, gpu_budget_bytes=1 << 20), 1)
    assert told() == ""
    check_budgets(FuyouConfig(dram_budget_bytes=total_host_bytes()), 1)
    assert "dram_budget_bytes asks for" in told()
