# SPDX-License-Identifier: Apache-2.0
"""Finds the builder and loads the C++ core, building it first if need be."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ds_fuyou.errors import FuyouBuildError
from ds_fuyou.host.threads import starting_threads

__all__ = ["builder_module", "load_core"]

_PACKAGE = "ds_fuyou.op_builder"


def builder_module() -> ModuleType:
    """The module that defines `FuyouCoreBuilder`.

    An installed package carries it as ``ds_fuyou.op_builder``; a source tree that is only on the path
    has it next to the package.

    Raises:
        FuyouBuildError: it is in neither place.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        _adopt_source_tree()
    return importlib.import_module(f"{_PACKAGE}.fuyou_core")


def _adopt_source_tree() -> None:
    """Makes the top-level op_builder/ of a source tree importable under its installed name."""
    folder = Path(__file__).resolve().parents[2] / "op_builder"
    spec = None
    if (folder / "fuyou_core.py").is_file():
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
    if spec is None or spec.loader is None:
        raise FuyouBuildError(
            f"the builder of the C++ core must be installed as {_PACKAGE} or lie in {folder}; it is in "
            f"neither place. Reinstall ds_fuyou"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)


@functools.lru_cache(maxsize=1)
def load_core() -> ModuleType:
    """The extension module ``fuyou_core``; its bindings are declared in csrc/bindings.

    The first call on a machine compiles it (a minute or so), later ones load it from the cache.

    Raises:
        FuyouBuildError: no compiler, a compile error, or a cache that cannot be written.
    """
    with starting_threads():  # compilers
        module: ModuleType = builder_module().FuyouCoreBuilder().load()
    return module
