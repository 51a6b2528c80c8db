# SPDX-License-Identifier: Apache-2.0
"""A long run of a small model (``make soak``): ``python -m tests.durability.soak [--steps N] [--table FILE]``.

Everything on storage, two micro-batches a step; every 1,000 steps a checkpoint and an evaluation. After a warm-up,
anonymous memory, descriptors, threads, shared memory and bytes on storage must not grow. Status 1 if they do.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import deepspeed
import torch

import tests.harness.preloaded  # noqa: F401  (first: the kind of CPU is found out once)
from tests.harness.killed_ranks import MODEL, build
from tests.harness.models import make_batch
from tests.harness.ports import free_port
from tests.harness.runner import environment

WARM_UP_SHARE = 0.2  # the order of use is kept for 2^17 uses
NVME = {"tier": "nvme"}
CASE = {
    "block": {"parameters": NVME, "gradients": NVME, "io": {"engine": "auto"}},
    "config": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5},
}


@dataclass(frozen=True)
class Sample:
    step: int
    anon_kib: int
    descriptors: int
    threads: int
    shared_kib: int
    storage_kib: int
    files: int


# Allocators keep what they once took; what grows with the steps is far above this after thousands of them.
ALLOWED = {"anon_kib": 4096, "descriptors": 0, "threads": 0, "shared_kib": 0, "storage_kib": 64, "files": 0}


def sample(step: int, path: Path) -> Sample:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = [file.lstat() for file in path.rglob("*") if file.is_file()]
    return Sample(
        step=step,
        anon_kib=int(status["RssAnon"].split()[0]),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=int(status["Threads"]),
        shared_kib=int(status["RssShmem"].split()[0]),
        storage_kib=sum(each.st_blocks for each in found) // 2,
        files=len(found),
    )


def train(path: Path, checkpoints: Path, num_steps: int) -> list[Sample]:
    engine = build(str(path), CASE, 0)
    every, samples = max(1, num_steps // 20), []
    for step in range(1, num_steps + 1):
        for micro in range(2):
            engine.backward(engine(**make_batch(MODEL, (2 * step + micro) % 64, 0)))
            engine.step()
        if step % every:
            continue
        engine.eval()
        with torch.no_grad():
            engine(**make_batch(MODEL, 99, 0))
        engine.train()
        engine.save_checkpoint(str(checkpoints), tag="last")
        shutil.rmtree(checkpoints)
        engine.optimizer.rank_state.core.wait_all()
        engine.optimizer.rank_state.core.commits.settle()
        samples.append(sample(step, path))
        sys.stdout.write(f"{samples[-1]}\n")
        sys.stdout.flush()
    engine.destroy()
    return samples


def growth(samples: list[Sample], num_steps: int) -> dict[str, int]:
    """Of each number, from the first sample after the warm-up to the last."""
    first = asdict(next(each for each in samples if each.step >= WARM_UP_SHARE * num_steps))
    last = asdict(samples[-1])
    return {name: last[name] - first[name] for name in ALLOWED}


def table(samples: list[Sample], grown: dict[str, int], secs: float) -> str:
    names = list(asdict(samples[0]))
    lines = [
        f"# {samples[-1].step:,} steps of a small model",
        "",
        f"`make soak`: {secs / 60:.0f} minutes, Linux {platform.release()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, DeepSpeed {deepspeed.__version__}. Everything on storage, two micro-batches a step,",
        "clipping; an evaluation and a checkpoint before each line. Growth is counted from the first line after "
        "a fifth of",
        "the steps: until then the order of uses is recorded (2^17 of them).",
        "",
        "| " + " | ".join(name.replace("_", " ").replace("kib", "KiB") for name in names) + " |",
        "|---:" * len(names) + "|",
    ]
    lines += ["| " + " | ".join(f"{value:,}" for value in asdict(each).values()) + " |" for each in samples]
    lines += [
        "",
        "Growth: " + ", ".join(f"{name.replace('_kib', ' KiB')} {value:+}" for name, value in grown.items()) + ".",
    ]
    return "\n".join(lines) + "\n"


def too_much(grown: dict[str, int]) -> list[str]:
    return [f"{name} grew by {grown[name]}, {most} are allowed" for name, most in ALLOWED.items() if grown[name] > most]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--path", type=Path, help="where; default: the temporary directory")
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    os.environ.update({**environment(0, 1, free_port()), "DS_FUYOU_LOG_LEVEL": "warning"})
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuyou-soak-", dir=args.path) as scratch:
        os.environ["DS_FUYOU_PROFILES"] = f"{scratch}/profiles"
        state = Path(scratch) / "state"
        state.mkdir()
        samples = train(state, Path(scratch) / "checkpoints", args.steps)
        left = list(state.rglob("*"))
    grown = growth(samples, args.steps)
    text = table(samples, grown, time.monotonic() - begin)
    sys.stdout.write(text)
    if args.table is not None:
        args.table.write_text(text, encoding="utf-8")
    wrong = too_much(grown) + [f"left behind: {left}" for _ in left[:1]]
    sys.stdout.write("\n".join(wrong) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
