# SPDX-License-Identifier: Apache-2.0
"""The same on an accelerator: pinned memory, copies that nobody waits for, gathers ordered by events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness.ports import free_port
from tests.harness.runner import HERE, TIMEOUT_SECS, differences, ds_config, environment, with_fuyou

pytestmark = pytest.mark.gpu

CASES = {
    "bf16": {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2},
    "fp16": {"gradient_clipping": 0.5, "bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 6}},
}
TIERS = {
    "dram": ("cpu", "cpu", "cpu"),
    "states": ("cpu", "nvme", "cpu"),
    "nvme": ("nvme", "nvme", "nvme"),
}


def run_on_device(case: dict, directory: Path, name: str) -> list[dict]:
    """As ``run_case``, in a process of its own: one that is forked knows the CPU only."""
    file = directory / f"{name}.json"
    file.write_text(json.dumps(case))
    done = subprocess.run(
        [sys.executable, HERE / "train_worker.py", file, directory / name],
        env={**environment(0, 1, free_port()), "DS_ACCELERATOR": "cuda", "MAX_JOBS": os.environ["MAX_JOBS"]},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [torch.load(f"{directory / name}.0", weights_only=False)]


@pytest.mark.parametrize("dtype", CASES)
@pytest.mark.parametrize("tiers", TIERS)
def test_equals_stock(dtype: str, tiers: str, tmp_path: Path) -> None:
    config = ds_config(**CASES[dtype])
    for section in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][section] = {"device": "cpu", "pin_memory": True}
    case = {
        "config": config,
        "model": {},
        "steps": 6,
        "zero_init": True,
        "eval_before": [2],
        "pairs_in": [3],
        "look_at": [4],
    }
    parameters, optimizer, gradients = TIERS[tiers]
    block = {
        "nvme_path": str(tmp_path / "swap"),
        "parameters": {"tier": parameters},
        "optimizer": {"tier": optimizer},
        "gradients": {"tier": gradients},
        "plan": {"chunk_bytes": 131072},
    }
    (tmp_path / "swap").mkdir()
    stock = run_on_device(case, tmp_path, "stock")
    ours = run_on_device(with_fuyou(case, block), tmp_path, "ours")
    assert ours[0]["optimizer_class"] != stock[0]["optimizer_class"]
    assert differences(stock, ours) == []
