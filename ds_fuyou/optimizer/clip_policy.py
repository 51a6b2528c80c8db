# SPDX-License-Identifier: Apache-2.0
"""Whether updates start during backward (``speculate``) or when ``step()`` has validated (``defer``)."""

from __future__ import annotations

from collections import deque
from enum import Enum

__all__ = ["ClipPolicy", "Overlap", "UpdateStart"]


class Overlap(Enum):
    """What optimizer work hides behind."""

    NONE = "none"
    BACKWARD = "backward"
    BACKWARD_AND_FORWARD = "backward_and_forward"


class UpdateStart(Enum):
    """DEFER: one slot suffices, state may be read ahead. SPECULATE: into the spare slot, redone if refused."""

    DEFER = "defer"
    SPECULATE = "speculate"


class ClipPolicy:
    """Chooses for each step. ``auto`` speculates unless redone work was frequent lately.

    A redone step costs a second read, update and write of every chunk that was prepared in vain, so `auto`
    defers while more than a quarter of the last 8 steps would have been redone.
    """

    WINDOW = 8

    def __init__(self, policy: str, possible: bool) -> None:
        self._policy = policy
        self.possible = possible
        """Whether any chunk can be updated ahead of the step."""
        self.waits = policy == "defer"
        """Whether all updates wait for ``step()``; changed between steps, on all ranks."""
        self._refused: deque[bool] = deque(maxlen=self.WINDOW)

    @property
    def may_speculate(self) -> bool:
        """Whether updates begin in backward in any step."""
        return self.possible and not self.waits

    def choose(self) -> UpdateStart:
        if not self.may_speculate:
            return UpdateStart.DEFER
        if self._policy == "speculate":
            return UpdateStart.SPECULATE
        refused = sum(self._refused)
        return UpdateStart.DEFER if 4 * refused > max(len(self._refused), 4) else UpdateStart.SPECULATE

    @property
    def refused_share(self) -> float | None:
        """Of the steps that are remembered; None before there are enough."""
        return sum(self._refused) / self.WINDOW if len(self._refused) == self.WINDOW else None

    def record(self, refused: bool) -> None:
        """``refused``: the step clipped, overflowed or changed its hyperparameters after backward."""
        self._refused.append(refused)
