# SPDX-License-Identifier: Apache-2.0
"""What torch and Python say where a checkpoint's file cannot be read, as the package's errors, which name it."""

from __future__ import annotations

import contextlib
import errno
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ds_fuyou.errors import FuyouError, FuyouStorageError

__all__ = ["UNREADABLE", "is_archive", "naming"]

UNREADABLE = "reading a checkpoint failed: the disk is faulty, or the file is shorter than when it was opened"
_ARCHIVE = b"PK\x03\x04"
_TORCH_READS = (
    "unable to open file",
    "unable to mmap",
    "PytorchStreamReader",
    "mmap can only be used with files saved",
)
"""How torch's errors begin that are of a file and not of what is in it."""


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Around whatever reads ``path`` by itself, ``torch.load`` first of all.

    Raises:
        FuyouStorageError: that failed. Python names no file where a read fails, ``zipfile`` takes the file for one of
            another kind, and what torch raises where it cannot open one, or does not find in it what it has written,
            is no error of a file.
    """
    try:
        yield
    except FuyouError:
        raise
    except OSError as error:
        if error.filename is not None and type(error) is not OSError:  # a missing file, or one of somebody else's
            raise
        raise FuyouStorageError(error.errno or errno.EIO, UNREADABLE, str(path)) from error
    except (EOFError, RuntimeError, struct.error, zipfile.BadZipFile) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith(_TORCH_READS):
            raise
        raise FuyouStorageError(_number_of(error), UNREADABLE, str(path)) from error


def is_archive(path: str | Path) -> bool:
    """Whether torch has written it so that it can be mapped and has checksums: as torch tells it, by the first bytes.

    Raises:
        FuyouStorageError: they cannot be read. ``zipfile.is_zipfile`` says then that it is none.
    """
    with naming(path), open(path, "rb") as file:
        return file.read(len(_ARCHIVE)) == _ARCHIVE


def _number_of(error: Exception) -> int:
    """``errno``, as far as the error has kept it."""
    if isinstance(error, zipfile.BadZipFile) and isinstance(error.__context__, OSError):
        return error.__context__.errno or errno.EIO
    told = re.search(r"\((\d+)\)$", str(error))
    return int(told[1]) if told else errno.EIO
