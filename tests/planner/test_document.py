# SPDX-License-Identifier: Apache-2.0
"""The plan document: saved, loaded, compared, edited by hand, refused where it is for something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_fuyou.errors import FuyouConfigError
from ds_fuyou.planner.document import PlanDocument, is_document, load, parse, save
from ds_fuyou.planner.plan import MIB
from ds_fuyou.simulator.report import document_of
from tests.planner.support import chosen, machine


@pytest.fixture(scope="module")
def plan() -> PlanDocument:
    return document_of(chosen("13B", 16, on=machine(4, 64)))


def test_a_saved_plan_is_the_same_when_loaded(plan: PlanDocument, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save(plan, path)
    assert load(path) == plan
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]
    assert is_document(json.loads(path.read_text(encoding="utf-8")))
    assert not is_document({"chunk_bytes": 1})


@pytest.mark.parametrize(("gib", "chunk_bytes"), [(64, 16 * MIB), (2.3, 4 * MIB)])
def test_settings_are_those_of_the_decision(gib: float, chunk_bytes: int) -> None:
    found = chosen("13B", 1, on=machine(4, gib))
    assert found.plan is not None
    assert document_of(found).settings["chunk_bytes"] == found.plan.chunk_bytes == chunk_bytes
    assert "chunk_bytes" not in document_of(chosen("13B", 1, "zero_infinity")).settings


def test_a_class_that_there_is_no_more_is_no_fault(plan: PlanDocument) -> None:
    data = plan.to_json()
    assert parse({**data, "residency": {**data["residency"], "accumulators": 1.0}}) == plan


def test_a_plan_edited_by_hand_is_taken(plan: PlanDocument) -> None:
    data = plan.to_json()
    data["residency"] = {"parameters": 1, "optimizer": 0.25, "gradients": 0}
    data["settings"] = {"chunk_bytes": 1 << 20}
    found = parse(data)
    assert (found.residency.parameters, found.residency.optimizer) == (1, 0.25)
    assert found.settings == {"chunk_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "ds_fuyou.plan/9"}, "schema must be 'ds_fuyou.plan/1', found 'ds_fuyou.plan/9'"),
        ({"residnecy": {}}, "residnecy: unknown key; did you mean residency?"),
        ({"residency": {"parameters": 1.5, "optimizer": 0, "gradients": 0}}, "residency.parameters must be a number"),
        ({"residency": {"parameters": True, "optimizer": 0, "gradients": 0}}, "residency.parameters must be a number"),
        ({"residency": {"parameters": 1, "optimiser": 0, "gradients": 0}}, "did you mean residency.optimizer?"),
        ({"residency": {"parameters": 1}}, "residency. lacks optimizer, gradients"),
        ({"residency": 3}, "residency must be an object"),
        ({"world_size": 0}, "world_size must be a whole number of at least 1, found 0"),
        ({"activations": {"qkv": {"keep": 1, "swap": 1, "recompute": 1}}}, "must add up to the 40 blocks, found 3"),
        ({"activations": {"qvk": {"keep": 40}}}, "activations.qvk: unknown key; did you mean activations.qkv?"),
        ({"activations": {"qkv": {"keep": 40}}}, "must have exactly keep, swap and recompute"),
        ({"activations": {"qkv": {"keep": -1, "swap": 41, "recompute": 0}}}, "activations.qkv.keep must be a whole"),
        ({"settings": []}, "settings must be an object"),
    ],
)
def test_wrong_values_are_named_by_their_path(plan: PlanDocument, change: dict[str, Any], said: str) -> None:
    with pytest.raises(FuyouConfigError) as raised:
        parse({**plan.to_json(), **change})
    assert said in str(raised.value)


def test_a_missing_section_is_named(plan: PlanDocument) -> None:
    data = plan.to_json()
    del data["activations"]
    with pytest.raises(FuyouConfigError, match="lacks activations"):
        parse(data)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe"])
def test_a_file_that_is_no_plan_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(FuyouConfigError, match="plan must be"):
        load(path)
    with pytest.raises(FuyouConfigError, match="must be a readable JSON file"):
        load(tmp_path / "none.json")


def test_a_failed_save_leaves_the_old_plan(plan: PlanDocument, tmp_path: Path) -> None:
    folder = tmp_path / "plan.json"
    folder.mkdir()
    with pytest.raises(OSError, match="directory"):
        save(plan, folder)
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]
