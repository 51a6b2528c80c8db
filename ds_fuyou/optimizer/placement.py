# SPDX-License-Identifier: Apache-2.0
"""Where P16, state and G16 of every chunk are: the memory of the resident ones, the extents of the others."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ds_fuyou.errors import FuyouStateError
from ds_fuyou.host.memory import PageLocks, aligned_tensor, give_back_pages, own_storage, round_up_to_page
from ds_fuyou.optimizer.coded_states import native
from ds_fuyou.optimizer.layout import Chunk, FlatLayout, ParamSpan
from ds_fuyou.optimizer.options import CoreOptions
from ds_fuyou.optimizer.residency import ChunkResidency
from ds_fuyou.state_layout import StateLayout
from ds_fuyou.storage.store import Extent, RegionSpec, SlotStore

__all__ = ["ChunkPlacement", "ParamMemory", "ParamsOfSubGroup", "param_region", "regions_for", "state_region"]


def state_region(chunk: int) -> str:
    return f"state/{chunk}"


def param_region(chunk: int) -> str:
    return f"param16/{chunk}"


def grad_region(chunk: int) -> str:
    return f"grad16/{chunk}"


def regions_for(layout: FlatLayout, options: CoreOptions, num_moments: int, num_slots: int) -> list[RegionSpec]:
    """Everything that lives on storage, with its size; empty when all chunks of all classes are in DRAM."""
    regions, stored = [], options.state_layout(num_moments)
    for chunk in layout.chunks:
        if not options.residency.states[chunk.index]:
            regions.append(_state_spec(chunk, stored, num_slots))
        if not options.residency.params[chunk.index]:
            regions.append(_param_spec(chunk, options.param_dtype, num_slots))
        if not options.residency.grads[chunk.index]:
            regions.append(_grad_spec(chunk, options.grad_dtype))
    return regions


def _state_spec(chunk: Chunk, stored: StateLayout, num_slots: int) -> RegionSpec:
    return RegionSpec(state_region(chunk.index), stored.of(chunk.param_begins).num_bytes(chunk.numel), num_slots)


def _param_spec(chunk: Chunk, dtype: torch.dtype, num_slots: int) -> RegionSpec:
    return RegionSpec(param_region(chunk.index), round_up_to_page(chunk.numel * dtype.itemsize), num_slots)


def _grad_spec(chunk: Chunk, dtype: torch.dtype) -> RegionSpec:
    return RegionSpec(grad_region(chunk.index), round_up_to_page(chunk.numel * dtype.itemsize), 1)


class ParamsOfSubGroup:
    """One version of P16 of a sub-group: its resident chunks, one behind the other in one memory. Those that are
    neighbours in the sub-group are neighbours there, so a parameter that is in memory as a whole is one tensor.
    """

    def __init__(self, chunks: Sequence[Chunk], dtype: torch.dtype) -> None:
        chunks = sorted(chunks, key=lambda chunk: chunk.begin)
        self._begins, self._ends = [chunk.begin for chunk in chunks], [chunk.end for chunk in chunks]
        self._places = [*itertools.accumulate((chunk.numel for chunk in chunks), initial=0)]
        num_bytes = round_up_to_page(self._places[-1] * dtype.itemsize)
        self.values = aligned_tensor(num_bytes).view(dtype)[: self._places[-1]]

    def give_back(self, chunk: Chunk) -> None:
        """The chunk's pages go back to the system; whoever reads them finds zeros."""
        give_back_pages(self.range(chunk.begin, chunk.end))

    def range(self, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of the sub-group, of chunks that are all here."""
        if begin == end:
            return self.values[:0]
        place, last = self._place(begin), self._place(end - 1)
        if place is None or last is None or last - place != end - 1 - begin:
            raise FuyouStateError(f"P16 of elements {begin} to {end} of a sub-group is not in one place in host memory")
        return self.values[place : place + end - begin]

    def _place(self, element: int) -> int | None:
        found = bisect.bisect_right(self._begins, element) - 1
        if found < 0 or element >= self._ends[found]:
            return None
        return self._places[found] + element - self._begins[found]


ParamMemory = list[dict[int, ParamsOfSubGroup]]
"""P16 in host memory, by version and sub-group."""


class ChunkPlacement:
    """Memory and extents of one rank. Memory is touched by the training thread, and by the pipeline's jobs."""

    def __init__(
        self, layout: FlatLayout, options: CoreOptions, num_moments: int, store: SlotStore | None, locks: PageLocks
    ) -> None:
        """``locks`` registers P16 in memory with the device; the fp32 state stays with the host."""
        self._layout, self._options, self._store = layout, options, store
        self.stored = options.state_layout(num_moments)
        """Of a state in a slot."""
        self.resident, self.whole = self.stored.resident, self.stored.whole
        """Of one in memory, and as readers see it."""
        self._locks = locks
        self.residency = options.residency
        """As it is now: chunks move."""
        self._params: ParamMemory = []
        self.set_params(self.residency.params, self.param_memory(self.residency.params, options.num_param_versions))
        self.pin_params()
        self._states = {
            chunk.index: aligned_tensor(self.resident_of(chunk).num_bytes(chunk.numel), inherited=False)
            for chunk in layout.chunks
            if self.residency.states[chunk.index]
        }
        self._spares = {
            index: aligned_tensor(
                self.resident_of(layout.chunks[index]).num_bytes(layout.chunks[index].numel), inherited=False
            )
            for index, has_spare in enumerate(self.residency.spares)
            if has_spare
        }
        self._published_at: Callable[[int], int] | None = None

    def stored_of(self, chunk: Chunk) -> StateLayout:
        """Of a chunk's state in a slot; :attr:`stored` is what all have in common."""
        return self.stored.of(chunk.param_begins)

    def resident_of(self, chunk: Chunk) -> StateLayout:
        """Of a chunk's state in memory."""
        return self.resident.of(chunk.param_begins)

    # ---- host memory --------------------------------------------------------------------------------------

    def param_memory(self, params: Sequence[bool], num_versions: int) -> ParamMemory:
        """For P16 of these chunks: that of now where a sub-group has as many as now, else new, whose pages are taken
        when they are written; all of it if versions are more or fewer.

        Raises:
            FuyouMemoryError: the system refuses.
        """
        now = self.residency.params
        found: dict[int, list[Chunk]] = {}
        is_same = num_versions == self.num_versions
        changed = {c.sub_group for c in self._layout.chunks if not is_same or params[c.index] != now[c.index]}
        for chunk in self._layout.chunks:
            if params[chunk.index]:
                found.setdefault(chunk.sub_group, []).append(chunk)
        memory: ParamMemory = []
        for version in range(num_versions):
            kept = self._params[version] if is_same else {}
            memory.append(
                {
                    sub_group: kept[sub_group]
                    if sub_group in kept and sub_group not in changed
                    else ParamsOfSubGroup(chunks, self._options.param_dtype)
                    for sub_group, chunks in found.items()
                }
            )
        return memory

    def set_params(self, params: tuple[bool, ...], memory: ParamMemory) -> ParamMemory:
        """P16 of these chunks is in ``memory`` from now on, that of the others on storage. Gives the memory of before,
        of which none is registered with the device any more."""
        before = self._params
        for version in before:
            for sub_group, held in version.items():
                if not any(new.get(sub_group) is held for new in memory):
                    self._locks.unlock(held.values)
        self._params, self.residency = memory, replace(self.residency, params=params)
        layout = self._layout
        self._in_memory = [all(params[index] for index in layout.chunks_of_param[span.index]) for span in layout.params]
        return before

    def set_grads(self, grads: tuple[bool, ...]) -> None:
        """G16 of these chunks is in host memory from now on, that of the others on storage."""
        self.residency = replace(self.residency, grads=grads)

    @property
    def num_versions(self) -> int:
        """Of P16 in DRAM, if there is any."""
        return len(self._params)

    @property
    def num_param_versions(self) -> int:
        """Of P16 in DRAM; 0 where all of it is on storage."""
        return len(self._params) if any(self.residency.params) else 0

    def pin_params(self) -> None:
        """Registers with the device what of P16 in host memory is not. Raises FuyouStateError if it refuses."""
        for version in self._params:
            for held in version.values():
                if not self._locks.has(held.values):
                    self._locks.lock(held.values)

    def is_in_memory(self, span: ParamSpan) -> bool:
        """Whether a parameter's P16 is in DRAM as a whole. One whose chunks are apart is read like one on storage."""
        return self._in_memory[span.index]

    def span_params(self, span: ParamSpan, version: int) -> torch.Tensor:
        """P16 of a parameter that is in memory, with a storage of its own."""
        return own_storage(self._params[version][span.sub_group].range(span.begin, span.end))

    def chunk_params(self, chunk: Chunk, version: int) -> torch.Tensor:
        """P16 of a chunk in memory."""
        return self._params[version][chunk.sub_group].range(chunk.begin, chunk.end)

    def flat_params(self, sub_group: int, version: int) -> torch.Tensor | None:
        """P16 of a whole sub-group, None unless all of it is in memory."""
        chunks = [chunk for chunk in self._layout.chunks if chunk.sub_group == sub_group]
        if not chunks or not all(self.residency.params[chunk.index] for chunk in chunks):
            return None
        return self._params[version][sub_group].range(0, self._layout.sub_group_numels[sub_group])

    def state(self, index: int) -> torch.Tensor | None:
        """The state block of a chunk in DRAM, bytes; None if it lives on storage. With a spare one it is the published
        of the two, to be asked for while no published update of the chunk is under way.
        """
        spare = self._spares.get(index)
        if spare is not None and self._published_at is not None and self._published_at(index) == spare.data_ptr():
            return spare
        return self._states.get(index)

    def follow(self, published_at: Callable[[int], int]) -> None:
        """``published_at(chunk)``: the address of a chunk's published state in memory. Updates exchange it."""
        self._published_at = published_at

    def has_spare(self, index: int) -> bool:
        """Whether the chunk's state is in memory with a spare block."""
        return index in self._spares

    @property
    def spare_bytes(self) -> int:
        """Of spare blocks of states in memory."""
        return sum(block.numel() for block in self._spares.values())

    def put_state(self, index: int, memory: torch.Tensor) -> None:
        """The chunk's state is in ``memory`` from now on."""
        self._states[index] = memory
        self._move_state(index)

    def drop_state(self, index: int) -> None:
        """The chunk's state is on storage from now on; its memory goes back to the system."""
        del self._states[index]
        self._spares.pop(index, None)
        self._move_state(index)

    def _move_state(self, index: int) -> None:
        states = list(self.residency.states)
        states[index] = index in self._states
        spares = tuple(chunk in self._spares for chunk in range(len(states)))
        self.residency = replace(self.residency, states=tuple(states), spares=spares)

    # ---- storage ------------------------------------------------------------------------------------------

    def param_spec(self, chunk: Chunk) -> RegionSpec:
        """The region of a chunk's P16, where it is on storage."""
        return _param_spec(chunk, self._options.param_dtype, self._options.num_slots)

    def state_spec(self, chunk: Chunk) -> RegionSpec:
        """The region of a chunk's state, where it is on storage."""
        return _state_spec(chunk, self.stored, self._options.num_slots)

    def grad_spec(self, chunk: Chunk) -> RegionSpec:
        """The region of a chunk's G16, where it is on storage."""
        return _grad_spec(chunk, self._options.grad_dtype)

    def state_extents(self, index: int, slot: int) -> tuple[Extent, ...]:
        return self._need_store().extents(state_region(index), slot)

    def param_extents(self, index: int, slot: int) -> tuple[Extent, ...]:
        return self._need_store().extents(param_region(index), slot)

    def param_pages(self, index: int, slot: int, begin: int, end: int) -> tuple[Extent, ...]:
        """Where bytes [begin, end) of a chunk's P16 lie, counted from the chunk's start, whole pages."""
        return self._need_store().range_extents(param_region(index), slot, begin, end)

    def grad_extents(self, index: int) -> tuple[Extent, ...]:
        return self._need_store().extents(grad_region(index), 0)

    def watched(self) -> Iterator[Extent]:
        """Where P16 and G16 live on storage: read by other ranges than they are written by, so checked by the page."""
        for chunk in self._layout.chunks:
            index = chunk.index
            if not self.residency.params[index]:
                for slot in range(self._options.num_slots):
                    yield from self.param_extents(index, slot)
            if not self.residency.grads[index]:
                yield from self.grad_extents(index)

    def _need_store(self) -> SlotStore:
        if self._store is None:
            raise FuyouStateError("this placement has nothing on storage")
        return self._store

    def slotted(self, slot_of: Callable[[int], int]) -> dict[str, int]:
        """The slots to be committed: of every chunk that has any, as ``slot_of(chunk)`` says."""
        keeps = self.residency.keeps_slots
        return {state_region(c.index): slot_of(c.index) for c in self._layout.chunks if keeps(c.index)}

    def may_prepare(self, index: int) -> bool:
        """Whether the chunk's update overwrites nothing that is in use before ``step()``."""
        residency = self.residency
        if residency.states[index] and not self.has_spare(index):
            return False
        if residency.keeps_slots(index) and self._options.num_slots < 2:
            return False
        return not residency.params[index] or self.num_param_versions == 2

    # ---- the pipeline's view ------------------------------------------------------------------------------

    def job_bytes(self, chunk: Chunk, residency: ChunkResidency | None = None) -> int:
        """Staging memory of one update: what it reads from storage or writes there."""
        residency, options = residency or self.residency, self._options
        num_bytes = 0 if residency.states[chunk.index] else self.stored_of(chunk).num_bytes(chunk.numel)
        if not residency.params[chunk.index]:
            num_bytes += round_up_to_page(chunk.numel * options.param_dtype.itemsize)
        if not residency.grads[chunk.index]:
            num_bytes += round_up_to_page(chunk.numel * options.grad_dtype.itemsize)
        return num_bytes

    def staging_bytes(self, residency: ChunkResidency | None = None, wanted_bytes: int | None = None) -> int:
        """``wanted_bytes``, or the plan's size, at least two of the largest jobs, at most all of them."""
        wanted = self._options.staging_bytes if wanted_bytes is None else wanted_bytes
        jobs = [self.job_bytes(chunk, residency) for chunk in self._layout.chunks]
        return max(4096, min(max(wanted, 2 * max(jobs)), sum(jobs)))

    def of_chunk(self, chunk: Chunk, state: torch.Tensor | None, *, first_slot: int = 0) -> dict[str, Any]:
        """The places of a chunk as a ``ChunkSpec`` of the core takes them, its state in memory or on storage; what is
        there lies in ``first_slot``.

        A chunk without anything in slots counts as one-slotted: its update overwrites nothing that a commit names, so
        it never waits for one.
        """
        residency, index = self.residency, chunk.index
        in_memory = residency.params[index]
        num_slots = 1 if in_memory and state is not None else self._options.num_slots
        slots = [(slot + first_slot) % self._options.num_slots for slot in range(num_slots)]
        return {
            "whole": native(self.whole, chunk.numel),
            "resident": native(self.resident_of(chunk), chunk.numel),
            "stored": native(self.stored_of(chunk), chunk.numel),
            "state_slots": [] if state is not None else [self.state_extents(index, s) for s in slots],
            "resident_state": 0 if state is None else state.data_ptr(),
            "spare_state": self._spares[index].data_ptr() if state is not None and index in self._spares else 0,
            "param_slots": [] if in_memory else [self.param_extents(index, s) for s in slots],
            "param_memory": [self.chunk_params(chunk, v).data_ptr() for v in range(len(self._params))]
            if in_memory
            else [],
            "grad_slot": [] if residency.grads[index] else self.grad_extents(index),
            "num_slots": num_slots,
        }

    def close(self) -> None:
        """Lets the memory go; nothing may work on it any more."""
        self._states.clear()
        self._spares.clear()
        self._published_at = None
        self._params.clear()
