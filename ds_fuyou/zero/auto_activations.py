# SPDX-License-Identifier: Apache-2.0
"""Runs the rule of ``activations.mode: auto`` in the engine: measures one step, decides once, the same on all ranks."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_fuyou.activations.auto import BlockFates, BlockMeasurement, choose_fates
from ds_fuyou.activations.session import ActivationSession
from ds_fuyou.log import log_once
from ds_fuyou.storage.io import IoLane

__all__ = ["AutoActivations"]

_MEASURED_STEP = 2  # the first one also builds what later ones use again


class AutoActivations:
    """To be told of every applied step, until it has decided."""

    def __init__(self, session: ActivationSession, io: IoLane, budget_bytes: int) -> None:
        self._session = session
        self._io = io
        self._budget_bytes = budget_bytes
        self._num_steps = 0
        self._at = self._look()

    def _look(self) -> dict[str, float]:
        """Counters since the start."""
        lanes = self._io.stats().values()
        moved = self._session.counters
        return {
            "time": time.perf_counter(),
            "bytes": float(sum(lane.num_bytes for lane in lanes)),
            "busy": float(sum(lane.busy_secs for lane in lanes)),
            "out": float(moved.out_bytes),
            "swapped": float(moved.written_bytes + moved.read_bytes),
            "forwards": float(self._session.num_forwards),
        }

    def step_applied(self) -> bool:
        """Whether the decision has fallen, so that this object is of no more use."""
        self._num_steps += 1
        if self._num_steps < _MEASURED_STEP:
            self._at = self._look()
            return False
        now = self._look()
        fates = self._agreed(choose_fates(self._measured({key: now[key] - self._at[key] for key in now})))
        swapped, recomputed = fates.split(self._session.blocks)
        self._session.decide(swapped, recomputed)
        log_once(
            logging.INFO,
            f"activations, decided after step {self._num_steps}: of {len(self._session.blocks)} blocks {len(swapped)} "
            f"are swapped, {len(recomputed)} recomputed, {fates.num_kept} kept on the device",
        )
        return True

    def _measured(self, step: dict[str, float]) -> BlockMeasurement:
        num_blocks = len(self._session.blocks)
        forwards = max(1, int(step["forwards"]))
        swapper = self._session.swapper
        on_storage = swapper is not None and swapper.tier is not None and swapper.tier.storage is not None
        return BlockMeasurement(
            num_blocks=num_blocks,
            block_bytes=step["out"] / forwards / max(1, num_blocks),
            num_forwards=forwards,
            step_secs=step["time"],
            storage_bytes_per_sec=step["bytes"] / step["busy"] if on_storage and step["busy"] > 0 else None,
            other_storage_bytes=max(0.0, step["bytes"] - step["swapped"]),
            device_bytes=max(0, self._budget_bytes - self._device_peak_bytes()),
        )

    @staticmethod
    def _device_peak_bytes() -> int:
        """What the rest of training needs of the device; on the host it is counted by the other budgets."""
        accelerator: Any = get_accelerator()
        return 0 if accelerator.device_name() == "cpu" else int(accelerator.max_memory_allocated())

    def _agreed(self, fates: BlockFates) -> BlockFates:
        """The smallest counts of all ranks: recomputed blocks gather parameters, which is a collective."""
        counts = torch.tensor([fates.num_swapped, fates.num_kept], device=get_accelerator().current_device_name())
        dist.all_reduce(counts, op=dist.ReduceOp.MIN)
        num_swapped, num_kept = (int(count) for count in counts.tolist())
        return BlockFates(num_swapped, len(self._session.blocks) - num_swapped - num_kept, num_kept)
