# SPDX-License-Identifier: Apache-2.0
"""Saved models and stock runs, made once a session."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.huggingface.runner import HERE, launch, run_script


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``pretrained("llama")``: a directory that from_pretrained reads."""
    directory = tmp_path_factory.mktemp("pretrained")

    def saved(kind: str) -> str:
        if not (directory / kind).exists():
            run_script(HERE / "save_pretrained.py", [kind, directory / kind], directory / "made")
        return str(directory / kind)

    return saved


@pytest.fixture(scope="session")
def stock_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict, str], dict]:
    """``stock_run(case, script)``: what the script leaves behind without the block; equal cases run once."""
    directory = tmp_path_factory.mktemp("stock")
    made: dict[str, dict] = {}

    def stock(case: dict, script: str) -> dict:
        key = json.dumps([script, case], sort_keys=True)
        if key not in made:
            name = f"stock{len(made)}"
            saved = directory / f"{name}.model"
            run = launch({**case, "save_model": str(saved)}, script, directory, name, by_launcher=False)
            made[key] = {**run, "saved": saved}
            assert made[key]["optimizer_class"] == "DeepSpeedZeroOptimizer_Stage3"
        return made[key]

    return stock


@pytest.fixture(scope="session")
def launched() -> set[tuple]:
    """Scripts that a launcher has started: by which one, on how many ranks."""
    return set()


@pytest.fixture
def ours_run(tmp_path: Path, launched: set[tuple]) -> Callable[..., dict]:
    """``ours_run(case_with_block, script)``: the same with the block; the state directory must be left empty.

    The first run of a script is started by the launcher that users start it by: of each launcher and number of ranks.
    """

    def run(case: dict, script: str, name: str = "ours") -> dict:
        saved = tmp_path / f"{name}.model"
        told = {**case, "save_model": str(saved)}
        how = (script, case["launcher"], case.get("num_ranks", 1))
        by_launcher = name == "ours" and how not in launched
        result = {**launch(told, script, tmp_path, name, by_launcher=by_launcher), "saved": saved}
        launched.add(how)
        assert result["optimizer_class"] == "FuyouStage3Optimizer", result["output"][-3000:]
        assert "is active under DeepSpeed" in result["output"]
        path = Path(case["config"]["fuyou"]["nvme_path"])
        left = [str(file) for file in path.glob("**/*") if file.is_file()]
        assert not left, f"files left behind: {left}"
        return {**result, "out": tmp_path / f"{name}.out"}

    return run
