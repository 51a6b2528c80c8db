# SPDX-License-Identifier: Apache-2.0
"""Whether this process ends cleanly: the state on storage goes away after a clean end alone.

[Note: a clean end]
Closing an engine while the script runs is one, and so is an interpreter that ends because its main module ran to its
last line, or called ``sys.exit()`` with 0 or nothing. None is: an exception that nobody caught, Ctrl-C, SIGTERM (the
launcher sends it to all ranks when one has died), ``sys.exit()`` with anything else. Python tells nobody at its end
how it came there, so three things are looked at: where the main module's outermost frame stopped (at a return, or in
the middle), the last exception that was printed, and the last status that ``sys.exit`` was given, or ``exit`` and
``quit``, which are wrapped while a store is open. ``raise SystemExit`` without them counts as no clean end, whatever
its status. Nor is it one where a thread that the interpreter waits for has ended by an exception: it may be the one
that trained. (Daemons only help.)

At a prompt, and in a notebook, a statement that fails ends nothing, and the frame that built the engine has returned
long before the end. There an exception that was printed since then makes the end unclean, whichever statement it was.
"""

from __future__ import annotations

import opcode
import sys
import threading
from _sitebuiltins import Quitter
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
        self.original_quit = Quitter.__call__
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
    _ending.original_exit, _ending.original_quit, _ending.watches = sys.exit, Quitter.__call__, True
    _ending.original_hook = threading.excepthook
    sys.exit, threading.excepthook = _exit, _thread_failed
    Quitter.__call__ = _quit  # type: ignore[method-assign]


def forget() -> None:
    """The last store is closed: ``sys.exit`` and the hook of threads are as they were, unless somebody else has wrapped
    them since. How this part of the process went says nothing of later stores."""
    _ending.watches, _ending.main = False, None
    _ending.because, _ending.is_signalled = "", False
    if sys.exit is _exit:
        sys.exit = _ending.original_exit
    if Quitter.__call__ is _quit:
        Quitter.__call__ = _ending.original_quit  # type: ignore[method-assign]
    if threading.excepthook is _thread_failed:
        threading.excepthook = _ending.original_hook


def signalled(name: str) -> None:
    """A signal asked the process to end."""
    _ending.because, _ending.is_signalled = f"the process was ended by {name}", True


def failed(error: BaseException) -> None:
    """Functions that run at exit are called while this exception is on its way out."""
    if not _is_clean(error):
        _ending.because = _ended_with(error)


def unclean_end() -> str:
    """Why the process ends, or has ended, other than cleanly; empty otherwise, and while the script runs."""
    main = _ending.main
    if _ending.because or main is None or _is_running(main):
        return _ending.because
    has_returned = _stopped_at_return(main)
    if has_returned and not _is_interactive():
        return ""
    printed = _last_printed()
    if printed is not None and printed is not _ending.printed and not _is_clean(printed):
        return _ended_with(printed)
    if _ending.status is _UNKNOWN:
        return "" if has_returned else "the script ended with SystemExit, and not by sys.exit, which tells its status"
    return "" if _ending.status in (None, 0) else f"the script ended with status {_ending.status!r}"


def by_signal() -> bool:
    """The process ends because SIGTERM asked it to, or Ctrl-C: whoever did waits for its end."""
    if _ending.is_signalled:
        return True
    printed, main = _last_printed(), _ending.main
    is_new = isinstance(printed, KeyboardInterrupt) and printed is not _ending.printed
    return is_new and main is not None and not _is_running(main) and not _is_interactive()


def _thread_failed(args: threading.ExceptHookArgs, /) -> None:
    if args.exc_value is not None and not threading.current_thread().daemon:
        failed(args.exc_value)
    _ending.original_hook(args)


def _exit(status: object = None, /) -> NoReturn:
    if threading.current_thread() is threading.main_thread():  # in others it ends no process
        _ending.status = status
    _ending.original_exit(status)  # type: ignore[arg-type]
    raise SystemExit(status)


def _quit(self: Quitter, code: object = None) -> NoReturn:
    _ending.status = code
    _ending.original_quit(self, code)  # type: ignore[arg-type]
    raise SystemExit(code)


def _is_interactive() -> bool:
    """This process reads statements: at Python's prompt, at that of another shell, or from a notebook."""
    return hasattr(sys, "ps1")


def _is_clean(error: object) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _last_printed() -> object:
    return getattr(sys, "last_value", None)


def _frame_of_main_thread() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _is_running(main: FrameType) -> bool:
    frame = _frame_of_main_thread()
    while frame is not None:
        is_statement = frame.f_back is None and frame.f_code.co_name == "<module>"  # functions at exit stand in none
        if frame is main or (is_statement and _is_interactive()):
            return True
        frame = frame.f_back
    return False


def _stopped_at_return(frame: FrameType) -> bool:
    code = frame.f_code.co_code
    return 0 <= frame.f_lasti < len(code) and opcode.opname[code[frame.f_lasti]].startswith("RETURN")


def _ended_with(error: object) -> str:
    return f"the script ended with {type(error).__name__}"
