# SPDX-License-Identifier: Apache-2.0
"""The lane trace is a Chrome trace: complete events, named tracks, no overlap within a track."""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from pathlib import Path
from types import FrameType

import pytest
import torch

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.telemetry import trace as trace_module
from ds_fuyou.telemetry.trace import Lane, LaneTrace
from tests.activations.support import Plain, attached


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
    trace.num_ranks = 2
    trace.close()
    trace.close()
    events = read(tmp_path / "trace.json")
    (counted,) = [event for event in events if event["ph"] == "C"]
    assert (counted["name"], counted["args"]) == ("bytes", {"storage": 7})
    other = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert (other["planned_secs"], other["ranks"]) == ({"storage write": 0.5}, 2)
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (spans["one"]["ts"], spans["one"]["dur"]) == (1.0, 4.0)
    assert spans["one"]["cat"] == "storage write"
    assert spans["one"]["tid"] != spans["two"]["tid"] == spans["three"]["tid"], "what overlaps has a track of its own"
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[spans["one"]["tid"]] == "storage write"
    assert names[spans["two"]["tid"]] == "storage write 2"
    assert names[spans["step()"]["tid"]] == "step()"


def calls_for_a_trace(directory: Path, trace: LaneTrace | None) -> tuple[int, int, int]:
    """Of a swapped step: calls into the trace, readings of the clock by who would record, bytes the trace allocated."""
    torch.manual_seed(0)
    model, ids = Plain().train(), torch.randint(300, (4, 33))
    found = {"trace": 0, "clock": 0}

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename == trace_module.__file__:
            found["trace"] += 1
        if event == "c_call" and argument is time.perf_counter_ns:
            found["clock"] += 1

    with attached(model, directory, arena_bytes=256 * 1024, trace=trace):
        model(ids).backward()
        tracemalloc.start()
        sys.setprofile(watch)
        try:
            model(ids).backward()
        finally:
            sys.setprofile(None)
            taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, trace_module.__file__)])
            tracemalloc.stop()
    return found["trace"], found["clock"], sum(item.size for item in taken.statistics("filename"))


def test_switched_off_it_costs_neither_a_call_nor_a_byte(tmp_path: Path) -> None:
    assert calls_for_a_trace(tmp_path, None) == (0, 0, 0)
    assert min(calls_for_a_trace(tmp_path, LaneTrace(str(tmp_path / "trace.json")))) > 50, "what is counted exists"


def test_a_full_trace_keeps_the_beginning(tmp_path: Path) -> None:
    trace = LaneTrace(str(tmp_path / "trace.json"), max_spans=2)
    for index in range(5):
        trace.add(Lane.COMPUTE, str(index), index, index + 1)
    trace.close()
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["otherData"]["dropped_spans"] == 3
    assert [event["name"] for event in document["traceEvents"] if event["ph"] == "X"] == ["0", "1"]


def test_a_trace_of_a_long_run_takes_little_memory_and_is_written_without_more(tmp_path: Path) -> None:
    trace, number = LaneTrace(str(tmp_path / "trace.json"), max_spans=20_000), 30_000
    tracemalloc.start()
    try:
        for index in range(number):
            trace.add(Lane.STORAGE_READ, "block", trace._origin_ns + index, trace._origin_ns + index + 2, 4096)
            trace.count({"host memory": index, "storage": index})
        kept = tracemalloc.get_traced_memory()[0]
        trace.close()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert kept < 20_000 * 100
    assert most < kept + 20_000 * 100, "the file is written piece by piece"
    events = read(tmp_path / "trace.json")
    assert [sum(event["ph"] == kind for event in events) for kind in "XC"] == [20_000, 20_000]


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FuyouStorageError, match=r"fuyou\.trace must name a file"):
        LaneTrace(str(tmp_path / "missing" / "trace.json"))
