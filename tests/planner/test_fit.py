# SPDX-License-Identifier: Apache-2.0
"""What fits keeps fitting with more memory, needs what its plan takes, and is the same to every command."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_fuyou.cli.main import main
from ds_fuyou.config import load_block
from ds_fuyou.planner.cost import Placement, Workload
from ds_fuyou.planner.hardware import OF_DEVICE
from ds_fuyou.planner.plan import MIB
from ds_fuyou.simulator.choose import Chosen, fits, try_choose
from ds_fuyou.simulator.fit import device_room, needs_of, rank_facts
from ds_fuyou.simulator.fixed import limited, under_block
from ds_fuyou.simulator.models import load_model
from ds_fuyou.simulator.systems import find_policy
from ds_fuyou.zero.run.budgets import loss_bytes_each
from tests.planner.support import machine

DRAM_GIB = (0.5, 1, 1.5, 2, 3, 4, 8, 16, 24, 28, 64, 128, 160, 192, 256, 512)
OURS = replace(find_policy("ds_fuyou"), slices_loss=True)  # else a GPU holds less than what is asked for here


@pytest.mark.parametrize("storage_tb", [0.0, 0.1, 0.3, 8.0])
@pytest.mark.parametrize(("name", "batch"), [("13B", 1), ("13B", 64), ("gpt:12,12,768,50257", 4)])
def test_what_fits_keeps_fitting_with_more_host_memory(name: str, batch: int, storage_tb: float) -> None:
    """Whatever the chosen plan does with the memory, it is counted as that plan has it."""
    work, fitted = Workload(load_model(name), batch, 1024), False
    for gib in DRAM_GIB:
        on = replace(machine(2 if storage_tb else 0, gib), storage_bytes=1e12 * storage_tb)
        found = try_choose(work, on, OURS)
        assert fits(work, on, OURS) == isinstance(found, Chosen), f"{gib} GiB"
        if not isinstance(found, Chosen):
            assert not fitted, f"{gib} GiB lack {found.missing()}"
            assert found.missing()
            continue
        fitted = True
        assert found.plan is not None
        taken = found.plan.host_bytes(rank_facts(work, on, found.policy))
        assert found.needs.total("cpu") <= taken + 8, "to a byte for each item"
        assert taken <= on.dram_usable_bytes * (1 + 1e-9)
    assert fitted or storage_tb < 1


@pytest.mark.parametrize(
    ("block", "batch", "swaps"),
    [
        ({}, 1, False),
        ({}, 64, True),
        ({"activations": {"mode": "recompute"}}, 1, False),
        ({"activations": {"mode": "swap"}}, 1, True),
        ({"gpu_budget_bytes": "20GB"}, 1, True),
    ],
)
def test_where_the_device_is_the_host_an_arena_is_planned_if_a_run_has_one(
    block: dict[str, Any], batch: int, swaps: bool
) -> None:
    """In mode "auto" activations stay where they are there, unless a budget of the device or the plan says else."""
    config = load_block({"fuyou": {"nvme_path": "/nvme", **block}})
    assert config is not None
    on = limited(replace(machine(2, 64), shares_cores=True), config, True)
    found = try_choose(Workload(load_model("6B"), batch, 1024), on, under_block(OURS, config, True))
    assert isinstance(found, Chosen)
    assert found.plan is not None
    assert (found.plan.activation_bytes > 0) == swaps


def test_no_model_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["max-model", "--dram-gb", "1", "--ssd-tb", "0.01", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"] is None
    assert "trains" in shown["why"]


def test_the_largest_model_is_one_that_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    for means in (["--dram-gb", "16", "--ssd-tb", "0.3"], ["--dram-gb", "192", "--num-ssds", "2", "--ssd-tb", "0.2"]):
        assert main(["max-model", *means, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["tokens_per_s"] > 0
        assert main(["plan", "--model", shown["model"], *means, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["predicted"]["tokens_per_s"] == pytest.approx(
            shown["tokens_per_s"], rel=0.01
        )


def test_what_would_do_is_rounded_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "6B", "--dram-gb", "1"]) == 2
    assert "it fits with 2 GiB of DRAM" in capsys.readouterr().err
    assert main(["plan", "--model", "6B", "--dram-gb", "2"]) == 0


def test_where_its_limit_is_what_lacks_no_memory_is_to_be_bought(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "30B", "--dram-gb", "512", "--pinned-gb", "1"]) == 2
    assert "it fits with 3 GiB of the DRAM that may be used (--pinned-gb" in capsys.readouterr().err
    assert main(["plan", "--model", "30B", "--dram-gb", "512", "--pinned-gb", "3"]) == 0
    assert main(["plan", "--model", "30B", "--dram-gb", "1", "--pinned-gb", "1"]) == 2
    assert "it fits with 3 GiB of DRAM that may be page-locked" in capsys.readouterr().err


def test_second_versions_leave_what_a_run_begins_with_for_activations() -> None:
    """They fill memory to the last byte, and nothing is swapped here: a MiB is there all the same."""
    work = Workload(load_model("13B"), 1, 1024, 4)
    found = try_choose(work, machine(2, 345), OURS)
    assert isinstance(found, Chosen), found.missing()
    assert 0 < found.place.states_twice < 1
    assert found.place.swapped_bytes == 0
    assert found.plan is not None
    assert found.plan.activation_bytes >= MIB
    assert found.needs.total("cpu") <= found.needs.have["cpu"]


def test_a_gpu_is_filled_as_far_as_a_run_fills_it() -> None:
    """And the loss takes of it what a run expects. With a budget in the block that is what a run may fill."""
    work, on, policy = Workload(load_model("13B"), 8, 1024), machine(4, 128), find_policy("ds_fuyou")
    assert needs_of(work, on, policy, Placement()).have["gpu"] == OF_DEVICE * on.gpu_bytes
    assert needs_of(work, on, find_policy("fuyou"), Placement()).have["gpu"] == on.gpu_bytes
    config = load_block({"fuyou": {"nvme_path": "/nvme", "gpu_budget_bytes": "20GB"}})
    assert config is not None
    given = under_block(policy, config, True)
    assert needs_of(work, limited(on, config, True), given, Placement()).have["gpu"] == 20e9
    items = {item.name: item.num_bytes for item in needs_of(work, on, policy, Placement()).items}
    vocab, hidden = work.model.vocab, work.model.hidden
    loss_bytes = loss_bytes_each(torch.nn.Linear(hidden, vocab, device="meta"))
    assert items["logits and loss"] == work.tokens * (loss_bytes + 2 * hidden)
    room = device_room(work, on, policy)
    assert room == pytest.approx(OF_DEVICE * on.gpu_bytes - needs_of(work, on, policy, Placement()).total("gpu"))
