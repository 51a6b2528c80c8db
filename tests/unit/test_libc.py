# SPDX-License-Identifier: Apache-2.0
"""Calls of the C library leave nothing that only Python's collector of cycles would find."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from ds_fuyou.files import exchange
from ds_fuyou.storage.data_file import allocate_blocks


def test_a_step_makes_no_cycles(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"1")
    other.write_bytes(b"2")

    def calls() -> None:
        exchange(one, other)
        with other.open("r+b") as file:
            allocate_blocks(file.fileno(), 4096)

    calls()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            calls()
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert os.stat(other).st_size == 4096
