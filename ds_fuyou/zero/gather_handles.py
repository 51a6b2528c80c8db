# SPDX-License-Identifier: Apache-2.0
"""One rank's "gathers" without stopping the host.

Stock's handles of a gather on one rank copy the partition to the device and then synchronise the stream, in backward
too. Here an event follows the copies, and the stream that waits for the handle comes after it: the coordinator's
gathering stream, which the computing stream waits for and whose work in flight it bounds, or the computing stream
itself. Host memory that was read for such a copy is given up after the same event, if it is not kept for a later use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fuyou.zero.device import rank_device
from ds_fuyou.zero.param_swapper import FuyouParameterSwapper

__all__ = ["event_ordered"]


def event_ordered(original: type) -> Callable[[Any], Any]:
    """Replaces a handle class: ours for parameters of an engine with the block, stock's for all others."""

    class EventOrderedHandle(original):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self._params = list(params) if isinstance(params, (list, tuple)) else [params]
            device = rank_device()
            self._copied = None if device.is_host else device.record_event()
            if self._copied is not None:
                for param in self._params:
                    param.nvme_swapper.copied(param, self._copied)

        def wait(self, **kwargs: Any) -> None:
            """Orders the current stream; marks the parameters available, once: each of them waits for their handle."""
            if self._copied is not None:
                rank_device().current_stream().wait_event(self._copied)
            for param in self._params:
                param.ds_status = ZeroParamStatus.AVAILABLE
            self._params = []

    @functools.wraps(original, updated=())
    def make(params: Any) -> Any:
        every = params if isinstance(params, (list, tuple)) else [params]
        ours = all(isinstance(param.nvme_swapper, FuyouParameterSwapper) for param in every)
        return EventOrderedHandle(params) if ours else original(params)

    return make
