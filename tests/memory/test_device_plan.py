# SPDX-License-Identifier: Apache-2.0
"""Beside a device, host memory is what the plan says while gradients accumulate, whatever form masters have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.build import build
from tests.harness import forked
from tests.harness.ports import free_port
from tests.harness.runner import environment

MOST_OVER_PLAN = 1.05

COMMON = """
import sys
from tests.device.accelerator import install
from tests.device.backend import preset

install(**preset("rtx4090"), zeros=1)  # what is large is not computed: the device's memory takes none of the host's

import deepspeed, torch
from tests.harness.models import TinyGPT, make_batch
from tests.harness.runner import ds_config

masters, path = sys.argv[1:]
mib = 1 << 20


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def train(config, num_layers, width, num_steps):
    model = TinyGPT(num_layers=num_layers, width=width, vocabulary=500)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    del model
    for micro_batch in range(num_steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(**make_batch({}, micro_batch, 0)))
        engine.step()
    torch.standin.synchronize()
    return engine


deepspeed.init_distributed("gloo")
memory = {"device": "cpu", "pin_memory": True}
zero = {"stage": 3, "offload_optimizer": memory, "offload_param": memory}
config = ds_config(gradient_accumulation_steps=4, zero_optimization=zero)
train(config, 1, 64, 1).destroy()  # what DeepSpeed and the device take whatever is trained
base = status("VmRSS")
plan = {"chunk_bytes": 8 * mib, "staging_bytes": 192 * mib, "prefetch_bytes": 64 * mib}
"""

SCRIPT = """
tier = {"tier": "nvme"}
config["fuyou"] = {"nvme_path": path, "plan": plan, "parameters": tier, "gradients": tier}
config["fuyou"] |= {"optimizer": {"tier": "nvme", "masters": masters}, "activations": {"mode": "none"}}
engine = train(config, 16, 640, 2)
with open("/proc/self/clear_refs", "w") as peaks:  # what building takes is told by the other test
    peaks.write("5")
for micro_batch in range(8):
    engine.backward(engine(**make_batch({}, micro_batch, 0)))
    engine.step()
state = engine.optimizer.rank_state
print("FOUND", status("VmHWM") - base, state.planned_host_bytes, flush=True)
assert state.core.options.masters == masters
engine.destroy()
"""


BUILT = """
small, in_memory = {**plan, "staging_bytes": 32 * mib, "prefetch_bytes": 16 * mib}, {"tier": "cpu"}
config["fuyou"] = {"nvme_path": path, "plan": small, "parameters": in_memory, "gradients": in_memory}
config["fuyou"] |= {"optimizer": {"tier": "nvme", "masters": masters}, "activations": {"mode": "none"}}
with deepspeed.zero.Init(config_dict_or_path=config):
    model = TinyGPT(num_layers=16, width=1024, vocabulary=500)
with open("/proc/self/clear_refs", "w") as peaks:
    peaks.write("5")
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
state = engine.optimizer.rank_state
print("FOUND", status("VmHWM") - base, state.planned_host_bytes, flush=True)
assert not any(state.core.place.residency.states) and all(state.core.place.residency.params)
assert state.core.place.num_param_versions == 2
engine.backward(engine(**make_batch({}, 0, 0)))
engine.destroy()
"""


def held_and_planned(script: str, masters: str, tmp_path: Path) -> tuple[int, int]:
    build()
    status, said = forked.run(COMMON + script, [masters, str(tmp_path)], environment(0, 1, free_port()), tmp_path)
    assert status == 0, said[-4000:]
    held, planned = map(int, next(line for line in said.splitlines() if line.startswith("FOUND")).split()[1:])
    return held, planned


@pytest.mark.parametrize("masters", ["split", "whole"])
def test_accumulation_holds_what_is_planned(masters: str, tmp_path: Path) -> None:
    held, planned = held_and_planned(SCRIPT, masters, tmp_path)
    assert planned / 2 < held <= MOST_OVER_PLAN * planned, f"{held / planned:.3f} of the plan's {planned} bytes"


def test_what_zero_init_built_is_gone_before_memory_is_registered(tmp_path: Path) -> None:
    """Registered memory is there as a whole; the partitions would be there beside it."""
    held, planned = held_and_planned(BUILT, "split", tmp_path)
    assert planned / 2 < held <= MOST_OVER_PLAN * planned, f"{held / planned:.3f} of the plan's {planned} bytes"
