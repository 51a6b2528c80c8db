# SPDX-License-Identifier: Apache-2.0
"""Where the kernel refuses io_uring, as Docker's default profile does, threads do the I/O, and that is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.forked import run

_CODE = """
import ctypes, os, struct, sys, torch
from pathlib import Path
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.types import Extent

IO_URING_SETUP, ERRNO, ALLOW = 425, 0x00050000 | 1, 0x7FFF0000
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, IO_URING_SETUP), (0x06, 0, 0, ERRNO), (0x06, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
libc = ctypes.CDLL(None, use_errno=True)
program = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0, os.strerror(ctypes.get_errno())

path = Path(sys.argv[1])
path.write_bytes(bytes([7]) * 4096)
fd = os.open(path, os.O_RDWR)
for _ in range(2):
    lane = IoLane(IoSettings(sys.argv[2]), lambda fd: path)
    memory = torch.zeros(4096, dtype=torch.uint8)
    lane.read([Extent(fd, 0, 4096)], memory, "reading").wait()
    assert memory.eq(7).all()
    lane.close()
"""
_LINE = "a pool of threads reads and writes, for io_uring is not to be had: io_uring_setup"


@pytest.mark.parametrize(("engine", "times"), [("auto", 1), ("threads", 0)])
def test_threads_that_stand_in_for_rings_are_told_once(engine: str, times: int, tmp_path: Path) -> None:
    status, output = run(_CODE, [str(tmp_path / "file"), engine], {**os.environ, "WORLD_SIZE": "1"}, tmp_path)
    assert status == 0, output
    assert output.count(_LINE) == times, output
