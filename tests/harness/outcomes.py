# SPDX-License-Identifier: Apache-2.0
"""What a long campaign has found so far, as JSON lines of a file: one that was interrupted goes on behind the last."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

__all__ = ["Outcomes", "add_arguments"]


class Outcomes:
    """``lines``: all so far, those of earlier processes first."""

    def __init__(self, file: Path, minutes: float) -> None:
        self._file, self._end = file, time.monotonic() + 60 * minutes
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.read_text(encoding="utf-8").rpartition("\n")[0] if file.exists() else ""
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def is_over(self) -> bool:
        """The minutes of this process have passed."""
        return time.monotonic() > self._end


def add_arguments(parser: argparse.ArgumentParser, file: str, minutes: float) -> None:
    parser.add_argument("--minutes", type=float, default=minutes, help="then it ends, and goes on when started again")
    parser.add_argument("--outcomes", type=Path, default=Path(".work") / file, help="what is there is not done again")
