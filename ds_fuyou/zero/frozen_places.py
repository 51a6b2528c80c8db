# SPDX-License-Identifier: Apache-2.0
"""Where frozen parameters are: as the plan says when an engine is built; on storage from when host memory is scarce.

[Note: frozen parameters that leave]
A base of adapters is most of what its run has in host memory. What leaves is written first, while everything stays
where it is: a rank whose disk has no room says so, and nothing has happened anywhere. Then, on all ranks, memory goes,
and reads begin. The smallest are written first, as each is copied on its way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.nn import Parameter

from ds_fuyou.errors import FuyouError
from ds_fuyou.host.memory import PageLocks
from ds_fuyou.optimizer.residency import spread_evenly
from ds_fuyou.parameters.partition import Partition
from ds_fuyou.storage.io import IoLane
from ds_fuyou.storage.parked import ParkedValues
from ds_fuyou.zero.frozen_base import still_as_taken
from ds_fuyou.zero.param_swapper import is_in_host_memory, partition_bytes, partition_of, pin_partition
from ds_fuyou.zero.run_design import TrainedModel
from ds_fuyou.zero.striping import parked_space

__all__ = ["FrozenPlaces"]

logger = logging.getLogger("ds_fuyou")


class FrozenPlaces:
    """Of one rank. ``bound_heap`` is told where memory of so many bytes was freed."""

    def __init__(self, model: TrainedModel, locks: PageLocks, bound_heap: Callable[..., None]) -> None:
        self._model, self._locks, self._bound_heap = model, locks, bound_heap

    def place(self, room_bytes: float) -> None:
        """So many bytes are in host memory, the same on every rank. ``zero.Init`` had put them where they fell."""
        for param, stays in _spread(self._model.planned_frozen(), room_bytes).items():
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

    # ---- where memory is scarce -----------------------------------------------------------------------------

    @property
    def may_leave(self) -> bool:
        """Whether none of them is gathered."""
        return all(param.ds_status is ZeroParamStatus.NOT_AVAILABLE for param in self._in_memory())

    def written(self, room_bytes: float) -> dict[Parameter, ParkedValues] | None:
        """All beyond so many bytes of host memory, copied to storage; None, and a word, where that has no room."""
        stays = _spread(self._in_memory(), room_bytes)
        found: dict[Parameter, ParkedValues] = {}
        try:
            space = parked_space(self._model.activation)
            for param in sorted((param for param in stays if not stays[param]), key=partition_bytes):
                found[param] = space.park(f"parameter {param.ds_id}", param.ds_tensor.data.view(-1))
                self._bound_heap()
            space.rest()
        except FuyouError as error:
            logger.warning("frozen parameters stay where they are, training goes on: %s", error)
            return None
        return found

    def leave(self, written: Mapping[Parameter, ParkedValues]) -> None:
        """Host memory, where no copy to the device may be in flight: from here on they are what was ``written``."""
        with still_as_taken(written):
            for param, values in written.items():
                self._locks.unlock(param.ds_tensor.data)
                param.nvme_swapper.hold(param, values)
                self._bound_heap(partition_bytes(param))

    def _in_memory(self) -> list[Parameter]:
        """In the order of use. Small ones, which stay gathered, are not worth it."""
        return [
            param
            for param in self._model.planned_frozen()
            if partition_of(param) is None and is_in_host_memory(param) and not param.ds_persist
        ]


def _spread(params: list[Parameter], room_bytes: float) -> dict[Parameter, bool]:
    """Whether each of them is in host memory where so many bytes are, spread over the model."""
    sizes, places = [*map(partition_bytes, params)], [(place,) for place in range(len(params))]
    return dict(zip(params, spread_evenly(sizes, places, room_bytes), strict=True))
