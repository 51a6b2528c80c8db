# SPDX-License-Identifier: Apache-2.0
"""A load gives what was saved under the tag that it names, or says why not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ds_fuyou.checkpoint.atomic import behind_link
from tests.harness.forked import finish, start
from tests.harness.ports import free_port
from tests.harness.runner import HERE, ds_config, environment, with_fuyou
from tests.parity.cases import block

CASE: dict = {"steps": 0, "model": {}, "config": ds_config()}


def said_by(case: dict, directory: Path) -> dict:
    """What rank 0 prints."""
    directory.mkdir(parents=True, exist_ok=True)
    file, world_size, port = directory / "case.json", case.get("world_size", 1), free_port()
    file.write_text(json.dumps(case))
    arguments, logs = [str(file), str(directory / "folder")], [directory / f"log{rank}" for rank in range(world_size)]
    processes = [
        start(HERE / "loading_worker.py", arguments, environment(rank, world_size, port), log)
        for rank, log in enumerate(logs)
    ]
    finish(processes)
    output = logs[0].read_text()
    assert [process.exitcode for process in processes] == [0] * world_size, logs[-1].read_text()[-4000:]
    found: dict = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
    return found


def ours_of(case: dict, directory: Path, tiers: str = "all", **more: object) -> dict:
    (directory / "swap").mkdir(parents=True, exist_ok=True)
    return with_fuyou(case, {**block(str(directory / "swap"), tiers), **more})


def test_as_stock_loads(tmp_path: Path) -> None:
    """Frozen parameters are those of the tag, states that a script has read from a file and changed, or has kept, those
    that it gives; a load under ``inference_mode`` leaves a model that can be trained.
    """
    exact = {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.5, 0.75]}  # products of which a resumed stock has to the bit
    config = ds_config(optimizer={"type": "AdamW", "params": exact})
    case = {**CASE, "config": config, "tasks": ["frozen", "given_by_script", "rolled_back", "within_inference"]}
    stock = said_by(case, tmp_path / "stock")
    for tiers in ("all", "states"):
        assert said_by(ours_of(case, tmp_path, tiers), tmp_path / tiers) == stock, tiers


def test_a_bit_that_changed_in_a_file_is_not_loaded(tmp_path: Path) -> None:
    """Whether the values are read past the page cache, as they are, or through mapped memory, rounded."""
    case = {**CASE, "tasks": ["flipped"]}
    narrow = {**case["config"], "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    for tiers, config in (("all", case["config"]), ("none", case["config"]), ("states", narrow)):
        found = said_by(ours_of({**case, "config": config}, tmp_path, tiers), tmp_path / tiers)["flipped"]
        assert found.pop("whole") == found.pop("whole, weights alone") == "nothing"
        assert "load_optimizer_states=False: DeepSpeed makes the weights in fp32" in found.pop("no memory")
        alone = {where: said for where, said in found.items() if where.endswith(", weights alone")}
        assert alone
        assert all(found.pop(where).startswith("FuyouChecksumError: reading a checkpoint") for where in alone)
        assert len(found) == 8
        for where, said in found.items():
            assert "FuyouChecksumError: reading a checkpoint" in said, (tiers, where, said)
            assert all(name in said for name in where.split()), (tiers, where, said)
    said_nothing = said_by(ours_of(case, tmp_path, checksum=False), tmp_path / "unchecked")["flipped"]
    assert "nothing" in said_nothing.values()


@pytest.mark.parametrize("tiers", ["all", "states"])
def test_where_one_rank_cannot_load_none_goes_on_with_its_own_part(tiers: str, tmp_path: Path) -> None:
    """Scripts catch what a load raises, and begin anew: on all ranks, then, and with what they had."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 50}}
    case = {**CASE, "config": ds_config(scheduler=schedule), "tasks": ["one_rank"], "world_size": 2}
    one, other = said_by(ours_of(case, tmp_path, tiers), tmp_path)["one_rank"]["ranks"]
    for what in ("states", "module"):
        assert one[what][0].startswith("FuyouStateError: rank 1 could not load its part"), one[what]
        assert one[what][1:] == other[what][1:] == [True, "nothing"], what
        assert "rank_1" in other[what][0] or what == "module"
    assert one["surplus"] == other["surplus"]
    assert 'Unexpected key(s) in state_dict: "surplus"' in one["surplus"][0]
    assert one["surplus"][1:] == [True, "nothing"], "torch has replaced what it knows when it raises"
    assert one["tensor"][0].startswith("FuyouStateError: rank 1 could not load its part")
    assert other["tensor"][0].startswith("FuyouChecksumError: reading a checkpoint")
    assert "loaded in part" in one["tensor"][2]
    assert "loaded in part" in other["tensor"][2]
    assert all("loaded in part" in each["weights over it"] for each in (one, other)), "moments of one are a mixture"
    assert one["given"].startswith("FuyouStateError: rank 1 could not load its part")
    assert other["given"].startswith("FuyouStateError: the checkpoint's sub-groups hold")
    assert one["elsewhere"] == other["elsewhere"]
    assert "rank 1 found no checkpoint" in one["elsewhere"][0]
    assert one["elsewhere"][1:] == [True, "nothing"]
    assert one["nowhere"] == other["nowhere"] == ["nothing", True, "nothing"]


def test_no_step_is_made_of_what_a_failed_load_left(tmp_path: Path) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 50}}
    case = {**CASE, "config": ds_config(scheduler=schedule), "tasks": ["failed_midway"]}
    found = said_by(ours_of(case, tmp_path), tmp_path)["failed_midway"]
    assert found["scheduler"][0] == "TypeError: 'int' object is not subscriptable"
    assert found["function"][0] == found["weights"][0] == "ValueError: half of it"
    assert found["weights over weights"] == "nothing", "of weights alone nothing else was replaced"
    assert "FuyouChecksumError" in found["states"]
    assert "a checkpoint was loaded in part" in found["weights over it"], "its moments are still a mixture"
    for what in ("scheduler", "function", "weights"):
        assert "a checkpoint was loaded in part when its load failed" in found[what][1], what
        assert found[what][2:] == ["nothing"], what


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict:
    directory = tmp_path_factory.mktemp("loads")
    case = {**CASE, "tasks": ["client_state", "reordered", "universal", "other_tag", "changed_directory"]}
    return said_by(ours_of(case, directory, checkpoint={"save": "background"}), directory)


def test_what_a_load_hands_out_does_not_change_with_the_file(said: dict) -> None:
    """Nor is a file's room held when it is deleted. Sparse tensors have no memory of their own."""
    names = ("sparse", "rows", "dense", "hidden", "scheduler", "hyperparameter")
    assert said["client_state"] == {**dict.fromkeys(names, True), "mapped": []}


def test_states_of_other_parameters_are_refused_and_of_other_names_told(said: dict) -> None:
    found = said["reordered"]
    assert "where the model has blocks.0.norm.weight [72] the checkpoint has blocks.1.norm.weight" in found["swapped"]
    assert found["renamed"] == found["as it is"] == found["by name"] == found["states given by the script"] == "nothing"
    assert len(found["renamed told"]) == 1
    assert found["as it is told"] == []
    assert (
        "where the model has tokens.weight [500, 72] the checkpoint has blocks.0.norm.weight" in found["other shapes"]
    )


def test_missed_steps_are_those_of_the_parameters_in_the_same_place(said: dict) -> None:
    """Whatever their names were. A name whose place nobody knows is refused before anything is replaced."""
    found = said["reordered"]
    assert set(found["missed"].values()) == {1}
    assert all(name.startswith("blocks.0.") for name in found["missed"])
    assert found["moved up"] == "nothing"
    for what in ("as it is", "renamed", "moved up"):
        assert found[f"{what} missed"] == found["missed"], what
    assert (
        "counts steps that blocks.0.ln.weight missed, which the model does not have" in found["states of other names"]
    )
    assert found["step after it"] == "nothing"


def test_missed_steps_of_what_is_frozen_now_are_no_more(said: dict) -> None:
    found, missed = said["universal"], said["reordered"]["missed"]
    assert found["load"] == found["step"] == "nothing"
    assert found["missed"] == {name: number for name, number in missed.items() if ".up." not in name}
    assert "blocks.0.up.weight" in found["renamed"]


def test_a_universal_checkpoint_of_other_groups_is_refused_before_anything_is_replaced(said: dict) -> None:
    found = said["universal"]
    assert "saved with 1 parameter groups, this run has 2" in found["groups"]
    assert found["groups, step"] == "nothing"


def test_another_tag_than_stock_reads_is_told(said: dict) -> None:
    assert [len(said["other_tag"][tag]) for tag in ("first", "second", "None")] == [1, 0, 0]
    assert "'second'" in said["other_tag"]["first"][0]


def test_files_that_read_as_empty_are_named(said: dict) -> None:
    """Stock says nothing but AssertionError of the first."""
    assert said["other_tag"]["None, empty"].startswith("FuyouStorageError: it names no checkpoint")
    assert "latest]" in said["other_tag"]["None, empty"]
    assert "model_states.pt" in said["other_tag"]["second, empty"]


def test_a_relative_folder_is_that_of_the_call(said: dict) -> None:
    assert said["changed_directory"]["found"] == ["relative", "relative/latest", "relative/tag"]


def test_a_tag_that_is_a_link_is_written_through(said: dict) -> None:
    """As in stock: the folder behind it may be on another disk."""
    names = ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"]
    assert said["changed_directory"]["linked"] == [True, ["large", "other"], names, names, "best", True]


def test_a_link_to_a_folder_that_nothing_can_replace_is_replaced(tmp_path: Path, monkeypatch, caplog) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "tag").symlink_to(tmp_path / "disk")
    assert behind_link(tmp_path, "tag") == (tmp_path, "disk")
    assert behind_link(tmp_path, "none") == (tmp_path, "none")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert behind_link(tmp_path, "tag") == (tmp_path, "tag")
    assert "cannot be replaced in one step" in caplog.text
