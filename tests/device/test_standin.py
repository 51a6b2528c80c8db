# SPDX-License-Identifier: Apache-2.0
"""Tests that need the stand-in device, or a GPU, in their own process, started in one that has it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from ds_fuyou.cli import main
from tests.device.build import build
from tests.device.parity import case_of, fuyou_of
from tests.harness.cpu_info import python_path
from tests.harness.forked import finish, start
from tests.harness.limits import HANG_SECS
from tests.harness.runner import run_case, with_fuyou

ROOT = Path(__file__).parent.parent.parent
MARKED = sorted(
    file.relative_to(ROOT).as_posix()
    for file in (ROOT / "tests").glob("**/test_*.py")
    if re.search(r"\bpytest\.mark\.(gpu|standin)\b", file.read_text())
)
FOR_GPUS = [file for file in MARKED if re.search(r"\bpytest\.mark\.gpu\b", (ROOT / file).read_text())]


def run(script: Path, arguments: list[str], log: Path, **settings: float) -> tuple[int, str]:
    """Status and output of a script in a process whose device has these settings."""
    build()
    return run_with({"STANDIN": json.dumps(settings)}, script, arguments, log)


def run_with(variables: dict[str, str], script: Path, arguments: list[str], log: Path) -> tuple[int, str]:
    env = {**os.environ, **variables, "PYTHONPATH": python_path()}
    process = start(script, arguments, env, log)
    finish([process])
    return process.exitcode, log.read_text(errors="replace")


DEVICES = {"standin": {"STANDIN": json.dumps({"seed": 1, "delay_secs": 0.002, "polls": True})}}
if torch.cuda.is_available():
    DEVICES["cuda"] = {"DS_ACCELERATOR": "cuda"}


@pytest.mark.parametrize(
    ("device", "file"), [(d, f) for d in DEVICES for f in MARKED if d == "standin" or f in FOR_GPUS]
)
def test_marked_tests_run_on_it(device: str, file: str, tmp_path: Path) -> None:
    arguments = [str(ROOT / file), "-m", "gpu or standin", "-q", "-p", "no:cacheprovider"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what the server imported already
    arguments += ["--timeout", str(HANG_SECS / 2), "--basetemp", str(tmp_path / "inner"), "--rootdir", str(ROOT)]
    script = Path(pytest.__file__).parent / "__main__.py"
    build()
    status, said = run_with(DEVICES[device], script, arguments, tmp_path / "log")
    failures = said[said.find("= FAILURES =") :]  # what threads and exit say behind them is long
    assert status == 0, failures[:12_000] or said[-6000:]
    assert " passed" in said
    assert "skipped" not in said


def test_the_host_cannot_read_its_memory(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import ctypes, os, torch\n"
        "from tests.device.accelerator import install_from\n"
        "install_from(os.environ)\n"
        "values = torch.ones(10, device='standin')\n"
        "torch.standin.synchronize()\n"
        "print('alive', flush=True)\n"
        "ctypes.string_at(values.data_ptr(), 4)\n"
    )
    status, said = run(script, [], tmp_path / "log")
    assert status == -signal.SIGSEGV, said
    assert "alive" in said


def test_a_run_that_its_device_ends_keeps_its_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script does not catch what a copy raises, and destroys nothing."""
    (tmp_path / "swap").mkdir()
    case = case_of("bf16-off-1-one", zero_init=True) | {"break": {"rank": 0, "step": 4, "how": "copy"}}
    fuyou = fuyou_of(tmp_path / "swap", "states", "auto", "backward_and_forward", 2, "swap-nvme")
    with pytest.raises(AssertionError, match="stand-in device: the device failed in a copy up"):
        run_case(with_fuyou({**case, "device": {"seed": 1, "delay_secs": 0.002}}, fuyou), tmp_path, "ours")
    (directory,) = {path.parent for path in (tmp_path / "swap").glob("**/*") if path.is_file()}
    assert main(["recover", str(directory), "--weights", str(tmp_path / "weights.pt")]) == 0
    assert "as of step 4 (" in capsys.readouterr().out
