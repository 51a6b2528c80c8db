# SPDX-License-Identifier: Apache-2.0
"""Budgets of the block against what the machine has, before anything is built."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

import torch

from ds_fuyou.config import FuyouConfig
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.host.available_memory import total_host_bytes
from ds_fuyou.host.device import Device
from ds_fuyou.log import log_once
from ds_fuyou.planner.hardware import OF_DEVICE
from ds_fuyou.planner.policies import LOGIT_BYTES
from ds_fuyou.zero.device import rank_device
from ds_fuyou.zero.run.neighbours import free_memory_of_rank, local_ranks, memory_of_rank

__all__ = [
    "check_budgets",
    "device_budget",
    "loss_bytes_each",
    "planned_host_bytes",
    "unmeasured_room",
]

planned_host_bytes: WeakKeyDictionary[object, int] = WeakKeyDictionary()
"""Host memory that the engines of this process have planned, by whoever holds it."""


def check_budgets(config: FuyouConfig) -> None:
    """Warns where ``dram_budget_bytes`` is more than this rank's part of what is free now: others may give memory
    back, or the system may end the run when they do not.

    Raises:
        FuyouConfigError: a budget is more than the machine, or a control group of this process, has at all.
    """
    dram, gpu = config.dram_budget_bytes, config.gpu_budget_bytes
    if dram != "auto":
        total, free = memory_of_rank(), free_memory_of_rank()
        if int(dram) > total:
            ranks = local_ranks()
            where = "machine" if ranks == 1 else f"machine, or its control group, for each of {ranks} ranks"
            raise _too_much("dram_budget_bytes", f"{dram} bytes", where, total)
        if int(dram) > free:
            log_once(
                logging.WARNING,
                f"fuyou.dram_budget_bytes asks for {dram} bytes, {free} are free now for this rank, of {local_ranks()} "
                f"here; if others do not give memory back, the system may end the run. Lower it, or end them",
                on_any_rank=True,
            )
    for name in ("staging_bytes", "prefetch_bytes", "activation_bytes"):
        wanted = getattr(config.plan, name, None)
        if wanted is not None and wanted > total_host_bytes():
            raise _too_much(f"plan.{name}", f"{wanted} bytes", "machine", total_host_bytes())
    if gpu != "auto":
        have = rank_device().total_bytes()
        if int(gpu) > have:
            raise _too_much("gpu_budget_bytes", f"{gpu} bytes", "device", have)


def device_budget(config: FuyouConfig, device: Device) -> int:
    """Bytes of the device for this rank: the block's, or most of what others leave it; the rest is the allocator's."""
    budget = config.gpu_budget_bytes
    return int(OF_DEVICE * device.usable_bytes()) if budget == "auto" else int(budget)


def unmeasured_room(budget_bytes: int, device: Device, held_bytes: int, loss_bytes: int) -> int:
    """Bytes of the device for saved tensors when a forward begins, of which it holds ``held_bytes`` already, while
    nothing is known of the rest: half of what is left of its budget, and less where ``loss_bytes``, which the loss may
    take at once, are more than the other half. On the host other budgets count the rest.
    """
    if device.is_host:
        return budget_bytes
    left = budget_bytes - device.allocated_bytes() + held_bytes
    return max(0, min(left // 2, left - loss_bytes))


def loss_bytes_each(module: torch.nn.Module) -> int:
    """Bytes of the device that cross entropy may take at once for a token; the vocabulary is taken to be as large as
    the widest output of any linear layer.
    """
    return LOGIT_BYTES * max(
        (_num_outputs(layer) for layer in module.modules() if isinstance(layer, torch.nn.Linear)), default=0
    )


def _num_outputs(layer: torch.nn.Linear) -> int:
    """A weight that is parametrized is not asked for: that computes it, and may change buffers (spectral norms)."""
    weight = layer._parameters.get("weight")
    return layer.out_features if weight is None else int(getattr(weight, "ds_shape", weight.shape)[0])


def _too_much(key: str, wanted: str, where: str, have: int) -> FuyouConfigError:
    return FuyouConfigError(
        f"fuyou.{key} must not exceed what there is: {wanted}, the {where} has {have}; lower it, or leave it out"
    )
