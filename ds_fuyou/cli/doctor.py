# SPDX-License-Identifier: Apache-2.0
"""``fuyou doctor``: check this machine, and give the exact fix of what is missing."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Finding", "add_arguments", "findings", "run"]

_IO_URING_SETUP = 425  # the same number on every Linux architecture
_MEMLOCK_WANTED_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: what was looked at; found: what is the case.
        ok: whether training works as it is.
        fix: what to do, empty when there is nothing to do.
    """

    what: str
    found: str
    ok: bool = True
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the paths to check."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help="nvme_path directories to check as well")


def run(arguments: argparse.Namespace) -> int:
    """Prints one line a check. Status 1 if something keeps training from working."""
    healthy = True
    for finding in findings(arguments.paths):
        healthy = healthy and finding.ok
        mark = "note" if finding.ok and finding.fix else "ok  " if finding.ok else "FAIL"
        sys.stdout.write(f"{mark}  {finding.what}: {finding.found}\n")
        if finding.fix:
            sys.stdout.write(f"      fix: {finding.fix}\n")
    return 0 if healthy else 1


def findings(paths: list[str]) -> Iterator[Finding]:
    """Every check in order; a check that itself fails is a finding, not an exception."""
    checks: list[Callable[[], Finding]] = [_hook, _versions, _compiler, _io_uring, _locked_memory]
    checks += [_path_check(path) for path in paths]
    for check in checks:
        try:
            yield check()
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            yield Finding(name, f"the check failed: {error}", ok=False, fix="reinstall ds_fuyou and DeepSpeed")


def _hook() -> Finding:
    """A fresh interpreter that imports torch and DeepSpeed as a training script does."""
    code = (
        "import torch, deepspeed, sys; plugin = sys.modules.get('ds_fuyou.plugin'); "
        "sys.exit(not (plugin and plugin.is_installed()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 0:
        return Finding("hook", "a script that imports torch and DeepSpeed sees the fuyou block")
    if os.environ.get("DS_FUYOU_DISABLE", "0") not in ("", "0"):
        return Finding("hook", "switched off by DS_FUYOU_DISABLE", ok=False, fix="unset DS_FUYOU_DISABLE")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        fix = "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or launch with: deepspeed --module ds_fuyou SCRIPT"
        return Finding("hook", "switched off by TORCH_DEVICE_BACKEND_AUTOLOAD=0", ok=False, fix=fix)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding("hook", f"not live: {last}", ok=False, fix="pip install --force-reinstall --no-deps ds_fuyou")


def _versions() -> Finding:
    from ds_fuyou import compat

    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("deepspeed", "torch"))
    compat.check()
    return Finding("versions", found)


def _compiler() -> Finding:
    from ds_fuyou.ops.core import builder_module

    builder_module()
    from ds_fuyou.op_builder import build_cache

    command = os.environ.get("CXX") or "c++"
    missing = build_cache.missing_tool(command)
    if missing:
        return Finding("compiler", "incomplete", ok=False, fix=missing)
    return Finding("compiler", f"{command}; cache {build_cache.cache_directory()}")


def _io_uring() -> Finding:
    """Asks the kernel for a small ring; falling back to threads works, hence never a failure."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)
    descriptor = libc.syscall(_IO_URING_SETUP, 4, parameters)
    if descriptor >= 0:
        os.close(descriptor)
        return Finding("io_uring", "allowed")
    reason = os.strerror(ctypes.get_errno())
    fix = "allow io_uring_* in the container's seccomp profile, or sysctl kernel.io_uring_disabled=0"
    return Finding("io_uring", f"refused ({reason}); a thread pool is used, which is slower", fix=fix)


def _locked_memory() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= _MEMLOCK_WANTED_BYTES:
        shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        return Finding("locked memory", shown)
    fix = "ulimit -l unlimited (container: --ulimit memlock=-1)"
    return Finding("locked memory", f"{limit} bytes; buffers are not registered with the kernel", fix=fix)


def _path_check(path: str) -> Callable[[], Finding]:
    def nvme_path() -> Finding:
        if not os.path.isdir(path):
            return Finding(path, "no such directory", ok=False, fix=f"mkdir -p {path}")
        if not os.access(path, os.W_OK | os.X_OK):
            return Finding(path, "not writable", ok=False, fix=f"chown {os.geteuid()} {path}, or name another path")
        info = os.statvfs(path)
        return Finding(path, f"{info.f_bavail * info.f_frsize} bytes free")

    return nvme_path
