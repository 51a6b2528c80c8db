# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on its way to storage, in a thread of its own.

[Note: a save behind training]
``save_checkpoint`` lays the files out, writes what is small, keeps the states of the present step
(:class:`~ds_fuyou.optimizer.snapshot.Snapshot`), and starts one thread, which takes them away and fills the files.
Blocking or not is one thing: whether the call waits for that thread.

* The thread owns the files from its start to its end, and of memory the snapshot's buffers. It calls nothing of
  DeepSpeed, makes no collective, and waits for the pipeline's updates up to the present step and for its own transfers
  alone; neither waits for it. ([Note: kept states] has the updates that do.)
* The training thread waits for it where all ranks do: before the next save, a load, and when asked; and alone in
  ``close()`` and before states are replaced in their place. Meanwhile the thread needs nothing of the training thread.
* The folder gets its name from the last rank that has written, which is told by files ([Note: the last one publishes]
  in checkpoint/parts.py), or, where the call waits, by all ranks together.
* A signal that ends the process, and Ctrl-C while somebody waits, give it up: whoever sent it waits for the end. Every
  other end finishes it.
* A failure is kept. It is raised once: by this rank's next ``step()``, or by all ranks in what they do together next.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

from ds_fuyou.checkpoint.parts import Parts
from ds_fuyou.checkpoint.streamed_file import StreamedFile
from ds_fuyou.errors import FuyouError, FuyouStateError, FuyouStorageError
from ds_fuyou.host.threads import starting_threads, stay_unbound
from ds_fuyou.host.waiting import wait_reporting, wait_through
from ds_fuyou.optimizer.snapshot import Snapshot
from ds_fuyou.storage import ending

__all__ = ["Save", "as_storage_error"]

logger = logging.getLogger("ds_fuyou")


class Save:
    """One rank's part of a checkpoint. ``name`` is its folder, for messages."""

    def __init__(self, name: str, files: Sequence[StreamedFile], snapshot: Snapshot | None, parts: Parts) -> None:
        self.name, self.parts = name, parts
        self.failure: Exception | None = None
        self.is_told = False
        """The script has met the failure."""
        self.publishes = False
        """Whoever of the ranks ends last gives the folder its name; else the caller does."""
        self.is_published = False
        """This rank was the last one, and did."""
        self._files, self._snapshot = list(files), snapshot
        self._is_cancelled = False
        self._taken = threading.Lock()  # by the thread, or by who drops it
        self._ended = threading.Event()
        self._begin, self._pid = time.perf_counter(), os.getpid()

    def start(self, *, publishes: bool) -> None:
        """See :attr:`publishes`."""
        self.publishes = publishes
        try:
            with starting_threads():
                threading.Thread(target=self._run, name="fuyou-save", daemon=True).start()
        except Exception as error:  # no thread to be had: as if it had failed
            self._failed(error)
            self._end()

    def drop(self) -> None:
        """Ctrl-C came as it was to start: where no thread has begun, none does, and it has failed, as the script knows.
        Other ranks, whose threads have begun, hear of it as of any failure.
        """
        if self._taken.acquire(blocking=False):
            self._failed(FuyouStateError("it was interrupted"))
            self.is_told = True
            self._end()

    def _run(self) -> None:
        if not self._taken.acquire(blocking=False):
            return
        try:
            stay_unbound()
            try:
                for file in reversed(self._files):  # states come last, and updates wait for them
                    file.fill_rest(self._check)
            except FileNotFoundError:
                self.parts.require_in_place()
                raise
            if self.publishes and self.parts.written():
                self.is_published = True
                logger.info("the checkpoint %s is whole, %.1f s after it began", self.name, self._secs())
        except Exception as error:  # told to the training thread, whatever it is
            self._failed(error)
        finally:
            self._end()

    def _failed(self, error: Exception) -> None:
        self.failure = error
        self.discard()

    def _end(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
        self._files, self._snapshot = [], None
        self._ended.set()

    def _check(self) -> None:
        if self._is_cancelled:
            raise FuyouStateError("it was interrupted")

    def _secs(self) -> float:
        return time.perf_counter() - self._begin

    def discard(self) -> None:
        """Removes this rank's large files: they would fill the disk to no use."""
        for file in self._files:
            file.path.unlink(missing_ok=True)

    def is_over(self) -> bool:
        """The thread has ended. In a forked child there is none."""
        return self._ended.is_set() or os.getpid() != self._pid

    def wait(self) -> None:
        """Until the thread has ended. Ctrl-C or SIGTERM meanwhile give the checkpoint up."""
        snapshot = self._snapshot
        if self.is_over():
            return
        if snapshot is not None:
            snapshot.hurry()
        try:
            wait_reporting(self._ended.wait, lambda: f"the checkpoint {self.name} to be written")
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        snapshot, self._is_cancelled = self._snapshot, True
        if snapshot is not None:
            snapshot.give_up()
        wait_through(self._ended.wait, lambda: f"the checkpoint {self.name} to be given up")

    def raise_failure(self) -> None:
        """Raises what the thread met, once."""
        if self.failure is not None and not self.is_told:
            self.is_told = True
            raise as_storage_error(self.failure, self.name)

    def finish(self) -> None:
        """At the end of the engine: the checkpoint is finished, or given up if a signal brought it. Nobody is left to
        raise to."""
        if not self.is_over() and ending.by_signal():
            self._give_up()
            if self.failure is not None:
                self.is_told = True
                logger.warning("the checkpoint %s was given up: a signal ended the process", self.name)
        self.wait()
        self.parts.end()
        if self.failure is not None and not self.is_told:
            self.is_told = True
            logger.error("%s", as_storage_error(self.failure, self.name))


def as_storage_error(failure: Exception, name: str) -> Exception:
    """What the script sees of a failed save: errors of the file system with number and file, others as they are."""
    if isinstance(failure, FuyouError) or not isinstance(failure, OSError):
        return failure
    path = failure.filename if isinstance(failure.filename, str) else name
    return FuyouStorageError(failure.errno or 0, f"saving a checkpoint failed: {failure.strerror or failure}", path)
