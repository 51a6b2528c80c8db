# SPDX-License-Identifier: Apache-2.0
"""A model put together from parts: two of ``zero.Init`` contexts, each with a swapper of its own, one built without.

DeepSpeed asks the first parameter's swapper for all parameters of a gather. What an engine took it leaves behind.
"""

from __future__ import annotations

from pathlib import Path

from tests.harness import forked
from tests.harness.ports import free_port
from tests.harness.runner import environment

SCRIPT = """
import sys, torch, deepspeed

tier = {{"tier": "nvme"}}
config = {{
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {{"enabled": True}},
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}},
    "zero_optimization": {{"stage": 3, "stage3_param_persistence_threshold": 0}},
    "fuyou": {{"nvme_path": {path!r}, "parameters": tier, "optimizer": tier, "gradients": tier}},
}}
deepspeed.init_distributed("gloo")
parts = []
for seed in (1, 2):
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=config):
        parts.append(torch.nn.Linear(64, 64))
frozen, head = parts
frozen.requires_grad_(False)
assert frozen.weight.nvme_swapper is not head.weight.nvme_swapper
model = torch.nn.Sequential(frozen, head, torch.nn.Linear(64, 64))
late = model[2]

def look():
    with deepspeed.zero.GatheredParameters([frozen.weight, head.weight]):
        return frozen.weight.clone(), head.weight.clone()

before = look()
trained = [p for p in model.parameters() if p.requires_grad]
engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
assert all(torch.equal(a, b) for a, b in zip(before, look()))
losses = []
for _ in range(3):
    loss = engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
after = look()
assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
assert losses[2] < losses[0]
engine.destroy()
assert all(torch.equal(a, b) for a, b in zip(after, look()))
engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
assert all(torch.equal(a, b) for a, b in zip(after, look()))
assert engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().square().mean().item() < losses[2]
engine.destroy()
"""


def test_parts_of_two_inits_train_together(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    status, said = forked.run(SCRIPT.format(path=str(swap)), [], environment(0, 1, free_port()), tmp_path)
    assert status == 0, said[-4000:]
    assert not [path for path in swap.glob("**/*") if path.is_file()]
