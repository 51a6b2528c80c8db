# SPDX-License-Identifier: Apache-2.0
"""The I/O engine alone against fio: same file, block size, depth, bytes and O_DIRECT, interleaved.

Four series a mode (read, write, and half-and-half in one file):

- ``engine``: io_uring backend on the aligned pool, registered, as the optimizer uses it;
- ``engine_threads``: the fall-back where io_uring is forbidden;
- ``fio``: ``ioengine=io_uring``, otherwise its defaults;
- ``fio_tuned``: with huge pages, registered buffers and no scrambling of what is written.

Both fio series are needed to read the result. The pool has huge pages and fio's default buffers have
not; where a device takes fewer segments a request than a block has small pages (virtio: 254 against
256), default fio's requests are split, and a ratio to it says more about pages than about the engine.
``ratio_tuned`` is the comparison of engines; ``ratio`` is what a user of plain fio sees.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["run"]

NUM_BYTES = 2 << 30
BLOCK_BYTES = 1 << 20
QUEUE_DEPTH = 32
OPERATION_BYTES = 8 << 20
MODES = ("read", "write", "mixed")

_Name = TypeVar("_Name")
_ROOT = Path(__file__).resolve().parent
_CSRC = _ROOT.parent / "ds_fuyou" / "csrc"
_COMMAND_SECS = 300
_FIO_MODES = {"read": "read", "write": "write", "mixed": "rw"}
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_TUNED = ("--fixedbufs=1", "--scramble_buffers=0")


def run(directory: Path, num_pairs: int) -> dict[str, Any]:
    """Measures in a scratch folder of `directory`, which needs 2 GiB free and O_DIRECT.

    Args:
        directory: on the device to measure.
        num_pairs: rounds a mode; each round runs every series once, in alternating order. At least 5.

    Returns:
        ``settings``, and for each mode the series (``median``, ``min``, ``max`` and ``values`` in bytes
        per second) with ``ratio``, ``ratio_tuned`` and ``ratio_threads``: medians of the rounds' own
        quotients, engine / fio, engine / fio_tuned and engine_threads / fio.

    Raises:
        ValueError: too few pairs. RuntimeError: fio or a compiler is missing, or a command failed.
        OSError: too little space.
    """
    if num_pairs < 5:
        raise ValueError(f"num_pairs must be at least 5 for a spread to mean anything; got {num_pairs}")
    _require("fio", "install the package fio of your distribution")
    with tempfile.TemporaryDirectory(prefix="fuyou-io-bench-", dir=directory) as scratch:
        driver = _build_driver(Path(scratch))
        data = Path(scratch) / "data"
        allocate(data)
        _engine(driver, data, "write", "io_uring")  # blocks that were never written read as zeros, for free
        results: dict[str, Any] = {
            "settings": {
                "num_bytes": NUM_BYTES,
                "block_bytes": BLOCK_BYTES,
                "queue_depth": QUEUE_DEPTH,
                "operation_bytes": OPERATION_BYTES,
                "num_pairs": num_pairs,
                "fio": _command(["fio", "--version"]).strip(),
            }
        }
        for mode in MODES:
            results[mode] = _compare(driver, data, mode, num_pairs)
        return results


def run_rings(directory: Path, num_rings: Sequence[int], num_rounds: int) -> dict[int, dict[str, Any]]:
    """Bytes a second read from the page cache and compared with checksums, by the rings that share it. As :func:`run`,
    but needs no O_DIRECT, and 4 GiB of free memory.
    """
    with tempfile.TemporaryDirectory(prefix="fuyou-io-bench-", dir=directory) as scratch:
        driver = _build_driver(Path(scratch))
        data = Path(scratch) / "data"
        allocate(data)
        series = {count: partial(_engine, driver, data, "checked", f"io_uring:{count}") for count in num_rings}
        return {count: _summary(rates) for count, rates in _in_turn(series, num_rounds).items()}


def allocate(data: Path) -> None:
    """Makes a file of NUM_BYTES whose blocks are reserved."""
    with data.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, NUM_BYTES)


def fill(data: Path) -> None:
    """Makes such a file and writes it once: blocks that were never written read as zeros, for free."""
    allocate(data)
    _fio(data, "write")


def _compare(driver: Path, data: Path, mode: str, num_pairs: int) -> dict[str, Any]:
    series: dict[str, Callable[[], float]] = {
        "engine": lambda: _engine(driver, data, mode, "io_uring"),
        "fio": lambda: _fio(data, mode),
        "fio_tuned": lambda: _fio(data, mode, _TUNED, _HUGE_PAGES),
        "engine_threads": lambda: _engine(driver, data, mode, "threads"),
    }
    values = _in_turn(series, num_pairs)
    result: dict[str, Any] = {name: _summary(rates) for name, rates in values.items()}
    result["ratio"] = _median_ratio(values["engine"], values["fio"])
    result["ratio_tuned"] = _median_ratio(values["engine"], values["fio_tuned"])
    result["ratio_threads"] = _median_ratio(values["engine_threads"], values["fio"])
    return result


def _in_turn(series: Mapping[_Name, Callable[[], float]], num_rounds: int) -> dict[_Name, list[float]]:
    """What each gives in every round; rounds go through them in alternating order."""
    values: dict[_Name, list[float]] = {name: [] for name in series}
    for index in range(num_rounds):
        for name in series if index % 2 == 0 else reversed(list(series)):
            values[name].append(series[name]())
    return values


def _summary(rates: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates), "values": list(rates)}


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _engine(driver: Path, data: Path, mode: str, engine: str) -> float:
    sizes = [str(number) for number in (NUM_BYTES, BLOCK_BYTES, QUEUE_DEPTH, OPERATION_BYTES)]
    result = json.loads(_command([str(driver), str(data), mode, *sizes, engine]))
    return float(result["num_bytes"]) / float(result["secs"])


def _fio(data: Path, mode: str, options: Sequence[str] = (), environment: dict[str, str] | None = None) -> float:
    command = [
        "fio",
        "--name=fuyou",
        f"--filename={data}",
        f"--rw={_FIO_MODES[mode]}",
        f"--size={NUM_BYTES}",
        f"--io_size={NUM_BYTES}",
        f"--bs={BLOCK_BYTES}",
        f"--iodepth={QUEUE_DEPTH}",
        "--direct=1",
        "--ioengine=io_uring",
        "--invalidate=0",
        "--output-format=json",
        *options,
    ]
    job = json.loads(_command(command, environment))["jobs"][0]
    num_bytes: int = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    if num_bytes != NUM_BYTES:
        raise RuntimeError(f"fio must move {NUM_BYTES} bytes to be compared, but moved {num_bytes}")
    secs: float = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
    return num_bytes / secs


@contextmanager
def steady_load(data: Path, bytes_per_sec: float) -> Iterator[None]:
    """fio, tuned, reads and writes ``data`` with O_DIRECT at this rate each while the context is open.

    ``data`` comes from :func:`fill`. RuntimeError when fio ended by itself.
    """
    _require("fio", "install the package fio of your distribution")
    rate = round(bytes_per_sec / 1e6)
    command = [
        *("fio", "--name=load", f"--filename={data}", "--rw=rw", f"--size={NUM_BYTES}", f"--bs={BLOCK_BYTES}"),
        "--thread",  # a process of its own would outlive this one
        *(f"--iodepth={QUEUE_DEPTH}", "--direct=1", "--ioengine=io_uring", "--invalidate=0", "--time_based"),
        *("--runtime=600", f"--rate={rate}M,{rate}M", "--kb_base=1000", *_TUNED),
    ]
    quiet = subprocess.DEVNULL
    environment = {**os.environ, **_HUGE_PAGES}
    process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
    try:
        time.sleep(1.0)  # its start is not the load
        yield
        if process.poll() is not None:
            raise RuntimeError(f"fio ended with status {process.returncode} while it should have been the load")
    finally:
        process.kill()
        process.wait()


def _build_driver(scratch: Path) -> Path:
    compiler = os.environ.get("CXX", "g++")
    _require(compiler, "install a C++ compiler or name one in CXX")
    sources = [
        _ROOT / "csrc" / "io_bench.cpp",
        *_CSRC.glob("io/*.cpp"),
        *_CSRC.glob("memory/*.cpp"),
        _CSRC / "kernels" / "place_sum.cpp",
    ]
    driver = scratch / "io_bench"
    flags = ["-std=c++17", "-O2", "-pthread", f"-I{_CSRC}"]
    _command([compiler, *flags, *map(str, sources), "-o", str(driver)])
    return driver


def _require(program: str, remedy: str) -> None:
    if shutil.which(program) is None:
        raise RuntimeError(f"this benchmark needs the program {program!r}, which is not in PATH: {remedy}")


def _command(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECS,
        check=False,
    )
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip()
        raise RuntimeError(f"{Path(command[0]).name} ended with status {done.returncode}: {reason}")
    return done.stdout


def _print_table(results: dict[str, Any]) -> None:
    print(f"{'mode':6} {'series':15} {'GB/s':>6} {'min':>6} {'max':>6}")
    for mode in MODES:
        for name in ("engine", "fio", "fio_tuned", "engine_threads"):
            rates = [results[mode][name][key] / 1e9 for key in ("median", "min", "max")]
            print(f"{mode:6} {name:15} " + " ".join(f"{rate:6.2f}" for rate in rates))
        ratios = [f"{key} {results[mode][key]:.2f}" for key in ("ratio", "ratio_tuned", "ratio_threads")]
        print(f"{mode:6} {', '.join(ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="I/O engine against fio")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--rings", type=int, nargs="+", help="only these numbers of rings, with checksums, in memory")
    arguments = parser.parse_args()
    if arguments.rings is not None:
        for count, rates in run_rings(arguments.directory, arguments.rings, arguments.pairs).items():
            print(
                f"{count} rings: {', '.join(f'{key} {rates[key] / 1e9:.2f} GB/s' for key in ('median', 'min', 'max'))}"
            )
        return
    results = run(arguments.directory, arguments.pairs)
    _print_table(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
