# SPDX-License-Identifier: Apache-2.0
"""Time the package adds to ``import torch``: loading and calling its entry point, in fresh interpreters.

python benchmarks/import_overhead.py [RUNS]      (bar: 2 ms)
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

CHILD = """
import time
from importlib.metadata import entry_points
import torch
points = [point for point in entry_points(group="torch.backends") if point.name == "ds_fuyou"]
begin = time.perf_counter()
points[0].load()()
print(time.perf_counter() - begin)
"""


def measure(num_runs: int) -> list[float]:
    """Milliseconds of each run. torch's own loading is off in the child, so that it can be timed alone."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", CHILD]
    subprocess.run(command, env=environment, check=True, capture_output=True)  # compiles and warms caches
    return [
        1e3 * float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
        for _ in range(num_runs)
    ]


if __name__ == "__main__":
    times = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    print(f"import torch: +{statistics.median(times):.2f} ms (median of {len(times)}, max {max(times):.2f} ms)")
