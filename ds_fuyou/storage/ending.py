# SPDX-License-Identifier: Apache-2.0
"""Whether this process ends cleanly: the state on storage goes away after a clean end alone.

[Note: a clean end]
Closing an engine while the script runs is one, and so is an interpreter that ends because its main module ran to its
last line, or called ``sys.exit()`` with 0 or nothing. None is: an exception that nobody caught, Ctrl-C, SIGTERM (the
launcher sends it to all ranks when one has died), ``sys.exit()`` with anything else, or in a handler of a signal, where
the script was interrupted. Python tells nobody at its end how it came there, so three things are looked at: where the
main module stopped (at its return, or in the middle, whatever ran it: a debugger's own frames return), the last
exception that was printed, and the last status that ``sys.exit``, ``exit`` or ``quit`` were given, if they were called
where the main module stopped, and no step was made since then: somebody had caught that (a command line's ``--help`` is
an exit, too). They are wrapped since torch was imported (``autoload.py``): in ``sys.exit(main())`` Python looks them up
first. ``raise SystemExit`` without them counts as no clean end, whatever its status. Nor is it one where a thread that
the interpreter waits for has ended by an exception (it may be the one that trained; daemons only help), or a function
that runs at exit has.

At a prompt, and in a notebook, a statement that fails ends nothing, and the one that built the engine returned long
before the end. There an exception that was printed since then makes the end unclean, whichever statement it was.
"""

from __future__ import annotations

import opcode
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ds_fuyou import autoload

__all__ = ["by_signal", "failed", "forget", "goes_on", "interrupted", "signalled", "unclean_end", "watch"]


class _Ending:
    def __init__(self) -> None:
        self.because = ""
        self.is_signalled = False
        self.outermost: FrameType | None = None
        self.module: FrameType | None = None
        """The main module's, or of the statement that was typed; the outermost one where there is neither."""
        self.has_prompt = False
        self.printed: object = None
        self.original_hook = threading.excepthook
        self.original_unraisable = sys.unraisablehook
        self.watches = False


_ending = _Ending()


def watch() -> None:
    """From now on the end is looked at. Idempotent; called before a store is made."""
    if _ending.watches:
        return
    autoload.note_exits()
    autoload.EXITS.clear()
    frames = [*_frames()]
    _ending.outermost = frames[-1] if frames else None
    _ending.module = next(filter(_is_main_module, frames), _ending.outermost)
    _ending.has_prompt, _ending.printed, _ending.watches = hasattr(sys, "ps1"), _last_printed(), True
    _ending.original_hook, _ending.original_unraisable = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = _thread_failed, _at_exit_failed


def forget() -> None:
    """The last store is closed: hooks are as they were, unless somebody else has wrapped them since. How this part of
    the process went says nothing of later stores."""
    _ending.watches, _ending.outermost, _ending.module = False, None, None
    _ending.because, _ending.is_signalled = "", False
    if threading.excepthook is _thread_failed:
        threading.excepthook = _ending.original_hook
    if sys.unraisablehook is _at_exit_failed:
        sys.unraisablehook = _ending.original_unraisable


def goes_on() -> None:
    """A step was made: what was to end the process before did not."""
    autoload.EXITS.clear()


def signalled(name: str) -> None:
    """A signal asked the process to end."""
    _ending.because, _ending.is_signalled = f"the process was ended by {name}", True


def interrupted() -> None:
    """Ctrl-C, in a process of ``multiprocessing``: what starts them for a script catches it to end them."""
    _ending.because = _ended_with(KeyboardInterrupt())


def failed(error: BaseException) -> None:
    """Functions that run at exit are called while this exception is on its way out."""
    if not _is_clean(error):
        _ending.because = _ended_with(error)


def unclean_end() -> str:
    """Why the process ends, or has ended, other than cleanly; empty otherwise, and while the script runs."""
    module = _ending.module
    if _ending.because or module is None or _is_running():
        return _ending.because
    if _stopped_at_return(module) and not _is_interactive():
        return ""
    printed = _last_printed()
    if printed is not None and printed is not _ending.printed and not _is_clean(printed):
        return _ended_with(printed)
    exits = [exited for exited in autoload.EXITS if _is_interactive() or (id(module), module.f_lasti) in exited.places]
    if exits and exits[-1].by_handler:
        return "a signal ended the script, by a handler of its own"
    if exits:
        return "" if _is_zero(exits[-1].status) else f"the script ended with status {exits[-1].status!r}"
    has_returned = _stopped_at_return(module)
    return "" if has_returned else "the script ended with SystemExit, and not by sys.exit, which tells its status"


def by_signal() -> bool:
    """The process ends because SIGTERM asked it to, or Ctrl-C: whoever did waits for its end. Not where a handler of
    the script's own ended it: what that began, a last checkpoint, say, is to be finished."""
    if _ending.is_signalled:
        return True
    printed = _last_printed()
    is_new = isinstance(printed, KeyboardInterrupt) and printed is not _ending.printed
    return is_new and _ending.module is not None and not _is_running() and not _is_interactive()


def _thread_failed(args: threading.ExceptHookArgs, /) -> None:
    if args.exc_value is not None and not threading.current_thread().daemon:
        failed(args.exc_value)
    _ending.original_hook(args)


def _at_exit_failed(args: Any, /) -> None:
    if args.exc_value is not None and "atexit" in str(args.err_msg):
        failed(args.exc_value)
    _ending.original_unraisable(args)


def _is_interactive() -> bool:
    """This process reads statements: at Python's prompt, at that of another shell, or from a notebook."""
    return _ending.has_prompt or bool(sys.flags.inspect or os.environ.get("PYTHONINSPECT"))


def _is_zero(status: object) -> bool:
    return status is None or (isinstance(status, int) and status == 0)


def _is_clean(error: object) -> bool:
    return isinstance(error, SystemExit) and _is_zero(error.code)


def _last_printed() -> object:
    return getattr(sys, "last_value", None)


def _frames() -> Iterator[FrameType]:
    """Of the main thread, from the innermost one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_main_module(frame: FrameType) -> bool:
    return autoload.is_module(frame) and frame.f_globals.get("__name__") == "__main__"


def _is_running() -> bool:
    return any(frame is _ending.outermost or _is_main_module(frame) for frame in _frames())


def _stopped_at_return(frame: FrameType) -> bool:
    code = frame.f_code.co_code
    return 0 <= frame.f_lasti < len(code) and opcode.opname[code[frame.f_lasti]].startswith("RETURN")


def _ended_with(error: object) -> str:
    return f"the script ended with {type(error).__name__}"
