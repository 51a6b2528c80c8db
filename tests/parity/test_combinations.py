# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed features beside the block: equal to stock. What the block refuses is in test_config_host.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.runner import differences, ds_config, run_case, with_fuyou
from tests.parity.cases import block

AUTOCAST = ds_config(bf16=None, torch_autocast={"enabled": True, "dtype": "bfloat16"}, gradient_clipping=1.0)
WIDE = ds_config(data_types={"grad_accum_dtype": "fp32"}, gradient_accumulation_steps=2, gradient_clipping=1.0)
SEQUENCE = ds_config(sequence_parallel_size=2, data_parallel_size=1, gradient_clipping=1.0)

CASES: dict[str, dict] = {
    "torch.compile": {"compile": "eager"},
    "torch_autocast": {"config": AUTOCAST},
    "gradients-in-fp32": {"config": WIDE},
    "sequence-parallel": {"config": SEQUENCE, "world_size": 2},
    "sequence-parallel-units": {"config": SEQUENCE, "world_size": 2, "sequence_parallel": 2},
}


@pytest.mark.parametrize(
    ("name", "tiers"),
    [
        ("torch.compile", "all"),
        ("torch_autocast", "all"),
        ("gradients-in-fp32", "all"),
        ("sequence-parallel", "states"),
        ("sequence-parallel-units", "all"),
    ],
)
def test_equals_stock(name: str, tiers: str, must_equal, tmp_path: Path) -> None:
    case = {"steps": 4, "model": {}, "groups": "two", "config": ds_config(), **CASES[name]}
    fuyou = block(str(tmp_path / "swap"), tiers, "speculate")
    if "compile" in case:
        fuyou["activations"] = {"mode": "swap"}
        fuyou["plan"] |= {"smallest_swapped_bytes": 1024}
    _, ours = must_equal(case, fuyou)
    if "compile" in case:
        assert ours[0]["swapped_bytes"] > 0
        assert "Exception ignored" not in ours[0]["output"], "the compiler does not trace into hooks"


def test_communication_that_deepspeed_logs(must_equal, tmp_path: Path) -> None:
    """Its logger ends the process, with status 0, at a collective that it does not know."""
    logged = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
    case = {"steps": 3, "model": {}, "groups": "two", "config": ds_config(comms_logger=logged), "world_size": 2}
    case |= {"save_after": 2, "save_to": str(tmp_path / "saved")}
    must_equal(case, block(str(tmp_path / "swap"), "all"))


def test_offload_and_reload_states_change_nothing(stock_run, tmp_path: Path) -> None:
    case = {"steps": 4, "model": {}, "groups": "two", "config": ds_config()}
    (tmp_path / "swap").mkdir()
    ours = with_fuyou({**case, "offload_states_in": [1, 3]}, block(str(tmp_path / "swap"), "all"))
    assert differences(stock_run(case), run_case(ours, tmp_path, "ours")) == []
