# SPDX-License-Identifier: Apache-2.0
"""Scripts in processes that are forked from a server which has imported torch, DeepSpeed and the package, nothing else.

Importing takes several seconds a process, training a small model one. What depends on launchers, command lines or the
order of imports is started as users start it; what only needs a process of its own is started here.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.harness.limits import HANG_SECS

__all__ = ["accelerator", "finish", "run", "start"]

_context = multiprocessing.get_context("forkserver")
_fresh = multiprocessing.get_context("spawn")
_context.set_forkserver_preload(["tests.harness.preloaded"])


def accelerator() -> str:
    """DeepSpeed's, of tests that name none."""
    return os.environ.get("DS_ACCELERATOR", "cpu")


def start(script: Path, arguments: Sequence[str], env: Mapping[str, str], output: Path) -> BaseProcess:
    """Runs ``python script arguments`` with exactly this environment; what it says goes to the file ``output``.

    The server has imported DeepSpeed for the accelerator that DS_ACCELERATOR names here; for another one the process
    imports it anew.
    """
    context = _context if env.get("DS_ACCELERATOR", "cpu") == accelerator() else _fresh
    process = context.Process(target=_main, args=(str(script), [str(a) for a in arguments], dict(env), str(output)))
    process.start()
    return process


def finish(processes: Sequence[BaseProcess], limit_secs: float = HANG_SECS) -> None:
    """Waits for all of them; whatever has not ended after ``limit_secs`` is killed. Negative statuses are signals."""
    end = time.monotonic() + limit_secs
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def run(code: str, arguments: Sequence[str], env: Mapping[str, str], directory: Path) -> tuple[int | None, str]:
    """Status and output of Python code, which is put into ``directory``."""
    script, log = directory / "script.py", directory / "script.log"
    script.write_text(code)
    process = start(script, arguments, env, log)
    finish([process])
    return process.exitcode, log.read_text(errors="replace")


def _main(script: str, arguments: list[str], env: dict[str, str], output: str) -> None:
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(Path(script).parent), *env.get("PYTHONPATH", "").split(os.pathsep)]
    import torch

    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "2")))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves without them
