# SPDX-License-Identifier: Apache-2.0
"""``fuyou report``: what the page says of a trace, and what is said of a file that is none."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.cli import main
from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.telemetry.lane_times import read_trace, sum_lanes
from ds_fuyou.telemetry.trace import Lane, LaneTrace


def _span(lane: str, begin: float, end: float, tid: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"a {lane}",
        "cat": lane,
        "pid": 0,
        "tid": tid,
        "ts": 1e6 * begin,
        "dur": 1e6 * (end - begin),
        **more,
    }


EVENTS = [
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}},
    _span("compute", 10, 14),
    _span("compute", 16, 20),
    _span("storage write", 12, 15, 1, args={"bytes": 3e9}),
    _span("storage write", 14, 18, 2, args={"bytes": 5e9}),
    _span("waits", 13, 16, 3),
    _span("step()", 19, 19.5, 4),
    _span("step()", 19.5, 20, 4),
    {"ph": "C", "name": "bytes", "pid": 0, "ts": 1e7, "args": {"host memory": 1e9, "storage": 0}},
    {"ph": "C", "name": "bytes", "pid": 0, "ts": 1.5e7, "args": {"host memory": 2e9, "storage": 3e9}},
]


def _written(tmp_path: Path, events: object = EVENTS, **keys: Any) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, **keys}), encoding="utf-8")
    return path


def test_busy_time_is_split_into_hidden_and_exposed(tmp_path: Path) -> None:
    content = read_trace(_written(tmp_path))
    assert (content.secs, content.num_steps, content.num_ranks) == (10.0, 2, 1)
    sums = {lane.lane: lane for lane in sum_lanes(content)}
    assert set(sums) == {"compute", "storage write"}
    write = sums["storage write"]  # 12 to 18 in two overlapping spans; compute waits from 13, none from 14 to 16
    assert (write.busy_secs, write.hidden_secs, write.exposed_secs, write.num_bytes) == (6.0, 3.0, 3.0, 8e9)
    assert sums["compute"].busy_secs == 7.0


def test_the_trace_that_a_run_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    trace = LaneTrace(str(path))
    for lane, begin, end in ((Lane.COMPUTE, 0, 10), (Lane.STORAGE_READ, 2, 6), (Lane.STORAGE_READ, 4, 14)):
        trace.add(lane, "block 1", begin * 10**9, end * 10**9)
    trace.count({"storage": 5.0})
    trace.planned({"iteration": 7.0, "storage read": 6.0})
    trace.close()
    content = read_trace(path)
    assert [values for _, values in content.tiers] == [{"storage": 5.0}]
    assert main(["report", str(path), "--no-png"]) == 0
    page = path.with_suffix(".html").read_text(encoding="utf-8")
    assert "<td>storage read</td><td>6.000 s</td><td>12.000 s</td><td>+100 %</td>" in page
    assert content.lanes == ("compute", "storage read")
    read = sum_lanes(content)[1]
    assert (read.busy_secs, read.hidden_secs) == (pytest.approx(12.0), pytest.approx(8.0))
    assert {span.track for span in content.spans} == {"compute", "storage read", "storage read 2"}


def test_the_page_needs_nothing_else_and_says_it_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = _written(tmp_path)
    assert main(["report", str(trace), "--ssd", "p5510", "--num-ssds", "2"]) == 0
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|<script|http", page)
    for text in ("2 steps of 5.000 s", "storage write", "4.000 GB written to storage a step", "host memory"):
        assert text in page
    assert "last 203 days" in page  # 14e15 bytes / 4e9 a step * 5 s
    said, picture = capsys.readouterr().out, tmp_path / "trace.png"
    if importlib.util.find_spec("matplotlib") is None:
        assert "pip install matplotlib" in said
        assert not picture.exists()
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_all_ranks_of_a_machine_wear_its_drives(tmp_path: Path) -> None:
    """A trace is one rank's; and the pages of two ranks are two."""
    trace = _written(tmp_path, otherData={"ranks": 7})
    ranks = [trace, *(trace.with_name(f"{trace.name}.rank{rank}") for rank in (1, 2))]
    for path in ranks[1:]:
        path.write_text(trace.read_text(encoding="utf-8"), encoding="utf-8")
    for path in ranks:
        assert main(["report", str(path), "--ssd", "p5510", "--num-ssds", "2", "--no-png"]) == 0
    names = ("trace.html", "trace.rank1.html", "trace.rank2.html")
    (page, *others) = ((tmp_path / name).read_text(encoding="utf-8") for name in names)
    assert "4.000 GB written to storage a step by each of 7 ranks of the machine" in page
    assert "last 29 days" in page  # 203 for one
    assert all("last 29 days" in other for other in others)


def test_a_simulated_step_is_compared_with_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, plan = tmp_path / "t.json", tmp_path / "p.json"
    wanted = ["--model", "13B", "--num-ssds", "4", "--dram-gb", "64", "--batch", "16"]
    assert main(["plan", *wanted, "--trace", str(trace), "--out", str(plan)]) == 0
    capsys.readouterr()
    assert main(["report", str(trace), "--plan", str(plan), "--no-png", "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    section = page.split("Plan against measurement")[1].split("</table>")[0]
    gaps = {row[0]: float(row[1]) for row in re.findall(r"<td>([a-z>-]+[ a-z]*)</td>.*?<td>([+-]\d+) %</td>", section)}
    assert abs(gaps["step"]) <= 1
    assert abs(gaps["compute"]) <= 1
    assert not (tmp_path / "page.png").exists()


def test_names_are_escaped(tmp_path: Path) -> None:
    events = [_span("compute", 0, 1), {**_span("<b>lane", 0, 1), "name": "<script>"}]
    assert main(["report", str(_written(tmp_path, events)), "--no-png"]) == 0
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;b&gt;lane" in page


def _around_a_span(*events: dict[str, Any], **keys: Any) -> bytes:
    span = {"ph": "X", "cat": "compute", "ts": 1, "dur": 1, "args": None}
    return json.dumps({"traceEvents": [span, *events], **keys}).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; the trace is written when the run ends"),
        (json.dumps({"traceEvents": EVENTS}).encode()[:300], "cut short"),
        (b"\xff\xfe\x00", "must be a readable trace file"),
        (b"3", "must hold traceEvents"),
        (b"{}", "must hold traceEvents"),
        (b'{"traceEvents": []}', "holds no span"),
        (b'{"traceEvents": [3]}', "event 0 must be an object with a ph"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1}]}', "event 0 must have a number as dur, found None"),
        (b'{"traceEvents": [{"ph": "X", "ts": NaN, "dur": 1}]}', "event 0 must have a number as ts"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": -1}]}', "must not last less than nothing"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1, "pid": []}]}', "must have a number or a name as pid"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 0}]}', "holds no span that lasts"),
        (_around_a_span(otherData=[]), "otherData must be an object"),
        (_around_a_span(otherData={"dropped_spans": "x"}), "otherData must have a number as dropped_spans"),
        (_around_a_span(otherData={"planned_secs": {"compute": None}}), "must have a number as compute, found None"),
        (_around_a_span({"ph": "C", "name": "bytes", "ts": 1, "args": {"gpu": "x"}}), "must have a number as gpu"),
    ],
)
def test_a_file_that_is_no_whole_trace_is_refused(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    assert main(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(path) in error
    assert error.count("\n") == 1
    assert not (tmp_path / "trace.html").exists()


def test_a_plan_of_nothing_has_no_gap(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(_around_a_span(otherData={"planned_secs": {"compute": 0, "iteration": 0}}))
    assert main(["report", str(path), "--no-png"]) == 0
    assert (tmp_path / "trace.html").read_text(encoding="utf-8").count("<td>–</td></tr>") >= 2


def test_wrong_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = _written(tmp_path)
    plan = tmp_path / "plan.json"
    plan.write_text("{}", encoding="utf-8")
    for more, said in (
        (["--ssd", "p551"], "did you mean p5510"),
        (["--ssd", "p5510", "--num-ssds", "0"], "--num-ssds must be at least 1"),
        (["--out", str(trace)], "must not be the trace itself"),
        (["--plan", str(plan)], "schema must be"),
        (["--out", str(tmp_path / "no" / "page.html")], "No such file"),
    ):
        assert main(["report", str(trace), *more]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(FuyouConfigError, match="readable trace file"):
        read_trace(tmp_path / "none.json")
