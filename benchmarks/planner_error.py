# SPDX-License-Identifier: Apache-2.0
"""The simulator against published throughput: error of every row, and what is left when a group was never looked at.

    python benchmarks/planner_error.py            # prints the tables
    python benchmarks/planner_error.py --write    # and writes them to benchmarks/results/

Three shares in presets.json were set by looking at published rows: what storage gives under load, and what a block's
rate gives over a whole step, streamed and under stock. So each group of rows is also predicted with these three
fitted to the *other* groups alone: the error that a machine or system nobody fitted would see.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ds_fuyou.planner.cost import Workload
from ds_fuyou.planner.hardware import GIB
from ds_fuyou.planner.presets import find_gpu, find_host, find_ssd, machine_of
from ds_fuyou.simulator.choose import Chosen, try_choose
from ds_fuyou.simulator.models import published_model
from ds_fuyou.simulator.systems import POLICIES, find_policy

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "tests" / "planner" / "published.csv"
STEPS = [0.7 + 0.05 * i for i in range(13)]


@dataclass(frozen=True)
class Scales:
    """Factors on the three shares; 1 is presets.json."""

    storage: float = 1.0
    streamed: float = 1.0
    stock: float = 1.0


def predict(row: dict[str, str], system: str, scales: Scales) -> Chosen | None:
    policy = find_policy(system)
    machine = machine_of(
        find_gpu(row["gpu"]),
        find_host("xeon5320x2"),
        find_ssd("p5510"),
        num_ssds=int(row["num_ssds"]),
        dram_bytes=float(row["dram_gb"]) * GIB,
    )
    machine = replace(
        machine,
        flops=machine.flops * (scales.streamed if policy.fused else scales.stock),
        storage_read=machine.storage_read * scales.storage,
        storage_write=machine.storage_write * scales.storage,
    )
    model = published_model(row["model"])
    if model is None:
        raise ValueError(f"{row['model']} is not a published size")
    found = try_choose(Workload(model, int(row["batch"])), machine, policy)
    return found if isinstance(found, Chosen) else None


def error_of(row: dict[str, str], scales: Scales) -> float:
    found = predict(row, row["system"], scales)
    return -1.0 if found is None else found.tokens_per_s / float(row["tokens_per_s"]) - 1


def fitted(rows: Sequence[dict[str, str]]) -> Scales:
    """The scales of least mean absolute error over ``rows``: one after the other, twice round."""
    scales = Scales()
    for _ in range(2):
        for name in ("storage", "streamed", "stock"):

            def loss(value: float, name: str = name, base: Scales = scales) -> float:
                tried = replace(base, **{name: value})
                return statistics.mean(abs(error_of(row, tried)) for row in rows)

            scales = replace(scales, **{name: _least(loss)})
    return scales


def _least(loss: Callable[[float], float]) -> float:
    """The value of least loss; the one nearest to 1 where a share does not matter to these rows."""
    return min(STEPS, key=lambda value: (round(loss(value), 6), abs(value - 1)))


def groups(rows: Sequence[dict[str, str]]) -> list[tuple[str, list[dict[str, str]]]]:
    """By system, and by model where a system has two."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(f"{row['system']}, {row['model']}", []).append(row)
    return list(found.items())


def report(rows: Sequence[dict[str, str]]) -> str:
    errors = [error_of(row, Scales()) for row in rows]
    absolute = [abs(error) for error in errors]
    lines = [
        "# Simulator against published throughput",
        "",
        f"{datetime.date.today().isoformat()}, `python benchmarks/planner_error.py --write`. Presets as they are, no "
        "constant of a row's own.",
        "",
        f"Median error {100 * statistics.median(absolute):.1f} %, worst {100 * max(absolute):.1f} %.",
        "",
        "| system | model | batch | published tokens/s | simulated | error | closed form / simulated | bound lane |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, error in zip(rows, errors, strict=True):
        found = predict(row, row["system"], Scales())
        if found is None:
            lines.append(
                f"| {row['system']} | {row['model']} | {row['batch']} | {row['tokens_per_s']} | does not fit |"
            )
            continue
        ratio = found.closed.iteration_secs / found.iteration_secs
        lines.append(
            f"| {row['system']} | {row['model']} | {row['batch']} | {row['tokens_per_s']} | {found.tokens_per_s:.1f} "
            f"| {100 * error:+.1f} % | {ratio:.3f} | {found.bound.label} |"
        )
    return "\n".join([*lines, "", *_held_out(rows), "", *_ours(rows), ""])


def _held_out(rows: Sequence[dict[str, str]]) -> list[str]:
    lines = [
        "## Each group predicted without having been looked at",
        "",
        "The three shares fitted to all other groups, as factors on presets.json; then this group predicted.",
        "",
        "| group | rows | storage | streamed | stock | median error | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, members in groups(rows):
        scales = fitted([row for row in rows if row not in members])
        errors = [abs(error_of(row, scales)) for row in members]
        lines.append(
            f"| {name} | {len(members)} | {scales.storage:.2f} | {scales.streamed:.2f} | {scales.stock:.2f} "
            f"| {100 * statistics.median(errors):.1f} % | {100 * max(errors):.1f} % |"
        )
    return lines


def _ours(rows: Sequence[dict[str, str]]) -> list[str]:
    lines = [
        "## Ours on the same machine, simulated",
        "",
        "Seconds of a step; in brackets the lane that bounds it. Not a measurement: it says what the placement and the "
        "order are worth if kernels and links are equal.",
        "",
        "| model | batch | " + " | ".join(POLICIES) + " |",
        "|---|---|" + "---|" * len(POLICIES),
    ]
    seen = sorted({(row["model"], int(row["batch"])) for row in rows}, key=lambda pair: (float(pair[0][:-1]), pair[1]))
    for model, batch in seen:
        row = {"gpu": "rtx4090", "num_ssds": "12", "dram_gb": "768", "model": model, "batch": str(batch)}
        cells = []
        for system in POLICIES:
            found = predict(row, system, Scales())
            cells.append("–" if found is None else f"{found.iteration_secs:.1f} ({found.bound.label})")
        lines.append(f"| {model} | {batch} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-planner.md")
    arguments = parser.parse_args()
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        text = report(list(csv.DictReader(file)))
    print(text)
    if arguments.write:
        target = ROOT / "benchmarks" / "results" / f"{datetime.date.today().isoformat()}-planner.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
