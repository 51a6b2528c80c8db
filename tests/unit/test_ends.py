# SPDX-License-Identifier: Apache-2.0
"""A run that fails leaves the state of its last step, from which its weights come; one that ends well leaves none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_fuyou.cli import main
from tests.harness.limits import HANG_SECS
from tests.harness.ports import free_port
from tests.harness.runner import HERE, environment


def ended(path: Path, end: str) -> tuple[int, str]:
    """Status and all output of a run as users start it."""
    done = subprocess.run(
        [sys.executable, str(HERE / "ended_run.py"), str(path), end],
        env=environment(0, 1, free_port()),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECS,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(("end", "status"), [("exception", 1), ("SIGTERM", 143), ("failed disk", 1)])
def test_weights_come_out_of_what_a_failed_run_leaves(tmp_path: Path, end: str, status: int) -> None:
    found, said = ended(tmp_path, end)
    assert found == status, said[-3000:]
    (line,) = [line for line in said.splitlines() if "fuyou recover" in line]
    command = line.split("fuyou recover ")[1].split(";")[0].split()
    assert main(["recover", command[0], "--weights", str(tmp_path / "weights.pt")]) == 0
    sums = json.loads(next(line for line in said.splitlines() if line.startswith("SUMS "))[5:])
    weights = torch.load(tmp_path / "weights.pt")
    assert {name: float(values.double().sum()) for name, values in weights.items()} == sums
    assert main(["clean", str(tmp_path)]) == 0
    assert not (tmp_path / "ds_fuyou").exists()


def test_nothing_is_left_after_a_clean_end(tmp_path: Path) -> None:
    status, said = ended(tmp_path, "nothing")
    assert status == 0, said[-3000:]
    assert list(tmp_path.iterdir()) == []
    assert "fuyou recover" not in said
