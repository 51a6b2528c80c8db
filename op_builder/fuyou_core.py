# SPDX-License-Identifier: Apache-2.0
"""Builds and loads the extension ``fuyou_core`` from ds_fuyou/csrc.

The compiler flags that touch arithmetic are the ones the installed DeepSpeed would use for its own CPU
Adam on this CPU, because its kernels are compiled in and must give its results to the bit.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ds_fuyou.errors import FuyouBuildError

__all__ = ["MODULE_NAME", "CompilePlan", "FuyouCoreBuilder"]

MODULE_NAME = "fuyou_core"
_DEEPSPEED_INCLUDES = ("includes", "adam", "lion", "adagrad")


@dataclass(frozen=True)
class CompilePlan:
    """Everything that decides what the built library contains.

    Attributes:
        sources: absolute paths of the translation units.
        headers: absolute paths of the further files they include, hashed but not compiled.
        include_dirs: searched as ``-I``, in order.
        system_include_dirs: searched as ``-isystem``.
        cxx_flags: compile flags; link_flags: flags of the final link.
        compiler: command of the C++ compiler.
        versions: names and versions that make a built library unusable when they change.
    """

    sources: tuple[str, ...]
    headers: tuple[str, ...]
    include_dirs: tuple[str, ...]
    system_include_dirs: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    compiler: str
    versions: tuple[str, ...]


class FuyouCoreBuilder:
    """Has the methods of a DeepSpeed OpBuilder that callers use: `load`, `is_compatible`, names, flags.

    Args:
        csrc: directory of the sources; default: ds_fuyou/csrc of the installed package.
        name: name of the extension module.
        extra_cxx_flags: appended to the compile and the link flags (sanitizers, tests).
    """

    NAME = MODULE_NAME

    def __init__(
        self, csrc: Path | None = None, name: str = MODULE_NAME, extra_cxx_flags: tuple[str, ...] = ()
    ) -> None:
        self.csrc = (csrc if csrc is not None else _package_csrc()).resolve()
        self.name = name
        self.extra_cxx_flags = extra_cxx_flags

    def absolute_name(self) -> str:
        return f"ds_fuyou.ops.{self.name}"

    def sources(self) -> list[str]:
        """Absolute paths of every .cpp file below `csrc`, sorted."""
        return sorted(str(path) for path in self.csrc.rglob("*.cpp") if path.is_file())

    def include_paths(self) -> list[str]:
        """`csrc` and the directories of DeepSpeed's CPU optimizer sources."""
        return [str(self.csrc), *_deepspeed_includes()]

    def cxx_args(self) -> list[str]:
        """Compile flags; the architecture and vector-width part is DeepSpeed's own choice."""
        return [
            "-O3",
            *_deepspeed_cpu_flags(),
            "-fopenmp",
            "-fPIC",
            "-fvisibility=hidden",
            *self.extra_cxx_flags,
        ]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether this machine can build the core: Linux with a C++ compiler and ninja."""
        del verbose
        from ds_fuyou.op_builder import build_cache

        return platform.system() == "Linux" and build_cache.missing_tool(_compiler()) is None

    def compile_plan(self) -> CompilePlan:
        """The complete, hashable description of the build.

        Raises:
            FuyouBuildError: there are no sources, or DeepSpeed's cannot be found.
        """
        import deepspeed
        import torch
        from torch.utils import cpp_extension

        sources = self.sources()
        if not sources:
            raise FuyouBuildError(f"{self.csrc} must hold the C++ sources of the core, found none; reinstall ds_fuyou")
        abi = getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True)
        standard = "c++20" if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12) else "c++17"
        return CompilePlan(
            sources=tuple(sources),
            headers=tuple(self._headers()),
            include_dirs=tuple(self.include_paths()),
            system_include_dirs=(*cpp_extension.include_paths(), sysconfig.get_path("include")),
            cxx_flags=(
                f"-std={standard}",
                f"-DTORCH_EXTENSION_NAME={self.name}",
                "-DTORCH_API_INCLUDE_EXTENSION_H",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(abi)}",
                *self.cxx_args(),
            ),
            # No OpenMP library here: the one torch has loaded serves DeepSpeed's sources, which updates call in
            # one thread each. It is what DeepSpeed's own build does, too.
            link_flags=(
                "-shared",
                *(f"-L{path}" for path in cpp_extension.library_paths()),
                "-lc10",
                "-ltorch_cpu",
                "-ltorch",
                "-ltorch_python",
                "-lpthread",
                *self.extra_cxx_flags,
            ),
            compiler=_compiler(),
            versions=(
                f"torch {torch.__version__}",
                f"python {sysconfig.get_config_var('SOABI')}",
                f"deepspeed {deepspeed.__version__}",
                f"libc {' '.join(platform.libc_ver())}",
                f"cpu {platform.machine()} {_cpu_level()}",
            ),
        )

    def build(self) -> Path:
        """Path of the built library, from the cache if it is there.

        Raises:
            FuyouBuildError: see `ds_fuyou.op_builder.build_cache.build_cached`.
        """
        from ds_fuyou.op_builder import build_cache

        library: Path = build_cache.build_cached(self.name, self.compile_plan())
        return library

    def built(self) -> Path | None:
        """The library in the cache; None where :meth:`build` would compile it. Raises as that."""
        from ds_fuyou.op_builder import build_cache

        found: Path | None = build_cache.find_built(self.name, self.compile_plan())
        return found

    def load(self, verbose: bool = False) -> ModuleType:
        """Builds if need be and imports the extension; one module object a process and name."""
        del verbose
        loaded = sys.modules.get(self.absolute_name())
        if loaded is not None:
            return loaded
        path = self.build()
        loader = importlib.machinery.ExtensionFileLoader(self.name, str(path))
        spec = importlib.util.spec_from_file_location(self.name, path, loader=loader)
        if spec is None:
            raise FuyouBuildError(f"{path} must be an extension module; remove it and build again: fuyou build")
        try:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            raise FuyouBuildError(
                f"the built core {path} cannot be loaded: {error}. Remove the file and run `fuyou build`"
            ) from error
        sys.modules[self.absolute_name()] = module
        return module

    def _headers(self) -> list[str]:
        folders = [self.csrc, *(Path(path) for path in _deepspeed_includes())]
        suffixes = {".h", ".hpp", ".cpp", ".inc"}
        found = {str(path) for folder in folders for path in folder.rglob("*") if path.suffix in suffixes}
        return sorted(found - set(self.sources()))


def _package_csrc() -> Path:
    spec = importlib.util.find_spec("ds_fuyou")
    if spec is None or not spec.submodule_search_locations:
        raise FuyouBuildError("the package ds_fuyou must be importable to find its C++ sources; install it")
    return Path(next(iter(spec.submodule_search_locations))) / "csrc"


def _deepspeed_includes() -> list[str]:
    """Directories of DeepSpeed's CPU optimizer sources: in the wheel, or beside it in a source tree."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.origin:
        raise FuyouBuildError("DeepSpeed must be installed to build the core: pip install 'deepspeed>=0.18.9'")
    package = Path(spec.origin).parent
    for root in (package / "ops" / "csrc", package.parent / "csrc"):
        if (root / "adam" / "cpu_adam_impl.cpp").is_file():
            return [str((root / part).resolve()) for part in _DEEPSPEED_INCLUDES]
    raise FuyouBuildError(
        f"the CPU Adam sources must lie in {package / 'ops' / 'csrc'}, found none; "
        f"reinstall DeepSpeed from its source distribution"
    )


def _deepspeed_cpu_flags() -> list[str]:
    """Architecture and vector-width flags as DeepSpeed's CPU Adam builder chooses them here."""
    import deepspeed
    from ds_fuyou.op_builder import build_cache

    # DeepSpeed asks py-cpuinfo twice, a second each; the answer only changes with the CPU.
    name = f"cpu-flags-{_cpu_level()}-{deepspeed.__version__}"
    flags: list[str] = build_cache.remembered(name, _probe_cpu_flags)
    return flags


def _probe_cpu_flags() -> list[str]:
    from deepspeed.ops.op_builder.builder import OpBuilder

    class CpuProbe(OpBuilder):
        def __init__(self) -> None:
            super().__init__(name=MODULE_NAME)

        def absolute_name(self) -> str:
            return MODULE_NAME

        def sources(self) -> list[str]:
            return []

    probe = CpuProbe()
    return [flag for flag in (probe.cpu_arch(), probe.simd_width()) if flag]


def _cpu_level() -> str:
    """What ``-march=native`` depends on: a digest of the CPU's feature flags."""
    import hashlib

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"
