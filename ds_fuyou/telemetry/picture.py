# SPDX-License-Identifier: Apache-2.0
"""A lane trace as a PNG. Needs matplotlib, the optional dependency ``report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_fuyou.telemetry.lane_times import COMPUTE, LaneSum, TraceContent
from ds_fuyou.telemetry.page import colour_of, merged_spans

__all__ = ["draw_png"]


def draw_png(path: Path, title: str, content: TraceContent, sums: Sequence[LaneSum]) -> None:
    """Lanes over time above, time hidden and exposed by lane below.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.8 + 0.36 * len(content.lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    lanes, bars = figure.subplots(2, 1, height_ratios=[max(3, len(content.lanes)), 3])
    for row, lane in enumerate(content.lanes):
        spans = [
            (begin, max(end - begin, content.secs / 4000))
            for begin, end, _ in merged_spans(content, lane, content.secs / 3000)
        ]
        lanes.broken_barh(spans, (row - 0.38, 0.76), facecolors=colour_of(lane, content.lanes))
    lanes.set_yticks(range(len(content.lanes)), content.lanes)
    lanes.set_ylim(len(content.lanes) - 0.5, -0.5)
    lanes.set_xlim(0, content.secs)
    lanes.set_xlabel("seconds")
    lanes.set_title(title)
    lanes.grid(axis="x", alpha=0.3)

    steps = content.num_steps
    names = [lane.lane for lane in sums]
    hidden = [0.0 if lane.lane == COMPUTE else lane.hidden_secs / steps for lane in sums]
    other = [lane.busy_secs / steps - inside for lane, inside in zip(sums, hidden, strict=True)]
    bars.barh(names, hidden, color="#9ecae9", label="hidden behind compute")
    bars.barh(names, other, left=hidden, color="#4269d0", label="compute, or exposed")
    bars.invert_yaxis()
    bars.set_xlabel("seconds of a step")
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    bars.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
