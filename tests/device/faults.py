# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults: a call of the package that orders work is left out, wherever it stands in the code.

Every place in ``ds_fuyou`` that waits for a stream or an event, asks for or records an event, or records a stream on a
tensor has a name: "call at file:function". A process lists those it came by (``seen``), and leaves one of them out
when told so: the event counts as passed, the wait as done.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import ds_fuyou

__all__ = ["leave_out", "seen"]

_PACKAGE = Path(ds_fuyou.__file__).parent
# These pass on what their caller wants.
_SEAMS = {"zero/device.py", "host/device.py"}
_TRANSPARENT = (str(Path(__file__).parent), str(Path(torch.__file__).parent))

seen: dict[str, int] = {}


def _site(what: str) -> str | None:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(_PACKAGE)):
            place = Path(file).relative_to(_PACKAGE).as_posix()
            if place not in _SEAMS:
                return f"{what} at {place}:{frame.f_code.co_name}"
        elif not file.startswith(_TRANSPARENT):
            return None  # of DeepSpeed, or of a script
        frame = frame.f_back
    return None


def leave_out(fault: str) -> None:
    """From now on ``fault`` does nothing; an empty name lists what there is only."""

    def asked(what: str) -> bool:
        site = _site(what)
        if site is not None:
            seen[site] = seen.get(site, 0) + 1
        return site is not None and site == fault

    torch.standin.core.ask_before_ordering(asked)
