# SPDX-License-Identifier: Apache-2.0
"""Two launcher "nodes" on loopback, paths by node, and how a failing rank ends all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_fuyou.cli import main
from tests.harness.limits import HANG_SECS
from tests.harness.ports import free_port
from tests.harness.runner import HERE, differences, ds_config, environment, run_case, with_fuyou
from tests.parity.cases import block


def launch_nodes(case: dict, directory: Path, name: str) -> list[subprocess.CompletedProcess[str]]:
    """The ``deepspeed`` command once a node, as a user without ssh between the nodes starts it."""
    file, port = directory / f"{name}.json", free_port()
    file.write_text(json.dumps(case))
    hosts = directory / "hostfile"
    hosts.write_text("first slots=1\nsecond slots=1\n")
    kept = environment(0, 2, port)
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del kept[variable]
    processes = []
    for node in range(2):
        command = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(hosts), "--no_ssh"]
        command += ["--node_rank", str(node), "--master_addr", "127.0.0.1", "--master_port", str(port)]
        command += ["--no_local_rank", str(HERE / "train_worker.py"), str(file), str(directory / name)]
        processes.append(
            subprocess.Popen(command, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    done = []
    try:
        for process in processes:
            output = process.communicate(timeout=HANG_SECS)[0]
            done.append(subprocess.CompletedProcess(process.args, process.returncode, output))
    finally:
        for process in processes:
            process.kill()
    return done


def files(directory: Path) -> list[Path]:
    return [path for path in directory.glob("**/*") if path.is_file()]


def test_two_nodes_with_paths_of_their_own_equal_two_ranks(stock_run, tmp_path: Path) -> None:
    case = {"steps": 4, "model": {}, "groups": "two", "config": ds_config(gradient_clipping=1.0), "world_size": 2}
    for node in range(2):
        (tmp_path / f"disk{node}").mkdir()
    nodes = launch_nodes(with_fuyou(case, block(str(tmp_path / "disk{node}"), "all")), tmp_path, "nodes")
    assert [node.returncode for node in nodes] == [0, 0], nodes[0].stdout[-3000:] + nodes[1].stdout[-3000:]
    ours = [torch.load(tmp_path / f"nodes.{rank}", weights_only=False) for rank in range(2)]
    assert differences(stock_run(case), ours) == []
    for rank, result in enumerate(ours):
        assert result["directories"]
        assert all(Path(path).is_relative_to(tmp_path / f"disk{rank}") for path in result["directories"])
    assert files(tmp_path / "disk0") + files(tmp_path / "disk1") == []


def test_a_node_that_cannot_begin_is_named_on_the_others(tmp_path: Path) -> None:
    """Who waits for it in a collective would say nothing until that is given up."""
    (tmp_path / "disk0").mkdir()
    case = with_fuyou({"steps": 1, "model": {}, "config": ds_config()}, block(str(tmp_path / "disk{node}"), "all"))
    nodes = launch_nodes(case | {"world_size": 2}, tmp_path, "lacking")
    assert all(node.returncode != 0 for node in nodes), [node.returncode for node in nodes]
    assert f"{tmp_path / 'disk1'}" in nodes[1].stdout
    assert "FuyouStateError: rank 1 could not look at its storage, so this rank does not go on" in nodes[0].stdout
    assert f"{tmp_path / 'disk1'}" in nodes[0].stdout
    assert files(tmp_path / "disk0") == []


@pytest.mark.parametrize("how", ["read", "kill"])
def test_a_failing_rank_ends_all_of_them(how: str, tmp_path: Path) -> None:
    """Its error is told with path and reason; the other rank ends by itself. Both leave what they have committed: one
    rank's part alone is of no use.
    """
    (tmp_path / "swap").mkdir()
    case = {"steps": 50, "model": {}, "config": ds_config(), "world_size": 2}
    case["break"] = {"rank": 1, "step": 3, "how": how}
    nodes = launch_nodes(with_fuyou(case, block(str(tmp_path / "swap"), "all")), tmp_path, "broken")
    assert all(node.returncode != 0 for node in nodes), [node.returncode for node in nodes]
    left = {path.relative_to(tmp_path / "swap").parts[1] for path in files(tmp_path / "swap")}
    if how == "read":
        assert "FuyouStorageError" in nodes[1].stdout
        assert os.strerror(5) in nodes[1].stdout
        assert str(tmp_path / "swap") in nodes[1].stdout
    assert len(left) == 2
    told = [node for node in nodes if "fuyou recover" in node.stdout]
    assert len(told) == (2 if how == "read" else 1), "a killed rank says nothing"


def test_two_ranks_keep_directories_of_their_own_and_what_they_keep_is_recovered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "swap").mkdir()
    case = {"steps": 1, "model": {}, "config": ds_config(), "world_size": 2, "free_bytes": [2_430_000, 2_180_000]}
    case["config"]["zero_optimization"] = {"stage": 3}
    kept = block(str(tmp_path / "swap"), "states") | {"keep_state": True, "parameters": {}, "gradients": {}}
    first, second = run_case(with_fuyou(case, kept), tmp_path, "ours")
    assert 0 < first["shares"]["parameters"] < 1, "memory holds a part of P16"
    assert first["shares"] == second["shares"], "gathers must run ahead alike on both ranks"
    assert first["directories"]
    assert not set(first["directories"]) & set(second["directories"])
    runs = {Path(path).name.rpartition("-rank")[0] for path in first["directories"] + second["directories"]}
    assert len(runs) == 1, "both ranks carry the id of their run"
    directories = [*second["directories"], *first["directories"]]
    weights = tmp_path / "weights.pt"
    assert main(["recover", *directories, "--weights", str(weights)]) == 0
    assert "as of step 1 (" in capsys.readouterr().out
    recovered = torch.load(weights)
    assert recovered.keys() == first["p32"].keys()
    assert all(torch.equal(recovered[name], values) for name, values in first["p32"].items())
    assert main(["recover", directories[0], "--weights", str(weights)]) == 2
    assert f"all 2 ranks of one run must be named, found {Path(directories[0]).name}" in capsys.readouterr().err


@pytest.mark.parametrize("tiers", ["states", "all"])
def test_parameters_of_one_element_leave_their_neighbours_alone(tiers: str, must_equal, tmp_path: Path) -> None:
    """The second rank holds padding of them and nothing else; it is updated beside the rest, as in stock."""
    case = {"steps": 5, "model": {"gates": True, "width": 83}, "groups": "one", "config": ds_config(), "world_size": 2}
    must_equal(case, block(str(tmp_path / "swap"), tiers, "speculate", chunk_bytes=1 << 20))
