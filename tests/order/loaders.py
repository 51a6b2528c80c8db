# SPDX-License-Identifier: Apache-2.0
"""``loaders.py SWAP fork|spawn``: trains from a data loader whose workers begin while updates are on their way. Prints
losses, and what each worker found of the engine's memory and files."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

from ds_fuyou.storage.lifetime import open_stores
from tests.harness.models import TinyGPT, make_batch
from tests.harness.runner import ds_config

MODEL = {"num_layers": 3, "width": 32, "vocabulary": 101}
STEPS = 4


class Batches(torch.utils.data.Dataset):
    """``staging``: where the engine's staging memory begins."""

    def __init__(self, staging: int) -> None:
        self.staging, self.parent = staging, os.getpid()

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        found = {
            "own process": os.getpid() != self.parent,
            "resident": resident_at(self.staging),
            "stores": len(open_stores()),
            "data files": sum(name.endswith("/data") for name in open_files()),
        }
        return make_batch(MODEL, index, 0), found


def open_files() -> list[str]:
    return [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]


def resident_at(address: int) -> int:
    """KiB in memory of the mapping that holds an address; -1 if there is none."""
    found = -1
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            found = 0 if int(bounds[1], 16) <= address < int(bounds[2], 16) else -1
        elif found == 0 and line.startswith("Rss:"):
            return int(line.split()[1])
    return -1


def main(swap: str, context: str) -> None:
    block = {"nvme_path": swap, "parameters": {"tier": "nvme"}, "optimizer": {"tier": "nvme"}}
    config = ds_config(fuyou={**block, "gradients": {"tier": "nvme"}, "io": {"engine": "threads"}})
    torch.manual_seed(1)
    model = TinyGPT(**MODEL)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    core = engine.optimizer.rank_state.core
    losses, found = [], []
    for epoch in range(2):
        data = Batches(core.staging.pool.base)
        loader = torch.utils.data.DataLoader(
            data, batch_size=None, num_workers=2 if epoch else 0, multiprocessing_context=context if epoch else None
        )
        for batch, there in loader:
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            found.append(there)
    own = resident_at(core.staging.pool.base)
    engine.destroy()
    sys.stdout.write("FOUND " + json.dumps({"losses": losses, "found": found, "resident": own}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
