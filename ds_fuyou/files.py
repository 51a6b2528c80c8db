# SPDX-License-Identifier: Apache-2.0
"""Names that change in one step, and where files lie that outlive runs."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_fuyou.libc import libc

__all__ = ["CACHE_VARIABLE", "cache_path", "exchange", "may_be_replaced", "replacing"]

CACHE_VARIABLE = "FUYOU_CACHE"

_HERE = -100  # AT_FDCWD
_RENAME_EXCHANGE = 2


def cache_path() -> Path:
    """``$FUYOU_CACHE``, else ``ds_fuyou`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; for a user who has no home, as in a
    container that knows the number alone, ``ds_fuyou-NUMBER`` among temporary files. Nothing is created.
    """
    named = os.environ.get(CACHE_VARIABLE)
    path = os.path.expanduser(named or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "ds_fuyou"))
    if path.startswith("~"):
        return Path(tempfile.gettempdir(), f"ds_fuyou-{os.geteuid()}")
    return Path(path)


def exchange(one: str | Path, other: str | Path, *, dir_fd: int = _HERE) -> bool:
    """Swaps two names at once, those of a directory if it is given. False if the file system cannot.

    Raises:
        OSError: FileNotFoundError if one of them is not there.
    """
    if not hasattr(libc(), "renameat2"):
        return False
    if libc().renameat2(dir_fd, os.fsencode(one), dir_fd, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), os.fspath(one), None, os.fspath(other))


def may_be_replaced(path: Path) -> bool:
    """Whether a regular file is there, or nothing: no directory, device or pipe, nor the name of an open descriptor, as
    ``/dev/stdout`` is: what has that open would go on writing to a file without a name.
    """
    folders = {str(folder) for folder in path.absolute().parents}
    if not folders.isdisjoint({"/proc", "/dev/fd"}) or str(path.absolute()) in ("/dev/stdout", "/dev/stderr"):
        return False
    return path.is_file() or not path.exists()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write: it takes its place at once when the block ends well, and goes otherwise. Links
    are followed; a device or a pipe is written to, and stays what it is.

    Raises:
        OSError: it cannot be written; names ``path``.
    """
    if not may_be_replaced(path):
        yield path
        return
    target = Path(os.path.realpath(path))
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        yield part
        os.replace(part, target)
    except OSError as error:
        if error.errno is None or error.filename not in (part, str(part)):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    finally:
        part.unlink(missing_ok=True)
