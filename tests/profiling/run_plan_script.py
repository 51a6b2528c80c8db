# SPDX-License-Identifier: Apache-2.0
"""Three engines one after the other: nothing known, planned from what the first one kept, and without any profile.

Run by test_run_plan.py with a directory, on two ranks that do not share their kept profiles; rank 0 prints one line of
JSON. The first engine clips in its last steps. What is kept claims a faster machine than this one before the second
one starts. That one is given larger batches, then a slower disk. How fast a disk is at first is limited, too: what is
found out is a ratio of limits.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch

from tests.harness.models import TinyGPT, make_batch
from tests.harness.runner import ds_config

MODEL = {"num_layers": 3, "width": 72, "vocabulary": 500}
USUAL, SLOW = 30e6, 5e6  # bytes a second; a loaded machine may reach less than the first, not as little as the second
TINY = 1e-6  # seconds
AUTO = {
    "activations": {"mode": "auto"},
    "gpu_budget_bytes": 150_000,
    "plan": {"smallest_swapped_bytes": 1024, "activation_bytes": 65536},
}


def config_of(directory: str, **block) -> dict:
    fuyou = {"nvme_path": directory, "optimizer": {"tier": "nvme"}, "dram_budget_bytes": 4 << 30, **block}
    return ds_config(gradient_clipping=0.0, fuyou=fuyou)


def engine_of(directory: str, **block) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    model = TinyGPT(**MODEL)
    config = config_of(directory, **block)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.optimizer.rank_state.core.io.engine.set_throttle(USUAL, USUAL)
    return engine


def train(engine, first: int, last: int, repeat: int = 1) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(make_batch(MODEL, step, 0)["ids"].repeat(repeat, 1))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def about(engine, losses: list[float]) -> dict:
    plan = engine.optimizer.run_plan
    profile = None if plan.profile is None else plan.profile.to_json()
    found = {"losses": losses, "profile": profile, "causes": [finding.cause.name for finding in plan.findings]}
    if plan.prediction is not None:
        found["predicted"] = {"secs": plan.prediction.iteration_secs, "written": plan.prediction.write_bytes}
        found["predicted"]["updates"] = plan.prediction.updates.name
    found["planned_bytes"] = engine.optimizer._tier_bytes.planned(1e9)
    found["peak_bytes"] = engine.optimizer._tier_bytes.peaks()
    numel = engine.optimizer.rank_state.layout.numel
    engine.destroy()
    return {**found, "numel": numel}


def kept() -> dict[str, str]:
    """What this rank has kept, by path."""
    return {str(path): path.read_text() for path in Path(os.environ["DS_FUYOU_PROFILES"]).glob("*")}


def claim_a_faster_machine() -> None:
    """Whose compute takes no time, nor the host's part in updates and I/O."""
    for path, text in kept().items():
        found = json.loads(text)
        found["storage"]["cpu_secs_per_byte"] = 0.0
        Path(path).write_text(
            json.dumps({**found, "forward_secs": TINY, "backward_secs": TINY, "update_rate": 1e15}),
        )


def main() -> None:
    directory, trace = sys.argv[1], os.path.join(sys.argv[1], "trace.json")
    deepspeed.init_distributed("gloo")
    results = {}
    engine = engine_of(directory, trace=trace, **AUTO)
    losses = train(engine, 0, 6)
    engine.optimizer.clip_grad = 1e-3  # every step from now on
    train(engine, 6, 10)
    results["cold"] = about(engine, losses)
    results["kept"] = [kept()]
    claim_a_faster_machine()
    results["claimed"] = kept()
    engine = engine_of(directory, **AUTO)
    results["document"] = engine.optimizer.run_plan.document().to_json()
    results["config"] = config_of(directory, **AUTO)
    losses = train(engine, 0, 6)  # as many as say what rates are usual: none is found slower before the batch is
    losses += train(engine, 6, 14, repeat=2)
    engine.optimizer.rank_state.core.io.engine.set_throttle(SLOW, SLOW)
    results["warm"] = about(engine, losses + train(engine, 14, 26, repeat=2))
    results["kept"].append(kept())
    os.environ["DS_FUYOU_PROFILES"] = "off"
    engine = engine_of(directory)
    results["off"] = about(engine, train(engine, 0, 4))
    if os.environ["RANK"] == "0":
        sys.stdout.write(f"RESULT {json.dumps(results)}\n")


if __name__ == "__main__":
    main()
