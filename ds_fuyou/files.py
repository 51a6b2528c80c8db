# SPDX-License-Identifier: Apache-2.0
"""Names that change in one step."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["exchange", "replacing"]

_HERE = -100  # AT_FDCWD
_RENAME_EXCHANGE = 2


def exchange(one: str | Path, other: str | Path, *, dir_fd: int = _HERE) -> bool:
    """Swaps two names at once, those of a directory if it is given. False if the file system cannot.

    Raises:
        OSError: FileNotFoundError if one of them is not there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(dir_fd, os.fsencode(one), dir_fd, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), os.fspath(one), None, os.fspath(other))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write: it takes its place at once when the block ends well, and goes otherwise. Links
    are followed; a device or a pipe is written to, and stays what it is.

    Raises:
        OSError: it cannot be written; names ``path``.
    """
    is_stream = path.exists() and not (path.is_file() or path.is_dir())
    if is_stream or path.absolute().parent == Path("/dev"):  # there /dev/stdout, which may be a file
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
