# SPDX-License-Identifier: Apache-2.0
"""``torch.save`` files whose large tensors are never in memory as a whole.

The file is laid out first: `torch.save` under `torch.serialization.skip_data` writes the pickle and leaves
holes where storages belong. The bytes are then written into the holes, from memory for ordinary tensors and
piece by piece for stand-ins. The result is an ordinary file for `torch.load`, with the checksums that
`torch.save` would have written.

[Note: which hole belongs to which tensor]
torch numbers storages (records ``data/0``, ``data/1``, ...) while it pickles. The pickler that it derives its
own from is ours, and notes the number that each storage gets: no order is assumed. A tree that cannot be laid
out (it holds a kind of tensor that torch saves in another way) is saved from memory, stand-ins filled, and a warning
says so.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
import types
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
from torch.utils import _pytree

from ds_fuyou.errors import FuyouStateError

__all__ = ["StandIns", "save"]

logger = logging.getLogger("ds_fuyou")

Pieces = Iterator[tuple[int, torch.Tensor]]
"""``(first element, values)`` of one stand-in, in ascending order and without gaps."""

_Pass = Iterator[tuple[int, int, torch.Tensor]]

_LOCAL_HEADER = struct.Struct("<4s2B4HL2L2H")
_CENTRAL_ENTRY = struct.Struct("<4s4B4HL2L5H2L")


class StandIns:
    """Tensors without memory, and where their values come from when a file is written.

    Sources of several stand-ins may share one pass over the state: see :meth:`add_together`.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._storages: set[int] = set()
        self._passes: list[tuple[list[torch.Tensor], Callable[[], _Pass]]] = []

    def add(self, shape: Sequence[int], dtype: torch.dtype, pieces: Callable[[], Pieces]) -> torch.Tensor:
        """A stand-in of this shape; ``pieces`` is called when it is written."""

        def one_of_one() -> _Pass:
            return ((0, begin, values) for begin, values in pieces())

        return self.add_together([(shape, dtype)], one_of_one)[0]

    def add_together(
        self,
        tensors: Sequence[tuple[Sequence[int], torch.dtype]],
        pieces: Callable[[], _Pass],
    ) -> list[torch.Tensor]:
        """Stand-ins that one pass fills: it yields ``(which of them, first element, values)``.

        Each of them must come in ascending order and without gaps; they may take turns.
        """
        with self._mode:
            made = [torch.empty(tuple(shape), dtype=dtype, device="cpu") for shape, dtype in tensors]
        self._storages.update(tensor.untyped_storage()._cdata for tensor in made)
        self._passes.append((made, pieces))
        return made

    def passes(self, wanted: Callable[[torch.Tensor], bool]) -> Iterator[tuple[list[torch.Tensor], _Pass]]:
        """The started passes over those sources that fill a wanted stand-in."""
        for made, pieces in self._passes:
            if any(wanted(tensor) for tensor in made):
                yield made, pieces()

    def __bool__(self) -> bool:
        return bool(self._passes)

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is that of a stand-in."""
        return storage._cdata in self._storages


class _Hole:
    """The place of one storage in the file."""

    def __init__(self, info: zipfile.ZipInfo, offset: int) -> None:
        self.info, self.offset = info, offset
        self.num_written, self.crc = 0, 0

    def write(self, fd: int, values: torch.Tensor) -> None:
        data = memoryview(values.contiguous().view(-1).view(torch.uint8).numpy())
        if self.num_written + len(data) > self.info.file_size:
            raise FuyouStateError(f"{self.info.filename} holds {self.info.file_size} bytes; more were given")
        self.crc = zlib.crc32(data, self.crc)
        at = self.offset + self.num_written
        self.num_written += len(data)
        while data:
            done = os.pwrite(fd, data, at)
            data, at = data[done:], at + done


def save(tree: Any, path: Path, stand_ins: StandIns) -> None:
    """Writes ``tree`` to ``path`` and flushes it to storage. Not atomic: the caller renames.

    Raises:
        OSError: the disk is full or failed.
        FuyouStateError: a source did not give all elements of its stand-in.
    """
    storages = _lay_out(tree, path) if stand_ins else {}
    if any(stand_ins.owns(storage) for storage in storages.values()):
        _fill(path, storages, stand_ins)
    else:
        torch.save(_filled_tree(tree, stand_ins), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


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
        with skip_data(materialize_fake_tensors=True):
            torch.save(tree, path, pickle_module=recording)
    except (RuntimeError, AttributeError, TypeError, pickle.PicklingError) as error:
        logger.warning("%s is written from host memory as a whole, it cannot be laid out first: %s", path, error)
        return {}
    return storages


def _holes(path: Path) -> dict[int, _Hole]:
    """The records of storages by number, with the offset of their bytes."""
    holes = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            folder, _, name = info.filename.rpartition("/")
            if folder.rpartition("/")[2] != "data" or not name.isdigit():
                continue
            file.seek(info.header_offset)
            *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            offset = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
            holes[int(name)] = _Hole(info, offset)
    return holes


def _fill(path: Path, storages: dict[int, torch.UntypedStorage], stand_ins: StandIns) -> None:
    holes = _holes(path)
    hole_of = {storage._cdata: holes[number] for number, storage in storages.items()}
    fd = os.open(path, os.O_RDWR)
    try:
        for storage in storages.values():
            if not stand_ins.owns(storage):
                whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.cpu())
                hole_of[storage._cdata].write(fd, whole)
        for made, pieces in stand_ins.passes(lambda tensor: tensor.untyped_storage()._cdata in hole_of):
            places = [hole_of.get(tensor.untyped_storage()._cdata) for tensor in made]
            for which, begin, values in pieces:
                hole = places[which]
                if hole is None or begin * values.element_size() != hole.num_written:
                    raise FuyouStateError(f"values of a stand-in came out of order at element {begin}")
                hole.write(fd, values)
        for hole in holes.values():
            if hole.num_written != hole.info.file_size:
                raise FuyouStateError(
                    f"{hole.info.filename} holds {hole.info.file_size} bytes; its source gave {hole.num_written}"
                )
        _write_checksums(path, fd, {hole.info.filename: hole for hole in holes.values()})
    finally:
        os.close(fd)


def _write_checksums(path: Path, fd: int, holes: dict[str, _Hole]) -> None:
    """Puts the CRC-32 of the bytes where laying out left that of nothing: local headers, central directory."""
    with zipfile.ZipFile(path) as archive:
        at = archive.start_dir
        for _ in archive.infolist():
            entry = _CENTRAL_ENTRY.unpack(os.pread(fd, _CENTRAL_ENTRY.size, at))
            name_bytes, extra_bytes, comment_bytes = entry[12:15]
            name = os.pread(fd, name_bytes, at + _CENTRAL_ENTRY.size).decode()
            hole = holes.get(name)
            if hole is not None:
                crc = struct.pack("<L", hole.crc)
                os.pwrite(fd, crc, at + 16)
                os.pwrite(fd, crc, hole.info.header_offset + 14)
                if hole.info.flag_bits & 0x08:  # a data descriptor repeats it behind the bytes
                    os.pwrite(fd, crc, hole.offset + hole.info.file_size + 4)
            at += _CENTRAL_ENTRY.size + name_bytes + extra_bytes + comment_bytes


def _filled_tree(tree: Any, stand_ins: StandIns) -> Any:
    """The tree with real tensors instead of stand-ins: needs their memory."""
    if not stand_ins:
        return tree
    wanted = {id(leaf) for leaf in _pytree.tree_leaves(tree)}
    real: dict[int, torch.Tensor] = {}
    for made, pieces in stand_ins.passes(lambda tensor: id(tensor) in wanted):
        flats = [torch.empty(tensor.numel(), dtype=tensor.dtype) for tensor in made]
        for which, begin, values in pieces:
            flats[which][begin : begin + values.numel()].copy_(values.view(-1))
        real.update({id(tensor): flat.view(tensor.shape) for tensor, flat in zip(made, flats, strict=True)})
    return _pytree.tree_map(lambda leaf: real.get(id(leaf), leaf), tree)
