# SPDX-License-Identifier: Apache-2.0
"""Reads a lane trace (Chrome format) and adds it up: time hidden and exposed by lane, bytes by tier. No torch.

A span of a lane is hidden while compute runs and does not wait, exposed while it does not. A lane may have several
tracks ("storage read 2"); they count as one. Counter events ("ph": "C", name "bytes") give bytes by tier over time
where a trace has them, and ``args.bytes`` of a span the bytes it moved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_fuyou.errors import FuyouConfigError, shown

__all__ = ["COMPUTE", "STEP", "LaneSum", "Span", "TraceContent", "content_of", "read_trace", "sum_lanes"]

COMPUTE, STEP = "compute", "step()"
_WAITS = "waits"


@dataclass(frozen=True)
class Span:
    """Seconds from the start of the trace; ``track`` is its row, of which a lane may have several."""

    lane: str
    track: str
    name: str
    begin: float
    end: float
    num_bytes: float = 0.0


@dataclass(frozen=True)
class TraceContent:
    """Spans of the smallest rank in the file, lanes in their order there; ``tiers``: (seconds, bytes by tier);
    ``planned``: seconds of a step by lane that the run itself predicted, empty if it did not; ``num_writers``: ranks
    of its machine, which write as much each.
    """

    spans: tuple[Span, ...]
    lanes: tuple[str, ...]
    tiers: tuple[tuple[float, Mapping[str, float]], ...]
    num_ranks: int
    num_dropped: int
    planned: Mapping[str, float] = field(default_factory=dict)
    num_writers: int = 1

    @property
    def num_steps(self) -> int:
        """Calls of ``step()`` in the trace; 1 where there is none."""
        return max(1, sum(1 for span in self.spans if span.lane == STEP))

    @property
    def secs(self) -> float:
        return max(span.end for span in self.spans)


@dataclass(frozen=True)
class LaneSum:
    """One lane over the whole trace. ``busy`` counts time with at least one span; hidden + exposed = busy."""

    lane: str
    busy_secs: float
    hidden_secs: float
    num_bytes: float

    @property
    def exposed_secs(self) -> float:
        return self.busy_secs - self.hidden_secs


def read_trace(path: Path) -> TraceContent:
    """Reads a trace of one or several ranks.

    Raises:
        FuyouConfigError: no file, cut short, not a trace, or an event that makes no sense; with its number.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FuyouConfigError(f"{path}: must be a readable trace file, found {error}") from error
    if not text.strip():
        raise FuyouConfigError(f"{path}: is empty; the trace is written when the run ends")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FuyouConfigError(f"{path}: is no JSON or was cut short ({error}); let the run end by itself") from error
    try:
        return content_of(data)
    except FuyouConfigError as error:
        raise FuyouConfigError(f"{path}: {error}") from None


def content_of(data: object) -> TraceContent:
    """A trace that is read already. Raises FuyouConfigError as :func:`read_trace`, without a path."""
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list):
        raise FuyouConfigError(f"must hold traceEvents as Chrome's format has them, found {type(data).__name__}")
    other = data.get("otherData", {}) if isinstance(data, Mapping) else {}
    try:
        if not isinstance(other, Mapping):
            raise _Wrong(f"otherData must be an object, found {shown(other, 60)}")
        content = _content(events, int(_finite("otherData", "dropped_spans", other.get("dropped_spans", 0))))
        writers = max(1, int(_finite("otherData", "ranks", other.get("ranks", 1))))
        return replace(content, planned=_planned(other.get("planned_secs", {})), num_writers=writers)
    except _Wrong as wrong:
        raise FuyouConfigError(str(wrong)) from None


class _Wrong(Exception):
    pass


def _content(events: Sequence[Any], num_dropped: int) -> TraceContent:
    ranks, names = set(), {}
    for number, event in enumerate(events):
        if not isinstance(event, Mapping) or "ph" not in event:
            raise _Wrong(f"event {number} must be an object with a ph, found {shown(event, 60)}")
        for key in ("pid", "tid"):
            if not isinstance(event.get(key, 0), (int, str)):
                raise _Wrong(f"event {number} must have a number or a name as {key}, found {shown(event[key])}")
        if event["ph"] == "X":
            ranks.add(event.get("pid", 0))
        if event["ph"] == "M" and event.get("name") == "thread_name":
            names[event.get("pid", 0), event.get("tid", 0)] = str(_arguments(event).get("name", "?"))
    if not ranks:
        raise _Wrong("holds no span; was the run traced for at least one step?")
    rank = min(ranks, key=str)
    spans, tiers = [], []
    for number, event in enumerate(events):
        if event.get("pid", 0) != rank:
            continue
        if event["ph"] == "X":
            spans.append(_span(number, event, names))
        elif event["ph"] == "C" and event.get("name") == "bytes":
            held = {str(tier): _finite(f"event {number}", tier, value) for tier, value in _arguments(event).items()}
            tiers.append((_number(number, event, "ts") / 1e6, held))
    origin = min(span.begin for span in spans)
    if max(span.end for span in spans) <= origin:
        raise _Wrong("holds no span that lasts; was the run traced for at least one step?")
    spans = [Span(s.lane, s.track, s.name, s.begin - origin, s.end - origin, s.num_bytes) for s in spans]
    order = {name: place for place, name in enumerate(dict.fromkeys(_lane(name) for name in names.values()))}
    lanes = sorted({span.lane for span in spans}, key=lambda lane: order.get(lane, len(order)))
    return TraceContent(
        spans=tuple(sorted(spans, key=lambda span: span.begin)),
        lanes=tuple(lanes),
        tiers=tuple(sorted(((at - origin, values) for at, values in tiers), key=lambda pair: pair[0])),
        num_ranks=len(ranks),
        num_dropped=num_dropped,
    )


def _planned(values: object) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise _Wrong(f"otherData.planned_secs must hold seconds by lane, found {shown(values, 60)}")
    return {str(lane): _finite("otherData.planned_secs", lane, secs) for lane, secs in values.items()}


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, Mapping) else {}


def _number(number: int, event: Mapping[str, Any], key: str) -> float:
    return _finite(f"event {number}", key, event.get(key))


_MOST = 1e300  # whole numbers in JSON have no end


def _finite(where: str, key: object, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST < value < _MOST:
        raise _Wrong(f"{where} must have a number as {key}, found {shown(value)}")
    return float(value)


def _span(number: int, event: Mapping[str, Any], names: Mapping[Any, str]) -> Span:
    begin, took = _number(number, event, "ts"), _number(number, event, "dur")
    if took < 0:
        raise _Wrong(f"event {number} must not last less than nothing, found dur {took:g}")
    track = names.get((event.get("pid", 0), event.get("tid", 0)), str(event.get("cat") or event.get("tid", "?")))
    lane = str(event["cat"]) if event.get("cat") else _lane(track)
    moved = _arguments(event).get("bytes", 0)
    num_bytes = float(moved) if isinstance(moved, (int, float)) else 0.0
    return Span(lane, track, str(event.get("name", "")), begin / 1e6, (begin + took) / 1e6, num_bytes)


def _lane(track: str) -> str:
    """The lane of a track's name: "storage read 2" is a track of "storage read"."""
    return re.sub(r" \d+$", "", track)


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _overlap(left: Sequence[tuple[float, float]], right: Sequence[tuple[float, float]]) -> float:
    """Seconds in both of two lists of disjoint sorted intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def _without(kept: Sequence[tuple[float, float]], cut: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint sorted intervals less others."""
    left, first = [], 0
    for begin, end in kept:
        while first < len(cut) and cut[first][1] <= begin:
            first += 1
        at, index = begin, first
        while index < len(cut) and cut[index][0] < end:
            if cut[index][0] > at:
                left.append((at, cut[index][0]))
            at = max(at, cut[index][1])
            index += 1
        if at < end:
            left.append((at, end))
    return left


def sum_lanes(content: TraceContent) -> list[LaneSum]:
    """Every lane but the waits and ``step()``, which are no work of a lane. Compute itself hides nothing."""
    waits = _union((s.begin, s.end) for s in content.spans if s.lane == _WAITS)
    compute = _without(_union((s.begin, s.end) for s in content.spans if s.lane == COMPUTE), waits)
    sums = []
    for lane in content.lanes:
        if lane in (_WAITS, STEP):
            continue
        own = compute if lane == COMPUTE else _union((s.begin, s.end) for s in content.spans if s.lane == lane)
        busy = sum(end - begin for begin, end in own)
        hidden = busy if lane == COMPUTE else _overlap(own, compute)
        moved = sum(s.num_bytes for s in content.spans if s.lane == lane)
        sums.append(LaneSum(lane, busy, hidden, moved))
    return sums
