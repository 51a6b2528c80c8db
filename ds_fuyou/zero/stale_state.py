# SPDX-License-Identifier: Apache-2.0
"""State of dead runs, when a run begins: told or removed, on every disk of every machine by one rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from deepspeed import comm as dist

from ds_fuyou.storage.cleanup import settle_stale, stale_bytes
from ds_fuyou.zero.agreement import of_every_rank

__all__ = ["settle_stale_state"]

logger = logging.getLogger("ds_fuyou")


def settle_stale_state(paths: Sequence[Path], clean: str = "") -> int:
    """Bytes of it that stay in this rank's paths. A collective: no rank goes on before all have looked.

    ``clean``: fingerprint of the model whose state is removed; none is without.
    """
    host = os.uname().nodename
    users = of_every_rank((host, [str(path) for path in paths]))
    settle_stale([path for path in paths if _first_user(users, host, str(path)) == dist.get_rank()], logger, clean)
    of_every_rank(None)
    return stale_bytes(paths)


def _first_user(users: Sequence[tuple[str, list[str]]], host: str, path: str) -> int:
    return next(rank for rank, (where, theirs) in enumerate(users) if where == host and path in theirs)
