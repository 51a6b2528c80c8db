# SPDX-License-Identifier: Apache-2.0
"""The exceptions of the package. Each is also the built-in exception a caller would expect.

    FuyouError
    ├── FuyouConfigError   (ValueError)     the fuyou block, or the DeepSpeed JSON around it
    ├── FuyouStorageError  (OSError)        a file of the slot store: path, offset and errno
    │   └── FuyouChecksumError              bytes came back different from what was written
    ├── FuyouStateError    (RuntimeError)   a call in the wrong state of the object's life
    ├── FuyouMemoryError   (MemoryError)    the system refuses host memory
    ├── FuyouBuildError    (RuntimeError)   the C++ core could not be built or loaded
    └── FuyouCompatError   (RuntimeError)   the installed DeepSpeed or torch does not fit

A message says what must hold, what was found and what to do next.
"""

from __future__ import annotations

import os

__all__ = [
    "FuyouBuildError",
    "FuyouChecksumError",
    "FuyouCompatError",
    "FuyouConfigError",
    "FuyouError",
    "FuyouMemoryError",
    "FuyouStateError",
    "FuyouStorageError",
    "shown",
]


class FuyouError(Exception):
    """Base of everything the package raises on purpose."""


class FuyouConfigError(FuyouError, ValueError):
    """A setting is wrong, missing, or cannot be combined with another one."""


class FuyouStorageError(FuyouError, OSError):
    """An I/O operation failed.

    Args:
        errno: error number of the operating system, as in ``OSError.errno``.
        message: what was being done and what to do next.
        path: file the operation was on, ``None`` when it was on none.
        offset: byte offset in that file where the failing piece starts, ``None`` if not known.
    """

    def __init__(self, errno: int, message: str, path: str | None = None, offset: int | None = None) -> None:
        super().__init__(errno, message, path)
        self.offset = offset

    def __str__(self) -> str:
        where = "" if self.filename is None else f" [{self.filename}"
        if where and self.offset is not None:
            where += f" at byte {self.offset}"
        reason = os.strerror(self.errno) if self.errno else "no error number"
        return f"{self.strerror} ({reason}){where + ']' if where else ''}"

    def __reduce__(self) -> tuple[type[FuyouStorageError], tuple[int, str, str | None, int | None]]:
        return type(self), (self.errno or 0, self.strerror or "", self.filename, self.offset)


class FuyouChecksumError(FuyouStorageError):
    """Bytes read differ from the bytes written."""


class FuyouStateError(FuyouError, RuntimeError):
    """A call came in the wrong state: after close, before initialisation, or after a failure."""


class FuyouMemoryError(FuyouError, MemoryError):
    """The system refuses host memory: there is too little, or a limit of the process."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(
            f"{num_bytes} bytes of host memory must be mapped, and the system refuses; free memory, raise the limit of "
            f"the process (ulimit -v, the control group), or lower fuyou.dram_budget_bytes"
        )


class FuyouBuildError(FuyouError, RuntimeError):
    """The C++ core could not be built or loaded."""


class FuyouCompatError(FuyouError, RuntimeError):
    """The installed DeepSpeed or torch lacks what the package relies on."""


def shown(value: object, most: int = 200) -> str:
    """For messages: ``value`` in one line of bounded length, whatever it is."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested without end, or a number of more digits than Python writes
        text = "..."
    return text if len(text) <= most else f"{text[:most]}..."
