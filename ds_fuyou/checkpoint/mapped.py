# SPDX-License-Identifier: Apache-2.0
"""Where in a file the bytes of a tensor lie that ``torch.load(mmap=True)`` gave.

The engine that reads everything else reads them from there and takes no thread's time. To touch the mapped memory takes
one page fault after the other, and a copy. But only what nobody has written to is what the file holds, so the files are
named by who loaded them.
"""

from __future__ import annotations

import bisect
import copy
import ctypes
import errno
import mmap
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ds_fuyou.checkpoint.file_sums import FileSums, Place
from ds_fuyou.checkpoint.reading import UNREADABLE
from ds_fuyou.errors import FuyouMemoryError, FuyouStorageError
from ds_fuyou.libc import libc
from ds_fuyou.storage.probe import enable_direct
from ds_fuyou.storage.types import PAGE_BYTES, Extent

__all__ = ["Compared", "MappedFiles", "check_readable", "copied"]

T = TypeVar("T")

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
        mapping = self._mapping_of(values)
        if mapping is None:
            return None
        offset, num_bytes = mapping.offset + values.data_ptr() - mapping.begin, values.nbytes
        try:
            buffered = self._open(mapping, is_direct=False)
            direct = self._open(mapping, is_direct=True) if offset % PAGE_BYTES == 0 else buffered
        except OSError:
            return None
        num_whole = num_bytes // PAGE_BYTES * PAGE_BYTES
        runs = [Extent(direct, offset, num_whole), Extent(buffered, offset + num_whole, num_bytes - num_whole)]
        return [run for run in runs if run.num_bytes]

    def place(self, values: torch.Tensor) -> Place | None:
        """Where a contiguous tensor begins; None if it is not in these files."""
        mapping = self._mapping_of(values)
        if mapping is None:
            return None
        return Place(mapping.path, mapping.inode, mapping.offset + values.data_ptr() - mapping.begin)

    def _mapping_of(self, values: torch.Tensor) -> _Mapping | None:
        at = values.data_ptr()
        index = bisect.bisect_right(self._begins, at) - 1
        if index < 0 or at + values.nbytes > self._mappings[index].end or not values.is_contiguous():
            return None
        return self._mappings[index]

    def path_of(self, fd: int) -> Path | None:
        """For messages."""
        return next((Path(path) for (path, _), known in self._fds.items() if known == fd), None)

    def _open(self, mapping: _Mapping, *, is_direct: bool) -> int:
        key = mapping.path, is_direct
        if key not in self._fds:
            fd = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(fd).st_ino != mapping.inode:
                os.close(fd)
                raise FileNotFoundError(f"{mapping.path} is another file now")
            self._fds[key] = fd
            if is_direct:
                enable_direct(fd)
        return self._fds[key]


def check_readable(values: torch.Tensor) -> None:
    """Reads the pages that a CPU tensor of a mapped file, or a part of one, lies in. Where one cannot be read, since
    the disk is faulty or the file has become shorter, who touches it is killed (SIGBUS). On older kernels this does
    nothing.

    Raises:
        FuyouStorageError: it cannot be read.
        FuyouMemoryError: there is no memory to read it to.
    """
    is_plain = values.layout is torch.strided and not is_traceable_wrapper_subclass(values)
    if is_plain and values.device.type == "cpu" and values.numel() and values.is_contiguous():
        _check_readable(values.data_ptr(), values.nbytes)
        return
    for storage in _storages(values):
        _check_readable(storage.data_ptr(), storage.nbytes())


class Compared:
    """Tensors of these files that are used where they are mapped; their memory is compared with its checksum once."""

    def __init__(self, paths: Collection[str], *, sums: bool) -> None:
        """``paths``: real ones. ``sums``: whether anything is compared, not only read."""
        self._files = MappedFiles(paths if sums else ())
        self._sums = FileSums()
        self._seen: set[int] = set()

    def check(self, values: torch.Tensor) -> None:
        """As :func:`check_readable`, and raises FuyouChecksumError if the bytes are not what was written."""
        for storage in _storages(values):
            if storage.data_ptr() in self._seen:
                continue
            _check_readable(storage.data_ptr(), storage.nbytes())
            self._seen.add(storage.data_ptr())
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            place = self._files.place(whole)
            if place is not None:
                self._sums.add(place, whole)


def copied(loaded: T, mapped: Iterable[object]) -> T:
    """A copy of what ``torch.load(mmap=True)`` gave, which no longer changes with the file; only ``mapped``, parts of
    it, stay in the file's memory.
    """
    known: dict[int, Any] = {id(part): part for part in mapped}
    for leaf in _pytree.tree_leaves(loaded):
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
            known[id(leaf)] = leaf
        elif isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:  # torch does not copy all of them
            known[id(leaf)] = leaf.clone()
    return copy.deepcopy(loaded, known)


def _check_readable(at: int, num_bytes: int) -> None:
    begin = at // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes += at - begin
    if not libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), _MADV_POPULATE_READ):
        return
    number = ctypes.get_errno()
    if number == errno.ENOMEM:
        raise FuyouMemoryError(num_bytes)
    if number in (errno.EFAULT, _EHWPOISON):
        path = next((found.path for found in _file_mappings() if found.begin <= begin < found.end), None)
        raise FuyouStorageError(errno.EIO, UNREADABLE, path)


def _storages(values: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor, or of those that it is made of, if it has none of its own."""
    parts: list[torch.Tensor] = []
    if is_traceable_wrapper_subclass(values):
        names, _ = values.__tensor_flatten__()
        parts = [getattr(values, name) for name in names]
    elif values.layout is not torch.strided:
        parts = [getattr(values, part)() for part in _PARTS.get(values.layout, ())]
    elif values.numel() and values.device.type == "cpu":
        yield values.untyped_storage()
    for part in parts:
        yield from _storages(part)


def _file_mappings() -> list[_Mapping]:
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, _, offset, _, inode, *path = line.rstrip("\n").split(None, 5)
            if path and path[0].startswith("/"):
                begin, _, end = addresses.partition("-")
                found.append(_Mapping(int(begin, 16), int(end, 16), int(offset, 16), int(inode), path[0]))
    return found
