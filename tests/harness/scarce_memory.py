# SPDX-License-Identifier: Apache-2.0
"""A run whose host memory ends: ``PATH CASE``, a JSON object as in killed_ranks.py, which has model and batches.

After two steps the process may map ``left_bytes`` more (RLIMIT_AS), and does ``action``: "train", "save" (behind
training, and steps), "load" (of what it saved before, to ``folder``), "gather". Prints ``MET`` and the exception that
this ended with, or "nothing". Then the limit goes, six steps are completed, and ``LEFT`` tells of P32.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

from tests.harness.group import leave_group
from tests.harness.killed_ranks import MODEL, build
from tests.harness.models import make_batch, masters_digest


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def train(engine: Any, until: int) -> None:
    while engine.global_steps < until:
        engine.backward(engine(**make_batch(MODEL, engine.global_steps, 0)))
        engine.step()


def act(engine: Any, action: str, folder: str) -> None:
    if action == "train":
        train(engine, 4)
        engine.eval()
        with torch.no_grad():
            engine(**make_batch(MODEL, 0, 0))
        engine.train()
    elif action == "save":
        engine.save_checkpoint(folder, tag="scarce")
        train(engine, 4)
        engine.fuyou_wait_checkpoint()
    elif action == "load":
        engine.load_checkpoint(folder, tag="before")
    else:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            pass


def main(path: str, case: dict) -> None:
    deepspeed.init_distributed("gloo")
    engine = build(path, case, 0)
    train(engine, 2)
    engine.save_checkpoint(case["folder"], tag="before")
    engine.fuyou_wait_checkpoint()
    engine.optimizer.rank_state.core.commits.settle()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + case["left_bytes"], hard))
    try:
        act(engine, case["action"], case["folder"])
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        del error
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    train(engine, 6)
    sys.stdout.write(f"\nMET {said}\nLEFT {masters_digest(engine)}\n")
    sys.stdout.flush()
    engine.destroy()
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
