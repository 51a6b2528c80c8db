# SPDX-License-Identifier: Apache-2.0
"""``fuyou plan --measure``: this machine instead of presets."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ds_fuyou.cli import main
from ds_fuyou.errors import FuyouStateError
from ds_fuyou.planner.cost import Workload
from ds_fuyou.planner.presets import constants
from ds_fuyou.profiling import rates
from ds_fuyou.profiling.machine import MeasuredMachine, machine_of_measured
from ds_fuyou.simulator.choose import choose
from ds_fuyou.simulator.models import load_model
from ds_fuyou.simulator.report import plan_text
from ds_fuyou.simulator.systems import find_policy

FOUND = MeasuredMachine(
    device="a GPU",
    device_bytes=24 << 30,
    device_is_host=False,
    is_unified=False,
    matmul_flops=100e12,
    link_up=20e9,
    link_down=21e9,
    first_read=6e9,
    first_write=5e9,
    read=6e9,
    write=3e9,
    mixed=4e9,
    update=2e9,
    dram_bytes=64 << 30,
    storage_bytes=10**12,
)


def test_measured_rates_become_those_of_the_planner() -> None:
    machine = machine_of_measured(FOUND, 2)
    assert (machine.num_gpus, machine.storage_read, machine.storage_write) == (2, 6e9, 3e9)
    assert machine.flops == 100e12 * constants().block_share_of_matmul
    # equal bytes both ways: in turn 1/6 + 1/3 = 0.5 ns a pair, mixed 2/4 = 0.5 ns: they share one resource
    assert machine.storage_duplex == pytest.approx(1.0)
    assert machine_of_measured(replace(FOUND, mixed=6e9), 1).storage_duplex == pytest.approx(1.5)


def test_where_the_device_is_the_host_there_is_no_gpu_and_no_link() -> None:
    work, policy = Workload(load_model("gpt:12,12,768,8192"), 2, 256, 1), find_policy("ds_fuyou")
    shown = plan_text(choose(work, machine_of_measured(replace(FOUND, device="host of 2 cores"), 1), policy))
    assert "GPU" in shown
    assert "device to host" in shown
    host = machine_of_measured(replace(FOUND, device="host of 2 cores", device_is_host=True), 1)
    shown = plan_text(choose(work, host, policy))
    assert "GPU" not in shown
    assert "device" not in shown
    assert "cpu optimizer" in shown


def test_where_device_and_host_share_memory_what_is_swapped_goes_to_storage() -> None:
    work, policy = Workload(load_model("6B"), 16, 1024), replace(find_policy("ds_fuyou"), slices_loss=True)
    apart = machine_of_measured(replace(FOUND, device_bytes=12 << 30, dram_bytes=256 << 30), 1)
    found = {one: choose(work, replace(apart, is_unified=one), policy).place for one in (False, True)}
    assert found[True].dram_activation_bytes == 0
    assert found[False].dram_activation_bytes > 0


def test_a_rate_that_falls_is_told() -> None:
    (told,) = FOUND.drift()
    assert "write fell from 5.00 to 3.00 GB/s" in told
    assert replace(FOUND, first_write=3.1e9).drift() == []


def test_this_machine_is_measured_and_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "gpt:4,4,256,1000", "--batch", "1", "--seq", "128", "--json"]
    assert main(["plan", "--measure", str(tmp_path), "--measure-gb", "0.0625", *arguments]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "measured" in shown["machine"]
    assert shown["predicted"]["tokens_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_what_may_be_page_locked_bounds_a_measured_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ds_fuyou.profiling.machine.measure_machine", lambda *_: FOUND)
    model = ["--model", "gpt:4,4,256,1000", "--batch", "1", "--seq", "128"]
    assert main(["plan", "--measure", str(tmp_path), *model, "--pinned-gb", "2"]) == 0
    assert "of 2.1 GB" in capsys.readouterr().out


def test_what_cannot_be_measured_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory, said in ((tmp_path / "none", "does not exist"), (Path("/proc"), "nvme_path must be writable")):
        assert main(["plan", "--model", "6B", "--measure", str(directory)]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert main(["plan", "--model", "6B", "--measure", str(tmp_path), "--measure-gb", "0"]) == 2
    assert "--measure-gb must be positive" in capsys.readouterr().err
    assert main(["plan", "--model", "6B", "--measure", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "could not be measured: no message; run fuyou doctor, or name presets" in error
    assert error.count("\n") == 1


def test_a_process_that_ends_while_adam_is_measured_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_update", lambda place, *_: os._exit(3) if place else time.sleep(60))
    with pytest.raises(FuyouStateError, match=r"were to measure Adam ended with \[3\]"):
        rates.update_rate(2)
