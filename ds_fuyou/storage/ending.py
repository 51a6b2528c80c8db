# SPDX-License-Identifier: Apache-2.0
"""Whether this process ends cleanly: the state on storage goes away after a clean end alone.

[Note: a clean end]
Closing an engine while the script runs is one, and so is an interpreter that ends because its main module ran to its
last line, or called ``sys.exit()`` with 0 or nothing. None is: an exception that nobody caught, Ctrl-C, SIGTERM (the
launcher sends it to all ranks when one has died), ``sys.exit()`` with anything else. Python tells nobody at its end
how it came there, so three things are looked at: where the main module's outermost frame stopped (at a return, or in
the middle), the last exception that was printed, and the last status that ``sys.exit`` was given, which is wrapped
while a store is open. ``raise SystemExit`` without it counts as no clean end, whatever its status. Nor is it one where
a thread that the interpreter waits for has ended by an exception: it may be the one that trained. (Daemons only help.)
"""

from __future__ import annotations

import opcode
import sys
import threading
from types import FrameType
from typing import NoReturn

__all__ = ["by_signal", "failed", "forget", "signalled", "unclean_end", "watch"]

_UNKNOWN = object()


class _Ending:
    def __init__(self) -> None:
        self.because = ""
        self.is_signalled = False
        self.main: FrameType | None = None
        self.status: object = _UNKNOWN
        self.printed: object = None
        self.original_exit = sys.exit
        self.original_hook = threading.excepthook
        self.watches = False


_ending = _Ending()


def watch() -> None:
    """From now on the end is looked at. Idempotent; called before a store is made."""
    if _ending.watches:
        return
    frame = _frame_of_main_thread()
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    _ending.main, _ending.status, _ending.printed = frame, _UNKNOWN, _last_printed()
    _ending.original_exit, _ending.watches = sys.exit, True
    _ending.original_hook = threading.excepthook
    sys.exit, threading.excepthook = _exit, _thread_failed


def forget() -> None:
    """The last store is closed: ``sys.exit`` and the hook of threads are as they were, unless somebody else has wrapped
    them since."""
    _ending.watches, _ending.main = False, None
    if sys.exit is _exit:
        sys.exit = _ending.original_exit
    if threading.excepthook is _thread_failed:
        threading.excepthook = _ending.original_hook


def signalled(name: str) -> None:
    """A signal asked the process to end."""
    _ending.because, _ending.is_signalled = f"the process was ended by {name}", True


def failed(error: BaseException) -> None:
    """Functions that run at exit are called while this exception is on its way out."""
    if not isinstance(error, SystemExit) or error.code not in (None, 0):
        _ending.because = _ended_with(error)


def unclean_end() -> str:
    """Why the process ends, or has ended, other than cleanly; empty otherwise, and while the script runs."""
    main = _ending.main
    if _ending.because or main is None or _is_running(main) or _stopped_at_return(main):
        return _ending.because
    printed = _last_printed()
    if printed is not None and printed is not _ending.printed:
        return _ended_with(printed)
    if _ending.status is _UNKNOWN:
        return "the script ended with SystemExit"
    return "" if _ending.status in (None, 0) else f"the script ended with status {_ending.status!r}"


def by_signal() -> bool:
    """The process ends because SIGTERM asked it to, or Ctrl-C: whoever did waits for its end."""
    if _ending.is_signalled:
        return True
    printed, main = _last_printed(), _ending.main
    is_new = isinstance(printed, KeyboardInterrupt) and printed is not _ending.printed
    return is_new and main is not None and not _is_running(main)


def _thread_failed(args: threading.ExceptHookArgs, /) -> None:
    if args.exc_value is not None and not threading.current_thread().daemon:
        failed(args.exc_value)
    _ending.original_hook(args)


def _exit(status: object = None, /) -> NoReturn:
    if threading.current_thread() is threading.main_thread():  # in others it ends no process
        _ending.status = status
    _ending.original_exit(status)  # type: ignore[arg-type]
    raise SystemExit(status)


def _last_printed() -> object:
    return getattr(sys, "last_value", None)


def _frame_of_main_thread() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _is_running(main: FrameType) -> bool:
    frame = _frame_of_main_thread()
    while frame is not None:
        if frame is main:
            return True
        frame = frame.f_back
    return False


def _stopped_at_return(frame: FrameType) -> bool:
    code = frame.f_code.co_code
    return 0 <= frame.f_lasti < len(code) and opcode.opname[code[frame.f_lasti]].startswith("RETURN")


def _ended_with(error: object) -> str:
    return f"the script ended with {type(error).__name__}"
