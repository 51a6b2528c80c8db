# SPDX-License-Identifier: Apache-2.0
"""A run of three steps on storage that ends as it is told: ``PATH END``. Prints its fp32 weights' sums before, and what
this rank has open or mapped of shared memory.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

from ds_fuyou.ops.core import load_core
from tests.harness.group import leave_group
from tests.harness.models import TinyGPT, make_batch
from tests.harness.runner import ds_config

MODEL = {"num_layers": 2, "width": 32, "vocabulary": 101}


def shared() -> list[str]:
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    opened = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    return sorted(path for path in mapped | opened if path.startswith("/dev/shm/"))


def main(path: str, end: str) -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    config = ds_config(fuyou={"nvme_path": path, "optimizer": {"tier": "nvme"}, "io": {"engine": "threads"}})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(3):
        engine.backward(engine(**make_batch(MODEL, step, torch.distributed.get_rank())))
        engine.step()
    sums = {name: float(safe_get_full_fp32_param(p).double().sum()) for name, p in engine.module.named_parameters()}
    sys.stdout.write(f"SUMS {json.dumps(sums)}\nSHARED {json.dumps(shared())}\n")
    sys.stdout.flush()
    leave_group()
    if end == "exception":
        raise ValueError("the script failed")
    if end in ("SIGTERM", "SIGKILL"):
        os.kill(os.getpid(), signal.Signals[end])
    if end == "failed disk":
        engine.optimizer.rank_state.core.commits.settle()
        core = load_core()
        io = engine.optimizer.rank_state.core.io.engine
        io.add_fault(core.IoKind.WRITE, core.IoFaultEffect.ERROR, error=errno.EIO, first=0, count=1000)
        try:
            for step in range(3, 6):
                engine.backward(engine(**make_batch(MODEL, step, 0)))
                engine.step()
        finally:
            engine.destroy()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
