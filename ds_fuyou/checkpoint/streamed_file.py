# SPDX-License-Identifier: Apache-2.0
"""``torch.save`` files whose large tensors are never in memory as a whole.

The file is laid out first: `torch.save` under `torch.serialization.skip_data` writes the pickle and leaves
holes where storages belong. The bytes are then written into the holes, from memory for ordinary tensors and
piece by piece for stand-ins. The result is an ordinary file for `torch.load`, with the checksums that
`torch.save` would have written.

[Note: which hole belongs to which tensor]
torch numbers storages (records ``data/0``, ``data/1``, ...) in the order in which it pickles them, which for
nested dicts, lists and tuples is their own order. A tree that hides tensors inside other objects has more
records than leaves; it is then saved from memory, stand-ins filled, which is slower but right.
"""

from __future__ import annotations

import os
import struct
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
            made = [torch.empty(tuple(shape), dtype=dtype) for shape, dtype in tensors]
        self._passes.append((made, pieces))
        return made

    def passes(self, wanted: Callable[[torch.Tensor], bool]) -> Iterator[tuple[list[torch.Tensor], _Pass]]:
        """The started passes over those sources that fill a wanted stand-in."""
        for made, pieces in self._passes:
            if any(wanted(tensor) for tensor in made):
                yield made, pieces()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return any(tensor is other for made, _ in self._passes for other in made)


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
    leaves = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    if not any(leaf in stand_ins for leaf in leaves):
        torch.save(tree, path)
    else:
        with skip_data(materialize_fake_tensors=True):
            torch.save(tree, path)
        storages = _distinct_storages(leaves)
        holes = _holes(path)
        if [hole.info.file_size for hole in holes] == [leaf.untyped_storage().nbytes() for leaf in storages]:
            _fill(path, storages, holes, stand_ins)
        else:
            torch.save(_filled_tree(tree, stand_ins), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _distinct_storages(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor of every storage, in the order of first appearance."""
    found: dict[Any, torch.Tensor] = {}
    for leaf in leaves:
        found.setdefault(leaf.untyped_storage()._cdata, leaf)
    return list(found.values())


def _holes(path: Path) -> list[_Hole]:
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
    return [holes[i] for i in sorted(holes)]


def _fill(path: Path, storages: Sequence[torch.Tensor], holes: Sequence[_Hole], stand_ins: StandIns) -> None:
    hole_of = {leaf.untyped_storage()._cdata: hole for leaf, hole in zip(storages, holes, strict=True)}
    fd = os.open(path, os.O_RDWR)
    try:
        for leaf in storages:
            if leaf not in stand_ins:
                whole = torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage().cpu())
                hole_of[leaf.untyped_storage()._cdata].write(fd, whole)
        for made, pieces in stand_ins.passes(lambda tensor: tensor.untyped_storage()._cdata in hole_of):
            places = [hole_of.get(tensor.untyped_storage()._cdata) for tensor in made]
            for which, begin, values in pieces:
                hole = places[which]
                if hole is None or begin * values.element_size() != hole.num_written:
                    raise FuyouStateError(f"values of a stand-in came out of order at element {begin}")
                hole.write(fd, values)
        for hole in holes:
            if hole.num_written != hole.info.file_size:
                raise FuyouStateError(
                    f"{hole.info.filename} holds {hole.info.file_size} bytes; its source gave {hole.num_written}"
                )
        _write_checksums(path, fd, {hole.info.filename: hole for hole in holes})
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
    wanted = {id(leaf) for leaf in _pytree.tree_leaves(tree)}
    real: dict[int, torch.Tensor] = {}
    for made, pieces in stand_ins.passes(lambda tensor: id(tensor) in wanted):
        flats = [torch.empty(tensor.numel(), dtype=tensor.dtype) for tensor in made]
        for which, begin, values in pieces:
            flats[which][begin : begin + values.numel()].copy_(values.view(-1))
        real.update({id(tensor): flat.view(tensor.shape) for tensor, flat in zip(made, flats, strict=True)})
    return _pytree.tree_map(lambda leaf: real.get(id(leaf), leaf), tree)
