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
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__: list[str] = []

ENGINE_MODULE = "deepspeed.runtime.engine"
DISABLE_VARIABLE = "DS_FUYOU_DISABLE"


def _autoload() -> None:
    """Arms the hook, or installs at once if DeepSpeed is there. Idempotent; never raises."""
    try:
        if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
            return
        if _engine_is_complete():
            _install()
        elif not any(isinstance(finder, _EngineFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _EngineFinder())
    except Exception as error:  # [Note: when the hook fires]: never raise into `import torch`
        _report(error)


def _engine_is_complete() -> bool:
    module = sys.modules.get(ENGINE_MODULE)
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)


def _install() -> None:
    """Removes the hook and hands over to the plugin. Never raises."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _EngineFinder)]
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


class _EngineFinder:
    """Meta-path finder that waits for the engine module; answers for no module itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        try:
            if fullname == ENGINE_MODULE:
                return self._spec_that_calls_back(fullname, path, target)
            if ENGINE_MODULE in sys.modules and _engine_is_complete():
                _install()
        except Exception as error:
            _report(error)
        return None

    def _spec_that_calls_back(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """The spec the other finders give, its loader told to call `_install` after the body ran.

        A loader that cannot carry the callback is left alone; the look at later imports then does it.
        """
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is None:
                continue
            body = getattr(spec.loader, "exec_module", None)
            if body is not None and hasattr(spec.loader, "__dict__"):
                _call_back_after(spec, body)
            return spec
        return None


def _call_back_after(spec: ModuleSpec, body: Callable[[ModuleType], None]) -> None:
    """Makes the loader instance of `spec` run `_install` once, after `body` executed the module."""
    loader = spec.loader

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        body(module)
        _install()

    vars(loader)["exec_module"] = exec_module
