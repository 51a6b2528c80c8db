# SPDX-License-Identifier: Apache-2.0
"""``offload_states()`` and ``reload_states()``, of an engine or, as some programs call them, of its optimizer: the
device is somebody else's for a while (a generation server).

Stock moves what is on the device to host memory, and refuses engines whose parameters are offloaded. Here states,
gradients and partitions are not on the device to begin with: what is there are gathered parameters, gradients on their
way, and registrations of host memory, which ``pin_memory=False`` takes back, also from engines beside it that only
infer. Such an engine sleeps alone, too.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from ds_fuyou.ds_json import activation_of
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.log import get_logger

__all__ = ["fall_asleep", "offloading", "reloading"]


def _asked(engine: Any) -> Any | None:
    """Who pins what the engine needs; None if the engine is stock's.

    Raises:
        FuyouStateError: the engine was destroyed.
    """
    state = getattr(engine.optimizer, "rank_state", None)
    if state is not None:
        state.require_parameters()
        return state
    reads = getattr(engine.optimizer, "fuyou_reads", None)
    if reads is None and activation_of(engine._config) is None:
        return None
    if reads is not None and reads.is_destroyed:
        raise FuyouStateError("the engine was destroyed: it has no states to offload or to reload")
    return reads


def fall_asleep(asked: Any, optimizer: Any, device: OffloadDeviceEnum, pin_memory: bool) -> None:
    """``asked``: who pins what the engine of this ``optimizer`` needs. Without ``pin_memory`` that is taken back."""
    if device == OffloadDeviceEnum.none:
        get_logger().warning("offload_states: no device is named, nothing is done")
        return
    if device == OffloadDeviceEnum.nvme:
        raise ValueError("offload_states: device must be cpu; what lives on storage is told by the fuyou block")
    if hasattr(optimizer, "gradient_flow"):
        optimizer.gradient_flow.rest()
    optimizer.empty_partition_cache()
    if not pin_memory:
        asked.sleep()
    gc.collect()
    get_accelerator().empty_cache()  # who is to have the device is another process


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
        asked = _asked(self)
        if asked is None:
            return original(self, include, device, pin_memory, non_blocking)
        return fall_asleep(asked, self.optimizer, device, pin_memory)

    return offload_states


def reloading(original: Callable[..., None]) -> Callable[..., None]:
    """``DeepSpeedEngine.reload_states``."""

    @functools.wraps(original)
    def reload_states(self: Any, non_blocking: bool = False) -> None:
        asked = _asked(self)
        if asked is None:
            return original(self, non_blocking)
        asked.wake()
        return None

    return reload_states
