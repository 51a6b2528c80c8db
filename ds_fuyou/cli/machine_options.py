# SPDX-License-Identifier: Apache-2.0
"""Command-line options that describe a machine, shared by the planner's commands."""

from __future__ import annotations

import argparse

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.hardware import GIB, Machine
from ds_fuyou.planner.presets import find_gpu, find_host, find_ssd, machine_of

__all__ = ["add_machine_options", "machine_from", "pinned_limit_bytes"]


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """GPU, SSDs, DRAM and host; names are those of ds_fuyou/planner/presets.json."""
    parser.add_argument("--gpu", default="rtx4090", help="GPU preset (%(default)s)")
    parser.add_argument("--num-gpus", type=int, default=1, help="GPUs, one rank each (%(default)s)")
    parser.add_argument("--ssd", default="p5510", help="SSD preset (%(default)s)")
    parser.add_argument("--num-ssds", type=int, help="SSDs; default: as many as --ssd-tb needs, else 1")
    parser.add_argument("--ssd-tb", type=float, help="storage, 10^12 bytes; default: the capacity of the SSDs")
    parser.add_argument("--dram-gb", type=float, default=128.0, help="DRAM, 2^30 bytes (%(default)s)")
    parser.add_argument("--pinned-gb", type=float, help="what may be page-locked, 2^30 bytes; default: all DRAM")
    parser.add_argument("--host", default="xeon5320x2", help="host preset: DRAM and PCIe rates (%(default)s)")


def machine_from(arguments: argparse.Namespace) -> Machine:
    """The machine that the options describe.

    Raises:
        FuyouConfigError: unknown presets (nearest are named), sizes out of range or contradicting each other.
    """
    ssd = find_ssd(arguments.ssd)
    _require_size("--ssd-tb", arguments.ssd_tb)
    pinned_limit = pinned_limit_bytes(arguments)
    _require_size("--dram-gb", arguments.dram_gb)
    if arguments.pinned_gb is not None and arguments.pinned_gb > arguments.dram_gb:
        raise FuyouConfigError(
            f"--pinned-gb must not exceed --dram-gb {arguments.dram_gb:g}, found {arguments.pinned_gb:g}: it is DRAM"
        )
    storage = None if arguments.ssd_tb is None else arguments.ssd_tb * 1e12
    count = arguments.num_ssds
    if count is None:
        count = 1 if storage is None else max(1, -int(-storage // ssd.capacity_bytes))
    if storage is not None and count >= 0 and storage > count * ssd.capacity_bytes:
        raise FuyouConfigError(
            f"--ssd-tb {arguments.ssd_tb:g} must fit {count} x {ssd.name} of {ssd.capacity_bytes / 1e12:g} TB; "
            f"raise --num-ssds or lower --ssd-tb"
        )
    return machine_of(
        find_gpu(arguments.gpu),
        find_host(arguments.host),
        ssd,
        num_ssds=count,
        dram_bytes=arguments.dram_gb * GIB,
        num_gpus=arguments.num_gpus,
        storage_bytes=storage,
        pinned_limit_bytes=pinned_limit,
    )


def pinned_limit_bytes(arguments: argparse.Namespace) -> float:
    """Of a machine that is measured, too.

    Raises:
        FuyouConfigError: out of range.
    """
    _require_size("--pinned-gb", arguments.pinned_gb)
    return float("inf") if arguments.pinned_gb is None else float(arguments.pinned_gb * GIB)


def _require_size(flag: str, value: float | None) -> None:
    if value is not None and not 0 < value < 1e6:
        raise FuyouConfigError(f"{flag} must be positive and below a million, found {value:g}")
