# SPDX-License-Identifier: Apache-2.0
"""Builds the standalone test program of the C++ core plainly and under sanitizers, and runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_BUILD = Path(__file__).parent / "build.sh"
# Against what hangs: on one loaded core the slowest of them takes a tenth of it.
_BUILD_SECS = 3000
_RUN_SECS = 3000  # each of its tests has a limit of its own


def _run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(directory), "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=_RUN_SECS,
        check=False,
    )


@pytest.mark.timeout(_BUILD_SECS + 2 * _RUN_SECS)
@pytest.mark.parametrize("variant", [pytest.param("plain", marks=pytest.mark.thorough), "asan", "tsan"])
def test_core(variant: str, tmp_path: Path) -> None:
    program = tmp_path / f"core_{variant}"
    built = subprocess.run(
        ["sh", str(_BUILD), variant, str(program)],
        capture_output=True,
        text=True,
        timeout=_BUILD_SECS,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    ran = _run([str(program)], tmp_path)
    # ThreadSanitizer cannot map its shadow where the kernel spreads addresses widely.
    if "unexpected memory mapping" in ran.stderr and (setarch := shutil.which("setarch")):
        ran = _run([setarch, "-R", str(program)], tmp_path)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert "0 checks failed" in ran.stdout


@pytest.mark.parametrize("flags", [["-mf16c"], []])
def test_half_precision_of_compilers_without_its_type(flags: list[str], tmp_path: Path) -> None:
    """g++ 11 on x86 has the instructions alone, and for other CPUs neither."""
    if flags and " f16c" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the CPU has no F16C")
    here, program = _BUILD.parent, tmp_path / "float16"
    sources = [str(here / name) for name in ("float16_tests.cpp", "test_core.cpp")]
    include = ["-I", str(here.parent.parent / "ds_fuyou" / "csrc"), "-I", str(here)]
    compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-U__FLT16_MAX__", *flags, *include]
    subprocess.run([*compiler, *sources, "-o", str(program)], check=True, timeout=_BUILD_SECS)
    ran = _run([str(program)], tmp_path)
    assert "2 tests run, 0 checks failed" in ran.stdout, ran.stderr
