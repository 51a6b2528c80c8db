# SPDX-License-Identifier: Apache-2.0
"""A commit record with a right checksum may say anything: what a run would go on from is looked at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.checkpoint.contents import check_resumable
from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.records import well_formed
from ds_fuyou.storage.types import CommitRecord

CONTENTS = {"params": [["weight", [4], 0, 0, 4], ["bias", [2], 0, 4, 6]], "chunks": [[0, 0, 4], [0, 4, 6]]}
META: dict[str, Any] = {
    "optimizer_step": 3,
    "edition": 0,
    "clock": [[1, [[0.9, 0.999]]], [2, [[0.8, 0.999]]]],
    "missed_steps": {"bias": 1},
    "without_moments": [1],
    "state_sums": bytes(32).hex(),
    "param_digests": bytes(16).hex(),
}


def check(**changes: Any) -> None:
    with well_formed(Path("commit.json")):
        check_resumable(CommitRecord(3, {}, {**META, **changes}, True), CONTENTS)


def test_what_a_run_writes_is_taken() -> None:
    check()
    check(state_sums="", param_digests="", without_moments=[], missed_steps={})
    check(clock=[], optimizer_step=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"edition": "first"},
        {"optimizer_step": 4},
        {"optimizer_step": "3"},
        {"clock": [["a"]]},
        {"clock": [[3, [[0.9]]]]},
        {"clock": [[3, [["0.9", 0.999]]]]},
        {"clock": 3},
        {"missed_steps": {"other": 1}},
        {"missed_steps": {"bias": -1}},
        {"missed_steps": [1]},
        {"without_moments": [2]},
        {"without_moments": "01"},
        {"state_sums": "00"},
        {"state_sums": "zz"},
        {"param_digests": bytes(8).hex()},
        {"param_digests": None},
    ],
    ids=str,
)
def test_what_no_run_writes_is_an_error_of_the_file(changes: dict[str, Any]) -> None:
    with pytest.raises(FuyouStorageError, match=r"commit.json is not of its format"):
        check(**changes)
