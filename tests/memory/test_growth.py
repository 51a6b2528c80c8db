# SPDX-License-Identifier: Apache-2.0
"""With everything on storage, host memory does not grow with the model (the benchmark measures it at size); with a
budget, the plan fills it with shares of the classes, and memory follows the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.harness import forked
from tests.harness.ports import free_port
from tests.harness.runner import environment

LAYERS = (4, 40)
LIMIT_BYTES_EACH = 0.8
"""Less than half of the smallest class. Some 30 MB are the smaller layers' first gradients and the heap's own rest."""
BUDGET_BYTES = 400 << 20
"""Less than half of what the larger model's classes take."""

SCRIPT = """
import sys
import deepspeed, torch
from ds_fuyou.telemetry.placement import placement_of
from tests.harness.models import TinyGPT, make_batch
from tests.harness.runner import ds_config

num_layers, budget, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
mib = 1 << 20
plan = {"chunk_bytes": 2 * mib, "staging_bytes": 32 * mib, "prefetch_bytes": 8 * mib}
tier = {"tier": "nvme"}
fuyou = {"nvme_path": path, "plan": plan}
if budget == "none":
    fuyou.update(parameters=tier, optimizer=tier, gradients=tier)
else:
    fuyou["dram_budget_bytes"] = int(budget)
config = {**ds_config(gradient_clipping=1.0, gradient_accumulation_steps=2), "fuyou": fuyou}
if budget != "none":
    config["zero_optimization"] = {"stage": 3}  # their offload sections would fix the tiers
deepspeed.init_distributed("gloo")

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

# How much of what it was forked with a process has is another number for each.
with open("/proc/self/clear_refs", "w") as peaks:
    peaks.write("5")
base = status("VmRSS")
with deepspeed.zero.Init(config_dict_or_path=config):
    model = TinyGPT(num_layers=num_layers, width=640, vocabulary=500)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for micro_batch in range(8):  # of a few tokens: to compute more takes long, and no more memory that grows
    engine.backward(engine(make_batch({}, micro_batch, 0)["ids"][:1, :5]))
    engine.step()
rows = placement_of(engine.optimizer.rank_state)
resident = sum(row.num_bytes for row in rows if row.tier == "cpu" and "pool" not in row.name)
print("FOUND", sum(p.ds_numel for p in model.parameters()), status("VmHWM") - base, resident, flush=True)
engine.destroy()
"""


@dataclass(frozen=True)
class Found:
    """Of a process of its own: parameters, the most resident bytes beyond those before the model, bytes of the classes
    that the plan keeps in memory."""

    numel: int
    peak_bytes: int
    resident_bytes: int


def run(num_layers: int, swap: Path, budget_bytes: int | None = None) -> Found:
    arguments = [str(num_layers), str(budget_bytes).lower(), str(swap)]
    status, said = forked.run(SCRIPT, arguments, environment(0, 1, free_port()), swap)
    assert status == 0, said[-4000:]
    words = next(line for line in said.splitlines() if line.startswith("FOUND")).split()
    return Found(*(int(word) for word in words[1:]))


def test_peak_memory_is_what_the_plan_says(tmp_path: Path) -> None:
    """Gradients are clipped in every step: the first updates are redone, later ones deferred. They are summed over two
    micro-batches, between which they are on storage."""
    small, large = (run(layers, tmp_path) for layers in LAYERS)
    assert small.resident_bytes == large.resident_bytes == 0
    grown = (large.peak_bytes - small.peak_bytes) / (large.numel - small.numel)
    assert large.numel - small.numel > 85_000_000
    assert grown <= LIMIT_BYTES_EACH, f"{grown:.2f} bytes an added parameter"

    filled = run(LAYERS[1], tmp_path, BUDGET_BYTES)
    assert 0.6 * BUDGET_BYTES < filled.resident_bytes < BUDGET_BYTES
    added = filled.peak_bytes - large.peak_bytes
    assert 0.8 * filled.resident_bytes <= added <= filled.resident_bytes + 0.1 * BUDGET_BYTES, f"{added} bytes more"
