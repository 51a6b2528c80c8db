# SPDX-License-Identifier: Apache-2.0
"""P16 of chunks changes its home between two steps.

[Note: how P16 moves]
In a pause. States take fourteen bytes of a parameter and move behind training ([Note: how a state moves]); P16 takes
two and is read in every pass, by tensors that others have: so all updates end first, then published values are copied,
chunk by chunk, and training goes on. Nobody may have a parameter gathered, or a read of one in flight.

What files hold tells whoever goes on from them where P16 is, so no record stands while that is not true: from before
room is taken on storage until values are there, and their old places are given back. The step's own record, which says
what the run was at its end, comes before and again behind; of several ranks none withdraws it before all have it. What
a slot holds is complete by itself before P16 that completed it goes. Room on storage, and memory, are taken before
anything moves: until then it may be given up, which changes nothing. Whatever cuts it short after that fails the
pipeline for good.

Host memory holds no P16 twice where a device has copies of its own: the pages of a chunk go back when it was copied.
Where the device is the host a script may have a tensor that is such memory: that goes with the last of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice, product
from typing import TYPE_CHECKING

import torch

from ds_fuyou.errors import FuyouError, FuyouStateError
from ds_fuyou.host.memory import aligned_tensor
from ds_fuyou.optimizer.layout import Chunk
from ds_fuyou.optimizer.placement import ParamsOfSubGroup
from ds_fuyou.storage.io import Transfer

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["ParamMove"]

logger = logging.getLogger("ds_fuyou")

_AT_ONCE = 4  # chunks that are read, or written
_BATCH_ELEMENTS = 4 << 20


class ParamMove:
    """P16 of the chunks that ``params`` says is to be in host memory, that of all others on storage. Training thread,
    between two steps. Prepared when it is built: then :meth:`make` it, or :meth:`give_up`.
    """

    def __init__(
        self,
        core: OutOfCoreOptimizer,
        params: tuple[bool, ...],
        budget_bytes: int | None = None,
        num_versions: int | None = None,
    ) -> None:
        """Waits for all updates. ``budget_bytes``: the most on storage. ``num_versions``: of P16 in host memory; None:
        as many as now.

        Raises:
            FuyouStorageError: no room on storage.
            FuyouMemoryError: none for P16 that comes, or for staging memory.
            FuyouStateError: within a step, while states move or are copied to a checkpoint, or there is no store.
        """
        self._core, self._params = core, params
        self._num_versions = core.place.num_versions if num_versions is None else num_versions
        core.check()
        if core.store is None:
            raise FuyouStateError("this run has no state files: everything was built in host memory")
        if not core.window.is_empty or not core.mover.is_idle or core.has_snapshot:
            raise FuyouStateError("P16 changes its home between steps only, while nothing else of the state moves")
        now = core.place.residency.params
        self._moving = [chunk for chunk in core.layout.chunks if params[chunk.index] != now[chunk.index]]
        self._is_nothing = not self._moving and self._num_versions == core.place.num_versions
        if self._is_nothing:
            return
        core.wait_all_idle()
        self._reserved = [core.place.param_spec(chunk) for chunk in self._moving if now[chunk.index]]
        self._memory = core.place.param_memory(params, self._num_versions)
        with self._or_fails():
            core.commits.withdraw(replaces=False)
        try:
            core.store.reserve(self._reserved, budget_bytes)
        except BaseException:
            with self._or_fails():
                core.commits.now()
            raise
        try:
            core.fit_staging(replace(core.place.residency, params=params))
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Everything stays where it is. Raises FuyouStorageError if room that was taken on storage cannot be given
        back: then no step is committed any more."""
        core, self._memory = self._core, []
        if core.store is None or self._is_nothing:
            return
        with self._or_fails():
            core.store.release(spec.name for spec in self._reserved)
            core.commits.now()
        with suppress(FuyouError):  # it is larger than it has to be
            core.fit_staging(core.place.residency)

    def make(self) -> None:
        """Waits until everything is there.

        Raises:
            FuyouStorageError: something could not be read or written; the pipeline has failed.
        """
        if not self._is_nothing:
            with self._or_fails():
                self._make()

    @contextmanager
    def _or_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # an interrupt, too: half of it is elsewhere
            self._core.fail("P16 that changes its home was cut short", error)
            raise

    def _make(self) -> None:
        core, place, all_chunks = self._core, self._core.place, self._core.layout.chunks
        now = place.residency.params
        coming = [chunk.index for chunk in self._moving if not now[chunk.index]]
        for some in self._batches(coming):
            core.before_params_change(some)
        is_same, version = self._num_versions == place.num_versions, core.param_version
        touched = {chunk.sub_group for chunk in (self._moving if is_same else all_chunks)}
        affected = [c for c in all_chunks if c.sub_group in touched and (now[c.index] or self._params[c.index])]
        before = place.set_params(self._params, self._memory)[version]  # nobody reads the other one any more
        self._memory = []
        if not is_same:
            core.published.param_version = 0
        if core.options.checksum:
            for chunk, slot in product(self._moving, range(core.options.num_slots)):
                if now[chunk.index]:
                    core.io.watch(place.param_extents(chunk.index, slot))
        gives_back, writing = not core.options.device.is_host, deque[Transfer]()
        for chunk, values in self._published(affected, now, before):
            core.set_places(chunk)
            if self._params[chunk.index]:  # of two versions the other one is written by the next step
                place.chunk_params(chunk, core.param_version).copy_(values)
            else:
                writing.extend(core.values.put_params(chunk, values))
            if gives_back and now[chunk.index]:
                before[chunk.sub_group].give_back(chunk)
            while len(writing) > _AT_ONCE:
                writing.popleft().wait()
        for write in writing:
            write.wait()
        self._pin()
        core.placed_anew()
        if core.store is not None:
            for index, slot in product(coming, range(core.options.num_slots)):
                core.io.forget(place.param_extents(index, slot))
            core.store.release(place.param_spec(all_chunks[index]).name for index in coming)
        core.commits.now()
        with suppress(FuyouError):  # it is larger than it has to be
            core.fit_staging(place.residency)

    def _batches(self, chunks: Sequence[int]) -> Iterator[list[int]]:
        """As many as may pass through memory at once."""
        batch: list[int] = []
        num_elements = 0
        for index in chunks:
            batch.append(index)
            num_elements += self._core.layout.chunks[index].numel
            if num_elements >= _BATCH_ELEMENTS:
                yield batch
                batch, num_elements = [], 0
        if batch:
            yield batch

    def _published(
        self, chunks: Sequence[Chunk], was_in_memory: Sequence[bool], before: Mapping[int, ParamsOfSubGroup]
    ) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Chunks and their values, out of the memory that they were in, or read from storage, ahead."""
        core = self._core
        stored = iter([chunk for chunk in chunks if not was_in_memory[chunk.index]])
        reading = deque(map(self._start_reading, islice(stored, _AT_ONCE)))
        for chunk in chunks:
            if was_in_memory[chunk.index]:
                yield chunk, before[chunk.sub_group].range(chunk.begin, chunk.end)
                continue
            read = reading.popleft()
            read.wait()
            reading.extend(map(self._start_reading, islice(stored, 1)))
            yield chunk, read.memory.view(core.options.param_dtype)[: chunk.numel]

    def _start_reading(self, chunk: Chunk) -> Transfer:
        core = self._core
        extents = core.place.param_extents(chunk.index, core.slot(chunk.index))
        memory = aligned_tensor(sum(extent.num_bytes for extent in extents))
        return core.io.read(extents, memory, f"reading P16 of chunk {chunk.index}")

    def _pin(self) -> None:
        """Memory that the device refuses is copied from all the same."""
        try:
            self._core.place.pin_params()
        except FuyouStateError as error:
            logger.warning("P16 that came to host memory is copied from by way of the driver's own: %s", error)
