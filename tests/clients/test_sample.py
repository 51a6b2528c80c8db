# SPDX-License-Identifier: Apache-2.0
"""A sample of the matrix that needs no other environment, and whether the comparison would notice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.clients.cases import CASES
from tests.clients.run import Results, cells_of, differences, last_error, outcomes_of
from tests.clients.table import TARGET, page


def test_a_mixture_of_experts_under_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    case = next(case for case in CASES if case.name == "trainer-moe")
    one = dataclasses.replace(case, ranks=(1,))
    cells = dict(outcomes_of(one, tmp_path, tmp_path, ("nvme",)))
    assert cells == {"1 nvme": "equal", "resumed": "equal"}
    assert list(cells) == cells_of(one, ("nvme",))


def _left(out: Path, log: list[dict], *weight: float) -> Path:
    save_file = pytest.importorskip("safetensors.torch").save_file
    (out / "final").mkdir(parents=True)
    (out / "log.json").write_text(json.dumps(log))
    save_file({"weight": torch.tensor(weight)}, out / "final" / "model.safetensors")
    return out


def test_differences_are_noticed(tmp_path: Path) -> None:
    log = [{"loss": 1.0, "train_runtime": 3.0}, {"loss": float("nan")}, {"loss": 0.5}]
    stock = _left(tmp_path / "stock", log, 1.0)
    same = _left(tmp_path / "same", [{"loss": 1.0, "train_runtime": 4.0}, *log[1:]], 1.0)
    assert differences(stock, same) == ""
    assert "log: " in differences(stock, _left(tmp_path / "loss", [*log[:2], {"loss": 0.5000001}], 1.0))
    assert "2 entries" in differences(stock, _left(tmp_path / "short", log[:2], 1.0))
    assert differences(stock, _left(tmp_path / "weight", log, 1.0000001)) == "weights: weight"
    empty = [_left(tmp_path / name, log) for name in ("empty", "also empty")]
    assert differences(*empty) == "weights: weight", "what was saved without values is equal to nothing"
    assert "nothing" in differences(stock, _left(tmp_path / "silent", [], 1.0))
    tail = _left(tmp_path / "tail", log[2:], 1.0)
    assert differences(stock, tail) != ""
    assert differences(stock, tail, resumed=True) == ""


def test_the_last_exception_is_told_or_how_processes_ended() -> None:
    ended = "script.py exited with [1, -6]"
    said = "[WARNING] an Error may follow\n  raise RuntimeError\n{}\n    return func(*args)\nexitcode: 1\n"
    for named in ("RuntimeError: no room", "[rank1]: torch.distributed.DistBackendError: closed", "AssertionError"):
        assert last_error(AssertionError(f"{ended}:\n{said.format(named)}")) == named
    assert last_error(AssertionError(f"{ended}:\n{said.format('terminate called')}")) == ended


def test_what_has_an_outcome_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.program == "Trainer")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1")
    Results(case, tmp_path).put("1 nvme", "equal")
    again = Results(case, tmp_path)
    assert again.has("1 nvme")
    assert not again.has("1 auto")
    assert Results(dataclasses.replace(case, remark="of another text"), tmp_path).has("1 nvme")
    assert not Results(dataclasses.replace(case, options={}), tmp_path).has("1 nvme")
    with monkeypatch.context() as changed:
        changed.setattr("importlib.metadata.version", lambda name: "2")
        assert not Results(case, tmp_path).has("1 nvme")
    monkeypatch.setattr("tests.clients.run.package", lambda: "another state of the package")
    now = Results(case, tmp_path)
    assert not now.has("1 nvme")
    now.put("1 auto", "differs: entry 0")
    assert Results(case, tmp_path).cells == {"1 nvme": "equal", "1 auto": "differs: entry 0"}


def test_the_page_has_a_row_for_every_case() -> None:
    rows = [line for line in TARGET.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = [line for line in page({}).splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:2] for row in rows] == [row.split(" | ")[:2] for row in named]


def test_what_did_not_run_is_said() -> None:
    case = CASES[0]
    told = {"cells": {"1 nvme": "equal", "1 auto": "differs: entry 0", "2 nvme": "stock fails: x"}}
    row = next(line for line in page({case.name: told}).splitlines() if case.shows in line)
    assert row.split(" | ")[2:7] == ["equal", "**differs**", "stock fails", "not run", "not run"]


def test_what_is_not_asked_any_more_is_not_shown() -> None:
    case = next(case for case in CASES if case.checkpoint is None and case.remark)
    told = {case.name: {"cells": {"1 nvme": "equal", "resumed": "differs: entry 0"}}}
    row = next(line for line in page(told).splitlines() if case.shows in line)
    assert row.strip("| ").split(" | ")[2:] == ["equal", "not run", "not run", "not run", "–", case.remark]


def test_what_ran_before_stays_on_the_page() -> None:
    case, other = CASES[0], next(case for case in CASES if case.remark)
    told = {
        case.name: {"cells": {"1 nvme": "equal", "1 auto": "fails: a | b"}, "versions": {"trl": "1"}, "date": "then"},
        other.name: {"cells": {"2 auto": "stock fails: x"}, "versions": {"trl": "1"}, "date": "then"},
    }
    before = page(told)
    assert page({}, before) == before
    assert page({case.name: {**told[case.name], "cells": {"1 auto": "equal"}}}, before) == page(
        {**told, case.name: {**told[case.name], "cells": {"1 nvme": "equal", "1 auto": "equal"}}}
    )
