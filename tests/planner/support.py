# SPDX-License-Identifier: Apache-2.0
"""The published testbed and its rows; shortcuts to choose on it."""

from __future__ import annotations

import csv
from pathlib import Path

from ds_fuyou.planner.cost import Workload
from ds_fuyou.planner.hardware import GIB, Machine
from ds_fuyou.planner.model import ModelSpec
from ds_fuyou.planner.presets import find_gpu, find_host, find_ssd, machine_of
from ds_fuyou.simulator.choose import Chosen, try_choose
from ds_fuyou.simulator.models import published_model
from ds_fuyou.simulator.systems import find_policy

PUBLISHED = Path(__file__).with_name("published.csv")


def rows() -> list[dict[str, str]]:
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def machine(num_ssds: int = 12, dram_gib: float = 768, gpu: str = "rtx4090", num_gpus: int = 1) -> Machine:
    return machine_of(
        find_gpu(gpu),
        find_host("xeon5320x2"),
        find_ssd("p5510"),
        num_ssds=num_ssds,
        dram_bytes=dram_gib * GIB,
        num_gpus=num_gpus,
    )


def model(name: str) -> ModelSpec:
    found = published_model(name)
    assert found is not None
    return found


def chosen(name: str, batch: int, system: str = "ds_fuyou", on: Machine | None = None, accumulation: int = 1) -> Chosen:
    found = try_choose(Workload(model(name), batch, 1024, accumulation), on or machine(), find_policy(system))
    assert isinstance(found, Chosen), found.missing()
    return found
