# SPDX-License-Identifier: Apache-2.0
"""Files without a name: nothing of them outlives the process, however that ends."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.storage.probe import enable_direct
from ds_fuyou.storage.types import PAGE_BYTES

__all__ = ["open_anonymous"]


def open_anonymous(directory: Path, purpose: str) -> int:
    """A new file for reading and writing in ``directory``, with O_DIRECT where that works; returns its descriptor.

    Raises:
        FuyouStorageError: the directory is missing or not writable; ``purpose`` is named.
    """
    try:
        return _open(directory)
    except OSError as error:
        message = f"cannot {purpose} in nvme_path; it must exist and be writable"
        raise FuyouStorageError(error.errno or errno.EIO, message, str(directory)) from error


def _open(directory: Path) -> int:
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
            raise
        fd, name = tempfile.mkstemp(dir=directory, prefix="ds_fuyou-")
        os.unlink(name)
    try:
        os.ftruncate(fd, PAGE_BYTES)
        enable_direct(fd)
        os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd
