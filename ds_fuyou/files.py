# SPDX-License-Identifier: Apache-2.0
"""Small files that others read while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write: it takes its place at once when the block ends well, and goes otherwise."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
