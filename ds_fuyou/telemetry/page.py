# SPDX-License-Identifier: Apache-2.0
"""A lane trace as one HTML page that needs nothing else: lanes over time, sums, bytes, plan against measurement."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_fuyou.telemetry.lane_times import COMPUTE, LaneSum, TraceContent

__all__ = [
    "COLOURS",
    "Endurance",
    "colour_of",
    "lanes_chart",
    "merged_spans",
    "page_of",
    "render_page",
    "stacked_bars",
    "table",
]

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#9c6b4e", "#9498a0")
_WIDTH, _ROW, _LEFT = 1100, 22, 130
_STYLE = """body{font:14px/1.45 system-ui,sans-serif;max-width:1280px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.6em 0 1.6em}
td,th{padding:.25em .9em;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto;background:#fafafa}
text{font:12px system-ui,sans-serif;fill:#333}.note{color:#666}"""


@dataclass(frozen=True)
class Endurance:
    """SSDs that take ``rated_bytes`` in all; ``name`` says which."""

    name: str
    rated_bytes: float


def colour_of(lane: str, lanes: Sequence[str]) -> str:
    return COLOURS[lanes.index(lane) % len(COLOURS)]


def merged_spans(content: TraceContent, lane: str, least_secs: float) -> Iterator[tuple[float, float, str]]:
    """(begin, end, what) of a lane's busy times; those closer than ``least_secs`` are drawn as one, and so are spans
    that overlap: a page of a long run stays small.
    """
    begin = end = -1.0
    names: list[str] = []
    for span in (s for s in content.spans if s.lane == lane):
        if names and span.begin - end < least_secs:
            end = max(end, span.end)
            names.append(span.name)
            continue
        if names:
            yield begin, end, _what(names)
        begin, end, names = span.begin, span.end, [span.name]
    if names:
        yield begin, end, _what(names)


def _what(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def render_page(
    title: str,
    content: TraceContent,
    sums: Sequence[LaneSum],
    planned: Mapping[str, float] | None,
    endurance: Endurance | None,
) -> str:
    """The page. ``planned``: seconds of a step by lane, as the plan document names them."""
    body = [f"<h1>{html.escape(title)}</h1>", _summary(content), "<h2>Lanes over time</h2>", lanes_chart(content)]
    body += ["<h2>Hidden and exposed</h2>", _sums_table(content, sums)]
    body += ["<h2>Bytes by tier over time</h2>", _tiers_chart(content)]
    if planned is not None:
        body += ["<h2>Plan against measurement</h2>", _plan_table(content, sums, planned)]
    body += ["<h2>Writes and endurance</h2>", _endurance(content, sums, endurance)]
    return page_of(title, body)


def page_of(title: str, body: Sequence[str]) -> str:
    """One page that needs nothing else."""
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{chr(10).join(body)}</body></html>\n'


def _summary(content: TraceContent) -> str:
    step = content.secs / content.num_steps
    text = f"{content.secs:.2f} s, {content.num_steps} steps of {step:.3f} s, {len(content.spans)} spans"
    if content.num_ranks > 1:
        text += f"; the first of {content.num_ranks} ranks is shown"
    if content.num_dropped:
        text += f"; {content.num_dropped} spans were dropped at the end of the run"
    return f"<p>{text}.</p>"


def _axis(secs: float, height: int) -> Iterator[str]:
    for part in range(11):
        x = _LEFT + _WIDTH * part / 10
        yield f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{height + 15}" text-anchor="middle">{secs * part / 10:.2f} s</text>'


def lanes_chart(content: TraceContent) -> str:
    scale, height = _WIDTH / content.secs, _ROW * len(content.lanes)
    parts = [f'<svg viewBox="0 0 {_LEFT + _WIDTH + 30} {height + 24}" role="img" aria-label="lanes over time">']
    parts += _axis(content.secs, height)
    for row, lane in enumerate(content.lanes):
        y = row * _ROW
        parts.append(f'<text x="4" y="{y + 15}">{html.escape(lane)}</text>')
        for begin, end, what in merged_spans(content, lane, 0.4 / scale):
            width = max(0.4, (end - begin) * scale)
            parts.append(
                f'<rect x="{_LEFT + begin * scale:.2f}" y="{y + 3}" width="{width:.2f}" height="{_ROW - 6}" '
                f'fill="{colour_of(lane, content.lanes)}"><title>{html.escape(what)}: '
                f"{1000 * begin:.1f} to {1000 * end:.1f} ms</title></rect>"
            )
    return "".join([*parts, "</svg>"])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in cells."""
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{lines}</table>"


def stacked_bars(rows: Sequence[tuple[str, float, Sequence[tuple[str, float]]]], shown: Callable[[float], str]) -> str:
    """A bar a row: (name, what there is at most, (part, amount)), each to its own scale; a mark where it ends."""
    height, names = 2 * _ROW, list(dict.fromkeys(part for _, _, parts in rows for part, _ in parts))
    lines = [f'<svg viewBox="0 0 {_LEFT + _WIDTH + 30} {height * len(rows)}" role="img" aria-label="bytes by tier">']
    for row, (name, most, parts) in enumerate(rows):
        y, used = row * height, sum(amount for _, amount in parts)
        x, scale = float(_LEFT), _WIDTH / max(most, used, 1.0)
        lines.append(f'<text x="4" y="{y + 19}">{html.escape(name)}</text>')
        for part, amount in parts:
            lines.append(
                f'<rect x="{x:.2f}" y="{y + 4}" width="{amount * scale:.2f}" height="{_ROW}" '
                f'fill="{colour_of(part, names)}"><title>{html.escape(part)}: {shown(amount)}</title></rect>'
            )
            x += amount * scale
        end = _LEFT + most * scale
        lines.append(f'<line x1="{end:.2f}" y1="{y}" x2="{end:.2f}" y2="{y + _ROW + 8}" stroke="#222"/>')
        lines.append(f'<text x="{_LEFT}" y="{y + 41}">{shown(used)} of {shown(most)}</text>')
    legend = " ".join(
        f'<span style="color:{colour_of(name, names)}">&#9632;</span> {html.escape(name)}' for name in names
    )
    return "".join([*lines, f'</svg><p class="note">{legend}</p>'])


def _sums_table(content: TraceContent, sums: Sequence[LaneSum]) -> str:
    steps, rows = content.num_steps, []
    for lane in sums:
        own = lane.lane == COMPUTE
        rows.append(
            (
                lane.lane,
                f"{lane.busy_secs / steps:.3f} s",
                f"{100 * lane.busy_secs / content.secs:.0f} %",
                "–" if own else f"{lane.hidden_secs / steps:.3f} s",
                "–" if own else f"{lane.exposed_secs / steps:.3f} s",
                f"{lane.num_bytes / steps / 1e9:.2f} GB" if lane.num_bytes else "–",
            )
        )
    note = '<p class="note">A step, on average. Hidden: while compute runs; exposed: while it does not.</p>'
    return note + table(("lane", "busy", "of the time", "hidden", "exposed", "bytes"), rows)


def _tiers_chart(content: TraceContent) -> str:
    if len(content.tiers) < 2:
        return '<p class="note">The trace holds no byte counters.</p>'
    tiers = sorted({tier for _, values in content.tiers for tier in values})
    most = max(1.0, max(value for _, values in content.tiers for value in values.values()))
    height, scale = 160, _WIDTH / content.secs
    parts = [f'<svg viewBox="0 0 {_LEFT + _WIDTH + 30} {height + 24}" role="img" aria-label="bytes by tier">']
    parts += _axis(content.secs, height)
    parts.append(f'<text x="4" y="15">{most / 1e9:.2f} GB</text>')
    for index, tier in enumerate(tiers):
        points, y = [], float(height)
        for at, values in content.tiers:
            x = _LEFT + max(0.0, at) * scale
            points.append(f"{x:.1f},{y:.1f}")
            y = height * (1 - values.get(tier, 0.0) / most)
            points.append(f"{x:.1f},{y:.1f}")
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="4" y="{40 + 18 * index}" style="fill:{colour}">{html.escape(tier)}</text>')
    return "".join([*parts, "</svg>"])


def _plan_table(content: TraceContent, sums: Sequence[LaneSum], planned: Mapping[str, float]) -> str:
    rows = []
    for lane in sums:
        wanted = planned.get(lane.lane)
        if wanted is None:
            continue
        rows.append(_plan_row(lane.lane, wanted, lane.busy_secs / content.num_steps))
    if "iteration" in planned:
        rows.append(_plan_row("step", planned["iteration"], content.secs / content.num_steps))
    return table(("lane, a step", "planned", "measured", "gap"), rows)


def _plan_row(name: str, wanted: float, measured: float) -> Sequence[str]:
    gap = "–" if wanted <= 0 else f"{100 * (measured / wanted - 1):+.0f} %"
    return name, f"{wanted:.3f} s", f"{measured:.3f} s", gap


def _endurance(content: TraceContent, sums: Sequence[LaneSum], endurance: Endurance | None) -> str:
    written = next((lane.num_bytes for lane in sums if lane.lane == "storage write"), 0.0) / content.num_steps
    if written <= 0:
        return '<p class="note">The trace does not say how many bytes were written to storage.</p>'
    ranks = "" if content.num_writers == 1 else f" by each of {content.num_writers} ranks of the machine"
    text = f"<p>{written / 1e9:.3f} GB written to storage a step{ranks}"
    if endurance is None or endurance.rated_bytes <= 0:
        return text + ". Name the SSDs (--ssd, --num-ssds) to see what that means.</p>"
    days = endurance.rated_bytes / (content.num_writers * written) * content.secs / content.num_steps / 86400
    return text + f"; without a pause the rated writes of {html.escape(endurance.name)} last {days:,.0f} days.</p>"
