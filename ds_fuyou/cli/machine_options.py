# SPDX-License-Identifier: Apache-2.0
"""Command-line options that describe a machine, and adapters over a model, shared by several commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.hardware import GIB, Machine
from ds_fuyou.planner.model import ModelSpec
from ds_fuyou.planner.presets import find_gpu, find_host, find_ssd, machine_of, preset_names
from ds_fuyou.simulator.models import load_model, with_adapters

__all__ = [
    "add_adapter_options",
    "add_machine_options",
    "machine_from",
    "model_from",
    "pinned_limit_bytes",
    "size_in",
]


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """GPU, SSDs, DRAM and host; names are those of ds_fuyou/planner/presets.json."""
    gpus, ssds, hosts = (preset_names(kind) for kind in ("gpus", "ssds", "hosts"))
    parser.add_argument("--gpu", default="rtx4090", help=f"GPU preset (%(default)s); known: {gpus}")
    parser.add_argument("--num-gpus", type=int, default=1, help="GPUs, one rank each (%(default)s)")
    parser.add_argument("--ssd", default="p5510", help=f"SSD preset (%(default)s); known: {ssds}")
    parser.add_argument("--num-ssds", type=int, help="SSDs; default: as many as --ssd-tb needs, else 1")
    parser.add_argument(
        "--ssd-tb", type=size_in(1e12), help="storage, 10^12 bytes, or as 2TB; default: the capacity of the SSDs"
    )
    parser.add_argument(
        "--dram-gb", type=size_in(GIB), default=128.0, help="DRAM, 2^30 bytes, or as 64GB, 64GiB (%(default)s)"
    )
    parser.add_argument(
        "--pinned-gb",
        type=size_in(GIB),
        help="what may be page-locked, as --dram-gb; default: all DRAM, of ds_fuyou what a run takes by itself",
    )
    parser.add_argument(
        "--host", default="xeon5320x2", help=f"host preset: DRAM and PCIe rates (%(default)s); known: {hosts}"
    )


def add_adapter_options(parser: argparse.ArgumentParser) -> None:
    """What is trained of a model."""
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank over a frozen base")
    parser.add_argument("--lora-attention", action="store_true", help="adapters beside attention's matrices alone")
    parser.add_argument("--base-bits", type=int, default=16, help="of the frozen base: 16, or 4 (%(default)s)")


def model_from(arguments: argparse.Namespace) -> ModelSpec:
    """``--model`` with the adapters that are told.

    Raises:
        FuyouConfigError: not known, or adapters that cannot be.
    """
    model = load_model(arguments.model)
    return with_adapters(model, arguments.lora, arguments.base_bits, arguments.lora_attention)


def size_in(unit: float) -> Callable[[str], float]:
    """A type of an argument: a number of ``unit`` bytes, or text with a suffix, as the block takes it."""

    def size(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            from ds_fuyou.config import parse_bytes

            return parse_bytes(text) / unit

    return size


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
