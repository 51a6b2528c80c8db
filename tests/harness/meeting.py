# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for each other before they die: who has left a collective may die before others have."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["Meeting"]


class Meeting:
    """Of all ranks, by files in a folder: nobody's help is needed to see that all have arrived. To be made before the
    ranks are a group, as what an earlier run left is removed.
    """

    def __init__(self, folder: str | Path, name: str) -> None:
        self._files = [Path(folder, f"{name}.{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
        self._mine = self._files[int(os.environ["RANK"])]
        self._mine.unlink(missing_ok=True)

    def arrive(self) -> None:
        self._mine.touch()

    def wait(self) -> None:
        while not all(file.exists() for file in self._files):
            time.sleep(0.001)
