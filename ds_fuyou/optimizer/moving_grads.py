# SPDX-License-Identifier: Apache-2.0
"""G16 of chunks changes its home with the first gradient of a window.

[Note: how G16 moves]
No gradient outlives its step, so nothing is copied. But until the next step's first gradient scripts may ask for those
of the last one: only then does memory go, or come. Room on storage is taken when the move is asked for. Where states
move in that instant, or are copied to a checkpoint, a later window does it; until then all stays as it is.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ds_fuyou.errors import FuyouError, FuyouStateError, FuyouStorageError

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["GradMover"]

logger = logging.getLogger("ds_fuyou")


class GradMover:
    """Where G16 is to be from the next window on. Used by the training thread alone."""

    def __init__(self, core: OutOfCoreOptimizer) -> None:
        self._core = core
        self.target: tuple[bool, ...] | None = None
        """By chunk: whether it is to be in host memory; None where all stays as it is."""

    def move_to(self, grads: tuple[bool, ...], budget_bytes: int | None = None) -> None:
        """From the next window on G16 of these chunks is in host memory, that of the others on storage, where room is
        taken for it now. Between steps. ``budget_bytes``: the most on storage.

        Raises:
            FuyouStorageError: no room; what was asked for before stays.
            FuyouMemoryError: none for staging memory; what was asked for before stays.
            FuyouStateError: within a step, or there is no store.
        """
        core, before = self._core, self.target
        core.check()
        if core.store is None:
            raise FuyouStateError("this run has no state files: everything was built in host memory")
        if not core.window.is_empty:
            raise FuyouStateError("G16 gets another home between steps only: a backward has begun")
        regions = core.store.regions
        specs = [core.place.grad_spec(chunk) for chunk in core.layout.chunks if not grads[chunk.index]]
        specs = [spec for spec in specs if spec.name not in regions]
        if specs:
            core.store.reserve(specs, budget_bytes)
        self.target = grads
        try:
            core.fit_staging(core.place.residency)
        except BaseException:
            self.undo(before)
            raise

    def undo(self, before: tuple[bool, ...] | None) -> None:
        """What was the target ``before`` is it again. The next window gives back what that does not need."""
        self.target = self._core.place.residency.grads if before is None else before

    def window_begins(self) -> None:
        """To be called before anything of it is there. Waits for the updates that read gradients of the last one."""
        core, target = self._core, self.target
        if target is None or core.has_snapshot or not core.window.is_empty:
            return
        core.return_lent()
        if core.mover.is_moving or core.staging.used_bytes or core.store is None:
            return
        self.target = None
        if target != core.place.residency.grads:
            core.forget_last_gradients()
            try:
                self._change(target)
            except BaseException as error:  # an interrupt, too: half of it is elsewhere
                core.fail("gradients that change their home were cut short", error)
                raise
            core.placed_anew()
        names, now = core.store.regions, core.place.residency.grads
        unused = {core.place.grad_spec(chunk).name: chunk for chunk in core.layout.chunks if now[chunk.index]}
        unused = {name: chunk for name, chunk in unused.items() if name in names}
        for chunk in unused.values():
            core.io.forget(core.place.grad_extents(chunk.index))
        try:
            core.store.release(unused)
        except FuyouStorageError as error:
            logger.warning("space on storage that gradients do not need any more stays taken: %s", error)

    def _change(self, grads: tuple[bool, ...]) -> None:
        core = self._core
        copied_to, was = core.copied_to, core.place.residency.grads
        core.options.device.synchronize()  # nothing is copied to memory that goes
        core.gradients.let_go()
        core.place.set_grads(grads)
        try:
            core.gradients = core.make_gradients()
        except FuyouError as error:
            logger.warning("gradients stay where they are, training goes on: %s", error)
            core.place.set_grads(was)
            core.gradients = core.make_gradients()
        core.intake.use(core.gradients)
        now = core.place.residency.grads
        for chunk in core.layout.chunks if core.options.checksum else ():
            if was[chunk.index] and not now[chunk.index]:
                core.io.watch(core.place.grad_extents(chunk.index))
        if core.copied_to is not copied_to:
            core.renew_staging(core.staging.capacity_bytes)
        for chunk in core.layout.chunks:
            core.set_places(chunk)
