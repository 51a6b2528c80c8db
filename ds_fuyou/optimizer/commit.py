# SPDX-License-Identifier: Apache-2.0
"""Commits generations in the background: durable first, then the record, then the next generation's writes.

[Note: one generation of all ranks]
Every rank writes a record of its own. A rank that is at generation g has it in one slot of a chunk, and g - 1 in the
other, until its updates of g + 1 are written there. So these begin when *every* rank has committed g, and the record
names g and g - 1: whichever ranks are killed whenever, what the slowest has committed is whole on all.

No message says so. There are two sums over all ranks to which a rank gives its part of step g + 1 only when it has
committed g; so whoever has one of them knows that all have.

* Gradients of the last micro-batch, if updates may begin in backward: the first that has ended on this rank opens the
  writes.
* The norm's all-reduce (or the overflow's), which comes before every ``step()`` changes anything.

Nothing is added to either, so that no sum changes. The wait for one's own commit is where the promise is kept that no
step is lost but the last one, too, so a run of one rank has the second of them; it opens its writes by itself.

[Note: states replaced in place]
Loading and ``safe_set_full_*`` write states between steps, into the slots that the last record names. Killed meanwhile,
the files would hold a mixture under that record. So the record is withdrawn first, durably. What was written is
committed anew when a checkpoint is loaded, else before the next norm; it is another *edition* of that generation, which
does not go together with what a slower rank had before.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ds_fuyou.host.threads import starting_threads
from ds_fuyou.host.waiting import wait_reporting, wait_through
from ds_fuyou.storage.store import JsonValue, SlotStore

__all__ = ["Committer"]

logger = logging.getLogger("ds_fuyou")


class _Order(NamedTuple):
    generation: int
    said: Mapping[str, JsonValue]
    opens: bool


class _Release(NamedTuple):
    names: Iterable[str]
    done: Callable[[], None]


class Committer:
    """One thread that handles orders one by one. A failure fails the pipeline, hence the training thread.

    A record's ``meta`` is what the order says (see :class:`~ds_fuyou.optimizer.core.OutOfCoreOptimizer`), the
    ``edition`` of the generation, ``state_sums``: hex of the checksums of every chunk's P32 and moments, 8 bytes each;
    and ``param_digests``: hex of 8 bytes a chunk that stand for its P16 on storage, all ones where it is not known.
    Both are "" without ``checksum``; records of older versions have no digests.

    ``edition``: of the commit that stands in ``store``.
    """

    def __init__(
        self,
        pipeline: Any,
        store: SlotStore,
        slots: Callable[[], Mapping[str, int]],
        *,
        edition: int = 0,
    ) -> None:
        self._pipeline, self._store, self._slots = pipeline, store, slots
        self._orders: queue.SimpleQueue[_Order | _Release | None] = queue.SimpleQueue()
        self._progress = threading.Condition()
        self._num_open = 0
        self._edition = edition
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="fuyou-committer", daemon=True)
        with starting_threads():
            self._thread.start()

    def order(self, generation: int, said: Mapping[str, JsonValue], *, opens: bool = True) -> None:
        """Asks for the record of a published generation.

        ``opens``: it opens the writes of the next one. Else :meth:`open_next` does, when all ranks are there.
        """
        with self._progress:
            self._num_open += 1
            self._edition = 0
        self._orders.put(_Order(generation, said, opens))

    def release(self, names: Iterable[str], done: Callable[[], None]) -> None:
        """Has regions given back when everything ordered so far is committed, then calls ``done``, in the thread. When
        that has ended they stay, and ``done`` is called at once.
        """
        with self._progress:
            if not self._ended:
                self._orders.put(_Release(names, done))
                return
        done()

    def commit_now(self, generation: int, said: Mapping[str, JsonValue], *, opens: bool = True) -> None:
        """Writes a record in the calling thread; nothing may be in flight (initialisation, a loaded checkpoint)."""
        sums, digests = self._pipeline.state_sums(), self._pipeline.param_digests()
        checksums = {"state_sums": sums.hex(), "param_digests": digests.hex() if digests.strip(b"\xff") else ""}
        self._store.commit(generation, self._slots(), {**said, "edition": self._edition, **checksums})
        if opens:
            self.open_next(generation)

    def open_next(self, generation: int) -> None:
        """Every rank has committed ``generation``: writes of the next one may overwrite the one before."""
        self._pipeline.set_committed(generation)

    def settled(self, timeout_secs: float) -> bool:
        """Waits until every order is committed; RuntimeError when the thread ended before."""
        with self._progress:
            self._progress.wait_for(lambda: self._num_open == 0 or self._ended, timeout_secs)
            if self._num_open and self._ended:
                raise RuntimeError("the committer ended before the last step was committed")
            return self._num_open == 0

    @property
    def is_withdrawn(self) -> bool:
        """Surely no record stands: states were replaced since the last one."""
        return self._store.knows_record and self._store.last_commit() is None

    @property
    def is_committed(self) -> bool:
        """Surely a record stands. Neither this nor withdrawn: the writing of one failed or was interrupted."""
        return self._store.knows_record and self._store.last_commit() is not None

    def withdraw(self, *, replaces: bool = True) -> None:
        """Before committed slots are overwritten; everything ordered must be settled. ``replaces``: by other values, so
        what is committed next is another edition. Raises FuyouStorageError.
        """
        if not self.is_withdrawn:
            last = self._store.last_commit()  # also where Ctrl-C ended this before
            if last is not None:  # else a record of this edition was being written
                self._edition = int(str(last.meta["edition"])) + replaces
            self._store.withdraw()

    def forget_params(self) -> None:
        """Before P16 that a commit names is edited in place: from then on it is what it is, and is not compared by a
        run that goes on from there. Everything ordered must be settled. Raises FuyouStorageError.
        """
        if not self._store.knows_record:
            self.withdraw(replaces=False)
        elif any(commit.meta.get("param_digests") for commit in self._store.commits()):
            self._store.amend({"param_digests": ""})

    def _run(self) -> None:
        try:
            self._commit_orders()
        finally:
            with self._progress:
                self._ended = True
                self._progress.notify_all()
            while not self._orders.empty():  # and no more come: nobody waits for what will not be given back
                order = self._orders.get()
                if isinstance(order, _Release):
                    order.done()

    def _commit_orders(self) -> None:
        while (order := self._orders.get()) is not None:
            if isinstance(order, _Release):
                self._give_back(order)
                continue
            target = order.generation
            try:
                wait_reporting(
                    lambda t, g=target: self._pipeline.wait_durable(g, t),  # type: ignore[misc]
                    lambda g=target: f"step {g} to be durable",  # type: ignore[misc]
                )
            except RuntimeError:
                return  # the pipeline failed or stopped: its own failure reaches the training thread
            try:
                self.commit_now(target, order.said, opens=order.opens)
            except Exception as error:
                number = error.errno if isinstance(error, OSError) else None
                said = f"{error.strerror} [{error.filename}]" if isinstance(error, OSError) else str(error)
                self._pipeline.fail(f"committing step {target} ({said})", number or 0)
                return
            with self._progress:
                self._num_open -= 1
                self._progress.notify_all()

    def _give_back(self, release: _Release) -> None:
        try:
            self._store.release(release.names)
        except Exception as error:  # the committer goes on
            logger.warning("space on storage that is not needed any more stays taken: %s", error)
        finally:
            release.done()

    def stop(self) -> None:
        """Lets the orders given so far finish or fail, then ends the thread. Idempotent."""
        self._orders.put(None)
        wait_through(self._joined, lambda: "the last steps to be committed")

    def _joined(self, timeout_secs: float) -> bool:
        self._thread.join(timeout_secs)
        return not self._thread.is_alive()
