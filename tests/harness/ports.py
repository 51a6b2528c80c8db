# SPDX-License-Identifier: Apache-2.0
"""Ports for groups of processes, and what DeepSpeed's CPU collectives leave behind under their numbers."""

import errno
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_SHARED = Path("/dev/shm")
_given: dict[int, int] = {}
"""With the descriptor of its lock."""


def _ports() -> range:
    """What the system gives to nobody who asks for any port, or only connects, before a group listens."""
    first_of_the_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return range(10_000, max(20_000, first_of_the_system))


def _take(port: int) -> bool:
    locks = Path(tempfile.gettempdir(), f"ds_fuyou-test-ports-{os.getuid()}")
    locks.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(locks / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket() as probe:
            probe.bind(("", port))
    except OSError as error:
        os.close(lock)
        if error.errno not in (errno.EWOULDBLOCK, errno.EADDRINUSE):
            raise
        return False
    _given[port] = lock
    return True


def free_port() -> int:
    """Nobody listens on it, and until this test ends no other process of tests gets it."""
    ports = _ports()
    return next(port for port in random.SystemRandom().sample(ports, 1000) if _take(port))


def remove_shared_buffers() -> None:
    """DeepSpeed never removes the buffers of its collectives in shared memory, 69 MB a rank and port: a run of all
    tests would leave several GB. Only those under ports that this process gave out; others may have these from now on.
    """
    for port, lock in _given.items():
        for left in _SHARED.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink(missing_ok=True)
        os.close(lock)
    _given.clear()
