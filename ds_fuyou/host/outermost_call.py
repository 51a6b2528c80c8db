# SPDX-License-Identifier: Apache-2.0
"""Which call of a module is the outermost one, also where calls have ended without a word.

PyTorch calls forward hooks at the end of a call and after an ``Exception``, but not after Ctrl-C, or whatever else a
signal's handler raises that is none. So calls are known by their frames, and where one lies on no thread's stack any
more, it has ended. One whose frame is not known counts as running.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

__all__ = ["OutermostCall"]


class OutermostCall:
    """Told by forward hooks of one module. A call may be within another one, or beside it in another thread."""

    def __init__(self) -> None:
        self._frames: list[FrameType | None] = []

    def enter(self) -> bool:
        """In the module's forward pre-hook: whether no other call is running."""
        self._frames = [frame for frame in self._frames if frame is None or _is_running(frame)]
        self._frames.append(_frame_of_call())
        return len(self._frames) == 1

    def leave(self) -> bool:
        """In its forward hook, ``always_call``: whether no other call is running."""
        if self._frames:
            self._frames.pop()
        return not self._frames

    def forget(self) -> None:
        """No call is running."""
        self._frames.clear()


def _frame_of_call() -> FrameType | None:
    """PyTorch's own that calls the hooks, which lasts as long as the call; also where it is compiled."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != nn.Module.__module__:
        frame = frame.f_back
    return frame


def _is_running(sought: FrameType) -> bool:
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame is sought:
                return True
            frame = frame.f_back
    return False
