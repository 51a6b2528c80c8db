# SPDX-License-Identifier: Apache-2.0
"""Stock runs are made once a session and shared by every block that is compared with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.runner import differences, run_case, with_fuyou

Results = list[dict]


@pytest.fixture(scope="session")
def stock_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict], Results]:
    """``stock_run(case)``: what stock DeepSpeed leaves behind; equal cases run once."""
    directory = tmp_path_factory.mktemp("stock")
    made: dict[str, Results] = {}

    def run(case: dict) -> Results:
        key = json.dumps(case, sort_keys=True)
        if key not in made:
            made[key] = run_case(case, directory, f"stock{len(made)}")
            assert made[key][0]["optimizer_class"] == "DeepSpeedZeroOptimizer_Stage3"
        return made[key]

    return run


@pytest.fixture
def must_equal(stock_run: Callable[[dict], Results], tmp_path: Path) -> Callable[[dict, dict], tuple[Results, Results]]:
    """``must_equal(case, block)`` runs both, wants every bit equal and no files left; returns the results."""

    def compare(case: dict, fuyou: dict) -> tuple[Results, Results]:
        stock = stock_run(case)
        Path(fuyou["nvme_path"]).mkdir()
        ours = run_case(with_fuyou(case, fuyou), tmp_path, "ours")
        assert ours[0]["optimizer_class"] == "FuyouStage3Optimizer"
        found = differences(stock, ours)
        assert not found, "\n".join(found)
        left = [str(path) for path in Path(fuyou["nvme_path"]).glob("**/*") if path.is_file()]
        assert not left, f"files left behind: {left}"
        return stock, ours

    return compare
