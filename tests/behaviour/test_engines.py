# SPDX-License-Identifier: Apache-2.0
"""Two engines in one process, one after another and together; what destroy() leaves behind: the model's values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.forked import finish, start
from tests.harness.ports import free_port
from tests.harness.runner import environment

ROOT = Path(__file__).parents[2]


def run(name: str, swap: Path, num_ranks: int = 1, script: str = "engines.py") -> list[dict[str, Any]]:
    """What every rank found."""
    swap.mkdir()
    logs = [swap.with_name(f"log{rank}") for rank in range(num_ranks)]
    path, port = ROOT / "tests/behaviour" / script, free_port()
    processes = [
        start(path, [name, str(swap)], environment(rank, num_ranks, port), log) for rank, log in enumerate(logs)
    ]
    finish(processes)
    outputs = [log.read_text() for log in logs]
    assert not any(process.exitcode for process in processes), "\n".join(output[-4000:] for output in outputs)
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("FOUND ")]
    return [json.loads(line.removeprefix("FOUND ")) for line in lines]


def test_two_engines_on_two_ranks_train_as_each_of_them_alone(tmp_path: Path) -> None:
    wanted = {"as alone": [True, True], "own directories": True, "files": [True, 0], "scores": 6}
    assert run("together", tmp_path / "swap", num_ranks=2) == [wanted, wanted]


def test_a_reference_model_without_an_optimizer_stays_as_it_is(tmp_path: Path) -> None:
    (found,) = run("reference", tmp_path / "swap")
    assert found == {"equal at first": True, "actor moved": True, "reference stayed": True}
    log = (tmp_path / "log0").read_text()
    table = r"0\.2 M parameters without an optimizer on this rank:\n(?:  host memory [\d.]+ [kM]B: look-ahead.*\n)?"
    assert re.findall(table + r"  (storage|host memory) [\d.]+ kB: P16", log) == ["storage", "host memory"]
    assert log.count("look-ahead pool") >= 2, "the one on storage has memory of its own, beside the actor's"


def test_a_configuration_without_the_block_evaluates_what_was_built_with_one(tmp_path: Path) -> None:
    assert run("unnamed", tmp_path / "swap") == [{"equal": True, "stores": 1, "ahead of use": True}]


def test_sanity_checks_find_ranks_that_reduce_different_gradients(tmp_path: Path) -> None:
    _, other = run("unlike", tmp_path / "swap", num_ranks=2)
    assert "disagreement" in (other["said"] or "")


def test_a_forked_child_that_ends_the_engines_waits_for_nothing_and_takes_nothing(tmp_path: Path) -> None:
    (found,) = run("forked", tmp_path / "swap")
    assert found == {"status": 7, "as alone": True, "files": True, "score": True}


def test_ranks_that_saw_different_forwards_do_what_rank_0_read_in_the_plan(tmp_path: Path) -> None:
    fates = {"0": None, "1": 0, "": None}  # one block is swapped whole, the other one recomputed whole
    wanted = {"fates": fates, "measured from": 1.0}  # not from the begin of the step that was skipped
    assert run("agree", tmp_path / "swap", num_ranks=2) == [wanted, wanted]


def test_losses_that_another_engine_has_scaled_are_refused(tmp_path: Path) -> None:
    (found,) = run("beside-autocast", tmp_path / "swap")
    assert "torch_autocast with float16" in (found["said"] or "")


@pytest.mark.parametrize("tiers", ["all", "none"])
def test_destroy_frees_threads_descriptors_files_and_memory(tiers: str, tmp_path: Path) -> None:
    (found,) = run(f"freed-{tiers}", tmp_path / "swap")
    kept = 1 if tiers == "all" else 0  # the model's values are in a file without a name, as long as there is a model
    assert found["after"] == found["before"] | {"descriptors": found["before"]["descriptors"] + kept}
    core, trace, plan, last = found["refused"]
    assert core == "the core refuses, 0 files are left"
    assert last == "this part did not end well, 0 hooks are left", "and all others have gone"
    assert "fuyou.trace must name a file that can be written" in trace
    assert "block_input is planned for 4 blocks, the model has 3" in plan
    assert found["gathered"] == 0, "reading a parameter of an engine that has ended"
    assert found["models"] == 0, "without an engine nothing holds a model, and its file"
    assert found["growth"] < 16 << 20  # one engine's states are 70 MB or more
