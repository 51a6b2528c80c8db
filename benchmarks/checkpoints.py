# SPDX-License-Identifier: Apache-2.0
"""Checkpoints beside training, storage-bound: how long ``save_checkpoint`` blocks, what steps cost while it is written,
how many bytes that takes, and how fast it is loaded.

``python -m benchmarks.checkpoints [--rounds N] [--save background|blocking] [--folder DIR] [--out FILE.json]``: one
process, one engine. A round: steps alone; a checkpoint that is waited for; steps, the first right after a
``save_checkpoint``, until it is whole; a load, between two copies of the checkpoint over an older one by threads that
do nothing else: what storage takes for a load's bytes. Without ``fuyou_wait_checkpoint`` (before there was any) a round
has a save and a load alone.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]

from benchmarks.cases import CASES, StockTuning, spec_of  # noqa: E402
from benchmarks.rates import measure_rates  # noqa: E402
from benchmarks.worker import Trainer  # noqa: E402

VARIANTS = ("fuyou_optimizer_nvme", "fuyou_all_nvme")
COPY_BYTES = 4 << 20  # of a request of a copy, a multiple of every block size
COPY_THREADS = 16


def written_bytes() -> int:
    """To storage, by this process."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes")).split()[1])


def copied(source: Path, target: Path) -> float:
    """Seconds of a copy past the page cache, as whole requests go: reads and writes at once."""
    read = os.open(source, os.O_RDONLY | os.O_DIRECT)
    write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)

    def copy(offset: int) -> None:
        with mmap.mmap(-1, COPY_BYTES) as buffer:  # which begins at a page
            os.preadv(read, [buffer], offset)
            os.pwrite(write, buffer, offset)

    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(COPY_THREADS) as threads:
            list(threads.map(copy, range(0, source.stat().st_size, COPY_BYTES)))
        return time.perf_counter() - begin
    finally:
        os.close(read)
        os.close(write)


class Checkpoints:
    """One engine, and where its checkpoints go."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer, self.engine, self.folder = trainer, trainer.engine, folder

    def steps(self, count: int) -> list[float]:
        return [self.trainer.step()[0] for _ in range(count)]

    def waited_for(self) -> float:
        """Seconds of a save until it is whole."""
        self.trainer.drain()
        begin = time.perf_counter()
        self.engine.save_checkpoint(str(self.folder), tag="waited")
        getattr(self.engine, "fuyou_wait_checkpoint", lambda: None)()
        return time.perf_counter() - begin

    def behind(self) -> dict[str, Any]:
        """Seconds of the call, and of the steps until the checkpoint is whole; bytes written beside theirs. Then as
        many steps alone: both with all that they leave to be updated."""
        io = self.trainer.state.core.io
        self.trainer.drain()
        before = written_bytes(), io.stats()["write"].num_bytes
        begin = time.perf_counter()
        self.engine.save_checkpoint(str(self.folder), tag="behind")
        blocked, steps = time.perf_counter() - begin, []
        save = self.engine.optimizer.checkpoint_state.save
        while save is not None and not save.is_over():
            steps.append(self.trainer.step()[0])
        whole = time.perf_counter() - begin
        self.trainer.drain()
        moved = io.stats()["write"].num_bytes - before[1]
        wall, written = time.perf_counter() - begin, written_bytes() - before[0] - moved
        begin = time.perf_counter()
        self.steps(len(steps))
        self.trainer.drain()
        found = {"wall": wall, "wall_alone": time.perf_counter() - begin, "written": written}
        return {"blocked": blocked, "steps": steps, "whole": whole, **found}

    def load(self) -> dict[str, Any]:
        """Seconds, the file not being in memory; of two copies of it, one before and one after."""
        files = sorted((self.folder / "waited").iterdir(), key=lambda file: file.stat().st_size)
        for file in files:
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        copy = self.folder / "copy"
        if not copy.exists():
            copied(files[-1], copy)  # its blocks are written before, as those of states are
        secs = [copied(files[-1], copy)]
        begin = time.perf_counter()
        self.engine.load_checkpoint(str(self.folder), tag="waited")
        load = time.perf_counter() - begin
        return {"load": load, "copies": [*secs, copied(files[-1], copy)]}

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in (self.folder / "waited").iterdir())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, default=VARIANTS[0])
    parser.add_argument("--save", choices=("background", "blocking"), default="background")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--target", type=Path, default=None, help="folder on another device for the checkpoints")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    with TemporaryDirectory(prefix="fuyou-bench-", dir=given.folder) as folder:
        rates = measure_rates(Path(folder))
        case = next(case for case in CASES if case.name == "storage_bound")
        spec = spec_of(case, given.variant, Path(folder), StockTuning())
        if given.save == "background":
            spec["config"]["fuyou"]["checkpoint"] = {"save": "background"}
        os.environ.setdefault("MASTER_PORT", "29741")
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            os.environ.setdefault(name, value)
        trainer = Trainer(spec)
        made = Checkpoints(trainer, Path(given.target or folder, "saved"))
        made.steps(3)
        rounds = []
        for _ in range(given.rounds):
            found: dict[str, Any] = {"waited": made.waited_for(), **made.load()}
            if given.save == "background":
                made.steps(1)
                found |= {"alone": made.steps(4), **made.behind()}
            rounds.append(found)
            sys.stderr.write(json.dumps(found) + "\n")
        result = {
            "numel": trainer.numel,
            "checkpoint_bytes": made.num_bytes,
            "rates": asdict(rates),
            "variant": given.variant,
            "rounds": rounds,
            "told": told(rounds, made.num_bytes),
        }
        trainer.close()
        shutil.rmtree(made.folder)
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


def told(rounds: list[dict[str, Any]], num_bytes: int) -> dict[str, float]:
    """Medians over rounds; ratios are taken within a round."""
    median = statistics.median
    found = {name: median(one[name] for one in rounds) for name in ("waited", "load")}
    found["copies / load"] = median(statistics.mean(one["copies"]) / one["load"] for one in rounds)
    if "blocked" not in rounds[0]:
        return found
    return {
        **found,
        "blocked / waited": median(one["blocked"] / one["waited"] for one in rounds),
        "whole": median(one["whole"] for one in rounds),
        "step beside / step alone": median((one["wall"] - one["blocked"]) / one["wall_alone"] for one in rounds),
        "written / checkpoint": median(one["written"] / num_bytes for one in rounds),
    }


if __name__ == "__main__":
    main()
