# SPDX-License-Identifier: Apache-2.0
"""The end of stores: at interpreter exit, after an exception, SIGINT or SIGTERM, and in forked children. What a store
does with its files then is its own affair (storage/ending.py says how the process ends).

At the end everything registered with :func:`register_closer` runs first, last registered first (threads that
still do I/O), then the stores are closed. A SIGTERM handler is installed only where nobody installed one (and one of
SIGINT, in processes of ``multiprocessing``), and is gone when the last store is closed: it turns SIGTERM into
``SystemExit(143)`` in the main thread, so that the interpreter unwinds. A forked child (a DataLoader worker) inherits
files and handlers; it drops them untouched.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from ds_fuyou import autoload
from ds_fuyou.storage import ending

if TYPE_CHECKING:
    from ds_fuyou.storage.store import SlotStore

__all__ = ["forget_store", "install", "open_stores", "register_closer", "register_store", "shutdown"]

logger = logging.getLogger("ds_fuyou")

_SIGTERM_STATUS = 128 + signal.SIGTERM


class _Registry:
    def __init__(self) -> None:
        self.stores: list[SlotStore] = []
        self.closers: list[Callable[[], object]] = []
        self.hooked = False
        self.finalizes_in = -1
        self.shutting_down = False


_registry = _Registry()


def install() -> None:
    """Hooks the process's end and fork once, and SIGTERM where it is free. Called before creation."""
    ending.watch()
    _open_standard_files()
    if not _registry.hooked:
        _registry.hooked = True
        if not autoload.watches_end():
            atexit.register(shutdown)
        os.register_at_fork(after_in_child=_after_fork_in_child)
    if multiprocessing.parent_process() is not None and _registry.finalizes_in != os.getpid():
        _registry.finalizes_in = os.getpid()  # one that was forked ends without what atexit knows
        multiprocessing.util.Finalize(None, shutdown, exitpriority=0)
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _on_sigterm)
        is_child = multiprocessing.parent_process() is not None  # others look whether the handler is Python's own
        if is_child and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _on_sigint)


def _open_standard_files() -> None:
    """A process that was started without standard error must not give its number to a state file: what C prints goes
    there."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def register_store(store: SlotStore) -> None:
    """Has the store closed at the end of the process, unless :func:`forget_store` comes first."""
    install()
    _registry.stores.append(store)


def open_stores() -> Sequence[SlotStore]:
    """Of this process, in the order in which they were opened."""
    return tuple(_registry.stores)


def forget_store(store: SlotStore) -> None:
    """The store is closed. After the last one SIGTERM is as it was. Unknown stores are ignored."""
    _registry.stores = [known for known in _registry.stores if known is not store]
    if not _registry.stores and not _registry.shutting_down:
        _restore_signals()
        ending.forget()


def register_closer(closer: Callable[[], object], *, behind_others: bool = False) -> Callable[[], None]:
    """Has ``closer`` run at the end, before the stores are closed; it must be idempotent. ``behind_others``: those that
    are registered later still use what it closes.

    Returns a function that takes the registration back.
    """
    install()
    entry = lambda: closer()  # noqa: E731  # an identity of its own: the same closer may be registered twice
    _registry.closers.insert(0 if behind_others else len(_registry.closers), entry)

    def forget() -> None:
        _registry.closers = [known for known in _registry.closers if known is not entry]

    return forget


def shutdown() -> None:
    """Runs all closers, then closes all stores; last registered first. A failing one does not stop the
    others.
    """
    _registry.shutting_down = True
    unhandled = sys.exc_info()[1]  # whoever calls this by hand, while an exception ends the process
    if unhandled is not None:
        ending.failed(unhandled)
    try:
        while _registry.closers:
            _run(_registry.closers.pop())
        while _registry.stores:
            _run(_registry.stores.pop().close)
    finally:
        _registry.shutting_down = False
    _restore_signals()
    ending.forget()


def _run(action: Callable[[], object]) -> None:
    try:
        action()
    except BaseException:  # a second Ctrl-C gives up on this one only
        logger.exception("closing at the end of the run failed; the rest is closed all the same")


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    ending.signalled("SIGTERM")
    if not _registry.shutting_down:  # the second signal finds the end under way
        raise SystemExit(_SIGTERM_STATUS)


def _on_sigint(number: int, frame: FrameType | None) -> None:
    ending.interrupted()
    signal.default_int_handler(number, frame)


def _restore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGTERM) is _on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is _on_sigint:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _after_fork_in_child() -> None:
    for store in _registry.stores:
        store.abandon()
    _registry.stores, _registry.closers = [], []
    _restore_signals()
    ending.forget()
