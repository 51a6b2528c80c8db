# SPDX-License-Identifier: Apache-2.0
"""Holes in the C heap go back to the system, also those that were given back, used and left again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds_fuyou.lanes import memory
from ds_fuyou.lanes.memory import HeapGuard

ROOT = Path(__file__).parents[2]

SCRIPT = """
import ctypes
from ds_fuyou.lanes.memory import HeapGuard, _resident_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: every block below comes from the heap
SIZE, COUNT = 256 << 10, 512

def fill():
    blocks = [libc.malloc(SIZE) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    return blocks

guard = HeapGuard()
pins, before = [], _resident_bytes()
for round in range(3):
    large = []
    if not pins:
        for _ in range(COUNT):  # a small block behind every large one keeps the heap from shrinking at its end
            large.append(libc.malloc(SIZE))
            ctypes.memset(large[-1], 1, SIZE)
            pins.append(libc.malloc(64))
    else:
        large = fill()
    for block in large:
        libc.free(block)
    held = _resident_bytes()
    guard.check()
    print("ROUND", held - before, _resident_bytes() - before, flush=True)
"""


def test_holes_are_given_back_each_time_they_come() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    rounds = [tuple(map(int, line.split()[1:])) for line in ran.stdout.splitlines() if line.startswith("ROUND")]
    assert len(rounds) == 3
    for held, left in rounds:
        assert held > 100 << 20  # the holes were there
        assert left < 24 << 20  # ... and are not now


def test_a_trim_that_finds_nothing_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = [100 << 20]
    trims = []
    monkeypatch.setattr(memory, "_resident_bytes", lambda: resident[0])
    guard = HeapGuard(limit_bytes=16 << 20)
    monkeypatch.setattr(guard, "_trim", lambda pad: trims.append(resident[0]))
    for megabytes in (110, 120, 121, 130, 50, 60, 70):
        resident[0] = megabytes << 20
        guard.check()
    assert [trim >> 20 for trim in trims] == [120, 70]  # 100 + 16 < 120; then from 120, from 50
    monkeypatch.setattr(guard, "_trim", None)  # another C library
    resident[0] = 1000 << 20
    guard.check()
    assert len(trims) == 2
