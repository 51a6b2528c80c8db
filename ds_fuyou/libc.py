# SPDX-License-Identifier: Apache-2.0
"""The C library, for what Python has no function for."""

from __future__ import annotations

import ctypes
import functools

__all__ = ["libc"]


@functools.cache
def libc() -> ctypes.CDLL:
    """One object for all: each is part of a cycle, and a run may have switched Python's collector off."""
    return ctypes.CDLL(None, use_errno=True)
