# SPDX-License-Identifier: Apache-2.0
"""One rank's "gathers" without stopping the host.

Stock's handles of a gather on one rank copy the partition to the device and then synchronise the stream, in backward
too. The coordinator makes the computing stream wait for the gathering stream and bounds what is in flight by events,
so that nothing else needs the host to wait; a gather outside of it runs on the stream that uses its result. The host
memory that such a copy reads is kept by the swapper's :class:`~ds_fuyou.lanes.fence.ReleaseFence`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_fuyou.zero.param_swapper import FuyouParameterSwapper

__all__ = ["event_ordered"]


def event_ordered(original: type) -> Callable[[Any], Any]:
    """Replaces a handle class: ours for parameters of an engine with the block, stock's for all others."""

    class EventOrderedHandle(original):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self._params = list(params) if isinstance(params, (list, tuple)) else [params]

        def wait(self, **kwargs: Any) -> None:
            """Marks the parameters available, once: one handle is waited for by each of its parameters."""
            for param in self._params:
                param.ds_status = ZeroParamStatus.AVAILABLE
            self._params = []

    @functools.wraps(original, updated=())
    def make(params: Any) -> Any:
        every = params if isinstance(params, (list, tuple)) else [params]
        ours = all(isinstance(param.nvme_swapper, FuyouParameterSwapper) for param in every)
        return EventOrderedHandle(params) if ours else original(params)

    return make
