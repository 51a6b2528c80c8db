# SPDX-License-Identifier: Apache-2.0
"""State of dead runs, when a run begins: told or removed, on every disk of every machine by one rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from deepspeed import comm as dist

from ds_fuyou.storage.cleanup import lost_state, settle_stale, stale_bytes
from ds_fuyou.zero.agreement import of_every_rank

__all__ = ["settle_stale_state"]

logger = logging.getLogger("ds_fuyou")


def settle_stale_state(paths: Sequence[Path], clean: str = "", *, resumes: bool = False) -> int:
    """Bytes of it that stay in this rank's paths. A collective: no rank goes on before all have looked.

    ``clean``: fingerprint of the model whose state is removed; none is without. ``resumes``: but for what a run may go
    on from.
    """
    host = os.uname().nodename
    users = of_every_rank((host, [str(path) for path in paths]))
    mine = [path for path in paths if _first_user(users, host, str(path)) == dist.get_rank()]
    lost = lost_state(mine) if clean and resumes else None
    of_every_rank(None)  # what a directory holds is said in the first of its run, which may be another rank's to remove
    settle_stale(mine, logger, clean, lost)
    of_every_rank(None)
    return stale_bytes(paths)


def _first_user(users: Sequence[tuple[str, list[str]]], host: str, path: str) -> int:
    return next(rank for rank, (where, theirs) in enumerate(users) if where == host and path in theirs)
