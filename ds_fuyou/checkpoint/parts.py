# SPDX-License-Identifier: Apache-2.0
"""Who says that a folder is whole when several ranks write into it and none of them may wait for the others.

[Note: the last one publishes]
A rank whose files are flushed leaves a mark in the hidden folder, and then counts the marks. The last one to leave its
mark sees all of them, since it counts after it has left its own. Of several that see all, the one publishes that takes
the first mark away, which only one can, and only once: it gives the folder its name and replaces ``latest``. The folder
is held open meanwhile, for its name may be that of another one by then. A rank that failed, or was killed, leaves no
mark, so the folder never gets its name.

It needs one folder for all ranks, and a file system whose names are the same everywhere at once. Where another host
sees a name late (NFS), nobody may have seen all marks; then the next call that all ranks make publishes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from ds_fuyou.checkpoint import atomic
from ds_fuyou.checkpoint.unfinished import WritingLock
from ds_fuyou.errors import FuyouStorageError

__all__ = ["Parts"]

_MARK = ".written-"
_MARKING = "marking a rank's part of a checkpoint as written"


class Parts:
    """One rank's view of a checkpoint in the folder ``hidden``, which becomes ``final``.

    ``makers``: of every rank who made the folder that it writes to, which is told where the folder is made: names of
    other machines come late. ``latest``: what the file of that name will say, None if it is not to be written.
    ``lock``: of ``hidden``, kept up to the end.
    """

    def __init__(
        self,
        hidden: Path,
        final: Path,
        rank: int,
        makers: Sequence[int],
        latest: tuple[Path, str] | None,
        lock: WritingLock | None = None,
    ) -> None:
        self._lock = lock
        self._hidden, self._final, self._latest = hidden, final, latest
        self._new_latest: Path | None = None
        self._rank, self._num_ranks = rank, len(makers)
        self.is_maker = makers[rank] == rank
        """This rank gives the folder its name where that is not left to the last one."""

    def written(self) -> bool:
        """This rank's files are whole and flushed. Whether this call gave the folder its name.

        Raises:
            FuyouStorageError: the folder could not be marked, flushed or renamed.
            OSError: the file system failed.
        """
        folder = os.open(self._hidden, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.close(os.open(f"{_MARK}{self._rank}", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=folder))
            if sum(name.startswith(_MARK) for name in os.listdir(folder)) < self._num_ranks:
                return False
            os.unlink(f"{_MARK}0", dir_fd=folder)
        except FileNotFoundError:
            return False  # another rank publishes it, or has
        except OSError as error:  # which knows the name in the folder alone
            name = error.filename if isinstance(error.filename, str) else ""
            raise FuyouStorageError(error.errno or 0, _MARKING, os.fspath(self._hidden / name)) from error
        finally:
            os.close(folder)
        self.prepare_latest()
        self.publish()
        self.write_latest()
        return True

    def publish(self) -> None:
        """All ranks have written their parts, and nobody else publishes.

        Raises:
            FuyouStorageError: the folder is another one than this rank has written to, or cannot get its name.
        """
        self.require_in_place()
        for name in os.listdir(self._hidden):
            if name.startswith(_MARK):
                (self._hidden / name).unlink()
        atomic.publish(self._hidden, self._final)

    def require_in_place(self) -> None:
        """Raises FuyouStorageError: the folder is another one than this rank writes to."""
        if self._lock is not None and not self._lock.is_in_place():
            what = "the folder that a checkpoint was written to is gone, or another one is there; save it again"
            raise FuyouStorageError(errno.ESTALE, what, os.fspath(self._hidden))

    def prepare_latest(self) -> None:
        """Before a folder gets its name: what replaces ``latest`` then needs no more room.

        Raises:
            FuyouStorageError: it could not be written.
        """
        if self._latest is not None:
            self._new_latest = atomic.write_beside(*self._latest)

    def write_latest(self) -> None:
        """All folders have their names, and this rank has prepared it."""
        if self._latest is not None and self._new_latest is not None:
            atomic.replace(self._new_latest, self._latest[0])
            self._new_latest = None

    def discard(self) -> None:
        """It will not be whole: what all ranks have written would fill the disk to no use."""
        if self._new_latest is not None:
            self._new_latest.unlink(missing_ok=True)
        if self.is_maker and self._lock is not None and self._lock.is_in_place():
            atomic.discard(self._hidden)

    def end(self) -> None:
        """Nobody writes there for this rank any more."""
        if self._lock is not None:
            self._lock.release()
