# SPDX-License-Identifier: Apache-2.0
"""Rows of a CSV, simulated one by one: throughput of a system on a machine, or the largest model that trains."""

from __future__ import annotations

import csv
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.files import replacing
from ds_fuyou.planner.cost import Workload
from ds_fuyou.planner.hardware import GIB, Machine
from ds_fuyou.planner.model import MOST_SIZE, ModelSpec
from ds_fuyou.planner.presets import find_gpu, find_host, find_ssd, machine_of, model_shapes
from ds_fuyou.simulator.choose import Chosen, best_batch, largest_model, try_choose
from ds_fuyou.simulator.models import load_model, published_model
from ds_fuyou.simulator.systems import find_policy

__all__ = ["ADDED", "MAX_MODEL", "Defaults", "predict", "read_points", "write_points"]

MAX_MODEL = "max_model"
REQUIRED = ("system", "gpu", "num_ssds", "dram_gb", "model", "batch")
ADDED = (
    "predicted_tokens_per_s",
    "predicted_tflops_8p",
    "bound_lane",
    "predicted_batch",
    "predicted_model",
)


@dataclass(frozen=True)
class Defaults:
    """What rows do not say: the SSD, the host and the sequence length of the published testbed unless told."""

    ssd: str = "p5510"
    host: str = "xeon5320x2"
    seq: int = 1024


def read_points(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Column names and rows.

    Raises:
        FuyouConfigError: not readable as CSV, a column is missing, or a row has more or fewer cells than columns.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            columns = list(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FuyouConfigError(f"{path}: must be a readable CSV file, found {error}") from error
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise FuyouConfigError(
            f"{path}: the first line must name the columns {', '.join(REQUIRED)}; missing {', '.join(missing)}"
        )
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise FuyouConfigError(f"{path}: the first line must name each column once; found twice {', '.join(twice)}")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise FuyouConfigError(f"{path} line {number}: must have {len(columns)} cells like the first line")
    return columns, rows


def write_points(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    """Writes through a temporary file beside ``path``, so that a failure leaves no half-written result."""
    names = [*columns, *(name for name in ADDED if name not in columns)]
    with replacing(path) as part, open(part, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _whole(row: Mapping[str, str], column: str, least: int, default: int | None = None) -> int:
    text = (row.get(column) or "").strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value < float("inf") or value != int(value):
        raise FuyouConfigError(f"{column} must be a whole number of at least {least}, found {text!r}")
    return int(value)


def _machine(row: Mapping[str, str], defaults: Defaults) -> Machine:
    text = (row["dram_gb"] or "").strip()
    try:
        dram = float(text)
    except ValueError:
        dram = float("nan")
    if not 0 < dram <= MOST_SIZE:
        raise FuyouConfigError(f"dram_gb must be a positive number, at most {MOST_SIZE}, found {text!r}")
    return machine_of(
        find_gpu(row["gpu"]),
        find_host(row.get("host") or defaults.host),
        find_ssd(row.get("ssd") or defaults.ssd),
        num_ssds=_whole(row, "num_ssds", 0),
        dram_bytes=dram * GIB,
        num_gpus=_whole(row, "num_gpus", 1, 1),
    )


def _model(text: str) -> ModelSpec:
    found = published_model(text)
    if found is not None:
        return found
    if text.startswith("gpt:") or os.path.exists(text):
        return load_model(text)
    known = list(model_shapes())
    near = difflib.get_close_matches(text.upper(), known, n=3, cutoff=0.4) or known
    raise FuyouConfigError(f"model {text!r} is not known; nearest are {', '.join(near)}")


def predict(row: Mapping[str, str], defaults: Defaults) -> dict[str, str]:
    """The row with the columns ADDED. What does not fit has 0 tokens/s and the tier that lacks as bound lane.

    Raises:
        FuyouConfigError: a cell is wrong.
    """
    machine, seq = _machine(row, defaults), _whole(row, "seq", 1, defaults.seq)
    system, _, policy_name = row["system"].strip().lower().partition(":")
    blank = {**row, **dict.fromkeys(ADDED, "")}
    if system == MAX_MODEL:
        policy = find_policy(policy_name or "fuyou")
        models = [model for name in model_shapes() if (model := published_model(name)) is not None]
        found = largest_model(models, _whole(row, "batch", 1, 1), seq, machine, policy)
        return {**blank, "predicted_model": found.name if found else "none"}
    policy, model = find_policy(system), _model(row["model"].strip())
    if row["batch"].strip().lower() == "best":
        best = best_batch(model, seq, machine, policy)
        chosen = best or try_choose(Workload(model, 1, seq), machine, policy)
    else:
        chosen = try_choose(Workload(model, _whole(row, "batch", 1), seq), machine, policy)
    if not isinstance(chosen, Chosen):
        lacking = " and ".join(chosen.missing())
        return {**blank, "predicted_tokens_per_s": "0", "predicted_tflops_8p": "0", "bound_lane": f"no fit: {lacking}"}
    return {
        **blank,
        "predicted_tokens_per_s": f"{chosen.tokens_per_s:.4g}",
        "predicted_tflops_8p": f"{chosen.tflops_8p:.4g}",
        "bound_lane": chosen.bound.label,
        "predicted_batch": str(chosen.work.batch),
        "predicted_model": model.name,
    }
