# SPDX-License-Identifier: Apache-2.0
"""While gradients accumulate, what backward uses last stays on the device: the next forward begins with it.

Nothing changes parameters between two micro-batches, and stock gathers the first blocks again at once. Here their last
release in backward takes the gathered values aside, as many as leave ``stage3_max_live_parameters`` room for what is
gathered ahead and as the budget of the device leaves beside what steps hold, and the next forward of the model has them
back. In between the parameter is partitioned, for DeepSpeed
and for scripts: who gathers it then gathers its partition. An edit ends what was put aside, and so does a step of any
engine that trains it (``FuyouParameterSwapper.put_aside``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.nn import Parameter

from ds_fuyou.host.device import Device
from ds_fuyou.zero.parameters.param_swapper import swaps_here
from ds_fuyou.zero.stock import iter_module_params, of_coordinator, set_of_coordinator, staying_numel

__all__ = ["AcrossBatches"]


class AcrossBatches:
    """Takes the place of the coordinator's releases and of its ``reset_step``, with which a forward begins.

    ``is_last``: whether the backward that runs is the last one before a step.
    """

    def __init__(self, coordinator: Any, device: Device, is_last: Callable[[], bool]) -> None:
        self._coordinator, self._device, self._is_last = coordinator, device, is_last
        self._order: Any = None
        self._room_bytes = 0.0
        self.most_bytes = 0
        """Of the device, for what stays."""
        self._last_use: dict[int, int] = {}  # by ds_id, of those that may stay: the place of their last module
        self._staying: list[Parameter] = []
        self._is_open = False  # from the begin of a forward until all parameters are released
        self._stock_release: Callable[..., None] = of_coordinator(coordinator, "release_param")
        self._stock_reset: Callable[[], None] = coordinator.reset_step
        self._stock_release_all: Callable[[torch.nn.Module], None] = coordinator.release_and_reset_all
        set_of_coordinator(coordinator, "release_param", torch.compiler.disable(self._release))
        coordinator.reset_step = torch.compiler.disable(self._reset)
        coordinator.release_and_reset_all = self._release_all

    def allow(self, room_bytes: float) -> None:
        """From the next forward on so much may stay, the same on all ranks: who has a parameter does not gather it."""
        self._room_bytes, self._order = room_bytes, None

    def _release(self, param: Parameter, free_data: bool = True) -> None:
        if not free_data or not self._may_stay(param):
            self._stock_release(param, free_data)
            return
        param.data.record_stream(self._device.current_stream())
        param.nvme_swapper.put_aside(param)
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        param.ds_status = ZeroParamStatus.NOT_AVAILABLE
        self._staying.append(param)  # DeepSpeed goes on counting it among those on the device

    def _may_stay(self, param: Parameter) -> bool:
        last_use = self._last_use.get(param.ds_id)
        return (
            self._is_open
            and last_use is not None
            and last_use < of_coordinator(self._coordinator, "step_id")
            and self._coordinator.is_complete_trace()
            and param.ds_status is ZeroParamStatus.AVAILABLE
            and not param.ds_active_sub_modules
            and not self._is_last()
        )

    def _reset(self) -> None:
        self._stock_reset()
        self._is_open = True
        num_available = 0
        for param in self._staying:
            values = param.nvme_swapper.take_gathered(param)
            if values is not None:
                param.data, param.ds_status = values, ZeroParamStatus.AVAILABLE
                num_available += param.ds_numel
        self._staying.clear()
        set_of_coordinator(self._coordinator, "n_available_params", num_available)
        self._follow_order()

    def _follow_order(self) -> None:
        order = of_coordinator(self._coordinator, "submodule_order")
        if order is not self._order:
            self._order, self._last_use, self.most_bytes = order, {}, 0
            if self._coordinator.is_complete_trace():
                self._last_use = self._choose(order)

    def _release_all(self, module: torch.nn.Module) -> None:
        """Before a step, a checkpoint or a sleep: nothing stays."""
        self._is_open = False
        self.forget()
        self._stock_release_all(module)

    def forget(self) -> None:
        for param in self._staying:
            param.nvme_swapper.forget_gathered(param)
        self._staying.clear()

    def _choose(self, order: tuple[torch.nn.Module, ...]) -> dict[int, int]:
        """Of a recorded forward and backward: what its begin uses, and its rest as well."""
        room, room_bytes = staying_numel(self._coordinator), self._room_bytes
        first_use: dict[Parameter, int] = {}
        last_use: dict[int, int] = {}
        for place, module in enumerate(order):
            for param in iter_module_params(module):
                first_use.setdefault(param, place)
                last_use[param.ds_id] = place
        chosen = {}
        for param, place in first_use.items():
            room -= param.ds_numel
            room_bytes -= param.ds_numel * param.element_size()
            if min(room, room_bytes) < 0:
                break
            is_ours = swaps_here(param) and not param.ds_persist
            if is_ours and last_use[param.ds_id] > place:
                chosen[param.ds_id] = last_use[param.ds_id]
                self.most_bytes += param.ds_numel * param.element_size()
        return chosen
