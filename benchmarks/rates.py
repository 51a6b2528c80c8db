# SPDX-License-Identifier: Apache-2.0
"""What the lanes of this machine can do alone.

Run as ``python -m benchmarks.rates DIRECTORY`` in a process of its own; writes one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.profiling.lane_rates import probe_storage
from ds_fuyou.profiling.rates import update_rate
from ds_fuyou.storage.io import IoLane, IoSettings

__all__ = ["Rates", "measure_rates"]

FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class Rates:
    """Bytes a second, elements a second; ``io_cpu_secs_per_byte`` is what the host pays to move a byte."""

    read: float
    write: float
    mixed: float
    io_cpu_secs_per_byte: float
    update: float
    num_cores: int


def measure_rates(directory: Path) -> Rates:
    """Measures in a fresh process, about 10 s. Raises FuyouStateError with its output if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "benchmarks.rates", str(directory.resolve())]
    done = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        raise FuyouStateError(f"the rates of the lanes could not be measured: {done.stderr[-2000:]}")
    return Rates(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    num_cores = len(os.sched_getaffinity(0))
    lane = IoLane(IoSettings(), lambda _: None)
    found = [probe_storage(lane, [Path(sys.argv[1])], FILE_BYTES, 16 << 20) for _ in range(3)]
    lane.close()
    rates = Rates(
        *(max(getattr(one, name) for one in found) for name in ("read", "write", "mixed")),
        io_cpu_secs_per_byte=statistics.mean(one.cpu_secs_per_byte for one in found),
        update=update_rate(num_cores),
        num_cores=num_cores,
    )
    sys.stdout.write(json.dumps(asdict(rates)) + "\n")


if __name__ == "__main__":
    main()
