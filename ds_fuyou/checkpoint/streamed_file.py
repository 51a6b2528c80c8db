# SPDX-License-Identifier: Apache-2.0
"""``torch.save`` files whose large tensors are never in memory as a whole.

The file is laid out first: `torch.save` under `torch.serialization.skip_data` writes the pickle and leaves
holes where storages belong. The bytes are then written into the holes, from memory for ordinary tensors and
piece by piece, in any order, for stand-ins. The result is an ordinary file for `torch.load`, with the checksums that
`torch.save` would have written.

[Note: which hole belongs to which tensor]
torch numbers storages (records ``data/0``, ``data/1``, ...) while it pickles. The pickler that it derives its
own from is ours, and notes the number that each storage gets: no order is assumed. A tree that cannot be laid
out (it holds a kind of tensor that torch saves in another way) is saved from memory, stand-ins filled, and a warning
says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import pickle
import queue
import struct
import threading
import types
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.serialization
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
from torch.utils import _pytree

from ds_fuyou.checkpoint.crc import crc32_of, crc32_of_both
from ds_fuyou.checkpoint.reading import read_at, record_begin
from ds_fuyou.errors import FuyouStateError, FuyouStorageError
from ds_fuyou.host.threads import starting_threads
from ds_fuyou.storage.data_file import NO_FALLOCATE, allocate_blocks
from ds_fuyou.storage.probe import enable_direct
from ds_fuyou.storage.types import PAGE_BYTES, Extent

__all__ = ["Clone", "StandIns", "StreamedFile", "lay_out", "save"]

logger = logging.getLogger("ds_fuyou")

Pieces = Iterator[tuple[int, torch.Tensor]]
"""``(first element, values)`` of one stand-in, without gaps."""

_Pass = Iterator[tuple[int, int, torch.Tensor]]
"""Closed where it is left before its end, if it is a generator."""

Clone = Callable[[int, int, Sequence[Extent]], Extent | None]
"""``(which of several stand-ins, first element, where its values lie)``: whole pages of another file, which the file
system makes pages of this one without copying them, and where they are in it. None if it cannot. The pass gives these
values all the same, for the checksum: they are not written."""

_WRITE_BYTES = 16 << 20  # at once

_WRITING = "writing a checkpoint failed"

_FICLONERANGE = 0x4020940D
_CLONE_RANGE = struct.Struct("qQQQ")
_NO_CLONES = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM, errno.ENOSYS)

_CENTRAL_ENTRY = struct.Struct("<4s4B4HL2L5H2L")


@dataclass(frozen=True)
class _Source:
    """Stand-ins that one pass fills; ``later``: another thread may, when the file is laid out."""

    made: list[torch.Tensor]
    pieces: Callable[..., _Pass]
    later: bool
    clones: bool = False


class StandIns:
    """Tensors without memory, and where their values come from when a file is written.

    Sources of several stand-ins may share one pass over the state: see :meth:`add_together`.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._storages: set[int] = set()
        self._sources: list[_Source] = []

    def add(self, shape: Sequence[int], dtype: torch.dtype, pieces: Callable[[], Pieces]) -> torch.Tensor:
        """A stand-in of this shape; ``pieces`` is called when it is written."""

        def one_of_one() -> _Pass:
            return ((0, begin, values) for begin, values in pieces())

        return self.add_together([(shape, dtype)], one_of_one)[0]

    def add_together(
        self,
        tensors: Sequence[tuple[Sequence[int], torch.dtype]],
        pieces: Callable[..., _Pass],
        *,
        later: bool = False,
        clones: bool = False,
    ) -> list[torch.Tensor]:
        """Stand-ins that one pass fills: it yields ``(which of them, first element, values)``, in any order, every
        element once. ``later``: the pass may run in another thread, see :meth:`StreamedFile.fill_rest`. ``clones``:
        ``pieces`` is called with a :data:`Clone`.
        """
        with self._mode:
            made = [torch.empty(tuple(shape), dtype=dtype, device="cpu") for shape, dtype in tensors]
        self._storages.update(tensor.untyped_storage()._cdata for tensor in made)
        self._sources.append(_Source(made, pieces, later, clones))
        return made

    def sources(self, wanted: Callable[[torch.Tensor], bool]) -> list[_Source]:
        """Those that fill a wanted stand-in."""
        return [source for source in self._sources if any(wanted(tensor) for tensor in source.made)]

    def __bool__(self) -> bool:
        return bool(self._sources)

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is that of a stand-in."""
        return storage._cdata in self._storages


class _Hole:
    """The place of one storage in the file."""

    def __init__(self, info: zipfile.ZipInfo, offset: int) -> None:
        self.info, self.offset = info, offset
        self._written: dict[int, tuple[int, int]] = {}  # first byte: CRC-32, number of bytes
        self._cloned: set[int] = set()  # first bytes of what is there before it is summed

    def write(self, file: _Outlet, begin: int, values: torch.Tensor) -> None:
        """Bytes from ``begin`` on. FuyouStorageError if the disk is full or failed."""
        values = values.contiguous().view(-1)
        data = memoryview(values.view(torch.uint8).numpy())
        if begin + len(data) > self.info.file_size or begin in self._written:
            raise FuyouStateError(
                f"{self.info.filename} holds {self.info.file_size} bytes; {len(data)} were given for byte {begin}"
            )
        if begin in self._cloned:
            self._written[begin] = crc32_of(values), len(data)
        elif len(data):
            with file.writing(data, self.offset + begin, is_aligned=values.data_ptr() % PAGE_BYTES == 0):
                self._written[begin] = crc32_of(values), len(data)

    def clone(self, file: _Outlet, begin: int, extents: Sequence[Extent]) -> Extent | None:
        """Pages of another file become those from byte ``begin`` on; where they are. None if that cannot be."""
        at, num_bytes = self.offset + begin, sum(extent.num_bytes for extent in extents)
        if at % PAGE_BYTES or begin + num_bytes > self.info.file_size or not file.clone(extents, at):
            return None
        self._cloned.add(begin)
        return Extent(file.direct_fd, at, num_bytes)

    def crc(self) -> int:
        """Of all bytes. FuyouStateError if some were not written, or twice."""
        crc, at = 0, 0
        for begin, (of_piece, num_bytes) in sorted(self._written.items()):
            if begin != at:
                break
            crc, at = crc32_of_both(crc, of_piece, num_bytes), at + num_bytes
        if at != self.info.file_size:
            raise FuyouStateError(
                f"{self.info.filename} holds {self.info.file_size} bytes; its source gave {at} without a gap"
            )
        return crc


class _Outlet:
    """A file open for writing: whole pages from aligned memory pass the page cache by, where the filesystem can. (As
    much as a model through the page cache would push out what others have there, and take processor time.)

    ``direct``: whether that is tried. The try reads a page past the cache, and waits until what the cache has of it is
    on storage: behind all that training writes.
    """

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self._path = path
        self._asked: queue.SimpleQueue[tuple[memoryview, int, bool] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        # No executor: the end of the interpreter closes those before what is in flight is finished.
        self._thread = threading.Thread(target=self._run, name=threading.current_thread().name, daemon=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC) if direct else -1
        if direct and enable_direct(self._direct):
            os.close(self._direct)
            self._direct = -1
        try:
            with starting_threads():
                self._thread.start()
        except RuntimeError:
            self._close_files()
            raise

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            try:
                self._write_pages(*asked)
                self._answers.put(None)
            except Exception as error:  # raised where the answer is waited for
                self._answers.put(error)

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def direct_fd(self) -> int:
        """Past the page cache, where the filesystem can."""
        return self._direct if self._direct >= 0 else self._fd

    def clone(self, extents: Sequence[Extent], at: int) -> bool:
        """False if the filesystem does not share blocks, or not between these. FuyouStorageError if it failed."""
        for extent in extents:
            given = _CLONE_RANGE.pack(*extent, at)
            try:
                fcntl.ioctl(self._fd, _FICLONERANGE, given)
            except OSError as error:
                if error.errno in _NO_CLONES:
                    return False
                raise FuyouStorageError(error.errno or errno.EIO, _WRITING, os.fspath(self._path), at) from error
            at += extent.num_bytes
        return True

    @contextlib.contextmanager
    def writing(self, data: memoryview, at: int, *, is_aligned: bool) -> Iterator[None]:
        """Writes ``data`` from byte ``at`` on while the block runs. FuyouStorageError if the disk is full or failed."""
        self._asked.put((data, at, is_aligned))
        try:
            yield
        finally:
            failure = self._answers.get()
        if failure is not None:
            raise failure

    def _write_pages(self, data: memoryview, at: int, is_aligned: bool) -> None:
        if is_aligned and self._direct >= 0 and at % PAGE_BYTES == 0:
            num_whole = len(data) // PAGE_BYTES * PAGE_BYTES
            self._write(self._direct, data[:num_whole], at)
            data, at = data[num_whole:], at + num_whole
        self._write(self._fd, data, at)

    def _write(self, fd: int, data: memoryview, at: int) -> None:
        try:
            _pwrite(fd, data, at)
        except OSError as error:
            raise FuyouStorageError(error.errno or errno.EIO, _WRITING, os.fspath(self._path), at) from error

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()
        self._close_files()

    def _close_files(self) -> None:
        for fd in {self._fd, self._direct} - {-1}:
            os.close(fd)


class StreamedFile:
    """A file that is laid out; what is in memory is in it, what stand-ins stand for is not yet.

    One thread at a time uses it, which need not be the one that laid it out.
    """

    def __init__(
        self, path: Path, holes: dict[int, _Hole], sources: Sequence[_Source], hole_of: dict[int, _Hole]
    ) -> None:
        self.path = path
        self._holes, self._sources, self._hole_of = holes, sources, hole_of

    def fill_now(self) -> None:
        """Writes what only this thread can give. A flush may take long: :meth:`fill_rest` does it."""
        self._fill([source for source in self._sources if not source.later], lambda: None)

    def fill_rest(self, check: Callable[[], None]) -> None:
        """Writes the rest, and flushes the file to storage; ``check`` is called often and may raise.

        Raises:
            OSError: the disk is full or failed.
            FuyouStateError: a source did not give all elements of its stand-ins.
        """
        self._fill([source for source in self._sources if source.later], check)
        self._end()

    def _fill(self, sources: Sequence[_Source], check: Callable[[], None]) -> None:
        if not sources:
            return
        with contextlib.closing(_Outlet(self.path)) as file:
            for source in sources:
                places = [self._hole_of.get(tensor.untyped_storage()._cdata) for tensor in source.made]
                with _closing(
                    source.pieces(_cloning(file, source, places)) if source.clones else source.pieces()
                ) as pieces:
                    for which, begin, values in pieces:
                        check()
                        hole = places[which]
                        if hole is not None:
                            hole.write(file, begin * values.element_size(), values)

    def _end(self) -> None:
        if self._holes:
            _write_checksums(self.path, self._holes.values())
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        self._holes, self._sources, self._hole_of = {}, [], {}


def _cloning(file: _Outlet, source: _Source, places: Sequence[_Hole | None]) -> Clone:
    def clone(which: int, begin: int, extents: Sequence[Extent]) -> Extent | None:
        hole = places[which]
        return None if hole is None else hole.clone(file, begin * source.made[which].element_size(), extents)

    return clone


@contextlib.contextmanager
def _closing(pieces: _Pass) -> Iterator[_Pass]:
    try:
        yield pieces
    finally:
        if isinstance(pieces, Generator):
            pieces.close()


def save(tree: Any, path: Path, stand_ins: StandIns) -> None:
    """Writes ``tree`` to ``path`` and flushes it to storage. Not atomic: the caller renames.

    Raises:
        OSError: the disk is full or failed.
        FuyouStateError: a source did not give all elements of its stand-in.
    """
    file = lay_out(tree, path, stand_ins)
    file.fill_now()
    file.fill_rest(lambda: None)


def lay_out(tree: Any, path: Path, stand_ins: StandIns) -> StreamedFile:
    """Writes what of ``tree`` is in memory, and claims the space of the rest, so that it is there when it comes.

    Raises:
        OSError: the disk is full or failed.
    """
    storages = _lay_out(tree, path) if stand_ins else {}
    if not any(stand_ins.owns(storage) for storage in storages.values()):
        _torch_save(_filled_tree(tree, stand_ins), path)
        return StreamedFile(path, {}, [], {})
    holes = _holes(path)
    hole_of = {storage._cdata: holes[number] for number, storage in storages.items()}
    there = [storage for storage in storages.values() if not stand_ins.owns(storage)]
    with contextlib.closing(_Outlet(path, direct=any(map(_has_pages, there)))) as file:
        _claim(file.fd, path)
        for storage in there:
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.cpu())
            hole_of[storage._cdata].write(file, 0, whole)
    sources = stand_ins.sources(lambda tensor: tensor.untyped_storage()._cdata in hole_of)
    return StreamedFile(path, holes, sources, hole_of)


def _has_pages(storage: torch.UntypedStorage) -> bool:
    """Whether any of it would pass the page cache by."""
    return storage.device.type != "cpu" or (storage.nbytes() >= PAGE_BYTES and storage.data_ptr() % PAGE_BYTES == 0)


def _claim(fd: int, path: Path) -> None:
    """Allocates the blocks of a file, where the filesystem can without writing them."""
    try:
        allocate_blocks(fd, os.fstat(fd).st_size)
    except OSError as error:
        if error.errno not in NO_FALLOCATE:
            raise FuyouStorageError(error.errno or errno.EIO, _WRITING, os.fspath(path)) from error


class _Paper(io.FileIO):
    """What torch writes to. What fails is kept: torch does not look at it, or tells neither file nor number."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        left = memoryview(data).cast("B")
        num_bytes = len(left)
        try:
            while left and self.failure is None:
                left = left[super().write(left) or 0 :]
        except OSError as error:
            self.failure = error
        return num_bytes


def _torch_save(tree: Any, path: Path, **how: Any) -> None:
    """``torch.save``, whose own failures of the file are RuntimeErrors, as if the tree could not be saved.

    Raises:
        OSError: the disk is full or failed.
    """
    with _Paper(path, "wb") as file:
        failed: Exception | None = None
        try:
            torch.save(tree, file, **how)
        except Exception as error:
            failed = error
        if file.failure is not None:
            number = file.failure.errno or errno.EIO
            raise FuyouStorageError(number, _WRITING, os.fspath(path), file.tell()) from file.failure
        if failed is not None:
            raise failed


def _aligned() -> contextlib.AbstractContextManager[object]:
    """Storages begin at pages of the file, where this torch can be told so."""
    config = torch.utils.serialization.config
    if not hasattr(config.save, "storage_alignment"):
        return contextlib.nullcontext()
    patch: contextlib.AbstractContextManager[object] = config.patch({"save.storage_alignment": PAGE_BYTES})
    return patch


def _lay_out(tree: Any, path: Path) -> dict[int, torch.UntypedStorage]:
    """Writes everything but the bytes of storages; the storage of every record. Empty: it cannot be done."""
    storages: dict[int, torch.UntypedStorage] = {}

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            names = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                name = names(self, value)
                if name is not None:
                    storages[int(name[2])] = getattr(value, "_untyped_storage", value)
                return name

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    recording = types.ModuleType("pickle")
    recording.Pickler = Pickler  # type: ignore[attr-defined]
    try:
        with _aligned(), skip_data(materialize_fake_tensors=True):
            _torch_save(tree, path, pickle_module=recording)
    except (RuntimeError, AttributeError, TypeError, pickle.PicklingError) as error:
        logger.warning("%s is written from host memory as a whole, it cannot be laid out first: %s", path, error)
        return {}
    return storages


class _Sheet(io.FileIO):
    """What torch has written. What fails is kept: zipfile takes it for a file of another kind."""

    failure: OSError | None = None

    def readinto(self, buffer: Any, /) -> int | None:
        with self._noted():
            return super().readinto(buffer)

    def readall(self) -> bytes | None:  # type: ignore[override]
        with self._noted():
            return super().readall()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            raise


@contextlib.contextmanager
def _read_back(path: Path, mode: str) -> Iterator[tuple[zipfile.ZipFile, int]]:
    """The archive that was laid out, and a descriptor of it.

    Raises:
        OSError: the disk failed, or does not give what was written.
    """
    with _Sheet(path, mode) as sheet, io.BufferedReader(sheet) as reader:
        try:
            with zipfile.ZipFile(reader) as archive:
                yield archive, sheet.fileno()
        except (OSError, zipfile.BadZipFile, UnicodeDecodeError) as error:
            failure = sheet.failure or (error if isinstance(error, OSError) else None)
            number = (failure.errno if failure is not None else 0) or errno.EIO
            raise FuyouStorageError(number, "reading a checkpoint back that was laid out", os.fspath(path)) from error


def _pwrite(fd: int, data: bytes | memoryview, at: int) -> None:
    """All of it; OSError if the disk is full, failed, or takes nothing."""
    while data:
        done = os.pwrite(fd, data[:_WRITE_BYTES], at)
        if not done:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data, at = data[done:], at + done


def _holes(path: Path) -> dict[int, _Hole]:
    """The records of storages by number, with the offset of their bytes."""
    holes = {}
    with _read_back(path, "rb") as (archive, fd):
        for info in archive.infolist():
            folder, _, name = info.filename.rpartition("/")
            if folder.rpartition("/")[2] != "data" or not name.isdigit():
                continue
            holes[int(name)] = _Hole(info, record_begin(fd, info))
    return holes


def _write_checksums(path: Path, filled: Iterable[_Hole]) -> None:
    """Puts the CRC-32 of the bytes where laying out left that of nothing: local headers, central directory."""
    holes = {hole.info.filename: hole for hole in filled}
    with _read_back(path, "r+b") as (archive, fd):
        at = archive.start_dir
        for _ in archive.infolist():
            entry = _CENTRAL_ENTRY.unpack(read_at(fd, _CENTRAL_ENTRY.size, at))
            name_bytes, extra_bytes, comment_bytes = entry[12:15]
            name = read_at(fd, name_bytes, at + _CENTRAL_ENTRY.size).decode()
            hole = holes.get(name)
            if hole is not None:
                crc = struct.pack("<L", hole.crc())
                _pwrite(fd, crc, at + 16)
                _pwrite(fd, crc, hole.info.header_offset + 14)
                if hole.info.flag_bits & 0x08:  # a data descriptor repeats it behind the bytes
                    _pwrite(fd, crc, hole.offset + hole.info.file_size + 4)
            at += _CENTRAL_ENTRY.size + name_bytes + extra_bytes + comment_bytes


def _no_clone(_which: int, _begin: int, _extents: Sequence[Extent]) -> None:
    """There is no file yet."""


def _filled_tree(tree: Any, stand_ins: StandIns) -> Any:
    """The tree with real tensors instead of stand-ins: needs their memory."""
    if not stand_ins:
        return tree
    wanted = {id(leaf) for leaf in _pytree.tree_leaves(tree)}
    real: dict[int, torch.Tensor] = {}
    for source in stand_ins.sources(lambda tensor: id(tensor) in wanted):
        flats = [torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu") for tensor in source.made]
        for which, begin, values in source.pieces(*[_no_clone] * source.clones):
            flats[which][begin : begin + values.numel()].copy_(values.view(-1))
        real.update({id(tensor): flat.view(tensor.shape) for tensor, flat in zip(source.made, flats, strict=True)})
    return _pytree.tree_map(lambda leaf: real.get(id(leaf), leaf), tree)
