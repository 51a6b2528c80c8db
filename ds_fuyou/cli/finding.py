# SPDX-License-Identifier: Apache-2.0
"""One line of the doctor's report, and what it says of a directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ds_fuyou.errors import FuyouStorageError

__all__ = ["Finding", "path_finding"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: what was looked at; found: what is the case.
        ok: whether training works as it is.
        fix: what to do, empty when there is nothing to do.
    """

    what: str
    found: str
    ok: bool = True
    fix: str = ""


def path_finding(path: str) -> Finding:
    """Whether a directory can hold state."""
    from ds_fuyou.storage.probe import probe_path

    if not os.path.isdir(path):
        if os.path.exists(path):
            return Finding(path, "is no directory", ok=False, fix="name a directory")
        return Finding(path, "no such directory", ok=False, fix=f"mkdir -p {path}")
    if not os.access(path, os.W_OK | os.X_OK):
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return Finding(
                path,
                "lies on what is mounted read-only",
                ok=False,
                fix="mount it to be written to, or name another path",
            )
        return Finding(path, "not writable", ok=False, fix=f"chown {os.geteuid()} {path}, or name another path")
    try:
        facts = probe_path(Path(path))
    except FuyouStorageError as error:
        return Finding(path, "cannot be used", ok=False, fix=str(error))
    found = f"{facts.free_bytes / 1e9:.1f} GB free, {facts.filesystem}"
    if facts.is_tmpfs:
        return Finding(path, f"{found}: this is host memory", fix="name a directory on the SSD")
    if not facts.supports_direct:
        fix = "use ext4 or xfs without encryption; buffered I/O works, slower and through the page cache"
        return Finding(path, f"{found}, O_DIRECT refused", fix=fix)
    return Finding(path, f"{found}, O_DIRECT works")
