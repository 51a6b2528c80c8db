# SPDX-License-Identifier: Apache-2.0
"""A run profiles its first steps, tells its plan, keeps the profile, and notices when it no longer holds."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ds_fuyou.cli import main
from ds_fuyou.planner.profile import RunProfile, StorageRates
from ds_fuyou.telemetry.report import LaneTimes
from ds_fuyou.zero.run.run_plan import storage_rates
from tests.harness.forked import finish, start
from tests.harness.ports import free_port
from tests.harness.runner import environment

SCRIPT = Path(__file__).with_name("run_plan_script.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str, Path]:
    """Results of the three engines, rank 0's log, and the directory, from two ranks with profiles of their own."""
    directory, port = tmp_path_factory.mktemp("plan"), free_port()
    processes = []
    for rank in range(2):
        env = {**environment(rank, 2, port), "DS_FUYOU_PROFILES": str(directory / f"profiles{rank}")}
        processes.append(start(SCRIPT, [str(directory)], env, directory / f"log{rank}"))
    finish(processes)
    log, other = ((directory / f"log{rank}").read_text(errors="replace") for rank in range(2))
    assert [process.exitcode for process in processes] == [0, 0], log[-5000:] + other[-5000:]
    (line,) = [line for line in log.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT ")), log, directory


def test_a_step_in_which_no_read_ended_says_nothing_of_reads() -> None:
    assert storage_rates(LaneTimes(read_secs=0.1)) is None
    written = LaneTimes(read_secs=0.1, write_secs=0.5, write_bytes=100.0)
    assert storage_rates(written) == StorageRates(200.0, 200.0, 200.0, 0.0, 0.0)


def test_the_first_steps_are_measured_and_kept(trained: tuple[dict, str, Path]) -> None:
    results, log, directory = trained
    profile = RunProfile.from_json(results["cold"]["profile"])
    ((kept, text),) = results["kept"][0].items()
    at_last = RunProfile.from_json(json.loads(text))
    assert at_last.redo_share >= 0.25, "its last steps were clipped"
    assert replace(at_last, redo_share=0.0) == profile
    assert Path(kept).parent == directory / "profiles0"
    assert not (directory / "profiles1").exists(), "rank 0 keeps it, and tells the others that it found it"
    assert f"plan (kept for the next run in {kept}): forward" in log
    assert [block.name for block in profile.blocks] == ["blocks.0", "blocks.1", "blocks.2", ""]
    tokens, width = profile.shape[0] * (profile.shape[1] - 1), 72
    assert profile.blocks[0].flops == 2 * 2 * tokens * width * (3 * width + 1)
    assert profile.storage is not None
    assert profile.accumulation == 1


def test_the_plan_is_told_in_two_lines_in_full_for_who_asks_and_compared_in_the_report(
    trained: tuple[dict, str, Path],
) -> None:
    results, log, directory = trained
    told = log.split("plan (kept for the next run")[1].split("[ds_fuyou]")[0].splitlines()[1:]
    (predicted,) = [line for line in told if "predicted" in line]
    assert "bound by" in predicted
    rows = [" ".join(line.split()[:4]) for line in told if "bound by" in line and line != predicted]
    assert rows == ["G16 in host memory;", "updates begin in backward;"], "the one class and what else was left open"
    assert "gpu" not in log.split("plan (kept for the next run")[1].split("RESULT ")[0], "where there is none"
    assert results["cold"]["predicted"]["written"] >= 12 * results["cold"]["numel"]
    assert main(["report", str(directory / "trace.json"), "--no-png"]) == 0
    page = (directory / "trace.html").read_text(encoding="utf-8")
    assert "Plan against measurement" in page
    assert "no byte counters" not in page


def test_what_is_said_until_there_is_a_plan_is_short(trained: tuple[dict, str, Path]) -> None:
    """With the line at the end of a run twelve lines at most: of a run of four steps nothing else is said."""
    _, log, _ = trained
    said, told = [], False
    for line in log[log.index("[ds_fuyou]") : log.index("updates wait for step()")].splitlines():
        told = " INFO: " in line if line.startswith("[ds_fuyou]") else told and line.startswith("  ")
        said += [line] if told and "Warning" not in line and "return func" not in line else []
    assert any("bound by" in line for line in said)
    assert len(said) - 1 <= 11, said  # the last one is cut off in the middle: it is not of the first four steps


def test_the_plan_follows_updates_that_clipping_holds_back(trained: tuple[dict, str, Path]) -> None:
    results, log, _ = trained
    assert results["cold"]["predicted"]["updates"] == "FORWARD"
    assert results["warm"]["predicted"]["updates"] == "DEADLINE"
    assert log.count("updates wait for step() from now on, because gradients were clipped often") == 1


def test_the_next_run_starts_planned_and_notices_batch_and_disk(trained: tuple[dict, str, Path]) -> None:
    results, log, _ = trained
    assert log.count("plan (measured in an earlier run)") == 1
    causes = results["warm"]["causes"]
    assert "WORKLOAD" in causes
    assert {"READS", "WRITES"} & set(causes)
    assert log.count("plan (made anew)") >= 2
    assert log.count("activations are decided anew within the next steps") >= 1
    assert log.count("activations, decided after step") >= 2
    assert log.count("activations, decided before step 1, as an earlier run measured") == 1
    cold, warm = results["cold"]["profile"], results["warm"]["profile"]
    claimed = 1e-6
    assert warm["shape"] == [2 * cold["shape"][0], cold["shape"][1]]
    assert warm["forward_secs"] == pytest.approx(2 * claimed)
    slower = [warm["storage"][side] / cold["storage"][side] for side in ("read", "write")]
    assert min(slower) < 0.8


def test_the_command_writes_the_document_of_a_run_with_the_same_profile(
    trained: tuple[dict, str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, _, _ = trained
    ((_, text),) = results["claimed"].items()
    profile, config = tmp_path / "profile.json", tmp_path / "ds.json"
    profile.write_text(text)
    config.write_text(json.dumps(results["config"]))
    assert RunProfile.from_json(json.loads(text)).room is not None, "found when mode auto decided"
    assert main(["plan", "--profile", str(profile), "--config", str(config), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == results["document"]
    assert document["predicted"]["activations"], "what becomes of activations is a part of it"
    assert main(["plan", "--profile", str(profile), "--config", str(config)]) == 0
    assert "G16 in host memory; on storage" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "--profile", str(config), "--config", str(config)]) == 2


def test_a_kept_profile_that_no_longer_holds_is_dropped(trained: tuple[dict, str, Path]) -> None:
    results, log, _ = trained
    assert "COMPUTE" in results["warm"]["causes"]
    assert log.count("the kept profile no longer holds: it is dropped") == 1
    assert results["kept"][1] == {}


def test_no_tier_holds_more_than_was_planned(trained: tuple[dict, str, Path]) -> None:
    for name in ("cold", "warm", "off"):
        planned, peaks = trained[0][name]["planned_bytes"], trained[0][name]["peak_bytes"]
        assert 0.85 * planned["host memory"] <= peaks["host memory"] <= planned["host memory"]
        assert peaks["storage"] <= planned["storage"]


def test_results_do_not_depend_on_what_is_known(trained: tuple[dict, str, Path]) -> None:
    results, _, _ = trained
    assert results["off"]["profile"] is None
    assert "predicted" not in results["off"]
    assert results["cold"]["losses"] == results["warm"]["losses"][:6]
    assert results["off"]["losses"] == results["cold"]["losses"][:4]
    assert os.environ["DS_FUYOU_PROFILES"] != "off"
