# SPDX-License-Identifier: Apache-2.0
"""Every operation of a run struck by every fault (``make faults``): ``python -m tests.faults.sweep [options]``.

One process a combination of I/O engine, way to begin and fault (see case.py); one that hangs or crashes is counted, and
another one goes on behind it. Writes ``--table``, and every outcome to ``--outcomes``: what is there is not run again.
Status 1 if anything is not as promised.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness.cpu_info import look_up
from tests.harness.limits import HANG_SECS
from tests.harness.outcomes import Outcomes, add_arguments
from tests.harness.ports import free_port, remove_shared_buffers
from tests.harness.runner import environment

HERE = Path(__file__).parent
ENGINES, STARTS, EFFECTS = (
    ("io_uring", "threads"),
    ("fresh", "resumed", "moving", "placing", "saving", "loading"),
    ("EIO", "ENOSPC", "short", "zero", "late", "memory"),
)


def preload_library(directory: Path) -> Path:
    library = directory / "preload.so"
    compiler = os.environ.get("CXX", "g++")
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, "-x", "c", *flags, HERE / "preload.c", "-o", library, "-ldl"], check=True)
    return library


def can_answer() -> bool:
    """Empty requests of io_uring have a result that can be chosen since Linux 6.10."""
    major, minor = platform.release().split(".")[:2]
    return (int(major), int("".join(c for c in minor if c.isdigit()))) >= (6, 10)


def outcomes_of(orders: dict[str, Any], library: Path, log: Path) -> Iterator[dict[str, Any]]:
    """Of one process; its last words go to ``log``. Where it hangs or crashes the last outcome says so."""
    env = environment(0, 1, free_port())
    env |= {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "DS_FUYOU_LOG_LEVEL": "warning"}
    env |= {"DS_FUYOU_PROFILES": f"{orders['path']}/profiles"}
    with open(log, "ab") as errors:
        command = [sys.executable, HERE / "case.py", json.dumps(orders)]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors)
    number, end = -1, ""
    try:
        for line in _lines(process):
            found = json.loads(line)
            number = found.get("begin", -1)
            if number < 0:
                yield found
        end = f"the process ended with {process.wait(HANG_SECS)}" if process.wait(HANG_SECS) or number >= 0 else ""
    except TimeoutError:
        end = "nothing was said for long: it hangs"
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if end:
        yield {"number": number, "struck": "", "end": "lost", "said": "", "wrong": end, "steps_after": 0}


def _lines(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Whole JSON lines; TimeoutError if there is none for long."""
    if process.stdout is None:
        return
    rest = b""
    while True:
        if not select.select([process.stdout], [], [], HANG_SECS)[0]:
            raise TimeoutError
        got = os.read(process.stdout.fileno(), 65536)
        if not got:
            return
        *lines, rest = (rest + got).split(b"\n")
        yield from (line for line in lines if line.startswith(b"{"))


def sweep(orders: dict[str, Any], library: Path, log: Path, first: int) -> Iterator[dict[str, Any]]:
    """One combination, from its run ``first`` on."""
    while True:
        lost = None
        for found in outcomes_of({**orders, "first": first}, library, log):
            found |= {"engine": orders["engines"][0], "start": orders["starts"][0], "effect": orders["effects"][0]}
            yield found
            lost = found["number"] if found["end"] == "lost" else None
        remove_shared_buffers()
        if lost is None:
            return
        if lost < first:
            raise RuntimeError(f"not one run came to its end; see {log}")
        first = lost + 1


def kind_of(found: dict[str, Any]) -> str:
    """The column that an outcome is counted in."""
    if found["wrong"]:
        return "wrong"
    if not found["struck"]:
        return "not reached"
    return {"told": "exception", "logged": "log", "equal": "equal", "unheard": "unheard"}[found["end"]]


COLUMNS = ("exception", "log", "unheard", "equal", "not reached", "wrong")


def table(found: list[dict[str, Any]], args: argparse.Namespace, secs: float) -> str:
    count = Counter((f["engine"], f["start"], f["effect"], kind_of(f)) for f in found)
    lines = [
        "# Every I/O operation of a run, struck by every fault",
        "",
        f"`make faults`: {len(found)} runs of three steps with two micro-batches each, everything on storage, in "
        f"{secs / 60:.0f} minutes; Linux {platform.release()}, {os.cpu_count()} cores. A run begins fresh, or goes on",
        "in place after two steps; or its states move, or a checkpoint is saved behind training, or loaded first. "
        "Its n-th operation is struck: a transfer of the I/O engine (an io_uring "
        "entry, or pread",
        "and pwrite of the thread pool), or a call of Python's that opens, makes, reads, writes, syncs, renames "
        "or removes",
        f"a file below the path. Late is {args.late} s. Short and zero are of transfers alone.",
        "Memory: the n-th mapping of host memory, or its registration with io_uring, is refused.",
        "",
        "* exception: the run ended in the step that was struck, or in the next `step()`, with one that names "
        "file, byte",
        "  (of transfers) and error; then it was started again, went on from the last step or the one before, "
        "and left the",
        "  bits of an undisturbed run.",
        "* log: the run had its results already (equal to the bit), or could do without; a line names the failure.",
        "* unheard: an error that nobody was told of, results equal to the bit; which ones stands below.",
        "* equal: results equal to the bit, nothing to tell. not reached: the run had fewer operations this time.",
        "* wrong: a hang, a crash, other bits, a lost step, or an exception too late or without the file and "
        "the error.",
        "",
        "| I/O engine | begins | fault | runs | " + " | ".join(COLUMNS) + " |",
        "|---" * (4 + len(COLUMNS)) + "|",
    ]
    for engine in args.engines:
        for start in args.starts:
            for effect in args.effects:
                counts = [count[engine, start, effect, column] for column in COLUMNS]
                cells = [engine, start, effect, str(sum(counts)), *map(str, counts)]
                lines.append("| " + " | ".join(cells) + " |")
    unheard = Counter(_operation(f) for f in found if kind_of(f) == "unheard")
    lines += ["", "Unheard: " + ("; ".join(f"{what} ({n})" for what, n in unheard.most_common()) or "none") + "."]
    wrong = [f for f in found if f["wrong"]]
    lines += [f"\nWrong: {len(wrong)}."]
    lines += [
        f"* {f['engine']}, {f['start']}, {f['effect']}, {f['number']}: {f['struck']}: {f['wrong']}" for f in wrong[:50]
    ]
    return "\n".join(lines) + "\n"


def _operation(found: dict[str, Any]) -> str:
    name, _, _, file = found["struck"].split(" ", 3)
    return f"{name} of {'a file without a name' if file.startswith('#') else Path(file).name}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--starts", nargs="+", default=STARTS, choices=STARTS)
    parser.add_argument("--effects", nargs="+", default=EFFECTS, choices=EFFECTS)
    parser.add_argument("--late", type=float, default=0.3, help="seconds that a late operation takes")
    parser.add_argument("--path", type=Path, help="scratch on the disk to be tested; default: the temporary directory")
    parser.add_argument("--table", type=Path)
    add_arguments(parser, "faults.jsonl", 600.0)
    return parser.parse_args(arguments)


def strike(args: argparse.Namespace, outcomes: Outcomes, scratch: Path) -> None:
    """All combinations, from where they were left."""
    library = preload_library(scratch)
    done = {tuple(line["done"]) for line in outcomes.lines if "done" in line}
    for engine, start, effect in itertools.product(args.engines, args.starts, args.effects):
        if (engine, start, effect) in done:
            continue
        if engine == "io_uring" and effect != "late" and not can_answer():
            sys.stdout.write(f"io_uring, {effect}: left out, needs Linux 6.10\n")
            continue
        before = [line["number"] for line in outcomes.lines if _combination(line) == (engine, start, effect)]
        orders = {"path": str(scratch / "runs"), "engines": [engine], "starts": [start], "effects": [effect]}
        orders["late_secs"] = args.late
        log, begin = args.outcomes.with_suffix(".log"), time.monotonic()
        for found in sweep(orders, library, log, 1 + max(before, default=-1)):
            now = time.monotonic()
            outcomes.add({**found, "secs": now - begin})
            begin = now
            if outcomes.is_over():
                return
        outcomes.add({"done": [engine, start, effect]})
        of_it = [line for line in outcomes.lines if _combination(line) == (engine, start, effect)]
        sys.stdout.write(f"{engine}, {start}, {effect}: {dict(Counter(map(kind_of, of_it)))}\n")
        sys.stdout.flush()


def _combination(found: dict[str, Any]) -> tuple[str, str, str]:
    return found.get("engine", ""), found.get("start", ""), found.get("effect", "")


def main() -> int:
    args = parse()
    look_up()
    outcomes = Outcomes(args.outcomes, args.minutes)
    with tempfile.TemporaryDirectory(prefix="fuyou-faults-", dir=args.path) as scratch:
        strike(args, outcomes, Path(scratch))
    found = [line for line in outcomes.lines if "done" not in line]
    text = table(found, args, sum(line["secs"] for line in found))
    sys.stdout.write(text)
    if args.table is not None:
        args.table.write_text(text, encoding="utf-8")
    return int(any(line["wrong"] for line in found))


if __name__ == "__main__":
    sys.exit(main())
