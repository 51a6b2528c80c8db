# SPDX-License-Identifier: Apache-2.0
"""The kind of CPU, which DeepSpeed asks for three times in every process that loads an operator: each time two
processes are started, and a second passes. A test run asks once, and tells its processes. No torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["look_up", "python_path", "use_known"]

_VARIABLE = "TESTS_CPU_INFO"  # what ``cpuinfo.get_cpu_info()`` gives, in JSON
_ROOT = Path(__file__).parents[2]


def look_up() -> None:
    """Asks, once for this process and those that it starts."""
    if _VARIABLE not in os.environ:
        asked = subprocess.run([sys.executable, "-m", "cpuinfo", "--json"], capture_output=True, text=True, check=True)
        os.environ[_VARIABLE] = json.dumps(json.loads(asked.stdout))


def use_known() -> None:
    """Where it is known, ``cpuinfo`` is a module that says it. (The real one starts processes when it is imported.)"""
    said = os.environ.get(_VARIABLE)
    spec = importlib.util.find_spec("cpuinfo") if said and "cpuinfo" not in sys.modules else None
    if said and spec is not None:
        known = importlib.util.module_from_spec(spec)
        vars(known)["get_cpu_info"] = lambda: json.loads(said)
        sys.modules["cpuinfo"] = known


def python_path(*folders: Path) -> str:
    """For ``PYTHONPATH``: what interpreters do first, these, then this tree, wherever it is checked out."""
    return os.pathsep.join(map(os.fspath, (Path(__file__).with_name("startup"), *folders, _ROOT)))
