# SPDX-License-Identifier: Apache-2.0
"""Activation: a hook that runs `ds_fuyou.plugin.install` once DeepSpeed's engine has been imported.

`_autoload` is the target of the ``torch.backends`` entry point, so torch calls it at the end of every
``import torch``. It uses the standard library alone, imports nothing heavier, and never raises: an
exception here would break ``import torch`` for a user who may not even use DeepSpeed.

[Note: when the hook fires]
The engine module may be not imported yet, imported already, or being imported right now further up
the stack. One meta-path finder covers all three. When it is asked for the engine it lets the other
finders answer and makes the loader call back after the module body ran. Whenever it is asked for any
other module it first looks whether the engine has become complete meanwhile; DeepSpeed imports more
modules after its engine, so this happens at the latest before ``import deepspeed`` returns.

The plugin waits in the same way for modules of other packages (`when_imported`).
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from _sitebuiltins import Quitter
from collections import deque
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, NamedTuple, NoReturn

__all__ = ["EXITS", "Exited", "forget", "is_awaited", "is_module", "note_exits", "watches_end", "when_imported"]

ENGINE_MODULE = "deepspeed.runtime.engine"
DISABLE_VARIABLE = "DS_FUYOU_DISABLE"
_OF_FUNCTIONS, _OF_MORE = 2, 4  # inspect.CO_NEWLOCALS, CO_VARARGS
_watched: set[str] = set()


class Exited(NamedTuple):
    """Of a call of ``sys.exit``, ``exit`` or ``quit`` in the main thread. ``places``: by identity, frames of modules
    that called it, and where these stood. ``by_handler``: a signal's handler called it."""

    status: object
    places: frozenset[tuple[int, int]]
    by_handler: bool


EXITS: deque[Exited] = deque(maxlen=16)
"""The last ones: of the one that ends the process nothing else tells, and others may have been caught."""


def _autoload() -> None:
    """Arms the hook, or installs at once if DeepSpeed is there. Idempotent; never raises."""
    try:
        if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
            return
        when_imported(ENGINE_MODULE, _install)
        _watch_end()
    except Exception as error:  # [Note: when the hook fires]: never raise into `import torch`
        _report(error)


def _watch_end() -> None:
    """What the script registers with ``atexit``, a last checkpoint, say, comes after this, and runs before it."""
    if "end" not in _watched:
        _watched.add("end")
        atexit.register(_end)
        note_exits()


def _end() -> None:
    lifetime = sys.modules.get("ds_fuyou.storage.lifetime")
    if lifetime is not None:
        lifetime.shutdown()


def note_exits() -> None:
    """From now on :data:`EXITS` has them. Idempotent."""
    if "exits" not in _watched:
        _watched.add("exits")
        sys.exit = _noting(sys.exit)
        Quitter.__call__ = _noting(Quitter.__call__)  # type: ignore[method-assign]


def _noting(exit_with: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    @functools.wraps(exit_with)
    def noting(*arguments: Any, **named: Any) -> NoReturn:
        if threading.current_thread() is threading.main_thread():  # in others it ends no process
            given = [*(each for each in arguments if not isinstance(each, Quitter)), *named.values()]
            places, by_handler = set(), False
            frame = sys._getframe().f_back  # None: C calls it
            while frame is not None:
                if is_module(frame):
                    places.add((id(frame), frame.f_lasti))
                by_handler = by_handler or _is_handler(frame)
                frame = frame.f_back
            EXITS.append(Exited(given[0] if given else None, frozenset(places), by_handler))
        exit_with(*arguments, **named)

    return noting


def _is_handler(frame: FrameType) -> bool:
    """Whether Python called it because of a signal: then it was given the frame that it interrupts."""
    code, interrupted = frame.f_code, frame.f_back
    if interrupted is None or is_module(frame):
        return False
    num_named = code.co_argcount + code.co_kwonlyargcount
    given = [frame.f_locals.get(name) for name in code.co_varnames[:num_named]]
    if code.co_flags & _OF_MORE:
        given += frame.f_locals.get(code.co_varnames[num_named], ())
    return any(each is interrupted for each in given)


def is_module(frame: FrameType) -> bool:
    """Whether it is no function's: a module's, or of a statement that was typed."""
    return not frame.f_code.co_flags & _OF_FUNCTIONS


def watches_end() -> bool:
    """Whether stores are closed at the end of the process, if there are any."""
    return "end" in _watched


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Runs `action` once: now if `module` is imported, otherwise right after its body has run.

    Whoever asks first for a module wins; `action` must not raise.
    """
    if _is_complete(module):
        _fire(module, action)
    elif not is_awaited(module):
        sys.meta_path.insert(0, _ImportFinder(module, action))


def is_awaited(module: str) -> bool:
    """Whether an action waits for the import of `module`."""
    return any(isinstance(finder, _ImportFinder) and finder.module == module for finder in sys.meta_path)


def forget(module: str) -> None:
    """Takes back what waits for `module`."""
    sys.meta_path[:] = [f for f in sys.meta_path if not (isinstance(f, _ImportFinder) and f.module == module)]


def _is_complete(name: str) -> bool:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)


def _fire(module: str, action: Callable[[], None]) -> None:
    forget(module)
    action()


def _install() -> None:
    """Hands over to the plugin. Never raises."""
    try:
        from ds_fuyou import plugin

        plugin.install()
    except Exception as error:
        _report(error)


def _report(error: Exception) -> None:
    import logging

    logging.getLogger("ds_fuyou").warning(
        'ds_fuyou could not hook DeepSpeed (%s: %s); a "fuyou" block in the DeepSpeed JSON would be '
        "ignored. Set %s=1 to switch the package off, or run `fuyou doctor`.",
        type(error).__name__,
        error,
        DISABLE_VARIABLE,
    )


class _ImportFinder:
    """Meta-path finder that waits for one module; answers for no module itself."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self.module = module
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        try:
            if fullname == self.module:
                return self._spec_that_calls_back(fullname, path, target)
            if self.module in sys.modules and _is_complete(self.module):
                _fire(self.module, self._action)
        except Exception as error:
            _report(error)
        return None

    def _spec_that_calls_back(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """The spec the other finders give, its loader told to call back after the body ran.

        A loader that cannot carry the callback is left alone; the look at later imports then does it.
        """
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is None:
                continue
            body = getattr(spec.loader, "exec_module", None)
            if body is not None and hasattr(spec.loader, "__dict__"):
                self._call_back_after(spec, body)
            return spec
        return None

    def _call_back_after(self, spec: ModuleSpec, body: Callable[[ModuleType], None]) -> None:
        """Makes the loader instance of `spec` act once, after `body` executed the module."""
        loader = spec.loader

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            body(module)
            _fire(self.module, self._action)

        vars(loader)["exec_module"] = exec_module
