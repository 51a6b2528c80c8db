# SPDX-License-Identifier: Apache-2.0
"""Reading files of torch.save: where records begin, and what torch and Python say where a file cannot be read, as the
package's errors, which name it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ds_fuyou.errors import FuyouError, FuyouStorageError

__all__ = ["UNREADABLE", "is_archive", "naming", "read_at", "record_begin"]

UNREADABLE = "reading a checkpoint failed: the disk is faulty, or the file is shorter than when it was opened"
_ARCHIVE = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<26xHH")
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


def read_at(fd: int, num_bytes: int, at: int) -> bytes:
    """All of them; OSError if the file ends before."""
    found = b""
    while len(found) < num_bytes:
        piece = os.pread(fd, num_bytes - len(found), at + len(found))
        if not piece:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        found += piece
    return found


def record_begin(fd: int, info: zipfile.ZipInfo) -> int:
    """Where in the file the bytes of a record begin, behind its local header."""
    header = read_at(fd, _LOCAL_HEADER.size, info.header_offset)
    return info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
