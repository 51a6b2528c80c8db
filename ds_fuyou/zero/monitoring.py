# SPDX-License-Identifier: Apache-2.0
"""What each step was like, given to DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet) beside stock's own events."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ds_fuyou.log import log_once
from ds_fuyou.telemetry.report import BOUND_LANES, LaneTimes
from ds_fuyou.telemetry.tier_bytes import TierBytes
from ds_fuyou.zero.run.rank_state import RankState

__all__ = ["StepMonitor", "count_tokens", "tokens_in"]


def count_tokens(rank_state: RankState, module: torch.nn.Module) -> RemovableHandle:
    """Until the handle is removed ``rank_state.num_tokens`` counts elements of the first input of whole numbers, of two
    dimensions or more, in every forward in training mode: token ids, as a rule. A model without such an input counts
    nothing. ``rank_state.has_begun`` says whether there was such a forward. Whatever forward begins, states that the
    script has looked at are not kept beside it.
    """
    state = weakref.ref(rank_state)

    def before(called: torch.nn.Module, args: Any, kwargs: Any) -> None:
        known = state()
        if known is None:
            return
        known.core.states.forget()
        if called.training and torch.is_grad_enabled():
            known.has_begun = True
            known.num_tokens += tokens_in((args, kwargs))

    return module.register_forward_pre_hook(torch.compiler.disable(before), with_kwargs=True)


def tokens_in(inputs: Any) -> int:
    for value in tree_leaves(inputs):
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.dtype in (torch.int64, torch.int32):
            return value.numel()
    return 0


class StepMonitor:
    """Writes one set of events a step, from the second one on, if a monitor is enabled. Rank 0 of the run alone.

    The x axis is that of stock's events: samples after the step.
    """

    def __init__(self, engine: Any, rank_state: RankState, tiers: TierBytes) -> None:
        self._engine = weakref.ref(engine)
        self._state = rank_state
        self._tiers = tiers
        self._writes = bool(engine.monitor.enabled) and dist.get_rank() == 0
        self._at: tuple[float, LaneTimes] | None = None

    def leave_out(self, secs: float, work: LaneTimes) -> None:
        """``work`` done within ``secs`` since the last call of :meth:`step_applied` is no part of the next step."""
        if self._at is not None:
            self._at = (self._at[0] + secs, self._at[1].after(work))

    def step_applied(self) -> None:
        engine = self._engine()
        if engine is None or not self._writes:
            return
        before, self._at = self._at, (time.perf_counter(), LaneTimes.of(self._state))
        if before is None:  # the first step also built what later ones use again
            return
        secs, lanes = self._at[0] - before[0], self._at[1].since(before[1])
        samples = engine.global_samples + engine.train_batch_size()  # stock adds them after the optimizer's step
        events = [(tag, value, samples) for tag, value in _events(secs, lanes, self._tiers.now())]
        try:
            engine.monitor.write_events(events)
        except Exception as error:  # of a program of the user's: a step is not left half done for it, on one rank
            log_once(logging.WARNING, f"the monitor cannot be told of steps ({error!r}); training goes on")


def _events(secs: float, lanes: LaneTimes, tiers: Mapping[str, float]) -> list[tuple[str, float]]:
    """Of one step and what lies in each tier after it: times and bytes of this rank, tokens of all, under
    ``Train/Fuyou``. The bound lane is given by its place in ``BOUND_LANES``.
    """
    values = {
        "step_secs": secs,
        "bound_lane": float(BOUND_LANES.index(lanes.bound_lane(secs))),
        "hidden_secs": lanes.hidden_secs,
        "exposed_secs": lanes.exposed_secs,
        "storage_read_secs": lanes.read_secs,
        "storage_write_secs": lanes.write_secs,
        "cpu_optimizer_secs": lanes.update_secs,
        "storage_read_bytes": lanes.read_bytes,
        "storage_write_bytes": lanes.write_bytes,
        "device_to_host_bytes": lanes.swapped_bytes,
        "host_to_device_bytes": lanes.returned_bytes,
    }
    if lanes.tokens and secs > 0:
        values["tokens_per_sec"] = lanes.tokens * dist.get_world_size() / secs
    for tier, num_bytes in tiers.items():
        values[f"bytes_in_{tier.replace(' ', '_')}"] = float(num_bytes)
    return [(f"Train/Fuyou/{name}", value) for name, value in values.items()]
