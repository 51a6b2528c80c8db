# SPDX-License-Identifier: Apache-2.0
"""With everything on storage, host memory does not grow with the model (the benchmark measures it at size)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runner import environment, free_port

ROOT = Path(__file__).parents[2]
LAYERS = (4, 12)
LIMIT_BYTES_EACH = 1.0

SCRIPT = """
import resource, sys
import deepspeed, torch
from tests.harness.models import TinyGPT, make_batch
from tests.harness.runner import ds_config

num_layers, clip, path = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
mib = 1 << 20
plan = {"chunk_bytes": 2 * mib, "staging_bytes": 32 * mib, "prefetch_bytes": 8 * mib}
tier = {"tier": "nvme"}
fuyou = {"nvme_path": path, "parameters": tier, "optimizer": tier, "gradients": tier, "plan": plan}
config = {**ds_config(gradient_clipping=clip), "fuyou": fuyou}
deepspeed.init_distributed("gloo")
with deepspeed.zero.Init(config_dict_or_path=config):
    model = TinyGPT(num_layers=num_layers, width=640, vocabulary=500)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(4):
    engine.backward(engine(**make_batch({}, step, 0)))
    engine.step()
peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print("FOUND", sum(p.ds_numel for p in model.parameters()), peak_bytes, flush=True)
engine.destroy()
"""


def peak(num_layers: int, clip: float, swap: Path) -> tuple[int, int]:
    """(parameters, peak resident bytes) of a fresh process."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(num_layers), str(clip), str(swap)],
        cwd=ROOT,
        env={**environment(0, 1, free_port()), "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    words = next(line for line in ran.stdout.splitlines() if line.startswith("FOUND")).split()
    return int(words[1]), int(words[2])


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_peak_memory_stays_flat(clip: float, tmp_path: Path) -> None:
    (small, small_peak), (large, large_peak) = (peak(layers, clip, tmp_path) for layers in LAYERS)
    grown = (large_peak - small_peak) / (large - small)
    assert large - small > 15_000_000
    assert grown <= LIMIT_BYTES_EACH, f"{grown:.2f} bytes an added parameter"
