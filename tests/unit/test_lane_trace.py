# SPDX-License-Identifier: Apache-2.0
"""The lane trace is a Chrome trace: complete events, named tracks, no overlap within a track."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.telemetry.trace import Lane, LaneTrace


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text())["traceEvents"]


def test_spans_become_events(tmp_path: Path) -> None:
    trace = LaneTrace(str(tmp_path / "trace.json"))
    trace.add(Lane.STORAGE_WRITE, "one", trace._origin_ns + 1000, trace._origin_ns + 5000)
    trace.add(Lane.STORAGE_WRITE, "two", trace._origin_ns + 2000, trace._origin_ns + 3000)
    trace.add(Lane.STORAGE_WRITE, "three", trace._origin_ns + 3000, trace._origin_ns + 4000)
    with trace.span(Lane.OPTIMIZER, "step()"):
        pass
    trace.count({"storage": 7})
    trace.planned({"storage write": 0.5})
    trace.close()
    trace.close()
    events = read(tmp_path / "trace.json")
    (counted,) = [event for event in events if event["ph"] == "C"]
    assert (counted["name"], counted["args"]) == ("bytes", {"storage": 7})
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["planned_secs"] == {"storage write": 0.5}
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (spans["one"]["ts"], spans["one"]["dur"]) == (1.0, 4.0)
    assert spans["one"]["cat"] == "storage write"
    assert spans["one"]["tid"] != spans["two"]["tid"] == spans["three"]["tid"], "what overlaps has a track of its own"
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[spans["one"]["tid"]] == "storage write"
    assert names[spans["two"]["tid"]] == "storage write 2"
    assert names[spans["step()"]["tid"]] == "step()"


def test_a_full_trace_keeps_the_beginning(tmp_path: Path) -> None:
    trace = LaneTrace(str(tmp_path / "trace.json"), max_spans=2)
    for index in range(5):
        trace.add(Lane.COMPUTE, str(index), index, index + 1)
    trace.close()
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["otherData"]["dropped_spans"] == 3
    assert [event["name"] for event in document["traceEvents"] if event["ph"] == "X"] == ["0", "1"]


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FuyouStorageError, match=r"fuyou\.trace must name a file"):
        LaneTrace(str(tmp_path / "missing" / "trace.json"))
