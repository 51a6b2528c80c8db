# SPDX-License-Identifier: Apache-2.0
"""Waiting that says what it waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["REPORT_SECS", "SLICE_SECS", "wait_reporting", "wait_through"]

logger = logging.getLogger("ds_fuyou")

REPORT_SECS = 30.0
"""A wait that lasts longer is reported, and again after each further period. It is not a time-out."""

_AT_ONCE_SECS = 0.01

SLICE_SECS = 0.2
"""Longest stay outside of Python: signal handlers (Ctrl-C, SIGTERM) run between two slices."""


def wait_reporting(wait: Callable[[float], bool], what: Callable[[], str]) -> float:
    """Calls ``wait(timeout_secs)`` until it returns true; returns the seconds spent.

    ``wait`` must raise when the awaited thing can no longer happen. ``what`` is evaluated for the report only.
    """
    begin = time.perf_counter()
    report = begin + REPORT_SECS
    while not wait(SLICE_SECS):
        now = time.perf_counter()
        if now >= report:
            logger.warning("still waiting for %s (%.0f s)", what(), now - begin)
            report = now + REPORT_SECS
    return time.perf_counter() - begin


def wait_through(wait: Callable[[float], bool], what: Callable[[], str]) -> None:
    """As :func:`wait_reporting`, for what must end before memory may go: what a signal handler raises meanwhile, Ctrl-C
    or a time limit, is raised after that. (What ``wait`` itself raises it raises again, at once.)
    """
    interrupts: list[BaseException] = []
    while True:
        begin = time.perf_counter()
        try:
            wait_reporting(wait, what)
            break
        except (KeyboardInterrupt, SystemExit) as interrupt:
            interrupts.append(interrupt)
        except BaseException as error:
            if interrupts and type(error) is type(interrupts[-1]) and time.perf_counter() - begin < _AT_ONCE_SECS:
                raise
            interrupts.append(error)
    if interrupts:
        raise interrupts[0]
