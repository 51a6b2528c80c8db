# SPDX-License-Identifier: Apache-2.0
"""Steps that are skipped in a row, and whether storage is to blame.

A parameter that is not a number makes every norm one that is not: the step is skipped, so the parameter is not updated,
and stays as it is. Checksums notice what the disk changed; where there are none (``checksum: false``, P16 of a run that
was gone on from without its sums) a script would skip for ever. So after four skipped steps, eight, and so on, one
looks at what is on storage.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ds_fuyou.errors import FuyouChecksumError
from ds_fuyou.log import get_logger, log_once
from ds_fuyou.optimizer.param_access import PublishedSpan
from ds_fuyou.parameters.partition import Partition

if TYPE_CHECKING:
    from ds_fuyou.optimizer.core import OutOfCoreOptimizer

__all__ = ["SkippedSteps"]

_FIRST_LOOK = 4


class SkippedSteps:
    """Counts them for one engine."""

    def __init__(self, core: OutOfCoreOptimizer) -> None:
        self._core = core
        self._in_a_row = 0

    def step_applied(self) -> None:
        self._in_a_row = 0

    def step_skipped(self, partitions: Iterable[Partition]) -> None:
        """Of all parameters, none of which is gathered.

        Raises:
            FuyouChecksumError: P16 on storage is not finite where P32 says that it should be.
        """
        self._in_a_row += 1
        if self._in_a_row < _FIRST_LOOK or self._in_a_row & (self._in_a_row - 1):
            return
        get_logger().info(f"{self._in_a_row} steps in a row were skipped: parameters on storage are looked at")
        for partition in partitions:
            source = partition.source
            source.wait()
            location = source.location()
            if not location.runs:
                continue
            bad = ~torch.isfinite(location.read(source.io))
            if not bad.any():
                continue
            found = f"{location.what} on storage holds {int(bad.sum())} values that are not finite"
            if not isinstance(source, PublishedSpan):
                told = f"{self._in_a_row} steps in a row were skipped, and {found}"
                log_once(logging.ERROR, told, on_any_rank=True)
            elif torch.isfinite(self._core.states.read_param(source.span, 0).to(location.dtype)[bad]).any():
                raise FuyouChecksumError(
                    errno.EBADMSG,
                    f"{self._in_a_row} steps in a row were skipped: {found}, where P32 is finite; the disk or its path "
                    "is faulty, or the script wrote them. Start from the last checkpoint",
                    None if self._core.store is None else str(self._core.store.directories[0]),
                )
