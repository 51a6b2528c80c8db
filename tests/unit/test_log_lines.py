# SPDX-License-Identifier: Apache-2.0
"""A run says what matters in few lines; the rest is for who asks (DS_FUYOU_LOG_LEVEL=debug)."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.log import get_logger, log_once
from tests.harness.runner import ds_config, run_case, with_fuyou

CASE = {
    "model": {},
    "steps": 6,  # the plan comes when activations have had their fates for a whole step
    "config": ds_config(
        zero_optimization={
            "offload_optimizer": {"device": "nvme", "nvme_path": "/none", "buffer_count": 5},
            "offload_param": {"device": "cpu", "buffer_size": 1000},
        }
    ),
}


def ours(output: str) -> list[str]:
    """Lines of our own: those with our prefix, of whatever level, and what follows indented."""
    found, mine = [], False
    for line in output.splitlines():
        mine = "[ds_fuyou]" in line or (mine and line.startswith("  "))
        if mine:
            found.append(line)
    return found


def test_of_several_ranks_a_line_names_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    get_logger().warning("seen")
    assert stream.getvalue().endswith(" rank 3 WARNING: seen\n")


def test_what_one_rank_alone_meets_is_said_by_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    for _ in range(2):
        log_once(logging.WARNING, "of all ranks")
        log_once(logging.WARNING, "of this one", on_any_rank=True)
    assert stream.getvalue().count("rank 3") == stream.getvalue().count("of this one") == 1


def test_lines_go_to_what_is_standard_error_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks and test runners replace it."""
    for _ in range(2):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        get_logger().warning("seen")
        assert re.fullmatch(r"\[ds_fuyou\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING: seen\n", stream.getvalue())
        stream.close()


def test_a_rank_is_that_of_torch_where_it_has_one(run_python: Any) -> None:
    script = """
import torch.distributed as dist
from ds_fuyou.log import current_rank
assert current_rank() == 0
for rank in (0, 1):
    store = dist.HashStore()
    dist.init_process_group("fake", rank=rank, world_size=2, store=store)
    assert current_rank() == rank
    dist.destroy_process_group()
"""
    done = run_python("from torch.testing._internal.distributed import fake_pg\n" + script, RANK="")
    assert done.returncode == 0, done.stderr


def test_a_short_run_says_twelve_lines_at_most(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_FUYOU_LOG_LEVEL", "info")
    monkeypatch.setenv("DS_FUYOU_PROFILES", str(tmp_path_factory.mktemp("profiles")))  # everything is measured
    block = {"nvme_path": str(tmp_path), "activations": {"mode": "auto"}, "gpu_budget_bytes": 150_000}
    (result,) = run_case(with_fuyou(CASE, block), tmp_path / "run", "short")
    lines = ours(result["output"])
    assert len(lines) <= 12, "\n".join(lines)
    assert sum("without effect" in line for line in lines) == 1
    assert sum("where every byte lives" in line for line in lines) == 1
    assert sum("plan (" in line for line in lines) == 1
    assert not any("gpu" in line.split("fuyou.gpu_budget")[0] for line in lines), "there is none"
    assert not any("NoGatherHandle" in line for line in lines)


def test_two_ranks_say_no_more_than_one(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps with everything on storage, some of them clipped."""
    monkeypatch.setenv("DS_FUYOU_LOG_LEVEL", "info")
    monkeypatch.setenv("DS_FUYOU_PROFILES", str(tmp_path_factory.mktemp("profiles")))
    tiers = {name: {"tier": "nvme"} for name in ("optimizer", "parameters", "gradients")}
    case = {**CASE, "steps": 4, "world_size": 2, "config": {**CASE["config"], "gradient_clipping": 1.0}}
    for profile in ("measured", "kept"):
        results = run_case(with_fuyou(case, {"nvme_path": str(tmp_path), **tiers}), tmp_path / profile, "short")
        lines = [line for result in results for line in ours(result["output"])]
        assert len(lines) <= 12, "\n".join(lines)
        assert sum("where every byte lives" in line for line in lines) == 1, "by one rank"
        assert sum("plan (" in line for line in lines) == 1
        assert not any("gpu" in line for line in lines), "there is none"
