# SPDX-License-Identifier: Apache-2.0
"""The checksums that ``torch.save`` writes beside every tensor, compared with what is read of it.

``torch.load`` does not look at them: a byte that changed on the way to the disk, on it or in a copy would be trained
on. Who reads tensors in pieces, in any order, gives each piece; a tensor is compared when all of it was given. A sum of
0 is none: torch can be told to write none.
"""

from __future__ import annotations

import bisect
import errno
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from ds_fuyou.checkpoint.crc import crc32_of, crc32_of_both
from ds_fuyou.checkpoint.reading import is_archive, naming, record_begin
from ds_fuyou.errors import FuyouChecksumError

__all__ = ["FileSums", "Place", "compare_archive", "compare_file"]

_READ_BYTES = 1 << 20


class Place(NamedTuple):
    """Where bytes lie: ``offset`` in the file that had this name when it was mapped, as this ``inode``."""

    path: str
    inode: int
    offset: int


@dataclass
class _Record:
    """Of one tensor's memory."""

    name: str
    begin: int
    end: int
    crc: int
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By first byte: CRC-32, number of bytes."""

    def is_whole(self) -> bool:
        return sum(num_bytes for _, num_bytes in self.seen.values()) == self.end - self.begin

    def holds(self) -> bool:
        crc, at = 0, self.begin
        for begin, (of_piece, num_bytes) in sorted(self.seen.items()):
            if begin != at:
                return True  # pieces overlap: nothing can be said
            crc, at = crc32_of_both(crc, of_piece, num_bytes), at + num_bytes
        return crc == self.crc


class FileSums:
    """Of all files that something was read of. Used by one thread."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, int], list[_Record]] = {}

    def add(self, place: Place, values: torch.Tensor) -> None:
        """These bytes of a contiguous tensor were read there.

        Raises:
            FuyouChecksumError: all of a tensor was read, and it is not what was written.
            FuyouStorageError: the file's list of what is in it cannot be read.
        """
        key = place.path, place.inode
        if key not in self._records:
            self._records[key] = _records(place)
        records = self._records[key]
        index = bisect.bisect_right(records, place.offset, key=lambda record: record.begin) - 1
        if index < 0 or not values.nbytes or place.offset + values.nbytes > records[index].end:
            return
        record = records[index]
        record.seen[place.offset] = crc32_of(values), values.nbytes
        if record.is_whole() and not record.holds():
            raise _differs(place.path, record.name, record.begin)


def compare_file(path: str, *, with_tensors: bool) -> None:
    """A file of ``torch.save``, read from its beginning to its end: its pickle and what lies beside it, and tensors.

    Raises:
        FuyouChecksumError: it is not what was written.
        FuyouStorageError: it cannot be read.
    """
    with naming(path), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.CRC or (_is_of_tensor(info.filename) and not with_tensors):
                continue
            try:
                with archive.open(info) as record:
                    while record.read(_READ_BYTES):
                        pass
            except zipfile.BadZipFile as error:
                raise _differs(path, info.filename, info.header_offset) from error


def compare_archive(file: Path) -> None:
    """As :func:`compare_file`, with tensors; a file of another format has no sums to compare with."""
    if is_archive(file):
        compare_file(str(file), with_tensors=True)


def _records(place: Place) -> list[_Record]:
    """In order of their place; none if the file has another name by now."""
    found = []
    with naming(place.path), open(place.path, "rb") as file, zipfile.ZipFile(file) as archive:
        if os.fstat(file.fileno()).st_ino != place.inode:
            return []
        for info in archive.infolist():
            if not info.CRC or not _is_of_tensor(info.filename) or info.compress_type != zipfile.ZIP_STORED:
                continue
            begin = record_begin(file.fileno(), info)
            found.append(_Record(info.filename, begin, begin + info.file_size, info.CRC))
    return sorted(found, key=lambda record: record.begin)


def _is_of_tensor(name: str) -> bool:
    folder, _, number = name.rpartition("/")
    return folder.rpartition("/")[2] == "data" and number.isdigit()


def _differs(path: str, name: str, at: int) -> FuyouChecksumError:
    what = f"reading a checkpoint: {name} is not what was written there (checksums); take another checkpoint or a copy"
    return FuyouChecksumError(errno.EBADMSG, what, path, at)
