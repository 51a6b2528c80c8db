# SPDX-License-Identifier: Apache-2.0
"""What a machine can do, as a training step sees it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GIB", "NO_THREADS", "OF_DEVICE", "Machine", "ThreadSecs"]

GIB = 1024**3
OF_DEVICE = 0.9
"""Of a GPU, that ``gpu_budget_bytes: auto`` takes; the rest is the allocator's."""
_RESERVED = 0.05  # of DRAM, for the system and the page cache


@dataclass(frozen=True)
class ThreadSecs:
    """What the threads that run the model do themselves, in seconds: of a micro-batch's forward and backward, and of a
    step between its last backward and the next forward. Device work is issued by them, so it takes no less.
    """

    forward: float = 0.0
    backward: float = 0.0
    between: float = 0.0


NO_THREADS = ThreadSecs()


@dataclass(frozen=True)
class Machine:
    """The rates of the lanes and the sizes of the tiers, as a training step sees them.

    Attributes:
        flops: FLOP/s of one block alone on one GPU; policies lower it by what their streaming costs.
        gpu_memory_rate: bytes/s, for operators that are not fused.
        link_up, link_down: bytes/s CPU to GPU and back, of each GPU.
        storage_read, storage_write: bytes/s of a direction alone under the load of a step, all SSDs together.
        storage_duplex: 1 where reads and writes share one resource; 2 where they do not disturb each other.
        update_rate: parameters/s of CPU Adam; ``pass_rate`` bytes/s of other passes over host memory; ``sum_rate``
            gradients/s that are added on the host where micro-batches accumulate.
        storage_bytes, endurance_bytes: of all SSDs together; 0 without SSDs.
        backward_over_forward: compute time of backward, in forwards.
        is_unified: device and host share one memory, of which both sizes are parts.
        thread: of one model, where it was measured; 0 where nobody knows.
        shares_cores: the device is the host: its compute, the updates and ``io_cpu_secs_per_byte`` take turns.
    """

    name: str
    num_gpus: int
    gpu_bytes: int
    flops: float
    gpu_memory_rate: float
    link_up: float
    link_down: float
    dram_bytes: float
    pinned_limit_bytes: float
    storage_read: float
    storage_write: float
    storage_duplex: float
    storage_bytes: float
    endurance_bytes: float
    update_rate: float
    pass_rate: float
    backward_over_forward: float = 2.0
    shares_cores: bool = False
    is_unified: bool = False
    io_cpu_secs_per_byte: float = 0.0
    thread: ThreadSecs = NO_THREADS
    sum_rate: float = float("inf")

    @property
    def dram_usable_bytes(self) -> float:
        """What a plan may fill: DRAM less the system's share, at most what may be page-locked."""
        return min(self.dram_bytes * (1 - _RESERVED), self.pinned_limit_bytes)
