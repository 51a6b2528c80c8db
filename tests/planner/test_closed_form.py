# SPDX-License-Identifier: Apache-2.0
"""The closed form against the simulation, and against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from ds_fuyou.planner.cost import Placement, StepCost, Workload, closed_form, shared_secs
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.policies import Policy, Updates
from ds_fuyou.simulator.choose import Chosen, try_choose
from ds_fuyou.simulator.models import with_adapters
from ds_fuyou.simulator.simulate import simulate
from ds_fuyou.simulator.systems import POLICIES, find_policy
from ds_fuyou.state_layout import SPLIT, WHOLE, layout_of
from tests.planner.support import chosen, machine, model

STREAMED = [name for name, policy in POLICIES.items() if not policy.on_device]


@pytest.mark.parametrize("system", STREAMED)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_both_agree_within_10_percent(system: str, accumulation: int) -> None:
    compared = 0
    for name, batch in (("13B", 8), ("13B", 64), ("70B", 16), ("175B", 8)):
        for on in (machine(12, 768), machine(3, 256), machine(12, 768, "a100_80gb")):
            work = Workload(model(name), batch, 1024, accumulation)
            all_of_it = replace(on, pinned_limit_bytes=on.dram_usable_bytes)
            found = try_choose(work, all_of_it, find_policy(system))
            if isinstance(found, Chosen):
                assert found.closed.iteration_secs == pytest.approx(found.iteration_secs, rel=0.10)
                compared += 1
    assert compared >= 2


@pytest.mark.parametrize("masters", [WHOLE, SPLIT])
@pytest.mark.parametrize("layers", [2, 3, 4, 6, 12])
def test_states_pass_storage_between_gradients(layers: int, masters: str) -> None:
    """What no lane shows by itself: with few blocks storage waits long for the first gradient, less long where writes
    of split masters are still on their way.
    """
    whole = model("13B")
    work = Workload(replace(whole, blocks=whole.blocks[:layers]), 16)
    place = Placement(params=1.0)
    ours, on = replace(find_policy("ds_fuyou"), layout=layout_of(masters, 2)), machine()
    simulated = simulate(work, on, ours, place)
    found = closed_form(work, on, ours, place)
    assert found.iteration_secs == pytest.approx(simulated.iteration_secs, rel=0.035)
    longest = shared_secs(found.lane_secs[Lane.READ], found.lane_secs[Lane.WRITE], on.storage_duplex)
    assert longest < 0.96 * simulated.iteration_secs or layers > 4


def test_what_is_kept_for_the_next_pass_is_not_read_again() -> None:
    """P16 on storage, 2 bytes a parameter a pass: backward begins where forward ended, and so does the next forward
    with what no update changes.
    """
    ours, on = replace(find_policy("ds_fuyou"), layout=layout_of(WHOLE, 2)), machine()
    dense, kept = model("13B"), 3e9

    def spared(work: Workload, place: Placement) -> float:
        with_memory = replace(place, kept_param_bytes=kept)
        lanes = [closed_form(work, on, ours, each).lane_secs[Lane.READ] for each in (place, with_memory)]
        simulated = simulate(work, on, ours, with_memory).lane_secs[Lane.READ]
        assert simulated == pytest.approx(lanes[1], rel=2e-2)
        return (lanes[0] - lanes[1]) * on.storage_read

    assert spared(Workload(dense, 8), Placement()) == pytest.approx(kept)
    assert spared(Workload(dense, 8, accumulation=4), Placement()) == pytest.approx((4 + 3) * kept), "and between them"
    assert spared(Workload(dense, 8), Placement(params=1.0)) == 0.0
    assert spared(Workload(dense, 8), Placement(params=0.95)) == pytest.approx(0.1 * dense.params), "all there is"
    frozen = with_adapters(dense, 8, 16, False)
    place = Placement(params=1.0, states=1.0, frozen=0.0)
    assert spared(Workload(frozen, 8), place) == pytest.approx(2 * kept)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_updates_beside_forward_hand_it_what_they_write(accumulation: int) -> None:
    """P16 on storage: a step's first forward takes it out of updates that wait for step(), and reads it where they end
    in backward; backward and further micro-batches read it always.
    """
    work, on = Workload(model("13B"), 8, accumulation=accumulation), machine()
    ours = replace(find_policy("ds_fuyou"), layout=layout_of(WHOLE, 2))

    def passes(policy: Policy, **shares: float) -> float:
        """In which all P16 is read."""
        place = Placement(grads=1.0, **shares)
        read = closed_form(work, on, policy, place).lane_secs[Lane.READ]
        assert simulate(work, on, policy, place).lane_secs[Lane.READ] == pytest.approx(read, rel=2e-2)
        states = policy.layout.moved_bytes(0.0, place.states)[0] * work.model.params
        return (read * on.storage_read - states) / (2 * work.model.params)

    all_of_them = 2 * accumulation
    assert passes(ours, states=0.0) == pytest.approx(all_of_them)
    assert passes(ours, states=1.0, states_twice=1.0) == pytest.approx(all_of_them)
    assert passes(ours, states=1.0, states_twice=0.25) == pytest.approx(all_of_them - 0.75), "one version waits"
    assert passes(ours.deferred(), states=0.25, states_twice=0.25) == pytest.approx(all_of_them - 0.25)
    assert passes(find_policy("zero_infinity"), states=0.0) == pytest.approx(all_of_them)


def test_what_stays_on_the_device_for_backward_comes_once() -> None:
    """Neither the link nor storage moves it again; what host memory keeps of it is the same."""
    on, work = machine(), Workload(model("13B"), 8)
    ours = replace(find_policy("ds_fuyou"), layout=layout_of(WHOLE, 2))
    for place, read in ((Placement(), 2e9), (Placement(params=1.0), 0.0), (Placement(kept_param_bytes=1e9), 1e9)):
        before, after = (
            closed_form(work, on, replace(ours, reused_bytes=reused), place).lane_secs for reused in (0.0, 2e9)
        )
        assert before[Lane.UP] - after[Lane.UP] == pytest.approx(2e9 / on.link_up)
        assert (before[Lane.READ] - after[Lane.READ]) * on.storage_read == pytest.approx(read)
    all_of_it = closed_form(work, on, replace(ours, reused_bytes=1e15), Placement())
    assert all_of_it.lane_secs[Lane.UP] == pytest.approx(2 * work.model.params / on.link_up)


def test_states_of_the_embedding_are_in_memory_before_all_others() -> None:
    """They are needed first, and nothing is read for them between two steps where any are in host memory."""
    ours, on = find_policy("ds_fuyou"), machine()
    work = Workload(model("13B"), 64)
    first = work.model.first_trained_params / work.model.trainable_params
    none, few, more = (Placement(params=1.0, states=share) for share in (0.0, first, 1.5 * first))
    secs = [closed_form(work, on, ours, place).iteration_secs for place in (none, few, more)]
    read, _ = ours.layout.moved_bytes(1.0, 0.0)
    assert secs[0] - secs[1] == pytest.approx(read * work.model.first_trained_params / on.storage_read)
    assert secs[1] == pytest.approx(secs[2])


def test_busy_seconds_of_the_lanes_are_the_same() -> None:
    for system in STREAMED:
        found = chosen("13B", 16, system)
        for lane in Lane:
            assert found.simulated.lane_secs[lane] == pytest.approx(found.closed.lane_secs[lane], rel=2e-2, abs=2e-2)


def test_a_step_by_hand() -> None:
    """13B at batch 8 on storage alone: 16 bytes read and 14 written a parameter, and the block inputs."""
    on, policy = machine(), find_policy("fuyou")
    work = Workload(model("13B"), 8)
    inputs = 40 * 8 * 1024 * 2 * 5120
    place = Placement(swapped_bytes=float(inputs))
    found = closed_form(work, on, policy, place)
    params = work.model.params
    assert found.lane_secs[Lane.READ] == pytest.approx((16 * params + inputs) / on.storage_read)
    assert found.lane_secs[Lane.WRITE] == pytest.approx((14 * params + inputs) / on.storage_write)
    assert found.lane_secs[Lane.UP] == pytest.approx((4 * params + inputs) / on.link_up)
    assert found.lane_secs[Lane.DOWN] == pytest.approx((4 * params + inputs) / on.link_down), "cast to fp32 before"
    assert found.lane_secs[Lane.CPU] == pytest.approx(params / on.update_rate)
    storage = (14 * params + inputs) / on.storage_read + 14 * params / on.storage_write
    forward = found.lane_secs[Lane.GPU] / 3  # which nothing delays; backward is storage's
    first = work.model.first_trained_params * (4 / on.link_down + 1 / on.update_rate)
    assert found.iteration_secs == pytest.approx(forward + storage + first)
    assert found.bound is Lane.WRITE  # as many bytes as are read, at a lower rate


def test_recomputed_flops_and_resident_shares_move_the_right_lanes() -> None:
    on, policy = machine(), replace(find_policy("ds_fuyou"), layout=layout_of(WHOLE, 2))
    work = Workload(model("13B"), 16)
    base = Placement(swapped_bytes=1e9)
    plain = closed_form(work, on, policy, base)
    again = closed_form(work, on, policy, replace(base, recompute_flops=1e15))
    rate = on.flops * policy.share_of_block_rate
    assert again.lane_secs[Lane.GPU] - plain.lane_secs[Lane.GPU] == pytest.approx(1e15 / rate)
    half = closed_form(work, on, policy, replace(base, states=0.5, states_twice=0.5))
    saved = 6 * work.model.params
    assert plain.lane_secs[Lane.READ] - half.lane_secs[Lane.READ] == pytest.approx(saved / on.storage_read)
    assert plain.lane_secs[Lane.WRITE] - half.lane_secs[Lane.WRITE] == pytest.approx(saved / on.storage_write)


def test_reads_and_writes_share_storage_unless_measured_otherwise() -> None:
    assert shared_secs(3.0, 2.0, 1.0) == 5.0
    assert shared_secs(3.0, 2.0, 2.0) == 3.0
    found = chosen("13B", 8, "fuyou")
    apart = replace(found.machine, storage_duplex=2.0)
    faster = simulate(found.work, apart, found.policy, found.place)
    assert faster.iteration_secs < 0.7 * found.iteration_secs
    closed = closed_form(found.work, apart, found.policy, found.place)
    assert closed.iteration_secs == pytest.approx(faster.iteration_secs, rel=0.10)


def test_deadline_order_hides_the_optimizer_behind_forward_too() -> None:
    """Same bytes and lanes; only when updates may run differs."""
    place = Placement(grads=1.0, swapped_bytes=1e9, dram_activation_bytes=1e9)
    work, on = Workload(model("13B"), 32), machine()
    ours = find_policy("ds_fuyou")
    secs = [
        simulate(work, on, replace(ours, updates=find_policy(other).updates), place).iteration_secs
        for other in ("ds_fuyou", "fuyou", "fuyou_optimizer_as_separate_stage")
    ]
    assert secs == sorted(secs)
    assert secs[0] < 0.9 * secs[1] < 0.9 * secs[2]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("updates", Updates)
def test_what_is_kept_between_placements_changes_nothing(updates: Updates, accumulation: int) -> None:
    """Each field of a placement, after another one."""
    work, on, policy = Workload(model("13B"), 8, 1024, accumulation), machine(3, 96), find_policy("ds_fuyou")
    policy = replace(policy, updates=updates, redo_share=0.2, staying_bytes=1e9)
    places = [Placement(0.3, 0.2, 0.4, frozen=0.5, swapped_bytes=4e9, staging_bytes=1e9, kept_param_bytes=1e9)]
    for field in fields(Placement):
        old = getattr(places[0], field.name)
        changed = (("qkv", 1, 2, 3),) if field.name == "fates" else old * 0.5 + 0.1
        places += [replace(places[0], **{field.name: changed}), places[0]]
    kept = StepCost(work, on, policy)
    for place in places:
        fresh = closed_form(work, on, policy, place)
        assert (kept.form(place), kept.secs(place)) == (fresh, fresh.iteration_secs)
    activations = {"swapped_bytes": 7e9, "dram_activation_bytes": 2e9, "kept_bytes": 3e9, "recompute_flops": 1e14}
    assert places[0].with_activations(*activations.values()) == replace(places[0], **activations)


@pytest.mark.parametrize("updates", Updates)
def test_a_system_in_which_nothing_overlaps_takes_the_sum(updates: Updates) -> None:
    policy = replace(find_policy("zero_infinity"), updates=updates)
    assert policy.in_a_row
    found = closed_form(Workload(model("13B"), 8, 1024, 2), machine(3, 96), policy, Placement())
    assert found.iteration_secs >= sum(found.lane_secs.values()) * (1 - 1e-9)
