# SPDX-License-Identifier: Apache-2.0
"""Measures this machine for the planner: storage, CPU optimizer, device compute and its link, memory.

:func:`measure_machine` starts a process of its own (``python -m ds_fuyou.profiling.machine BYTES DIRECTORY...``), so
that the caller needs no torch and the measurement has the threads it wants. About 15 s a directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.available_memory import available_host_bytes
from ds_fuyou.host.threads import starting_threads, usable_cores
from ds_fuyou.planner.hardware import Machine
from ds_fuyou.planner.presets import constants
from ds_fuyou.storage.probe import probe_path

__all__ = ["MeasuredMachine", "best_secs", "device_rates", "machine_of_measured", "measure_machine"]

FILE_BYTES = 1 << 30
_TRANSFER_BYTES = 16 << 20
_FELL = 0.8  # a last round below this share of the first is told as drift
_TIMEOUT_SECS = 600  # for each GiB of the file and directory


@dataclass(frozen=True)
class MeasuredMachine:
    """Rates in bytes, FLOP or parameters a second. ``first_*`` are those of the first round over the file, the others
    of the last: consumer SSDs fall once their cache is full.
    """

    device: str
    device_bytes: int
    device_is_host: bool
    is_unified: bool
    matmul_flops: float
    link_up: float
    link_down: float
    first_read: float
    first_write: float
    read: float
    write: float
    mixed: float
    update: float
    dram_bytes: int
    storage_bytes: int

    def drift(self) -> list[str]:
        """What fell during the measurement, in words."""
        pairs = (("read", self.first_read, self.read), ("write", self.first_write, self.write))
        return [
            f"storage {name} fell from {first / 1e9:.2f} to {last / 1e9:.2f} GB/s between two rounds; "
            f"a longer run may be slower still"
            for name, first, last in pairs
            if last < _FELL * first
        ]


def measure_machine(directories: Sequence[Path], file_bytes: int = FILE_BYTES) -> MeasuredMachine:
    """Measures with files of ``file_bytes`` (rounded to 16 MiB) in ``directories``, which are deleted. A larger file
    shows what is left of an SSD when its cache is full.

    Raises:
        FuyouStorageError: a directory cannot be used.
        FuyouStateError: the measuring process failed; with the last line it wrote.
    """
    for directory in directories:
        probe_path(directory)
    command = [sys.executable, "-m", "ds_fuyou.profiling.machine", str(file_bytes), *map(str, directories)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    limit_secs = _TIMEOUT_SECS * max(1, len(directories) * -(-file_bytes // FILE_BYTES))
    try:
        with starting_threads():
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit_secs, check=False
            )
    except subprocess.TimeoutExpired:
        raise FuyouStateError(f"this machine could not be measured within {limit_secs} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FuyouStateError(f"this machine could not be measured: {last}; run fuyou doctor, or name presets")
    return MeasuredMachine(**json.loads(done.stdout.splitlines()[-1]))


def machine_of_measured(found: MeasuredMachine, num_gpus: int) -> Machine:
    """As the planner sees it. Where device and host share memory, half of it is either's."""
    share = constants().block_share_of_matmul
    apart = 1 / found.read + 1 / found.write
    return Machine(
        name=f"{num_gpus} x {found.device}, measured",
        num_gpus=num_gpus,
        gpu_bytes=found.device_bytes,
        flops=found.matmul_flops * share,
        gpu_memory_rate=found.link_up,
        link_up=found.link_up,
        link_down=found.link_down,
        dram_bytes=float(found.dram_bytes),
        pinned_limit_bytes=float("inf"),
        storage_read=found.read,
        storage_write=found.write,
        storage_duplex=min(2.0, max(0.5, found.mixed * apart / 2)),
        storage_bytes=float(found.storage_bytes),
        endurance_bytes=0.0,
        update_rate=found.update,
        pass_rate=found.update * 30,
        shares_cores=found.device_is_host,
        is_unified=found.is_unified,
    )


def best_secs(work: Callable[[], object], wait: Callable[[], object], rounds: int = 4) -> float:
    """Of one ``work()`` and its end, for which ``wait()`` waits, by the clock of the host; the first does not count."""
    work()
    wait()
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - begin)
    return best


def device_rates() -> dict[str, Any]:
    """Matmul of a block's shape and copies of 256 MiB, on the device that DeepSpeed would train on."""
    import torch

    from ds_fuyou.profiling.lane_rates import probe_link
    from ds_fuyou.zero.device import rank_device

    device = rank_device()
    if device.is_host:
        torch.set_num_threads(len(usable_cores()))
    size = 1024 if device.is_host else 8192
    left, right = (torch.randn(size, size, device=device.torch_device, dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * size**3 / best_secs(lambda: left @ right, device.synchronize)
    up, down = probe_link(device, 256 << 20)
    return {
        "device": f"host of {len(usable_cores())} cores" if device.is_host else device.name,
        "device_bytes": device.free_bytes() // 2 if device.is_host or device.is_unified else device.free_bytes(),
        "device_is_host": device.is_host,
        "is_unified": device.is_unified,
        "matmul_flops": flops,
        "link_up": up,
        "link_down": down,
    }


def _storage_rates(directories: Sequence[Path], file_bytes: int) -> dict[str, float]:
    """All directories together, twice: what falls is seen."""
    from ds_fuyou.profiling.lane_rates import probe_storage
    from ds_fuyou.storage.io import IoLane, IoSettings

    if not directories:
        return dict.fromkeys(("first_read", "first_write", "read", "write", "mixed"), 0.0)
    num_bytes = max(1, round(file_bytes / _TRANSFER_BYTES)) * _TRANSFER_BYTES
    lane = IoLane(IoSettings(), lambda _: None)
    first, last = (probe_storage(lane, directories, num_bytes, _TRANSFER_BYTES) for _ in range(2))
    lane.close()
    rates = {"read": last.read, "write": last.write, "mixed": last.mixed}
    return {"first_read": first.read, "first_write": first.write, **rates}


def main() -> None:
    """Measures and writes one JSON object."""
    from ds_fuyou.profiling.rates import update_rate

    directories = [Path(text) for text in sys.argv[2:]]
    rates = _storage_rates(directories, int(sys.argv[1]))
    update = update_rate(len(usable_cores()))
    found = device_rates()
    dram = available_host_bytes()
    if found["device_is_host"] or found["is_unified"]:
        dram -= found["device_bytes"]
    free = {facts.device: facts.free_bytes for facts in map(probe_path, directories)}
    sizes = {"dram_bytes": dram, "storage_bytes": sum(free.values())}
    sys.stdout.write(json.dumps({**found, **rates, **sizes, "update": update}) + "\n")


if __name__ == "__main__":
    main()
