# SPDX-License-Identifier: Apache-2.0
"""Worker processes of a case: started, told to train, stopped. None of them runs while another is timed."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["ForeignLoad", "Worker", "environment_of_worker", "started"]

REPLY_SECS = 600
_ROOT = Path(__file__).resolve().parent.parent


class Worker:
    """One variant in a process of its own, with the package and the worker of the checkout ``root``. Its log is
    ``<scratch>/<name>.log``; what it measures no other variant, and no other run, knows.
    """

    def __init__(self, name: str, spec: Mapping[str, Any], scratch: Path, root: Path = _ROOT) -> None:
        self.name = name
        self._log = scratch / f"{name}.log"
        file = scratch / f"{name}.json"
        file.write_text(json.dumps(spec))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(root / "benchmarks" / "worker.py"), str(file)],
                env={
                    **environment_of_worker("cuda" if "gpu_bytes" in spec else "cpu"),
                    "PYTHONPATH": str(root),
                    "DS_FUYOU_PROFILES": str(scratch / f"{name}.profiles"),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
            )
        try:
            self.about = self._reply()
        except BaseException:
            self.kill()
            raise

    def ask(self, **command: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer, at most REPLY_SECS.

        Raises RuntimeError with the end of the worker's log when it died or did not answer.
        """
        if self._process.stdin is None:
            raise RuntimeError("the worker has no stdin")
        self._process.stdin.write(json.dumps(command) + "\n")
        return self._reply()

    def cpu_secs(self) -> float:
        """CPU time of the worker and all its threads since its start."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _reply(self) -> dict[str, Any]:
        pipe = self._process.stdout
        ready = select.select([pipe], [], [], REPLY_SECS)[0]
        line = pipe.readline() if ready and pipe is not None else ""
        if not line:
            tail = self._log.read_text()[-3000:]
            state = "ended" if ready else f"did not answer within {REPLY_SECS} s"
            raise RuntimeError(f"the worker of variant {self.name} {state}; the end of its log:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        if self._process.stdin is not None and self._process.poll() is None:
            self._process.stdin.write(json.dumps({"do": "stop"}) + "\n")
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class ForeignLoad:
    """Cores the rest of the machine used while the workers ran: whether their times can be trusted."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._begin, self._busy = time.perf_counter(), self._foreign_secs()

    def _foreign_secs(self) -> float:
        with open("/proc/stat", encoding="ascii") as handle:
            user, nice, system, _, _, irq, softirq, steal = map(int, handle.readline().split()[1:9])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy - sum(worker.cpu_secs() for worker in self._workers)

    def cores(self) -> float:
        """Mean since the start."""
        return (self._foreign_secs() - self._busy) / (time.perf_counter() - self._begin)


@contextmanager
def started(specs: Mapping[str, Mapping[str, Any]], scratch: Path) -> Iterator[Sequence[Worker]]:
    """The workers of all variants, one started after the other; all are gone when the block ends."""
    workers: list[Worker] = []
    try:
        for name, spec in specs.items():
            workers.append(Worker(name, spec, scratch))
        yield workers
        for worker in workers:
            worker.stop()
    finally:
        for worker in workers:
            worker.kill()


def environment_of_worker(accelerator: str = "cpu") -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": accelerator}
    return {**os.environ, **rank, **address}
