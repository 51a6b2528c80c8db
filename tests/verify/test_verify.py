# SPDX-License-Identifier: Apache-2.0
"""``fuyou verify``: equal, different, not comparable, and what a user can do wrong."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest

from ds_fuyou.cli.main import main
from ds_fuyou.cli.verify import compare
from tests.harness.runner import HERE, ds_config, environment, free_port

SCRIPT = str(HERE / "verify_script.py")
RECORD = {
    "losses": [1.5, 1.25],
    "norms": [0.5, 0.25],
    "applied": [True, True],
    "parameters": {"a": ["1", "2"], "b": ["3"]},
    "world_size": 1,
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    block = {"nvme_path": str(tmp_path), "plan": {"chunk_bytes": 65536}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ds_config(fuyou=block, gradient_clipping=0.1)))
    return str(file)


def test_a_script_that_trains_the_same_parameters(config: str, capfd: pytest.CaptureFixture) -> None:
    assert main(["verify", "--steps", "3", "--", sys.executable, SCRIPT, config]) == 0
    said = capfd.readouterr().out
    assert "equal: 3 losses, 3 gradient norms and 4 parameters" in said


def test_a_script_without_seeds_is_not_comparable(config: str, capfd: pytest.CaptureFixture) -> None:
    assert main(["verify", "--steps", "1", "--", sys.executable, SCRIPT, config, "--unseeded"]) == 1
    assert "not comparable" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a script"),
        (["missing.py"], "must be an existing script"),
        (["--steps", "0", "--", sys.executable, SCRIPT], "--steps must be at least 1"),
        (["no-such-program", "x"], "must be a program on the PATH"),
        ([sys.executable, "-c", "pass"], "never made its last step"),
        (["--timeout", "0.2", "--", sys.executable, "-c", "import time; time.sleep(30)"], "longer than --timeout"),
    ],
)
def test_mistakes_are_said_in_one_message(arguments: list[str], message: str, capfd: pytest.CaptureFixture) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_a_failing_script_shows_its_own_error(config: str, capfd: pytest.CaptureFixture) -> None:
    assert main(["verify", "--", sys.executable, SCRIPT, config, "--failing"]) == 2
    assert "the script's own mistake" in capfd.readouterr().err


def _changed(**changes: object) -> list[dict]:
    return [{**copy.deepcopy(RECORD), **changes}]


@pytest.mark.parametrize(
    ("ours", "line"),
    [
        (_changed(losses=[1.5, 1.0]), "rank 0: losses[1] is 1.25 against 1.0"),
        (_changed(norms=[0.5]), "rank 0: 2 norms against 1"),
        (_changed(applied=[True, False]), "rank 0: applied[1] is True against False"),
        (_changed(parameters={"a": ["1", "x"], "b": ["3"]}), "rank 0: 1 of 2 parameters differ: a"),
        (_changed(parameters={"a": ["1", "2"]}), "rank 0: other names of parameters"),
        ([RECORD, RECORD], "1 ranks against 2"),
    ],
)
def test_every_difference_is_named(ours: list[dict], line: str) -> None:
    assert line in compare([RECORD], ours)


def test_equal_runs_have_no_differences() -> None:
    nan = _changed(norms=[0.5, float("nan")])
    assert compare(nan, json.loads(json.dumps(nan))) == []
