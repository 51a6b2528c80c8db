# SPDX-License-Identifier: Apache-2.0
"""When the steps of a rank are committed, and as what. Called by the training thread; :class:`Committer` does it.

[Note: what a record says]
A commit record holds what a run needs to go on beside the slots: ``optimizer_step``, the steps applied to these
states, in earlier runs too; ``clock``, the history of betas; ``missed_steps`` by parameter; ``without_moments``, chunks
that no update has touched; ``states_in_memory``, how many chunks' states it lacks, so that nobody can go on from it if
there are any; and ``training``, what the engine and the script handed over at the end of its step, null if they did
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ds_fuyou.optimizer.commit import Committer
from ds_fuyou.optimizer.worker import Worker
from ds_fuyou.storage.store import CommitRecord, JsonValue

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["StepCommits"]


class StepCommits:
    """Does nothing where there is no storage. ``resumed``: the commit that the run goes on from."""

    def __init__(self, core: OutOfCoreOptimizer, worker: Worker, resumed: CommitRecord | None) -> None:
        self._core, self._worker = core, worker
        store = core.store
        self._reduced: Any = None
        self._unordered: int | None = None
        self._training: JsonValue = None
        self.holds_orders = False
        """``engine.step()`` runs: :meth:`order` is called when it has ended, not by :meth:`applied`. If that does not
        come, the commit before stays the last one, until there is a next step."""
        self._committer: Committer | None = None
        if store is not None:
            edition = 0 if resumed is None else int(str(resumed.meta["edition"]))
            self._committer = Committer(core.pipeline, store, core.slots_on_storage, edition=edition)

    @property
    def _has_peers(self) -> bool:
        """Their commits are waited for: see [Note: one generation of all ranks] in commit.py."""
        return self._core.options.has_peers and self._core.keeps_steps

    @property
    def has_unordered(self) -> bool:
        """A step was applied, and its commit is not ordered yet."""
        return self._unordered is not None

    def begin(self, training: JsonValue) -> None:
        """Of the commit that is gone on from: what it holds of the run."""
        self._training = training

    def applied(self) -> None:
        """A step was applied."""
        self._unordered = self._core.generation
        if not self.holds_orders:
            self.order(None)

    def order(self, training: JsonValue) -> None:
        """The last applied step has ended; has it committed, with what it left of the run beside the states."""
        if self._unordered is None:
            return
        generation, self._unordered, self._training = self._unordered, None, training
        if self._committer is not None:
            self._committer.order(generation, self._said(), opens=not self._has_peers)

    def _said(self) -> dict[str, JsonValue]:
        core = self._core
        return {
            "optimizer_step": core.clock.step,
            "clock": [[number, [list(pair) for pair in betas]] for number, betas in core.clock.history],
            "missed_steps": core.missed.by_name(),
            "without_moments": core.states.without_moments(),
            "states_in_memory": sum(core.place.residency.states),
            "training": self._training,
        }

    def now(self) -> None:
        """In this thread; nothing is in flight, and no step without an order."""
        if self._committer is not None:
            self._committer.commit_now(self._core.generation, self._said(), opens=not self._has_peers)

    def replaced(self, training: JsonValue) -> None:
        """A checkpoint was loaded: what it brought is committed at once, with what it left of the run."""
        self._training = training
        if self._committer is not None and not self._committer.is_committed:
            self._core.wait_all()
            self.now()

    def settle(self) -> None:
        """Before this rank's part of the norm: its last step is committed, so no kill loses more than the next one."""
        if self._committer is None or not self._core.keeps_steps:
            return
        self.wait()
        if not self._committer.is_committed:
            self.now()

    def _wait(self) -> None:
        if self._committer is not None:
            generation = self._core.generation
            self._worker.wait(self._committer.settled, lambda: f"step {generation} to be committed")

    # ---- the writes of a step, see [Note: one generation of all ranks] in commit.py ------------------------

    def window_opens(self) -> None:
        """The last micro-batch of a step begins, whose sums may be what other ranks begin their writes by."""
        self.order(None)
        self._core.mover.advance()
        if self._has_peers and self._core.policy.may_speculate:
            self.settle()

    def summed_over_all(self) -> None:
        """A sum over all ranks was made on the current stream, after the window was opened."""
        if not (self._has_peers and self._core.policy.may_speculate):
            return
        device = self._core.options.device
        if self._reduced is None and not device.is_host:
            self._reduced = device.record_event()
        if device.is_host:
            self._open_next()
        self.open_if_reduced()

    def open_if_reduced(self) -> None:
        """The first reduction of the last micro-batch may have ended."""
        if self._reduced is not None and self._reduced.query():
            self._open_next()

    def window_ended(self) -> None:
        """What is summed from now on belongs to the next step."""
        self._reduced = None

    def norm_is_known(self) -> None:
        """All ranks have given their part, so all have committed the last step."""
        if self._has_peers and self._committer is not None:
            self.settle()
            self._open_next()

    def _open_next(self) -> None:
        if self._committer is not None:
            self._committer.open_next(self._core.generation)

    # ---- writes in place -----------------------------------------------------------------------------------

    def withdraw(self, *, replaces: bool = True) -> None:
        """Before states on storage are overwritten in place; see [Note: states replaced in place]. Waits. ``replaces``:
        what is committed next is not what was."""
        if self._committer is not None:
            self.wait()
            self._committer.withdraw(replaces=replaces)

    def wait(self) -> None:
        """Until the last applied step is committed."""
        self.order(None)
        self._wait()

    @property
    def is_withdrawn(self) -> bool:
        """Surely no record stands."""
        return self._committer is None or self._committer.is_withdrawn

    def forget_params(self) -> None:
        """Before P16 on storage is edited in place. Waits until the steps that were ordered are committed. One that is
        not ordered yet is committed after the edit, hence with what it leaves; to order it here would commit it
        without its state of training."""
        if self._committer is not None:
            self._wait()
            self._committer.forget_params()

    def release(self, names: Iterable[str], done: Callable[[], None]) -> None:
        """Gives regions back, in the committer's thread, when what was ordered is committed, and calls ``done``."""
        if self._committer is not None:
            self._committer.release(names, done)

    def stop(self) -> None:
        """Lets what was ordered finish or fail. Idempotent."""
        if self._committer is not None:
            self._committer.stop()

    def end(self) -> None:
        """After :meth:`stop`: holds nothing of the core's any more."""
        self._committer = None
