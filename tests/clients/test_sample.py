# SPDX-License-Identifier: Apache-2.0
"""A sample of the matrix that needs no other environment, and whether the comparison would notice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.clients.cases import CASES
from tests.clients.run import Answer, Results, Runs, cells_of, differences, last_error, outcomes_of, package
from tests.clients.table import OLDER, TARGET, Told, how_much, page


def test_a_mixture_of_experts_under_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    case = next(case for case in CASES if case.name == "trainer-moe")
    one = dataclasses.replace(case, ranks=(1,))
    cells = dict(outcomes_of(one, tmp_path, tmp_path, ("nvme",)))
    assert cells == {"1 nvme": "equal", "1 nvme resumed": "equal"}
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


def test_a_run_that_fails_answers_all_cells_that_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(next(case for case in CASES if case.checkpoint), ranks=(1, 2))

    def run(self: Runs, kind: str, resume: Path | None = None) -> Path:
        if (self.num_ranks, kind) in ((1, "nvme"), (2, "stock")):
            raise AssertionError("RuntimeError: no room")
        return tmp_path

    monkeypatch.setattr(Runs, "run", run)
    monkeypatch.setattr("tests.clients.run.differences", lambda stock, ours, resumed=False: "")
    found = dict(outcomes_of(case, tmp_path / "work", tmp_path))
    failed, stock_failed = "fails: RuntimeError: no room", "stock fails: RuntimeError: no room"
    one = {"1 nvme": failed, "1 nvme resumed": failed, "1 auto": "equal", "1 auto resumed": "equal"}
    assert found == one | dict.fromkeys(cells_of(dataclasses.replace(case, ranks=(2,))), stock_failed)
    assert found.keys() == set(cells_of(case))


def test_a_run_without_a_log_fails_and_the_matrix_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(CASES[0], ranks=(1, 2))
    monkeypatch.setattr("tests.clients.run.run_script", lambda *arguments, **variables: "")
    failed = "stock fails: it ended well and left no log"
    assert dict(outcomes_of(case, tmp_path / "work", tmp_path)) == dict.fromkeys(cells_of(case), failed)


def test_what_has_an_outcome_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.program == "Trainer")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1")
    Results(case, tmp_path).put("1 nvme", "equal", 12.34)
    again = Results(case, tmp_path)
    assert again.has("1 nvme")
    assert not again.has("1 auto")
    assert Results(dataclasses.replace(case, remark="of another text"), tmp_path).has("1 nvme")
    assert not Results(dataclasses.replace(case, options={}), tmp_path).has("1 nvme")
    with monkeypatch.context() as changed:
        changed.setattr("importlib.metadata.version", lambda name: "2")
        assert not Results(case, tmp_path).has("1 nvme")
    then = package()
    monkeypatch.setattr("tests.clients.run.package", lambda: "another")
    now = Results(case, tmp_path)
    assert not now.has("1 nvme")
    now.put("1 auto", "differs: entry 0", 1.0)
    cells, told = Results.read(tmp_path / f"{case.name}.json")
    found = {cell: (answer.outcome, answer.package, answer.secs) for cell, answer in cells.items()}
    assert found == {"1 nvme": ("equal", then, 12.3), "1 auto": ("differs: entry 0", "another", 1.0)}
    assert told.keys() == {"versions", "date"}


def told_of(state: str = "", **outcomes: str) -> Told:
    """A file of outcomes, found out with these sources or the present ones; "one_auto_resumed" is "1 auto resumed"."""
    numbers = {"one": "1", "two": "2"}
    named = {" ".join(numbers.get(word, word) for word in cell.split("_")): outcomes[cell] for cell in outcomes}
    answers = {cell: Answer(outcome, "asked", state or package(), 1800.0) for cell, outcome in named.items()}
    return Told(answers, {"trl": "1"}, "then")


def row_of(page: str, shows: str) -> list[str]:
    """The columns behind the first two."""
    row = next(line for line in page.splitlines() if shows in line.split(" | "))
    return [column.strip() for column in row.removeprefix("| ").removesuffix("|").split(" | ")][2:]


def test_the_page_has_a_row_for_every_case() -> None:
    rows = [line for line in TARGET.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = [line for line in page({}).splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:2] for row in rows] == [row.split(" | ")[:2] for row in named]


def test_what_did_not_run_is_said() -> None:
    case = CASES[0]
    told = told_of(one_nvme="equal", one_auto_resumed="differs: entry 0", two_nvme="stock fails: x")
    row = row_of(page({case.name: told}), case.shows)
    assert row[:4] == ["equal", "not run", "not run", "**differs**"]
    assert row[4:-1] == ["stock fails", "not run", "not run", "not run"]
    assert row[-1] == "entry 0; x"


def test_what_is_not_asked_any_more_is_not_shown() -> None:
    case = next(case for case in CASES if case.checkpoint is None and case.remark)
    told = told_of(one_nvme="equal", one_nvme_resumed="differs: entry 0")
    row = row_of(page({case.name: told}), case.shows)
    assert row == ["equal", "–", "not run", "–", "not run", "–", "not run", "–", case.remark]


def test_what_ran_before_stays_on_the_page() -> None:
    case, other = CASES[0], next(case for case in CASES if case.remark)
    first = {
        case.name: told_of(one_nvme="equal", one_auto="fails: a | b"),
        other.name: told_of(two_auto="stock fails: x"),
    }
    before = page(first)
    assert page({}, before) == before
    assert page({case.name: told_of(one_auto="equal")}, before) == page(
        {**first, case.name: told_of(one_nvme="equal", one_auto="equal")}
    )


def test_what_other_sources_were_run_with_is_marked_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    before = page({case.name: told_of(one_nvme="equal", one_auto="stock fails: x", two_nvme="differs: y")})
    assert OLDER not in before.split("| program")[1]
    now = page({case.name: told_of("earlier", two_auto="equal")}, before)
    assert row_of(now, case.shows)[:-1] == [
        *("equal", "not run", "stock fails", "not run", "**differs**", "not run", f"equal{OLDER}", "not run"),
    ]
    for module in ("run", "table"):
        monkeypatch.setattr(f"tests.clients.{module}.package", lambda: "0123456789abcdef")
    later = page({case.name: told_of("0123456789abcdef", two_auto="equal")}, now)
    assert row_of(later, case.shows)[:-1] == [
        *(f"equal{OLDER}", "not run", f"stock fails{OLDER}", "not run"),
        *(f"**differs**{OLDER}", "not run", "equal", "not run"),
    ]
    assert "sources\n  `0123456789abcdef`" in later
    assert page({}, later) == later


def test_how_much_there_is_of_this_state() -> None:
    told = {CASES[0].name: told_of(one_nvme="equal", one_auto="equal"), CASES[1].name: told_of("old", one_nvme="equal")}
    asked = sum(len(cells_of(case)) for case in CASES)
    assert how_much(told) == f"2 of {asked} cells are of this state of the package, and took 1.0 hours"
