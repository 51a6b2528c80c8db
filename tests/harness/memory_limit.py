# SPDX-License-Identifier: Apache-2.0
"""A run whose control group limits its memory: ``PATH GROUP CASE``, a JSON object as in killed_ranks.py.

The process enters the control group ``GROUP``. ``left_bytes``: what it may use beyond what it uses then. ``lowered``:
what is left of that after three steps, until the last. ``held_bytes``: what else it has in memory, for floors that are
shares of the limit. ``decides``: the JSON offloads nothing, so that "auto" is for the plan to decide, and to change.
``collects``: garbage, after the build and not before, so that what the server of processes shares is copied then.
Prints ``SHARE before after``, of states in host memory after the build and at the end, and ``LEFT``, which tells of P32
after ``steps``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

from tests.harness.group import leave_group
from tests.harness.models import TinyGPT, make_batch, masters_digest
from tests.harness.runner import ds_config

MODEL = {"num_layers": 4, "width": 600, "vocabulary": 101}
NAMES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


def limit(group: Path, left_bytes: int) -> None:
    file = next(group / name for name in NAMES if (group / name).exists())
    used = int((group / NAMES[file.name]).read_text())
    file.write_text(str((used + left_bytes) // 4096 * 4096))


def share(engine: Any) -> float:
    states = engine.optimizer.rank_state.core.place.residency.states
    return sum(states) / len(states)


def main(path: str, group: Path, case: dict) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
    if not case.get("collects"):
        gc.collect()
    limit(group, case["left_bytes"] + case.get("held_bytes", 0))
    held = b"x" * case.get("held_bytes", 0)
    deepspeed.init_distributed("gloo")
    limit(group, case["left_bytes"])
    config = ds_config(fuyou={"nvme_path": path, **case["block"]})
    for name in ("offload_optimizer", "offload_param") if case.get("decides") else ():
        del config["zero_optimization"][name]
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    before = share(engine)
    if case.get("collects"):
        gc.collect()
    for step in range(case["steps"]):
        if step == 3 and "lowered" in case:
            limit(group, case["lowered"])
        engine.backward(engine(**make_batch(MODEL, step, 0)))
        engine.step()
    limit(group, case["left_bytes"])  # to look at all of P32 takes memory, too
    sys.stdout.write(f"\nSHARE {before} {share(engine)}\nLEFT {masters_digest(engine)}\nHELD {len(held)}\n")
    sys.stdout.flush()
    engine.destroy()
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
