# SPDX-License-Identifier: Apache-2.0
"""``fuyou report``: a lane trace as an HTML page and a picture."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.files import replacing
from ds_fuyou.planner.document import load
from ds_fuyou.planner.presets import find_ssd
from ds_fuyou.telemetry.lane_times import read_trace, sum_lanes
from ds_fuyou.telemetry.page import Endurance, render_page

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace, and what to compare it with."""
    parser.add_argument("trace", type=Path, metavar="TRACE.JSON", help='file that "fuyou": {"trace": ...} wrote')
    parser.add_argument("--out", type=Path, metavar="PAGE.HTML", help="page to write; default: beside the trace")
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="PLAN.JSON",
        help="plan to compare lane times with; default: what the run predicted",
    )
    parser.add_argument("--ssd", help="SSD preset, to turn writes into days of endurance")
    parser.add_argument("--num-ssds", type=int, default=1, help="how many of them (%(default)s)")
    parser.add_argument("--no-png", action="store_true", help="write the page alone")


def run(arguments: argparse.Namespace) -> int:
    """Writes the page, and the picture beside it unless told otherwise.

    Raises:
        FuyouConfigError: the trace or the plan cannot be read, a preset is misspelt, or matplotlib is missing.
        OSError: a file cannot be written.
    """
    if arguments.num_ssds < 1:
        raise FuyouConfigError(f"--num-ssds must be at least 1, found {arguments.num_ssds}")
    content = read_trace(arguments.trace)
    sums = sum_lanes(content)
    planned = _planned(arguments.plan) if arguments.plan is not None else content.planned or None
    endurance = None
    if arguments.ssd is not None:
        ssd = find_ssd(arguments.ssd)
        endurance = Endurance(f"{arguments.num_ssds} x {ssd.name}", arguments.num_ssds * ssd.endurance_bytes)
    page = arguments.out or _beside(arguments.trace, ".html")
    if page.resolve() == arguments.trace.resolve():
        raise FuyouConfigError(f"--out {page} must not be the trace itself")
    title = f"Lanes of {arguments.trace.name}"
    with replacing(page) as part:
        part.write_text(render_page(title, content, sums, planned, endurance), encoding="utf-8")
    sys.stdout.write(f"page: {page}\n")
    if arguments.no_png:
        return 0
    if importlib.util.find_spec("matplotlib") is None:
        sys.stdout.write("no picture: matplotlib is not installed (pip install matplotlib)\n")
        return 0
    from ds_fuyou.telemetry.picture import draw_png

    picture = page.with_suffix(".png") if arguments.out else _beside(arguments.trace, ".png")
    draw_png(picture, title, content, sums)
    sys.stdout.write(f"picture: {picture}\n")
    return 0


def _beside(trace: Path, suffix: str) -> Path:
    """``trace.json`` → ``trace.html``, and ``trace.json.rank1``, another rank's, → ``trace.rank1.html``."""
    if not re.fullmatch(r"\.rank\d+", trace.suffix):
        return trace.with_suffix(suffix)
    return trace.with_suffix("").with_suffix(trace.suffix + suffix)


def _planned(path: Path) -> dict[str, float]:
    predicted = load(path).predicted
    lanes = predicted.get("lane_secs")
    if not isinstance(lanes, dict) or not all(isinstance(value, (int, float)) for value in lanes.values()):
        raise FuyouConfigError(f"{path}: predicted.lane_secs must be there; make the plan again with fuyou plan --out")
    step = predicted.get("iteration_secs")
    return {**lanes, **({"iteration": step} if isinstance(step, (int, float)) and step > 0 else {})}
