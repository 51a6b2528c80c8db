# SPDX-License-Identifier: Apache-2.0
"""A process that may map no more: what it does goes on without, or ends with an exception, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness.forked import finish, start
from tests.harness.ports import free_port
from tests.harness.runner import HERE, environment

STORED = {"parameters": {"tier": "nvme"}, "gradients": {"tier": "nvme"}, "checkpoint": {"save": "background"}}


def lived(path: Path, action: str, left_bytes: int) -> tuple[str, str]:
    """What it met, and what it left."""
    path.mkdir()
    case = {"block": STORED, "action": action, "left_bytes": left_bytes, "folder": str(path / "folder")}
    log = path / "log"
    process = start(HERE / "scarce_memory.py", [str(path), json.dumps(case)], environment(0, 1, free_port()), log)
    finish([process])
    said = log.read_text(errors="replace")
    assert process.exitcode == 0, said[-3000:]
    met, left = (said.partition(f"\n{word} ")[2].partition("\n")[0] for word in ("MET", "LEFT"))
    return met, left


def test_what_needs_memory_that_there_is_not_ends_with_an_exception_alone(tmp_path: Path) -> None:
    met, left = lived(tmp_path / "enough", "save", 1 << 40)
    assert met == "nothing"
    for action in ("train", "save", "load", "gather"):
        found, after = lived(tmp_path / action, action, 0)
        assert after == left, action
        if action == "save":
            assert "bytes of host memory must be mapped, and the system refuses" in found
            assert "dram_budget_bytes" in found
        else:
            assert found == "nothing" or "emory" in found, f"{action}: {found}"
