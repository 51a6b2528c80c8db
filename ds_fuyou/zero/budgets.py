# SPDX-License-Identifier: Apache-2.0
"""Budgets of the block against what the machine has, before anything is built."""

from __future__ import annotations

import logging

from deepspeed.accelerator import get_accelerator

from ds_fuyou.config import FuyouConfig
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.log import log_once
from ds_fuyou.planner.host_memory import available_host_bytes, total_host_bytes

__all__ = ["check_budgets"]


def check_budgets(config: FuyouConfig, local_ranks: int) -> None:
    """Warns where ``dram_budget_bytes`` of all ranks of this machine is more than what is free now: others may give
    memory back, or the system may end the run when they do not.

    Raises:
        FuyouConfigError: a budget is more than the machine, or a control group of this process, has at all.
    """
    dram, gpu = config.dram_budget_bytes, config.gpu_budget_bytes
    if dram != "auto":
        needed, total, free = int(dram) * local_ranks, total_host_bytes(), available_host_bytes()
        if needed > total:
            raise _too_much("dram_budget_bytes", f"{needed} bytes for the {local_ranks} ranks here", "machine", total)
        if needed > free:
            log_once(
                logging.WARNING,
                f"fuyou.dram_budget_bytes asks for {needed} bytes for the {local_ranks} ranks here, {free} are free "
                f"now; if the others do not give memory back, the system may end the run. Lower it, or end them",
            )
    if gpu != "auto":
        have = int(get_accelerator().total_memory())
        if int(gpu) > have:
            raise _too_much("gpu_budget_bytes", f"{gpu} bytes", "device", have)


def _too_much(key: str, wanted: str, where: str, have: int) -> FuyouConfigError:
    return FuyouConfigError(
        f"fuyou.{key} must not exceed what there is: {wanted}, the {where} has {have}; lower it, or leave it out"
    )
