# SPDX-License-Identifier: Apache-2.0
"""Where frozen parameters are: as the plan says when an engine is built, and while it trains.

[Note: frozen parameters that move]
A base of adapters is most of what its run has in host memory, and all that it reads from storage. What leaves is
written first, or what comes read, while everything stays where it is: a rank that has no room says so, and nothing has
happened anywhere. Then, on all ranks, it changes its home. The smallest are written first: each is copied on its way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.nn import Parameter

from ds_fuyou.errors import FuyouError
from ds_fuyou.host.memory import PageLocks
from ds_fuyou.optimizer.residency import spread_evenly
from ds_fuyou.parameters.partition import Partition
from ds_fuyou.storage.io import IoLane
from ds_fuyou.storage.parked import ParkedValues
from ds_fuyou.zero.parameters.param_swapper import is_in_host_memory, partition_bytes, partition_of, pin_partition
from ds_fuyou.zero.run.run_design import TrainedModel
from ds_fuyou.zero.run.striping import parked_space
from ds_fuyou.zero.saving.frozen_base import still_as_taken

__all__ = ["FrozenPlaces"]

logger = logging.getLogger("ds_fuyou")


class FrozenPlaces:
    """Of one rank. ``bound_heap`` is told where memory of so many bytes was freed."""

    def __init__(self, model: TrainedModel, locks: PageLocks, bound_heap: Callable[..., None]) -> None:
        self._model, self._locks, self._bound_heap = model, locks, bound_heap
        self._planned: list[Parameter] = []  # whose place is the plan's to say, in the order of use

    def place(self, room_bytes: float) -> None:
        """So many bytes are in host memory, the same on every rank. ``zero.Init`` had put them where they fell."""
        self._planned = self._model.planned_frozen()
        for param, stays in _spread(self._planned, room_bytes).items():
            partition = partition_of(param)
            if stays and partition is not None:
                param.nvme_swapper.give_back(param, partition.copy())
            elif not stays and partition is None and is_in_host_memory(param):
                param.nvme_swapper.park(param, param.ds_tensor.data)
            self._bound_heap()

    def attach(self, io: IoLane) -> dict[int, Partition]:
        """Those on storage, by ``ds_id``, which ``io`` reads from now on; those in host memory are registered with a
        device that pins.
        """
        found = {}
        for param in self._model.frozen:
            partition = partition_of(param)
            if partition is None:
                if pin_partition(param, self._locks):
                    self._bound_heap(partition_bytes(param))
            elif partition.store is None and isinstance(partition.source, ParkedValues):
                partition.source.space.rest()
                partition.source.read_by(io)
                found[param.ds_id] = partition
        return found

    # ---- while it trains ------------------------------------------------------------------------------------

    @property
    def may_move(self) -> bool:
        """Whether none of them is gathered."""
        return all(param.ds_status is ZeroParamStatus.NOT_AVAILABLE for param in self._movable)

    def copied(self, room_bytes: float) -> dict[Parameter, ParkedValues | torch.Tensor] | None:
        """What has to move for so many bytes to be in host memory, where it moves; None, and a word, without room."""
        there = [param for param in self._movable if partition_of(param) is not None]
        here = [param for param in self._movable if partition_of(param) is None and self._is_held(param)]
        held_bytes = sum(map(partition_bytes, here))
        room_bytes -= self.held_bytes - held_bytes  # by what stays
        found: dict[Parameter, ParkedValues | torch.Tensor] = {}
        try:
            if room_bytes < held_bytes:
                stays = _spread(here, room_bytes)
                found.update(self._written([param for param in here if not stays[param]]))
            else:
                comes = _spread(there, room_bytes - held_bytes)
                for param in filter(comes.__getitem__, there):
                    found[param] = self._locks.lock(param.nvme_swapper.partitions[param.ds_id].copy())
        except FuyouError as error:
            self.drop(found)
            logger.warning("frozen parameters stay where they are, training goes on: %s", error)
            return None
        return found

    def _written(self, params: list[Parameter]) -> dict[Parameter, ParkedValues]:
        space, found = parked_space(self._model.activation), {}
        try:
            for param in sorted(params, key=partition_bytes):
                found[param] = space.park(f"parameter {param.ds_id}", param.ds_tensor.data.view(-1))
                self._bound_heap()
        finally:
            space.rest()
        return found

    def drop(self, copied: Mapping[Parameter, ParkedValues | torch.Tensor]) -> None:
        """They do not move after all."""
        for values in copied.values():
            if isinstance(values, torch.Tensor):
                self._locks.unlock(values)

    def move(self, copied: Mapping[Parameter, ParkedValues | torch.Tensor]) -> None:
        """To where they were copied, while the device copies none of them, and no parameter store serves them."""
        with still_as_taken(copied):
            for param, values in copied.items():
                if isinstance(values, torch.Tensor):
                    param.nvme_swapper.give_back(param, values)
                else:
                    self._locks.unlock(param.ds_tensor.data)
                    param.nvme_swapper.hold(param, values)
                    self._bound_heap(partition_bytes(param))

    @property
    def held_bytes(self) -> int:
        """In host memory, of those whose place is the plan's to say."""
        return sum(partition_bytes(param) for param in self._planned if partition_of(param) is None)

    def _is_held(self, param: Parameter) -> bool:
        """By this engine: another one may have locked its memory."""
        return is_in_host_memory(param) and self._locks.has(param.ds_tensor.data)

    @property
    def _movable(self) -> list[Parameter]:
        """Small ones, which stay gathered, are not worth it."""
        return [param for param in self._planned if not param.ds_persist]


def _spread(params: list[Parameter], room_bytes: float) -> dict[Parameter, bool]:
    """Whether each of them is in host memory where so many bytes are, spread over the model."""
    sizes, places = [*map(partition_bytes, params)], [(place,) for place in range(len(params))]
    return dict(zip(params, spread_evenly(sizes, places, room_bytes), strict=True))
