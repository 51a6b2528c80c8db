# SPDX-License-Identifier: Apache-2.0
"""The package's logger: one stream, one prefix with time and rank, each fact told once and by one rank.

DeepSpeed's own logger is silent below WARNING by default, so it cannot carry the activation line.
``DS_FUYOU_LOG_LEVEL`` (debug, info, warning, error; default info) sets the threshold.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any

__all__ = ["Stderr", "current_rank", "get_logger", "is_news", "log_once"]

_told: set[str] = set()


class Stderr:
    """A file that is what ``sys.stderr`` is now: notebooks, test runners and scripts replace it. What cannot be written
    (a full disk, a pipe whose reader is gone) is dropped: it ends no training.
    """

    def write(self, text: str) -> None:
        """AttributeError: there is none, ValueError: it is closed; both are as good as no room."""
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def flush(self) -> None:
        """Nothing is kept."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            Stderr().write(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)


class _Lines(logging.Formatter):
    """When, and of several ranks which: their lines come to one terminal."""

    def __init__(self) -> None:
        super().__init__("[ds_fuyou] %(asctime)s%(rank)s %(levelname)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.rank = f" rank {current_rank()}" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        return super().format(record)


def get_logger() -> logging.Logger:
    """The logger ``ds_fuyou``, given a stderr handler on first use."""
    logger = logging.getLogger("ds_fuyou")
    if not logger.handlers:
        handler = _ToStderr()
        handler.setFormatter(_Lines())
        logger.addHandler(handler)
        level = getattr(logging, os.environ.get("DS_FUYOU_LOG_LEVEL", "info").upper(), None)
        logger.setLevel(level if isinstance(level, int) else logging.INFO)
        logger.propagate = False
    return logger


def current_rank() -> int:
    """Global rank of this process: torch.distributed's, before it has begun the launcher's, 0 when there is none."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def is_news(fact: str) -> bool:
    """Whether nobody asked this about `fact` before, in the life of the process."""
    if fact in _told:
        return False
    _told.add(fact)
    return True


def log_once(level: int, message: str, *, on_any_rank: bool = False) -> None:
    """Logs `message` once in the life of the process: on rank 0, or on every rank that meets it alone."""
    if (on_any_rank or current_rank() == 0) and is_news(message):
        get_logger().log(level, "%s", message)
