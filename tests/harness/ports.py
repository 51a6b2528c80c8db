# SPDX-License-Identifier: Apache-2.0
"""Ports for groups of processes, and what DeepSpeed's CPU collectives leave behind under their numbers."""

import socket
from pathlib import Path

_SHARED = Path("/dev/shm")
_given: list[int] = []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        _given.append(int(probe.getsockname()[1]))
        return _given[-1]


def remove_shared_buffers() -> None:
    """DeepSpeed never removes the buffers of its collectives in shared memory, 69 MB a rank and port: a run of all
    tests would leave several GB. Only those under ports that this process gave out.
    """
    for port in _given:
        for left in _SHARED.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink(missing_ok=True)
    _given.clear()
