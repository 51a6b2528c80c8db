# SPDX-License-Identifier: Apache-2.0
"""Compiles the device once for every state of its sources, of torch and of Python."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["build", "load"]

_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-DTORCH_EXTENSION_NAME=_standin", "-DTORCH_API_INCLUDE_EXTENSION_H")


def build() -> Path:
    """The compiled extension; made where it is not there yet. Several processes may come at once: one compiles."""
    library = _directory() / "_standin.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.parent / "lock", "w") as lock:  # the system lets go of it with the process that holds it
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(library)
    return library


def load() -> ModuleType:
    """The extension module; from here on this process has the device."""
    spec = importlib.util.spec_from_file_location("_standin", build())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _directory() -> Path:
    content = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for file in sorted(_SOURCES.iterdir()):
        content.update(file.name.encode() + file.read_bytes())
    caches = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "ds_fuyou"
    return Path(caches) / "standin" / content.hexdigest()[:16]


def _compile(library: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("the stand-in device needs a C++ compiler: none is called g++ or c++, and CXX names none")
    torch_path = Path(torch.__file__).parent
    include = [torch_path / "include", torch_path / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    with tempfile.TemporaryDirectory(dir=library.parent) as objects:

        def compiled(source: Path) -> str:
            target = f"{objects}/{source.stem}.o"
            _run([compiler, *_FLAGS, *(f"-I{each}" for each in include), "-c", str(source), "-o", target])
            return target

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as jobs:
            files = list(jobs.map(compiled, sorted(_SOURCES.glob("*.cpp"))))
        libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        paths = [f"-L{torch_path}/lib", f"-Wl,-rpath,{torch_path}/lib"]
        _run([compiler, "-shared", *files, *paths, *libraries, "-o", f"{objects}/_standin.so"])
        os.replace(f"{objects}/_standin.so", library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
