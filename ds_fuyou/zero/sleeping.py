# SPDX-License-Identifier: Apache-2.0
"""``engine.offload_states()`` and ``reload_states()``: the device is somebody else's for a while (a generation server).

Stock moves what is on the device to host memory, and refuses engines whose parameters are offloaded. Here states,
gradients and partitions are not on the device to begin with: what is there are gathered parameters, gradients on their
way, and registrations of host memory, which ``pin_memory=False`` takes back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from ds_fuyou.ds_json import activation_of
from ds_fuyou.log import get_logger

__all__ = ["offloading", "reloading"]


def _is_ours(engine: Any) -> bool:
    return activation_of(engine._config) is not None and hasattr(engine.optimizer, "rank_state")


def offloading(original: Callable[..., None]) -> Callable[..., None]:
    """``DeepSpeedEngine.offload_states``."""

    @functools.wraps(original)
    def offload_states(
        self: Any,
        include: Any = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        if not _is_ours(self):
            return original(self, include, device, pin_memory, non_blocking)
        if device == OffloadDeviceEnum.none:
            get_logger().warning("offload_states: no device is named, nothing is done")
            return None
        if device == OffloadDeviceEnum.nvme:
            raise ValueError("offload_states: device must be cpu; what lives on storage is told by the fuyou block")
        self.optimizer.gradient_flow.rest()
        self.empty_partition_cache()
        if not pin_memory:
            self.optimizer.rank_state.unpin()
        return None

    return offload_states


def reloading(original: Callable[..., None]) -> Callable[..., None]:
    """``DeepSpeedEngine.reload_states``."""

    @functools.wraps(original)
    def reload_states(self: Any, non_blocking: bool = False) -> None:
        if not _is_ours(self):
            return original(self, non_blocking)
        self.optimizer.rank_state.wake()
        return None

    return reload_states
