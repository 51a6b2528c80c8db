# SPDX-License-Identifier: Apache-2.0
"""A measured profile and a placement with round numbers."""

from __future__ import annotations

from ds_fuyou.planner.cost import Placement
from ds_fuyou.planner.plan import PlanInput
from ds_fuyou.planner.policies import Updates
from ds_fuyou.planner.profile import BlockCost, MeasuredActivations, OperatorCost, RunProfile, StorageRates
from ds_fuyou.planner.profiled import Prediction, predict, run_time
from ds_fuyou.state_layout import WHOLE, layout_of

__all__ = ["ACTIVATIONS", "GIVEN", "PLACE", "PROFILE", "predicted"]

GIVEN = PlanInput(
    numel=100_000_000,
    param_bytes_each=2,
    grad_bytes_each=2,
    layout=layout_of(WHOLE, 2),
    largest_param_numel=1_000_000,
    dram_budget_bytes=4 << 30,
)

PROFILE = RunProfile(
    machine="m" * 16,
    model="n" * 16,
    shape=(2, 100),
    num_elements=200.0,
    accumulation=1,
    blocks=(
        BlockCost("blocks.0", 4e9, 100.0, (OperatorCost("up/mm", 4e9, 400.0, True),)),
        BlockCost("blocks.1", 4e9, 100.0, (OperatorCost("up/mm", 4e9, 400.0, True),)),
        BlockCost("", 2e9, 0.0, ()),
    ),
    forward_secs=1.0,
    backward_secs=3.0,
    update_rate=100e6,
    storage=StorageRates(read=2e9, write=1e9, mixed=4e9 / 3, cpu_secs_per_byte=0.0, probed_bytes=1e8),
    link_up=10e9,
    link_down=10e9,
    device_is_host=False,
    num_cores=2,
    host_bytes=8e9,
    device_bytes=4e9,
    given=GIVEN,
    world_size=1,
    num_params=100_000_000,
)
"""4 s of compute; reads and writes share storage exactly (duplex 1)."""

ACTIVATIONS = MeasuredActivations(
    num_blocks=2,
    block_bytes=1e9,
    outside_bytes=1e8,
    beside_bytes=2e9,
    loss_bytes=1e9,
    passing_bytes=1e8,
    fixed_bytes=5e8,
    mean_tokens=150.0,
    longest_tokens=200.0,
    room=1e9,
    once={"blocks.1": "what it is given is changed in place, by itself or behind it"},
)

PLACE = Placement(params=1.0, states=0.0, grads=1.0)
"""States on storage: 1.2 GB read, 1.2 GB written, 1.8 s of storage; 1 s of updates."""


def predicted(
    profile: RunProfile = PROFILE,
    place: Placement = PLACE,
    updates: Updates = Updates.DEADLINE,
    given: PlanInput = GIVEN,
) -> Prediction:
    return predict(run_time(profile, given, updates=updates), place)
