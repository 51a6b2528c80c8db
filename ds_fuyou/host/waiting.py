# SPDX-License-Identifier: Apache-2.0
"""Waiting that says what it waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["REPORT_SECS", "wait_reporting"]

logger = logging.getLogger("ds_fuyou")

REPORT_SECS = 30.0
"""A wait that lasts longer is reported, and again after each further period. It is not a time-out."""


def wait_reporting(wait: Callable[[float], bool], what: Callable[[], str]) -> float:
    """Calls ``wait(timeout_secs)`` until it returns true; returns the seconds spent.

    ``wait`` must raise when the awaited thing can no longer happen. ``what`` is evaluated for the report only.
    """
    begin = time.perf_counter()
    while not wait(REPORT_SECS):
        logger.warning("still waiting for %s (%.0f s)", what(), time.perf_counter() - begin)
    return time.perf_counter() - begin
