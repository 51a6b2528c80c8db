# SPDX-License-Identifier: Apache-2.0
"""A run of three steps on storage that ends as it is told: ``PATH END``. Prints its fp32 weights' sums before."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

from ds_fuyou.ops.core import load_core
from tests.harness.models import TinyGPT, make_batch
from tests.harness.runner import ds_config

MODEL = {"num_layers": 2, "width": 32, "vocabulary": 101}


def main(path: str, end: str) -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    config = ds_config(fuyou={"nvme_path": path, "optimizer": {"tier": "nvme"}, "io": {"engine": "threads"}})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(3):
        engine.backward(engine(**make_batch(MODEL, step, 0)))
        engine.step()
    sums = {name: float(safe_get_full_fp32_param(p).double().sum()) for name, p in engine.module.named_parameters()}
    sys.stdout.write(f"SUMS {json.dumps(sums)}\n")
    sys.stdout.flush()
    if end == "exception":
        raise ValueError("the script failed")
    if end == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
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
