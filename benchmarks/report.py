# SPDX-License-Identifier: Apache-2.0
"""Results as files: benchmarks/results/<date>-<hardware>.json and .md."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["environment_of", "markdown", "write_results"]

_RESULTS = Path(__file__).resolve().parent / "results"

_METHOD = """\
Model: GPT of examples/finetune.py, bf16, AdamW, width 768, 12 layers, 12 heads, vocabulary 8192. All variants
of a case run in one session, each in a process of its own that sleeps while another is timed. A round runs
one burst of every variant, in alternating order; a burst is one untimed step, then the timed steps (3, in
the compute-bound case 2), then an untimed drain of what the last step left behind. So a timed step contains
the waiting for the step before it, as in a long run, and a burst's number is wall time over its timed steps:
drawing the batch, forward, backward, `step()`. Ratios are medians of the quotients within a round.
"stock_off" is ZeRO-Offload's engine, "fuyou_off" ours with everything in DRAM, that never reach a gradient
accumulation boundary: forward, backward and the gradients' way to host memory, no norms, no updates.
"fuyou_off_beside_io" is a control: "fuyou_off" while fio (tuned, O_DIRECT) moves as many bytes a second as the
optimizer on storage does, with which nothing is done; "fuyou_dram" updates everything without I/O.

Floor: the larger of (storage bytes that the placement requires / rate) and (the faster of the two "off"
variants + parameters / Adam rate + the host's CPU time for the bytes moved), the cores counted as one
resource. Rates are the best of micro-benchmarks before and after the case: 1 GiB through our I/O engine with
O_DIRECT, and unscale, Adam and narrowing on all cores at once."""


def environment_of(directory: Path) -> dict[str, Any]:
    """Hardware and versions that the numbers belong to."""
    with open("/proc/cpuinfo", encoding="utf-8") as handle:
        models = re.findall(r"model name\s*:\s*(.+)", handle.read())
    with open("/proc/meminfo", encoding="ascii") as handle:
        memory_kib = int(handle.readline().split()[1])
    mount = subprocess.run(
        ["df", "--output=source,fstype", str(directory)], capture_output=True, text=True, check=False
    ).stdout.split()
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": models[0] if models else platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "storage": " ".join(mount[-2:]),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "deepspeed", "ds-fuyou")},
        "load_average_at_start": os.getloadavg()[0],
        "commit": _commit(),
    }


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(
        ["git", "-C", str(_RESULTS.parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def write_results(results: dict[str, Any]) -> Path:
    """Writes both files and returns the path of the table."""
    environment = results["environment"]
    hardware = re.sub(r"[^a-z0-9]+", "-", f"{environment['num_cores']}-core-{environment['cpu']}".lower()).strip("-")
    stem = _RESULTS / f"{environment['date']}-{hardware}"
    _RESULTS.mkdir(exist_ok=True)
    stem.with_name(stem.name + ".json").write_text(json.dumps(results, indent=1) + "\n")
    path = stem.with_name(stem.name + ".md")
    path.write_text(markdown(results) + "\n")
    return path


def markdown(results: dict[str, Any]) -> str:
    """Everything a reader compares, as Markdown; the JSON beside it holds every value and configuration."""
    lines = [f"# Benchmark of {results['environment']['date']}", ""]
    lines += [f"- {key.replace('_', ' ')}: {value}" for key, value in results["environment"].items()]
    lines += ["", _METHOD, "", f"ZeRO-Infinity as tuned: {results['stock_tuning']}", ""]
    lines += list(_tuning_lines(results))
    for case in results["cases"]:
        lines += [*_case_lines(case), ""]
    lines += [*_memory_lines(results), *_io_lines(results)]
    lines += [f"Failed: {name}: {reason}" for name, reason in results.get("failed", {}).items()]
    lines.append(f"Total: {results.get('total_secs', 0) / 60:.0f} minutes.")
    return "\n".join(lines)


def _tuning_lines(results: dict[str, Any]) -> Iterator[str]:
    rows = results.get("tuning", [])
    if not rows:
        return
    yield "| sub_group_size | intra_op_parallelism | buffer_count | s a step |"
    yield "|---|---|---|---|"
    for row in rows:
        secs = f"{row['secs']:.3f}" if row["secs"] is not None else f"failed: {row['failed']}"
        yield f"| {row['sub_group_size']} | {row['intra_op_parallelism']} | {row['buffer_count']} | {secs} |"
    yield ""


def _case_lines(result: dict[str, Any]) -> Iterator[str]:
    case = result["case"]
    yield f"## {case['name']}: batch {case['batch']}, sequence {case['length']}, clip {case['clip']}"
    yield ""
    if case.get("checkpointing"):
        yield "The script checkpoints every block; where activations are swapped, these regions are taken over."
        yield ""
    yield f"{result['num_pairs']} rounds. Other processes used {result['foreign_cores']:.2f} cores meanwhile."
    yield ""
    yield "| variant | s a step | min to max | forward | backward | step() | measured / floor |"
    yield "|---|---|---|---|---|---|---|"
    for name, found in result["variants"].items():
        step, parts = found["step_secs"], found["parts"]
        floor = result["floors"].get(name)
        over = f"{floor['measured_over_floor']:.2f}" if floor else "–"
        yield (
            f"| {name} | {step['median']:.3f} | {step['min']:.3f} to {step['max']:.3f} | "
            f"{parts['forward']:.3f} | {parts['backward']:.3f} | {parts['step']:.3f} | {over} |"
        )
    yield ""
    yield "| ratio, round by round | median | quartiles | min to max | bar | reached |"
    yield "|---|---|---|---|---|---|"
    for ratio in result["ratios"]:
        bar = ratio["bar"]
        reached = "–" if bar is None else "yes" if ratio["median"] <= bar else "no"
        yield (
            f"| {ratio['of']} / {ratio['to']} | {ratio['median']:.3f} | {ratio['quartile_1']:.3f} to "
            f"{ratio['quartile_3']:.3f} | {ratio['min']:.3f} to {ratio['max']:.3f} | "
            f"{'–' if bar is None else bar} | {reached} |"
        )
    yield ""
    yield from _lane_lines(result)


def _lane_lines(result: dict[str, Any]) -> Iterator[str]:
    yield "Lanes of a step (busy seconds; bytes in GB) and what the training thread waited for them:"
    yield ""
    yield "| variant | read | GB | update | write | GB | waited | floor: storage | floor: cores |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, found in result["variants"].items():
        lanes, floor = found["lanes"], result["floors"].get(name)
        if not lanes:
            continue
        floors = f"{floor['storage']:.3f} | {floor['cores']:.3f}" if floor else "– | –"
        yield (
            f"| {name} | {lanes['read_busy_secs']:.3f} | {lanes['read_bytes'] / 1e9:.2f} | "
            f"{lanes['update_busy_secs']:.3f} | {lanes['write_busy_secs']:.3f} | "
            f"{lanes['write_bytes'] / 1e9:.2f} | {lanes['waited_secs']:.3f} | {floors} |"
        )
    yield from _swap_lines(result)
    rates = result["rates"]
    shown = ", ".join(
        f"{key} {' / '.join(f'{rate[key] / 1e9:.2f}' for rate in rates)}"
        for key in ("read", "write", "mixed", "update")
    )
    yield ""
    yield f"Rates before / after (10^9 bytes a second; update: 10^9 parameters a second): {shown}."


def _swap_lines(result: dict[str, Any]) -> Iterator[str]:
    for name, found in result["variants"].items():
        lanes = found["lanes"]
        if lanes.get("activation_out_bytes"):
            yield ""
            yield (
                f"{name}: {lanes['activation_out_bytes'] / 1e9:.2f} GB of activations a step left the device, "
                f"{lanes['activation_written_bytes'] / 1e9:.2f} GB were written to storage, "
                f"{lanes['activation_read_bytes'] / 1e9:.2f} GB read from it; "
                f"waited {lanes['activation_waited_secs']:.3f} s."
            )


def _memory_lines(results: dict[str, Any]) -> Iterator[str]:
    rows = results.get("memory", [])
    if not rows:
        return
    yield "## Peak host memory an added parameter"
    yield ""
    yield "Width 1024, sequence 32, `zero.Init`; parameters, optimizer and gradients on storage (stock:"
    yield "parameters and optimizer, its default `max_in_cpu`). Peak resident set (VmHWM) of a fresh process"
    yield "after four steps; bar 0.5."
    yield ""
    yield "| variant | clip | 12 layers | 36 layers | bytes an added parameter |"
    yield "|---|---|---|---|---|"
    for row in rows:
        peaks = " | ".join(f"{s['peak_rss_bytes'] / 1e9:.2f} GB ({s['numel'] / 1e6:.0f} M)" for s in row["sizes"])
        yield f"| {row['variant']} | {row['clip']} | {peaks} | {row['bytes_per_parameter']:.2f} |"
    yield ""


def _io_lines(results: dict[str, Any]) -> Iterator[str]:
    if "io" not in results:
        return
    yield "## I/O engine against fio"
    yield ""
    yield f"{results['io']['settings']}"
    yield "See benchmarks/io_engine.py for the series. GB/s; bar of the ratios 0.95."
    yield ""
    yield "| mode | engine | fio | fio tuned | engine, threads | engine / fio | engine / fio tuned |"
    yield "|---|---|---|---|---|---|---|"
    for mode in ("read", "write", "mixed"):
        found = results["io"][mode]
        rates = " | ".join(
            f"{found[name]['median'] / 1e9:.2f}" for name in ("engine", "fio", "fio_tuned", "engine_threads")
        )
        yield f"| {mode} | {rates} | {found['ratio']:.2f} | {found['ratio_tuned']:.2f} |"
    yield ""
