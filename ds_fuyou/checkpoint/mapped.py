# SPDX-License-Identifier: Apache-2.0
"""Where in a file the bytes of a tensor lie that ``torch.load(mmap=True)`` gave.

The engine that reads everything else reads them from there and takes no thread's time. To touch the mapped memory takes
one page fault after the other, and a copy. But only what nobody has written to is what the file holds, so the files are
named by who loaded them.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ds_fuyou.errors import FuyouMemoryError, FuyouStorageError
from ds_fuyou.storage.probe import enable_direct
from ds_fuyou.storage.types import PAGE_BYTES, Extent

__all__ = ["MappedFiles", "check_readable", "naming"]

_MADV_POPULATE_READ = 22  # since Linux 5.14
_EHWPOISON = 133
_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}
"""Those of other layouts are read when they are loaded."""
_UNREADABLE = "reading a checkpoint failed: the disk is faulty, or the file is shorter than when it was opened"


class _Mapping(NamedTuple):
    begin: int
    end: int
    offset: int
    inode: int
    path: str


class MappedFiles:
    """What is mapped of these files when it is made. Closes what it opened at the end of the block."""

    def __init__(self, paths: Collection[str]) -> None:
        """``paths``: real ones."""
        self._mappings = [mapping for mapping in _file_mappings() if mapping.path in paths] if paths else []
        self._begins = [mapping.begin for mapping in self._mappings]
        self._fds: dict[tuple[str, bool], int] = {}

    def __enter__(self) -> MappedFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in set(self._fds.values()):
            os.close(fd)
        self._fds.clear()

    def extents(self, values: torch.Tensor) -> list[Extent] | None:
        """Runs of the file, in order, that hold a contiguous tensor: whole pages past the page cache, where they are
        pages of the file and the filesystem can. None if it is not in these files, or one has lost its name.
        """
        at = values.data_ptr()
        index = bisect.bisect_right(self._begins, at) - 1
        if index < 0 or at + values.nbytes > self._mappings[index].end or not values.is_contiguous():
            return None
        mapping = self._mappings[index]
        offset, num_bytes = mapping.offset + at - mapping.begin, values.nbytes
        try:
            buffered = self._open(mapping, is_direct=False)
            direct = self._open(mapping, is_direct=True) if offset % PAGE_BYTES == 0 else buffered
        except OSError:
            return None
        num_whole = num_bytes // PAGE_BYTES * PAGE_BYTES
        runs = [Extent(direct, offset, num_whole), Extent(buffered, offset + num_whole, num_bytes - num_whole)]
        return [run for run in runs if run.num_bytes]

    def path_of(self, fd: int) -> Path | None:
        """For messages."""
        return next((Path(path) for (path, _), known in self._fds.items() if known == fd), None)

    def _open(self, mapping: _Mapping, *, is_direct: bool) -> int:
        key = mapping.path, is_direct
        if key not in self._fds:
            self._fds[key] = fd = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(fd).st_ino != mapping.inode:
                raise FileNotFoundError(f"{mapping.path} is another file now")
            if is_direct:
                enable_direct(fd)
        return self._fds[key]


def check_readable(values: torch.Tensor) -> None:
    """Reads the pages that a CPU tensor of a mapped file lies in. Where one cannot be read, since the disk is faulty or
    the file has become shorter, who touches it is killed (SIGBUS). On older kernels this does nothing.

    Raises:
        FuyouStorageError: it cannot be read.
        FuyouMemoryError: there is no memory to read it to.
    """
    parts = _parts(values)
    if parts is not None:
        for part in parts:
            check_readable(part)
        return
    if not values.numel():
        return
    storage = values.untyped_storage()
    begin = storage.data_ptr() // PAGE_BYTES * PAGE_BYTES
    num_bytes = storage.data_ptr() + storage.nbytes() - begin
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), _MADV_POPULATE_READ):
        return
    number = ctypes.get_errno()
    if number == errno.ENOMEM:
        raise FuyouMemoryError(num_bytes)
    if number in (errno.EFAULT, _EHWPOISON):
        path = next((found.path for found in _file_mappings() if found.begin <= begin < found.end), None)
        raise FuyouStorageError(errno.EIO, _UNREADABLE, path)


def _parts(values: torch.Tensor) -> list[torch.Tensor] | None:
    """What a tensor without a memory of its own is made of; None if it has one."""
    if is_traceable_wrapper_subclass(values):
        names, _ = values.__tensor_flatten__()
        return [getattr(values, name) for name in names]
    if values.layout is torch.strided:
        return None
    return [getattr(values, part)() for part in _PARTS.get(values.layout, ())]


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Around ``torch.load``, which reads the beginning of a file itself.

    Raises:
        FuyouStorageError: that failed; Python names no file then.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise FuyouStorageError(error.errno or errno.EIO, _UNREADABLE, str(path)) from error


def _file_mappings() -> list[_Mapping]:
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, _, offset, _, inode, *path = line.rstrip("\n").split(None, 5)
            if path and path[0].startswith("/"):
                begin, _, end = addresses.partition("-")
                found.append(_Mapping(int(begin, 16), int(end, 16), int(offset, 16), int(inode), path[0]))
    return found
