# SPDX-License-Identifier: Apache-2.0
"""``fuyou verify SCRIPT ...``: does the user's own script train the same parameters with the block?

Runs it for a few steps with stock ZeRO-3 (CPU tier) and with the block, and compares losses, gradient norms,
parameters, fp32 values and moments bit by bit. Where they differ, stock runs a second time: a script that does not
repeat itself cannot be compared. Under ``optimizer.moments`` of fewer bits they must differ, but not before the first
update: then it says by how much.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ds_fuyou.errors import FuyouConfigError, FuyouStateError
from ds_fuyou.host.threads import starting_threads

__all__ = ["add_arguments", "compare", "explanation", "nearness", "run"]

Results = list[dict[str, Any]]
_PATIENCE_SECS = 5.0
_GRACE_SECS = 45.0  # for a launcher that is told to end: torchrun gives its ranks 30
_NEAR = {"losses": 0.05, "parameter": 0.02, "fp32 value": 0.02}
"""Departures, by their sizes, that a few steps with rounded moments may make."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the number of steps and the command."""
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to compare (default 5)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds one run may take (default 3600)")
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="a .py file and its arguments, started by the deepspeed launcher; or any command, launcher included",
    )


def run(arguments: argparse.Namespace) -> int:
    """Status 0: equal, or as near as the block's moments allow; 1: they differ, or the script does not repeat itself.

    Raises:
        FuyouConfigError: no script, or fewer than one step.
        FuyouStateError: a run failed, or ended before the last step.
    """
    command = _command(arguments.script)
    if arguments.steps < 1:
        raise FuyouConfigError(f"--steps must be at least 1, found {arguments.steps}")
    if not 0 < arguments.timeout < math.inf:
        raise FuyouConfigError(f"--timeout must be a number of seconds, found {arguments.timeout:g}")
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="fuyou-verify-") as scratch:
        stock = _recorded(command, "stock", arguments, Path(scratch, "stock"))
        ours = _recorded(command, "fuyou", arguments, Path(scratch, "fuyou"))
        found = compare(stock, ours)
        if not found:
            sys.stdout.write(_summary(stock))
            return 0
        near = nearness(stock, ours)
        if near is not None:
            sys.stdout.write(near[1])
            return 0 if near[0] else 1
        again = compare(stock, _recorded(command, "stock", arguments, Path(scratch, "again")))
    if again:
        sys.stdout.write(
            "not comparable: two stock runs of this script differ from each other. Fix its seeds (torch, numpy, "
            "random, data order, dropout) and use deterministic kernels. First differences between them:\n"
        )
    else:
        sys.stdout.write(
            f"DIFFERENT: stock repeats itself, the run with the block departs from it{explanation(ours)}:\n"
        )
    sys.stdout.write("".join(f"  {line}\n" for line in (again or found)[:20]))
    return 1


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP are raised, as Ctrl-C is: the script ends, and what it leaves goes."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores one
    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _command(given: Sequence[str]) -> list[str]:
    command = [part for i, part in enumerate(given) if not (i == 0 and part == "--")]
    if not command:
        raise FuyouConfigError("name a script: fuyou verify train.py --deepspeed_config ds.json")
    if command[0].endswith(".py"):
        if not os.path.isfile(command[0]):
            raise FuyouConfigError(f"{command[0]} must be an existing script; it is not there")
        return ["deepspeed", *command]
    return command


def _recorded(command: Sequence[str], mode: str, arguments: argparse.Namespace, folder: Path) -> Results:
    """One run of the script; what its ranks wrote."""
    from ds_fuyou.zero.verification import Verification

    folder.mkdir()
    sys.stdout.write(f"running {arguments.steps} steps: {mode}\n")
    sys.stdout.flush()
    recording = Verification(mode, arguments.steps, str(folder)).to_environment()
    log = folder / "output"
    try:
        with log.open("wb") as stream:
            status = _status(command, recording, stream, arguments.timeout)
    except FileNotFoundError as error:
        raise FuyouConfigError(f"{command[0]} must be a program on the PATH; it is not") from error
    except subprocess.TimeoutExpired as error:
        raise FuyouStateError(f"the {mode} run took longer than --timeout {arguments.timeout:g} s") from error
    finally:
        _remove_storage(folder)
    files = sorted(folder.glob(f"{mode}.*.json"), key=lambda file: int(file.name.split(".")[1]))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if not results or len(results) != results[0]["world_size"]:
        why = f"ended with status {status}" if status else "never made its last step under an active fuyou block"
        last = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise FuyouStateError(f"the {mode} run {why}; the end of its output:\n{last}")
    return results


def _remove_storage(folder: Path) -> None:
    """What the run's processes on this machine have left on storage: where they ended well, empty folders."""
    from ds_fuyou.storage.cleanup import find_state, remove_state
    from ds_fuyou.zero.verification import STORAGE

    lines = [line for file in folder.glob(f"{STORAGE}.*") for line in file.read_text(encoding="utf-8").splitlines()]
    for path in sorted(set(map(json.loads, lines))):
        with contextlib.suppress(OSError, FuyouStateError), _locked(path):
            for state in find_state(path):
                remove_state(state)
            os.rmdir(path)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Processes that were killed may take a moment to end. OSError if one lives on, which is another command's."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _PATIENCE_SECS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            except OSError:  # a file system without locks
                break
            time.sleep(0.1)
        yield
    finally:
        os.close(fd)


def _status(command: Sequence[str], recording: dict[str, str], log: IO[bytes], timeout: float) -> int:
    """Runs the command in a process group of its own, so that a launcher's ranks end with it; torchrun's, which have
    groups of their own, by its hand.
    """
    with starting_threads():
        process = subprocess.Popen(
            list(command), env={**os.environ, **recording}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(timeout)
    except BaseException:
        try:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(_GRACE_SECS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def compare(stock: Results, ours: Results) -> list[str]:
    """What differs, one line each; empty when all is equal."""
    if len(stock) != len(ours):
        return [f"{len(stock)} ranks against {len(ours)}"]
    lines = []
    for rank, (one, other) in enumerate(zip(stock, ours, strict=True)):
        for key in ("losses", "norms", "applied"):
            if len(one[key]) != len(other[key]):
                lines.append(f"rank {rank}: {len(one[key])} {key} against {len(other[key])}")
            pairs = enumerate(zip(one[key], other[key], strict=False))
            first = next(((i, a, b) for i, (a, b) in pairs if a != b and not (a != a and b != b)), None)
            if first is not None:
                lines.append(f"rank {rank}: {key}[{first[0]}] is {first[1]!r} against {first[2]!r}")
        if one["parameters"].keys() != other["parameters"].keys():
            lines.append(f"rank {rank}: other names of parameters")
        lines += [f"rank {rank}: {line}" for line in _differing_tensors(one["parameters"], other["parameters"])]
    return lines


def nearness(stock: Results, ours: Results) -> tuple[bool, str] | None:
    """How far a run whose moments are rounded departed from stock, and whether that is near; None if they are not
    rounded, or if it departed before its first update.
    """
    kind = ours[0].get("moments", "fp32")
    if kind == "fp32" or len(stock) != len(ours):
        return None
    for one, other in zip(stock, ours, strict=True):
        if any(len(one[key]) != len(other[key]) for key in ("losses", "norms", "applied")):
            return None
        micro_batches = max(1, len(one["losses"]) // max(1, len(one["norms"])))
        starts = {"losses": micro_batches, "norms": 1, "applied": 1}
        if any(one[key][:num] != other[key][:num] for key, num in starts.items()):
            return None
        if one["samples"].keys() != other["samples"].keys():
            return None
    names = ("losses", "norms", *stock[0]["samples"])
    pairs: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for one, other in zip(stock, ours, strict=True):
        for name in names:
            for taken, run in zip(pairs[name], (one, other), strict=True):
                taken += [value or 0.0 for value in (run[name] if name in run else run["samples"][name])]
    apart = {name: _apart(*pair) for name, pair in pairs.items()}
    is_near = all(apart.get(name, 0.0) <= most for name, most in _NEAR.items())  # not so of NaN
    by = ", ".join(f"{name} by {100 * each:.2g} %" for name, each in apart.items())
    bounds = ", ".join(f"{name} by {100 * most:g} %" for name, most in _NEAR.items())
    what = (
        f'near, not equal, as "moments": "{kind}" is'
        if is_near
        else (f'DIFFERENT, by more than "moments": "{kind}" explains ({bounds} at most)')
    )
    return is_near, (
        f"{what}: the first step's losses and norm agree bit for bit; after {len(stock[0]['norms'])} steps these "
        f"depart from stock's: {by} (root mean squares)\n"
    )


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Of two series, the size of their difference by that of the first."""
    size = math.fsum(value * value for value in one)
    difference = math.fsum((a - b) ** 2 for a, b in zip(one, other, strict=True))
    return math.sqrt(difference / size) if size else float(difference > 0)


def explanation(ours: Results) -> str:
    """What the block asked for that changes last bits; empty if nothing."""
    if len(ours) > 2 and ours[0].get("reduce_by") == "block":
        return ', as "gradients": {"reduce_by": "block"} may on more than two ranks (leave it out for equal bits)'
    return ""


def _differing_tensors(stock: dict[str, dict[str, str]], ours: dict[str, dict[str, str]]) -> list[str]:
    """One line for each kind of tensor (parameter, fp32 value, a moment) that differs somewhere."""
    lines = []
    for kind in dict.fromkeys(kind for found in (*stock.values(), *ours.values()) for kind in found):
        having = [name for name in stock if kind in stock[name] or kind in ours.get(name, {})]
        differ = [name for name in having if ours.get(name, {}).get(kind) != stock[name].get(kind)]
        if differ:
            names = ", ".join(differ[:4]) + (", ..." if len(differ) > 4 else "")
            lines.append(f"{kind} of {len(differ)} of {len(having)} differs: {names}")
    return lines


def _summary(stock: Results) -> str:
    first = stock[0]
    kinds = dict.fromkeys(kind for found in first["parameters"].values() for kind in found)
    ranks = f" on {len(stock)} ranks" if len(stock) > 1 else ""
    return (
        f"equal{ranks}: {len(first['losses'])} losses, {len(first['norms'])} gradient norms and "
        f"{len(first['parameters'])} parameters ({', '.join(kinds)}) agree bit for bit; "
        f"last loss {first['losses'][-1] if first['losses'] else 'not given to engine.backward'}\n"
    )
