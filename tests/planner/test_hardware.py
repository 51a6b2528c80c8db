# SPDX-License-Identifier: Apache-2.0
"""Presets, the rates a step sees, the engine of lanes, and what a plan needs of each tier."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

import ds_fuyou.planner.presets as hardware
from ds_fuyou.cli import main
from ds_fuyou.cli.machine_options import add_machine_options, machine_from
from ds_fuyou.errors import FuyouConfigError, FuyouStateError
from ds_fuyou.planner.cost import Placement, Workload, closed_form
from ds_fuyou.planner.hardware import GIB
from ds_fuyou.planner.lanes import Lane
from ds_fuyou.planner.presets import find_gpu, find_host, find_ssd
from ds_fuyou.simulator.choose import choose, fits, largest_model
from ds_fuyou.simulator.schedule import Schedule, Task
from ds_fuyou.simulator.systems import POLICIES, find_policy
from tests.planner.support import chosen, machine, model

PRESETS = json.loads(Path(hardware.__file__).with_name("presets.json").read_text(encoding="utf-8"))


def test_every_number_has_a_source() -> None:
    for kind in ("gpus", "ssds", "hosts"):
        for name, entry in PRESETS[kind].items():
            for number, value in entry.items():
                if number != "aliases":
                    assert value[0] > 0
                    assert len(value[1]) > 10, f"{name}: {number}"
    for value in PRESETS["constants"].values():
        assert len(value[1]) > 10


def test_names_are_found_whatever_their_spelling() -> None:
    assert find_gpu("RTX 4090") == find_gpu("nvidia-geforce-rtx-4090") == find_gpu("4090")
    assert find_gpu("A100").memory_bytes == 80 * GIB
    for kind, find in (("gpus", find_gpu), ("ssds", find_ssd), ("hosts", find_host)):
        for name in PRESETS[kind]:
            assert find(name).name == name
        with pytest.raises(FuyouConfigError, match=rf"; known are {', '.join(PRESETS[kind])}$"):
            find("zzzz")
    with pytest.raises(FuyouConfigError, match=r"did you mean h100, .*\? Known are rtx4090, .*, b200$"):
        find_gpu("h101")


@pytest.mark.parametrize("command", ["plan", "max-model"])
def test_names_of_parts_are_in_the_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for kind in ("gpus", "ssds", "hosts"):
        assert f"known: {', '.join(PRESETS[kind])}" in said


def test_the_newest_gpus_hold_and_compute_more() -> None:
    h100, h200, b200 = map(find_gpu, ("H100", "H200", "B200"))
    assert h100.memory_bytes < h200.memory_bytes < b200.memory_bytes
    assert h100.memory_rate < h200.memory_rate < b200.memory_rate
    assert h100.matmul_flops == h200.matmul_flops < b200.matmul_flops


@pytest.mark.parametrize(
    ("flag", "given", "num_bytes"),
    [
        ("--dram-gb", "64", 64 * GIB),
        ("--dram-gb", "64GiB", 64 * GIB),
        ("--dram-gb", "64 GB", 64e9),
        ("--ssd-tb", "2", 2e12),
        ("--ssd-tb", "2TB", 2e12),
        ("--ssd-tb", "500gb", 5e11),
        ("--pinned-gb", "0.5", GIB / 2),
        ("--pinned-gb", "512MiB", GIB / 2),
    ],
)
def test_sizes_may_have_the_suffix_of_the_block(flag: str, given: str, num_bytes: float) -> None:
    parser = argparse.ArgumentParser()
    add_machine_options(parser)
    on = machine_from(parser.parse_args([flag, given]))
    found = {"--dram-gb": on.dram_bytes, "--ssd-tb": on.storage_bytes, "--pinned-gb": on.pinned_limit_bytes}
    assert found[flag] == pytest.approx(num_bytes)


def test_a_size_that_is_none_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--model", "6B", "--dram-gb", "much"])
    assert "argument --dram-gb: invalid size value: 'much'" in capsys.readouterr().err


def test_storage_grows_with_ssds_up_to_what_the_host_carries() -> None:
    rates = [machine(n).storage_write for n in (1, 2, 3, 6, 12, 24)]
    assert rates == sorted(rates)
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.02)
    assert rates[-1] < 32e9 * hardware.constants().storage_under_load
    assert machine(0).storage_read == 0


def test_the_testbed_gets_its_published_rates() -> None:
    on = machine()
    assert on.flops == pytest.approx(159.7e12, rel=0.001)
    assert 18e9 <= on.storage_write <= on.storage_read <= 21e9


def test_the_earliest_deadline_runs_first_and_storage_is_shared() -> None:
    schedule = Schedule()
    first = schedule.add(Task("late", Lane.CPU, 1.0, deadline=5))
    second = schedule.add(Task("soon", Lane.CPU, 1.0, deadline=1))
    third = schedule.add(Task("after", Lane.GPU, 1.0, deadline=0), second)
    assert schedule.run() == 2.0
    assert [schedule.tasks[i].start for i in (first, second, third)] == [1.0, 0.0, 1.0]
    for duplex, end in ((1.0, 4.0), (2.0, 3.0)):
        shared = Schedule(duplex)
        shared.add(Task("read", Lane.READ, 3.0, 0))
        shared.add(Task("write", Lane.WRITE, 1.0, 0))
        assert shared.run() == pytest.approx(end)


def test_buffers_hold_back_and_a_circle_is_found() -> None:
    schedule = Schedule(pools={"staging": 1})
    for number in range(2):
        read = schedule.add(Task("read", Lane.READ, 1.0, number, takes="staging"))
        schedule.add(Task("update", Lane.CPU, 5.0, number, gives="staging"), read)
    assert schedule.run() == 12.0  # without the pool: 11
    circle = Schedule()
    number = circle.add(Task("a", Lane.GPU, 1.0, 0))
    circle.tasks[number].waits = 1
    with pytest.raises(FuyouStateError, match="wait for each other"):
        circle.run()


@pytest.mark.parametrize(("in_memory_secs", "loaded_begins", "ends"), [(3.0, 3.0, 11.0), (10.0, 20.0, 28.0)])
def test_a_loaded_chunk_goes_ahead_while_storage_would_end_last(
    in_memory_secs: float, loaded_begins: float, ends: float
) -> None:
    schedule = Schedule(pools={"staging": 1})
    for number in range(2):
        update = schedule.add(Task("in memory", Lane.CPU, in_memory_secs, number))
        schedule.tasks[update].chunk = (update,)
    loaded = []
    for number in (10, 11):
        read = schedule.add(Task("read", Lane.READ, 2.0, number, takes="staging", holds=True))
        update = schedule.add(Task("update", Lane.CPU, 1.0, number, holds=True), read)
        write = schedule.add(Task("write", Lane.WRITE, 2.0, number, gives="staging", holds=True), update)
        schedule.tasks[read].chunk = (read, update, write)
        loaded.append(update)
    assert schedule.run() == ends
    assert schedule.tasks[loaded[0]].start == loaded_begins


@pytest.mark.parametrize("system", POLICIES)
@pytest.mark.parametrize("dram_gib", [48, 128, 384, 768])
def test_what_is_chosen_fits_every_tier(system: str, dram_gib: int) -> None:
    on = machine(6, dram_gib)
    for name in ("13B", "70B"):
        work = Workload(model(name), 8)
        if fits(work, on, find_policy(system)):
            found = chosen(name, 8, system, on)
            assert found.needs.missing() == {}
            for tier, have in found.needs.have.items():
                assert found.needs.total(tier) <= have


def test_the_pinned_limit_counts() -> None:
    on = replace(machine(6, 768), pinned_limit_bytes=30e9)
    found = chosen("13B", 8, on=on)
    assert found.needs.total("cpu") <= 30e9
    assert found.iteration_secs > chosen("13B", 8, on=machine(6, 768)).iteration_secs


def test_everything_in_host_memory_needs_no_storage_and_is_not_slower_than_offload() -> None:
    found = chosen("13B", 8, on=machine(0, 768))
    assert found.needs.total("nvme") == 0
    assert found.simulated.lane_secs[Lane.READ] == found.simulated.lane_secs[Lane.WRITE] == 0
    assert found.tokens_per_s >= chosen("13B", 8, "zero_offload", machine(0, 768)).tokens_per_s


def test_more_host_memory_is_never_slower() -> None:
    rates = [chosen("70B", 16, on=machine(4, dram)).tokens_per_s for dram in (48, 96, 192, 384, 768, 1536)]
    for less, more in itertools.pairwise(rates):
        assert more >= 0.995 * less


def test_sums_of_gradients_move_where_gradients_are_on_storage() -> None:
    """By each micro-batch but the last, and read by the updates, as far as staging does not hold them."""
    work, on, policy = Workload(model("13B"), 8, accumulation=4), machine(), find_policy("ds_fuyou")
    grad = 2.0 * work.model.params
    moved = {
        name: closed_form(work, on, policy, place).lane_secs
        for name, place in (
            ("memory", Placement(grads=1.0)),
            ("storage", Placement(grads=0.0)),
            ("staged", Placement(grads=0.0, staging_bytes=grad / 2)),
        )
    }
    written = {name: secs[Lane.WRITE] * on.storage_write for name, secs in moved.items()}
    assert written["storage"] - written["memory"] == pytest.approx((3 + 1) * grad)
    assert written["staged"] - written["memory"] == pytest.approx((3 / 2 + 1) * grad)
    assert chosen("13B", 8, accumulation=4).tokens_per_s > 0


def test_the_cheapest_change_really_fits() -> None:
    work, on, policy = Workload(model("175B"), 64), machine(12, 256), find_policy("ds_fuyou")
    with pytest.raises(FuyouConfigError, match=r"batch (\d+) fits") as raised:
        choose(work, on, policy)
    batch = int(str(raised.value).split("batch ")[-1].split()[0])
    assert fits(replace(work, batch=batch), on, policy)
    assert not fits(replace(work, batch=2 * batch), on, policy)
    with pytest.raises(FuyouConfigError, match=r"it fits with .* of storage"):
        choose(Workload(model("276B"), 1), machine(1, 768), find_policy("fuyou"))


def test_no_model_where_nothing_trains() -> None:
    models = [model(name) for name in ("6B", "13B")]
    assert largest_model(models, 1, 1024, machine(1, 1), find_policy("ds_fuyou")) is None
    assert largest_model(models, 1, 1024, machine(1, 64), find_policy("ds_fuyou")) is models[1]
