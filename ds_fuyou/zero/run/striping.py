# SPDX-License-Identifier: Apache-2.0
"""How much of what is on storage each ``nvme_path`` receives: by the block, or by what its device is measured to do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ds_fuyou.ds_json import Activation
from ds_fuyou.errors import FuyouError
from ds_fuyou.log import get_logger, log_once
from ds_fuyou.profiling.lane_rates import path_rates
from ds_fuyou.storage.io import IoLane, IoSettings
from ds_fuyou.storage.parked import ParkedSpace
from ds_fuyou.storage.probe import probe_path
from ds_fuyou.storage.store import SlotStore
from ds_fuyou.zero.run.neighbours import local_ranks

__all__ = ["measured_weights", "parked_space", "path_weights", "shares_of_machine"]

_ALIKE = 1.25
"""Devices whose rates differ by less are taken for alike: a short measurement says no more."""


def path_weights(activation: Activation) -> tuple[float, ...] | None:
    """``plan.shares``, or relative bandwidths, measured once in this process where paths lie on several devices. None:
    alike.
    """
    config = activation.config
    if config.plan is not None and config.plan.shares is not None:
        return tuple(config.plan.shares)
    return measured_weights(tuple(activation.state_paths), config.io.engine)


@lru_cache(maxsize=16)
def measured_weights(paths: tuple[str, ...], engine: str) -> tuple[float, ...] | None:
    """Bytes a second that states, which are read as often as they are written, move on each path; None where all are on
    one device, do about the same, or cannot be measured.
    """
    if len(paths) < 2:
        return None
    directories = [Path(path) for path in paths]
    try:
        if len({probe_path(directory).device for directory in directories}) < 2:
            return None
        io = IoLane(IoSettings(engine), lambda _: None)
        try:
            rates = [path_rates(io, directory) for directory in directories]
        finally:
            io.close()
    except (FuyouError, OSError) as error:
        get_logger().debug("bandwidths of %s were not measured: %s", ", ".join(paths), error)
        return None
    weights = tuple(2 / (1 / write + 1 / read) for write, read in rates)
    if max(weights) < _ALIKE * min(weights):
        return None
    shown = ", ".join(
        f"{path} {100 * weight / sum(weights):.0f} % ({weight / 1e9:.2f} GB/s)"
        for path, weight in zip(paths, weights, strict=True)
    )
    log_once(logging.INFO, f"state is striped by measured bandwidth: {shown}; fuyou.plan.shares sets other shares")
    return weights


def parked_space(activation: Activation) -> ParkedSpace:
    """Where this configuration parks parameters.

    Raises:
        FuyouStorageError: a path is not writable.
    """
    config, weights = activation.config, path_weights(activation)
    return ParkedSpace.at(activation.state_paths, config.io.engine, weights, checksum=config.checksum)


def shares_of_machine(paths: Sequence[str], store: SlotStore | None) -> dict[str, float]:
    """Path → what the ranks of this machine write there, in multiples of what one rank writes everywhere."""
    if store is None:
        return dict.fromkeys(paths, local_ranks() / len(paths)) if paths else {}
    directories, sizes = store.directories, store.path_bytes
    run = directories[0].name.rpartition("-rank")[0]
    ranks = [sum(1 for _ in directory.parent.glob(f"{run}-rank*")) for directory in directories]
    return {path: size / sum(sizes) * num_ranks for path, size, num_ranks in zip(paths, sizes, ranks, strict=True)}
