# SPDX-License-Identifier: Apache-2.0
"""Tensors that a script gets, in a file without a name that is mapped: the system drops what it needs room for, and
reads it again when it is used."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import torch

from ds_fuyou.storage.anonymous import open_anonymous
from ds_fuyou.storage.data_file import preallocate

__all__ = ["MappedTensors"]

_ALIGN_BYTES = 64  # of what torch allocates
_SYNC_BYTES = 1 << 30


class MappedTensors:
    """Room for tensors in a mapped file, one after the other. Used by one thread; the tensors by anybody, for as long
    as they like: the file goes with the last of them. A script may write to them.

    Args:
        directory: an existing one, on a disk with so much room.
        num_bytes: of all tensors; those of ``count`` tensors may need :meth:`size_of`.

    Raises:
        FuyouStorageError: the directory is not writable.
        OSError: there is no room, on the disk or in the address space.
    """

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self._size, self._end, self._synced = num_bytes, 0, 0
        self._fd = open_anonymous(directory, "keep a model that is saved")
        try:
            # Through the page cache: what is given is not aligned, and is read back by way of the cache.
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            preallocate(self._fd, num_bytes)
            # Shared: private pages that may be written to count as memory that is promised.
            self._map = mmap.mmap(self._fd, num_bytes, mmap.MAP_SHARED)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def size_of(num_bytes: int, count: int) -> int:
        """Bytes of the file for ``count`` tensors that have ``num_bytes`` together."""
        return num_bytes + count * _ALIGN_BYTES

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """The same values, dense, in the file; ``values`` itself if there is no room for it, or it is no plain tensor.

        Raises:
            OSError: the disk failed.
        """
        is_plain = type(values) is torch.Tensor and values.device.type == "cpu"
        is_plain = is_plain and values.layout is torch.strided and not values.is_quantized
        begin = -(-self._end // _ALIGN_BYTES) * _ALIGN_BYTES
        if not is_plain or not 0 < values.nbytes <= self._size - begin:
            return values
        values = values.detach().resolve_conj().resolve_neg().contiguous()
        data = memoryview(values.view(-1).view(torch.uint8).numpy())
        at = begin
        while data:
            num_bytes = os.pwrite(self._fd, data[:_SYNC_BYTES], at)
            data, at = data[num_bytes:], at + num_bytes
            if at - self._synced >= _SYNC_BYTES:
                self._sync(at)
        self._end = at
        kept = torch.frombuffer(self._map, dtype=values.dtype, count=values.numel(), offset=begin)
        return kept.view(values.shape)

    def _sync(self, end: int) -> None:
        """So that a disk that fails says so here, and the page cache holds for others what it held for them."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, self._synced, end - self._synced, os.POSIX_FADV_DONTNEED)
        self._synced = end

    def close(self) -> None:
        """Nothing more is kept. Idempotent.

        Raises:
            OSError: the disk failed.
        """
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                if self._end > self._synced:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
