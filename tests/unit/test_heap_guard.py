# SPDX-License-Identifier: Apache-2.0
"""Holes in the C heap go back to the system, also those that were given back, used and left again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds_fuyou.host import memory
from ds_fuyou.host.memory import HeapGuard
from tests.harness.limits import HANG_SECS

ROOT = Path(__file__).parents[2]

SCRIPT = """
import ctypes, mmap, tempfile
from ds_fuyou.host.memory import HeapGuard, resident_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: every block below comes from the heap
SIZE, COUNT = 256 << 10, 512

def fill(count):
    blocks = [libc.malloc(SIZE) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    return blocks

guard = HeapGuard()
with tempfile.TemporaryFile() as file:  # as checkpoints are read: pages of the file, which the system can take back
    file.truncate(2 * COUNT * SIZE)
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapped[:: mmap.PAGESIZE]
    guard.check()
    mapped.close()
before = resident_bytes() + COUNT * SIZE  # with those that stay
blocks = fill(2 * COUNT)
stay, holes = blocks[::2], blocks[1::2]
for round in range(3):
    for block in holes:
        libc.free(block)
    held = resident_bytes()
    guard.check()
    print("ROUND", held - before, resident_bytes() - before, flush=True)
    holes = fill(COUNT)
"""


def test_holes_are_given_back_each_time_they_come() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECS, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    rounds = [tuple(map(int, line.split()[1:])) for line in ran.stdout.splitlines() if line.startswith("ROUND")]
    assert len(rounds) == 3
    for held, left in rounds:
        assert held > 100 << 20  # the holes were there
        assert left < 24 << 20  # ... and are not now


def test_memory_is_trimmed_only_where_its_peak_would_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = [160]
    trims = []
    monkeypatch.setattr(memory, "resident_bytes", lambda: resident[0])
    guard = HeapGuard(limit_bytes=15)
    monkeypatch.setattr(guard, "_trim", lambda pad: trims.append(resident[0]))

    def check(*levels: int) -> list[int]:
        trims.clear()
        for resident[0] in levels:
            guard.check()
        return list(trims)

    assert check(165, 170) == []  # a sixteenth more
    assert check(192) == [192]  # nothing was given back: 192 are in use
    assert check(50, 200, 50, 204) == []  # what a step takes and leaves
    assert check(320) == [320]
    assert check(335, 336) == [336]  # the limit is smaller than a sixteenth
    monkeypatch.setattr(guard, "_trim", lambda pad: (trims.append(resident[0]), resident.__setitem__(0, 90)))
    assert check(352, 340, 352) == [352, 352]  # holes: 336 remains the most that was in use
    monkeypatch.setattr(guard, "_trim", None)  # another C library
    assert check(1000) == []
