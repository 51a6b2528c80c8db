# SPDX-License-Identifier: Apache-2.0
"""Lane trace: what each lane did when, as a Chrome trace file that Perfetto (ui.perfetto.dev) opens.

Whoever records holds a ``LaneTrace | None`` and asks ``if trace is not None`` first: switched off, that branch is all
that is left. A recorded span is five numbers in an array; the file is written when the trace is closed.

Spans of the storage lanes run from the submission of a transfer to the moment at which its end was noticed, which is
at the next saved or used tensor; so they may be drawn a little too long, never too short.
"""

from __future__ import annotations

import enum
import itertools
import json
import os
import threading
import time
import weakref
from array import array
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


_LANES = tuple(Lane)
_NUMBERS = {lane: number for number, lane in enumerate(_LANES)}
_TRACKS = 1000  # at most, of a lane

_ROW = 5  # numbers of a span: lane, name, begin, end, bytes


class LaneTrace:
    """Spans of one rank, kept in memory until :meth:`close`, 40 bytes each, and bytes held, 8 each. At most
    ``max_spans``: the first ones are kept, as many as are written within a scheduler's grace.

    Raises:
        FuyouStorageError: the file cannot be created. Said at once, not at the end of the run.
    """

    def __init__(self, path: str, max_spans: int = 300_000) -> None:
        self.path = Path(path) if current_rank() == 0 else Path(f"{path}.rank{current_rank()}")
        try:
            self.path.write_text("")
        except OSError as error:
            message = "fuyou.trace must name a file that can be written; create its directory or name another"
            raise FuyouStorageError(error.errno or 0, message, str(self.path)) from error
        self._spans = array("q")
        self._names: dict[str, int] = {}
        self._free_numbers = itertools.count()  # another thread may have a new name, too
        self._counts = array("d")
        self._tiers: tuple[str, ...] = ()
        self._plan: Mapping[str, float] = {}
        self.num_ranks = 1
        """How many share this machine's storage."""
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
        if len(self._spans) >= _ROW * self._max_spans:
            self.num_dropped += 1
            return
        known = self._names.get(name)
        if known is None:
            known = self._names.setdefault(name, next(self._free_numbers))
        self._spans.extend((_NUMBERS[lane], known, begin_ns - self._origin_ns, end_ns - self._origin_ns, num_bytes))

    def count(self, bytes_by_tier: Mapping[str, float]) -> None:
        """Bytes held by tier from now on, always of the same tiers. As many as spans are kept."""
        if len(self._counts) < (1 + len(bytes_by_tier)) * self._max_spans:
            self._tiers = self._tiers or tuple(bytes_by_tier)
            self._counts.extend(
                (time.perf_counter_ns() - self._origin_ns, *map(bytes_by_tier.__getitem__, self._tiers))
            )

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

    def events(self) -> Iterator[dict[str, Any]]:
        """The Chrome trace events. Spans of a storage lane overlap, so each goes to the first free track."""
        rank, spans, names = current_rank(), self._spans, {number: name for name, number in self._names.items()}
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"ds_fuyou rank {rank}"}}
        free_at: dict[int, int] = {}  # by track
        for at in sorted(range(0, len(spans), _ROW), key=lambda at: spans[at + 2]):
            number, name, begin, end, num_bytes = spans[at : at + _ROW]
            track = _TRACKS * number
            while free_at.get(track, begin) > begin:
                track += 1
            if track not in free_at:
                yield from _named(rank, track)
            free_at[track] = end
            event: dict[str, Any] = {
                "ph": "X",
                "name": names[name],
                "cat": _LANES[number].value,
                "pid": rank,
                "tid": track,
                "ts": begin / 1000,
                "dur": (end - begin) / 1000,
            }
            if num_bytes:
                event["args"] = {"bytes": num_bytes}
            yield event
        row = 1 + len(self._tiers)
        for at in range(0, len(self._counts), row):
            when, *values = self._counts[at : at + row]
            held = dict(zip(self._tiers, values, strict=True))
            yield {"ph": "C", "name": "bytes", "pid": rank, "ts": when / 1000, "args": held}

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
        other = {"dropped_spans": self.num_dropped, "planned_secs": dict(self._plan), "ranks": self.num_ranks}
        try:
            with self.path.open("w", encoding="utf-8") as file:
                file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(other)}, "traceEvents": [')
                for number, event in enumerate(self.events()):
                    file.write(",\n" if number else "\n")
                    file.write(json.dumps(event))
                file.write("\n]}\n")
        except OSError as error:
            get_logger().error("the trace could not be written: %s", error)

    def _close_at_exit(self) -> None:
        self._num_users = 1
        self.close()


_open_traces: weakref.WeakValueDictionary[str, LaneTrace] = weakref.WeakValueDictionary()


def _named(rank: int, track: int) -> Iterator[dict[str, Any]]:
    lane, other = divmod(track, _TRACKS)
    name = _LANES[lane].value + (f" {other + 1}" if other else "")
    yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}
