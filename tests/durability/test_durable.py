# SPDX-License-Identifier: Apache-2.0
"""With `durable` the plan keeps every step, though all of it would fit host memory; or the run does not begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_fuyou.checkpoint.recovery import recover_weights
from tests.durability.runs import launch
from tests.harness.forked import finish

PLANNED = {"optimizer": {"tier": "auto"}}


@pytest.mark.parametrize("durable", [True, False])
def test_every_step_can_be_gone_on_from_where_the_block_asks_for_it(durable: bool, tmp_path: Path) -> None:
    case = {"steps": 4, "die": {"0": [4, "after"]} if durable else {}, "block": {**PLANNED, "durable": durable}}
    if not durable:
        case["out"] = str(tmp_path)
    processes, (log,) = launch(tmp_path, case, 1)
    finish(processes)
    said = log.read_text(errors="replace")
    assert processes[0].exitcode == (-9 if durable else 0), said[-3000:]
    assert ("on storage (durable); in host memory" in said) == durable
    if durable:
        assert recover_weights([*tmp_path.glob("ds_fuyou/*")], tmp_path / "weights.pt").step == 4


def test_a_rank_without_room_for_two_slots_ends_all_before_anything_is_allocated(tmp_path: Path) -> None:
    block = {**PLANNED, "durable": True, "nvme_budget_bytes": 300_000}
    processes, logs = launch(tmp_path, {"steps": 2, "block": block}, 2)
    finish(processes)
    for process, log in zip(processes, logs, strict=True):
        said = log.read_text(errors="replace")
        assert process.exitcode not in (0, -9), said[-3000:]
        assert "fuyou.durable needs two slots a chunk: two need" in said
        assert "nvme_budget_bytes is 300000" in said
    assert not list(tmp_path.glob("ds_fuyou/*"))
