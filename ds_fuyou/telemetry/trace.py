# SPDX-License-Identifier: Apache-2.0
"""Lane trace: what each lane did when, as a Chrome trace file that Perfetto (ui.perfetto.dev) opens.

Whoever records holds a ``LaneTrace | None`` and asks ``if trace is not None`` first: switched off, that branch is all
that is left. A recorded span is one tuple in a list; the file is written when the trace is closed.

Spans of the storage lanes run from the submission of a transfer to the moment at which its end was noticed, which is
at the next saved or used tensor; so they may be drawn a little too long, never too short.
"""

from __future__ import annotations

import enum
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_fuyou.errors import FuyouStorageError
from ds_fuyou.log import current_rank, get_logger
from ds_fuyou.storage.lifetime import register_closer

__all__ = ["Lane", "LaneTrace"]


class Lane(enum.Enum):
    """Tracks of the trace, from top to bottom."""

    COMPUTE = "compute"
    COPY_OUT = "device to host"
    STORAGE_READ = "storage read"
    STORAGE_WRITE = "storage write"
    UPDATE = "cpu optimizer"
    OPTIMIZER = "step()"
    WAIT = "waits"


class LaneTrace:
    """Spans of one rank, kept in memory until :meth:`close`. At most ``max_spans``: the first ones are kept.

    Raises:
        FuyouStorageError: the file cannot be created. Said at once, not at the end of the run.
    """

    def __init__(self, path: str, max_spans: int = 1_000_000) -> None:
        self.path = Path(path) if current_rank() == 0 else Path(f"{path}.rank{current_rank()}")
        try:
            self.path.write_text("")
        except OSError as error:
            message = "fuyou.trace must name a file that can be written; create its directory or name another"
            raise FuyouStorageError(error.errno or 0, message, str(self.path)) from error
        self._spans: list[tuple[Lane, str, int, int, int]] = []
        self._counts: list[tuple[int, Mapping[str, float]]] = []
        self._plan: Mapping[str, float] = {}
        self._max_spans = max_spans
        self._origin_ns = time.perf_counter_ns()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._num_users = 1
        self.num_dropped = 0
        self._forget = register_closer(self._close_at_exit)

    @classmethod
    def at(cls, path: str) -> LaneTrace:
        """The open trace of this path, which the last of its users closes; a new one if there is none. Engines that
        share a configuration share its trace.

        Raises:
            FuyouStorageError: the file cannot be created.
        """
        path = os.path.abspath(path)  # when it is written the script may have another working directory
        found = _open_traces.get(path)
        if found is None or found._closed:
            found = _open_traces[path] = cls(path)
        else:
            found._num_users += 1
        return found

    def add(self, lane: Lane, name: str, begin_ns: int, end_ns: int, num_bytes: int = 0) -> None:
        """One span; times are those of ``time.perf_counter_ns``, ``num_bytes`` what it moved."""
        if len(self._spans) >= self._max_spans:
            self.num_dropped += 1
            return
        self._spans.append((lane, name, begin_ns, end_ns, num_bytes))

    def count(self, bytes_by_tier: Mapping[str, float]) -> None:
        """Bytes held by tier from now on. As many as spans are kept."""
        if len(self._counts) < self._max_spans:
            self._counts.append((time.perf_counter_ns(), bytes_by_tier))

    def planned(self, lane_secs: Mapping[str, float]) -> None:
        """Predicted seconds of a step by lane (and "iteration"), for the report; the last ones are kept."""
        self._plan = lane_secs

    @contextmanager
    def span(self, lane: Lane, name: str) -> Iterator[None]:
        """Records what runs inside."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(lane, name, begin, time.perf_counter_ns())

    def events(self) -> list[dict[str, Any]]:
        """The Chrome trace events. Spans of a storage lane overlap, so each goes to the first free track."""
        rank = current_rank()
        events: list[dict[str, Any]] = []
        tracks: dict[tuple[Lane, int], int] = {}
        for lane, name, begin, end, num_bytes in sorted(self._spans, key=lambda span: span[2]):
            track = 0
            while tracks.get((lane, track), -1) > begin:
                track += 1
            tracks[lane, track] = end
            event: dict[str, Any] = {
                "ph": "X",
                "name": name,
                "cat": lane.value,
                "pid": rank,
                "tid": _tid(lane, track),
                "ts": (begin - self._origin_ns) / 1000,
                "dur": (end - begin) / 1000,
            }
            if num_bytes:
                event["args"] = {"bytes": num_bytes}
            events.append(event)
        named: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"ds_fuyou rank {rank}"}}
        ]
        for lane, track in tracks:
            number = "" if track == 0 else f" {track + 1}"
            tid = _tid(lane, track)
            named.append(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane.value + number}}
            )
            named.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}})
        return named + events + self._counters(rank)

    def _counters(self, rank: int) -> list[dict[str, Any]]:
        return [
            {"ph": "C", "name": "bytes", "pid": rank, "ts": (at - self._origin_ns) / 1000, "args": dict(values)}
            for at, values in self._counts
        ]

    def close(self) -> None:
        """The last user's writes the file; where that fails now, training was not the worse for it, so it is logged.
        Does nothing after that, nor in a forked child.
        """
        if os.getpid() != self._pid:  # a thread that a forked child lacks may have had the lock
            return
        with self._lock:
            if self._closed:
                return
            self._num_users -= 1
            if self._num_users > 0:
                return
            self._closed = True
        self._forget()
        document = {
            "traceEvents": self.events(),
            "displayTimeUnit": "ms",
            "otherData": {"dropped_spans": self.num_dropped, "planned_secs": dict(self._plan)},
        }
        try:
            self.path.write_text(json.dumps(document))
        except OSError as error:
            get_logger().error("the trace could not be written: %s", error)

    def _close_at_exit(self) -> None:
        self._num_users = 1
        self.close()


_open_traces: weakref.WeakValueDictionary[str, LaneTrace] = weakref.WeakValueDictionary()


def _tid(lane: Lane, track: int) -> int:
    return list(Lane).index(lane) * 1000 + track
