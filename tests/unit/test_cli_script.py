# SPDX-License-Identifier: Apache-2.0
"""`python -m ds_fuyou SCRIPT`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_fuyou.__main__ import script_arguments
from tests.conftest import RunPython


@pytest.mark.parametrize(
    ("given", "argv"),
    [
        (["train.py"], ["train.py"]),
        (["--local_rank=1", "train.py", "--lr", "3"], ["train.py", "--local_rank=1", "--lr", "3"]),
        (["--local_rank", "1", "train.py", "-x"], ["train.py", "--local_rank", "1", "-x"]),
        (["train.py", "--local_rank=1"], ["train.py", "--local_rank=1"]),
        (["--local_rank=1"], None),
        ([], None),
    ],
)
def test_launcher_options_move_behind_the_script(given: list[str], argv: list[str] | None) -> None:
    assert script_arguments(given) == argv


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(
        "import json, sys\nimport neighbour\n"
        "print(json.dumps([__name__, sys.argv, sys.path[0], 'ds_fuyou.autoload' in sys.modules]))\n"
        "sys.exit(7)\n"
    )
    (tmp_path / "neighbour.py").touch()
    return path


def test_a_script_runs_as_if_started_directly(run_python: RunPython, script: Path) -> None:
    done = run_python(["-m", "ds_fuyou", "--local_rank=0", str(script), "--epochs", "1"])
    assert done.returncode == 7, done.stderr
    argv = [str(script), "--local_rank=0", "--epochs", "1"]
    assert json.loads(done.stdout) == ["__main__", argv, str(script.parent), True]


@pytest.mark.parametrize("arguments", [[], ["--local_rank=0"], ["no_such_script.py"]])
def test_without_a_script(run_python: RunPython, arguments: list[str]) -> None:
    done = run_python(["-m", "ds_fuyou", *arguments])
    assert done.returncode == 2
    assert "a script file must be named" in done.stderr
