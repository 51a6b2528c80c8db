# SPDX-License-Identifier: Apache-2.0
"""What comes when a thread is at a place, and not after some time."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType

__all__ = ["Interrupts", "interrupted_in", "once_in"]


def _met(innermost: object, around: set[object]) -> FrameType | None:
    for frame in sys._current_frames().values():
        inner, missing, caller = None, around | {innermost}, frame
        while caller is not None and missing:
            if caller.f_code is innermost and inner is None:
                inner = caller
            missing.discard(caller.f_code)
            caller = caller.f_back
        if not missing:
            return inner
    return None


@contextmanager
def once_in(
    call: Callable[[], object],
    innermost: FunctionType,
    *around: FunctionType,
    when: Callable[[FrameType], bool] = lambda frame: True,
) -> Iterator[None]:
    """Another thread makes the call as soon as one is in all of these functions, which call each other; when the block
    ends at the latest, so that nothing stays held. ``when`` is asked of the innermost one's frame."""
    places, over = {function.__code__ for function in around}, threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            frame = _met(innermost.__code__, places)
            if frame is not None and when(frame):
                break
        call()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Interrupts:
    """SIGINT: ``then`` is called before ``error`` is raised."""

    def __init__(self, then: Callable[[], object], error: type[BaseException]) -> None:
        self.num_met, self._then, self._error = 0, then, error

    def __call__(self, *_: object) -> None:
        self.num_met += 1
        self._then()
        raise self._error


@contextmanager
def interrupted_in(
    *functions: FunctionType,
    then: Callable[[], object] = lambda: None,
    error: type[BaseException] = KeyboardInterrupt,
) -> Iterator[Interrupts]:
    """Ctrl-C comes as soon as this thread, the main one, is in all of these functions; the script's handler makes
    ``error`` of it.
    """
    met, is_inside = Interrupts(then, error), True

    def interrupt() -> None:
        if is_inside:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, met)
    try:
        with once_in(interrupt, *functions):
            try:
                yield met
            finally:
                is_inside = False
    finally:
        signal.signal(signal.SIGINT, before)
