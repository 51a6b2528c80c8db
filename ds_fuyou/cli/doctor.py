# SPDX-License-Identifier: Apache-2.0
"""``fuyou doctor``: check this machine, and give the exact fix of what is missing."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ds_fuyou.cli.doctor_config import config_findings
from ds_fuyou.cli.ds_config import read_ds_file
from ds_fuyou.cli.finding import Finding, path_finding
from ds_fuyou.cli.machine_options import add_adapter_options, model_from
from ds_fuyou.ds_json import section_of
from ds_fuyou.errors import FuyouBuildError, FuyouConfigError, FuyouError
from ds_fuyou.libc import libc
from ds_fuyou.planner.model import ModelSpec

__all__ = ["Finding", "add_arguments", "findings", "run"]

_IO_URING_SETUP = 425  # the same number on every Linux architecture
REINSTALL = "in the checkout of ds_fuyou: pip install --force-reinstall --no-deps ."
_MEMLOCK_WANTED_BYTES = 64 * 1024 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the paths to check."""
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="nvme_path directories, and DeepSpeed JSON files, to check as well"
    )
    parser.add_argument(
        "--model", help="what is to be trained, as fuyou plan takes it: are the disks of a DeepSpeed JSON large enough?"
    )
    add_adapter_options(parser)
    parser.add_argument("--measure", action="store_true", help="measure bandwidths in these directories, 10 s each")


def run(arguments: argparse.Namespace) -> int:
    """Prints one line a check. Status 1 if something keeps training from working.

    Raises:
        FuyouConfigError: something is to be measured and no directory is named; a model is not known, or there is no
            JSON to compare it with.
    """
    healthy = True
    files = [Path(path) for path in arguments.paths if path.endswith(".json") or os.path.isfile(path)]
    directories = [path for path in arguments.paths if Path(path) not in files]
    if arguments.measure and not directories:
        raise FuyouConfigError("--measure must know where: name the nvme_path directories behind it")
    model = _model(arguments, files)
    found = itertools.chain(
        findings(directories, _optimizers(files), measure=arguments.measure),
        *(config_findings(file, model) for file in files),
    )
    for finding in found:
        healthy = healthy and finding.ok
        mark = "note" if finding.ok and finding.fix else "ok  " if finding.ok else "FAIL"
        sys.stdout.write(f"{mark}  {finding.what}: {finding.found}\n")
        if finding.fix:
            sys.stdout.write(f"      fix: {finding.fix}\n")
    return 0 if healthy else 1


def _model(arguments: argparse.Namespace, files: list[Path]) -> ModelSpec | None:
    if arguments.model is None:
        if arguments.lora is not None:
            raise FuyouConfigError("--lora needs --model: adapters of what?")
        return None
    if not files:
        raise FuyouConfigError("--model needs a DeepSpeed JSON, whose paths are compared with what it takes")
    return model_from(arguments)


def _optimizers(files: Iterable[Path]) -> list[str]:
    """Those that the DeepSpeed JSON files name, else Adam: whose operators a run loads."""
    found = []
    for file in files:
        with contextlib.suppress(FuyouError):  # a finding of its own
            found.append(section_of(read_ds_file(file).config, "optimizer").get("type"))
    return list(dict.fromkeys(name for name in found if isinstance(name, str))) or ["Adam"]


def findings(paths: list[str], optimizers: Iterable[str], *, measure: bool = False) -> Iterator[Finding]:
    """Every check in order; a check that itself fails is a finding, not an exception."""
    checks: list[Callable[[], Finding]] = [_hook, _other_ways, _versions, _compiler, _operators_check(optimizers)]
    checks += [_io_uring]
    checks += [_locked_memory, _host_memory, _shared_memory, *(_path_check(path) for path in paths)]
    if measure:
        checks += [_rates_check(path) for path in paths]
        checks += [_shares_check(paths)] if len(paths) > 1 else []
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
    if _is_disabled():
        return Finding("hook", "switched off by DS_FUYOU_DISABLE", ok=False, fix="unset DS_FUYOU_DISABLE")
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if autoload != "1":
        fix = "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or launch with: deepspeed --module ds_fuyou SCRIPT"
        return Finding("hook", f"switched off by TORCH_DEVICE_BACKEND_AUTOLOAD={autoload}", ok=False, fix=fix)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding("hook", f"not live: {last}", ok=False, fix=REINSTALL)


def _is_disabled() -> bool:
    return os.environ.get("DS_FUYOU_DISABLE", "0") not in ("", "0")


def _other_ways() -> Finding:
    """The two ways that work without torch's plugin loading: an import in the script, and ``--module ds_fuyou``."""
    if _is_disabled():
        return Finding("without plugin loading", "not looked at: DS_FUYOU_DISABLE is set")
    check = (
        "import deepspeed, sys; plugin = sys.modules.get('ds_fuyou.plugin'); "
        "sys.exit(not (plugin and plugin.is_installed()))"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "script.py")
        with open(script, "w", encoding="utf-8") as file:
            file.write(check)
        ways = {
            "import ds_fuyou": [sys.executable, "-c", f"import ds_fuyou; {check}"],
            "deepspeed --module ds_fuyou": [sys.executable, "-m", "ds_fuyou", script],
        }
        running = {
            way: subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for way, command in ways.items()
        }
        try:
            dead = [way for way, process in running.items() if process.wait(timeout=300) != 0]
        finally:
            for process in running.values():
                process.kill()
    if dead:
        fix = REINSTALL
        return Finding("without plugin loading", f"not live: {', '.join(dead)}", ok=False, fix=fix)
    return Finding("without plugin loading", f"live by {' and by '.join(ways)}")


def _versions() -> Finding:
    from ds_fuyou import compat

    found = ", ".join(f"{name} {compat.installed_version(name)}" for name in ("deepspeed", "torch"))
    compat.check()
    return Finding("versions", found)


def _compiler() -> Finding:
    from ds_fuyou.ops.core import builder_module

    builder = builder_module().FuyouCoreBuilder()
    from ds_fuyou.op_builder import build_cache

    command = os.environ.get("CXX") or "c++"
    missing = build_cache.missing_tool(command)
    lacking = missing or build_cache.missing_headers()
    try:
        built = builder.built()
        if built is not None:
            note = f"{command}; " if missing is None else "none is needed; "
            return Finding("compiler", f"{note}the core is built, in {built.parent.parent}")
        cache = build_cache.cache_directory()
    except FuyouBuildError as error:
        return Finding("compiler", "the core cannot be built", ok=False, fix=str(error))
    if lacking:
        return Finding("compiler", "incomplete", ok=False, fix=lacking)
    return Finding("compiler", f"{command}; cache {cache}")


def _io_uring() -> Finding:
    """Asks the kernel for a small ring; falling back to threads works, hence never a failure."""
    parameters = ctypes.create_string_buffer(120)
    descriptor = libc().syscall(_IO_URING_SETUP, 4, parameters)
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


def _host_memory() -> Finding:
    from ds_fuyou.host.available_memory import available_host_bytes

    return Finding("host memory", f"{available_host_bytes() / 1e9:.1f} GB available, a run plans with 80 % of it")


def _shared_memory() -> Finding:
    from ds_fuyou.cli.clean import left_in_shared_memory

    left = left_in_shared_memory()
    return Finding("shared memory", left or "nothing is left there", fix="fuyou clean --shared-memory" if left else "")


def _path_check(path: str) -> Callable[[], Finding]:
    def nvme_path() -> Finding:
        return path_finding(path)

    return nvme_path


def _operators_check(optimizers: Iterable[str]) -> Callable[[], Finding]:
    def operators() -> Finding:
        """What a first start would wait for, or compile."""
        from ds_fuyou.ops import stock_operators

        directory = stock_operators.build_directory()
        left = stock_operators.left_locks(directory)
        if left:
            return Finding("DeepSpeed's operators", stock_operators.told_of_locks(left), ok=False, fix=f"rm {left[0]}")
        missing = {name: stock_operators.operators_to_compile(name) for name in optimizers}
        names = dict.fromkeys(itertools.chain(*missing.values()))
        if names:
            found = f"{', '.join(names)} would be compiled at the first start, minutes without a word"
            fix = " && ".join(dict.fromkeys(stock_operators.build_command(name) for name in missing if missing[name]))
            return Finding("DeepSpeed's operators", found, fix=fix)
        return Finding("DeepSpeed's operators", f"compiled, in {directory}")

    return operators


def _rates_check(path: str) -> Callable[[], Finding]:
    def measured_rates() -> Finding:
        from ds_fuyou.profiling.machine import measure_machine

        try:
            rates = measure_machine([Path(path)])
        except FuyouError as error:
            return Finding(f"rates in {path}", "not measured", ok=False, fix=str(error))
        found = (
            f"read {rates.read / 1e9:.2f} GB/s, write {rates.write / 1e9:.2f} GB/s, both {rates.mixed / 1e9:.2f} GB/s; "
            f"Adam {rates.update / 1e9:.2f} billion parameters/s; "
            f"{rates.device}: {rates.matmul_flops / 1e12:.2f} TFLOPS"
        )
        drift = rates.drift()
        if drift:
            found += f"; {'; '.join(drift)}"
            return Finding(
                f"rates in {path}", found, fix="plan with the lower rate; cool the SSD or give it more free space"
            )
        return Finding(f"rates in {path}", found)

    return measured_rates


def _shares_check(paths: list[str]) -> Callable[[], Finding]:
    def shares() -> Finding:
        from ds_fuyou.zero.run.striping import measured_weights

        weights = measured_weights(tuple(paths), "auto") or (1.0,) * len(paths)
        each = (f"{path} {100 * weight / sum(weights):.0f} %" for path, weight in zip(paths, weights, strict=True))
        return Finding("shares of paths", f"of every chunk, {', '.join(each)}; fuyou.plan.shares sets others")

    return shares
