# SPDX-License-Identifier: Apache-2.0
"""The simulator against published throughput, from hardware constants alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ds_fuyou.planner.cost import Workload
from ds_fuyou.planner.hardware import OF_DEVICE
from ds_fuyou.simulator.choose import Chosen, try_choose
from ds_fuyou.simulator.systems import find_policy
from tests.planner.support import chosen, machine, model, rows

SYSTEMS = ("fuyou", "fuyou_optimizer_as_separate_stage", "zero_infinity", "zero_offload")


def _errors() -> Iterator[tuple[str, float]]:
    for row in rows():
        on = machine(int(row["num_ssds"]), float(row["dram_gb"]), row["gpu"])
        found = chosen(row["model"], int(row["batch"]), row["system"], on)
        yield row["system"], found.tokens_per_s / float(row["tokens_per_s"]) - 1


def test_every_published_row_is_predicted_within_25_percent_and_the_median_within_10() -> None:
    errors = [abs(error) for _, error in _errors()]
    assert len(errors) == 18
    assert statistics.median(errors) <= 0.10
    assert max(errors) <= 0.25


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_system_is_favoured(system: str) -> None:
    assert abs(statistics.mean(error for name, error in _errors() if name == system)) <= 0.10


@pytest.mark.parametrize("row", rows(), ids=lambda r: f"{r['system']}-{r['model']}-{r['batch']}")
def test_ours_is_never_slower_on_the_same_machine(row: dict[str, str]) -> None:
    """With the same loss, which the published system takes slice by slice, and as much of the GPU's memory."""
    work = Workload(model(row["model"]), int(row["batch"]), 1024)
    on = replace(machine(), gpu_bytes=math.ceil(machine().gpu_bytes / OF_DEVICE))
    ours = try_choose(work, on, replace(find_policy("ds_fuyou"), slices_loss=True))
    assert isinstance(ours, Chosen)
    for system in SYSTEMS:
        theirs = _or_none(row, system)
        if theirs is not None:
            assert ours.tokens_per_s >= theirs.tokens_per_s


def _or_none(row: dict[str, str], system: str) -> Chosen | None:
    try:
        return chosen(row["model"], int(row["batch"]), system)
    except AssertionError:  # does not fit at all
        return None


def test_the_convention_of_published_figures_counts_the_round_size() -> None:
    found = chosen("13B", 64, "fuyou")
    assert found.tflops_8p == pytest.approx(8 * 13e9 * found.tokens_per_s / 1e12)
    attention = 3 * 4 * 40 * 5120 * 1024
    wanted = (6 * model("13B").params + attention) * found.tokens_per_s / 1e12
    assert found.tflops_model == pytest.approx(wanted, rel=1e-3)  # biases and norms are no FLOPs


def test_storage_traffic_is_that_of_the_design() -> None:
    found = chosen("13B", 16, "fuyou")
    params, acts = model("13B").params, found.place.storage_activation_bytes
    read = found.simulated.lane_secs[_lane("storage read")] * found.machine.storage_read
    assert read == pytest.approx(16 * params + acts, rel=1e-3)
    assert found.written_bytes == pytest.approx(14 * params + acts, rel=1e-3)


def _lane(label: str):  # type: ignore[no-untyped-def]
    from ds_fuyou.planner.lanes import Lane

    return next(lane for lane in Lane if lane.label == label)
