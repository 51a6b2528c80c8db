# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of adapters hold no frozen base where it is as the script built it, and all that is frozen elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.runner import HERE, run_case

WORKER = HERE / "adapter_worker.py"
STORED = {"parameters": {"tier": "nvme"}, "optimizer": {"tier": "nvme"}, "gradients": {"tier": "nvme"}}
IN_MEMORY = {"parameters": {"tier": "cpu"}, "optimizer": {"tier": "cpu"}, "gradients": {"tier": "cpu"}}
TIERS = {"stored": STORED, "in memory": IN_MEMORY}
LORA: dict[str, Any] = {"adapter": {}}


def run(tmp_path: Path, name: str, do: list, *, key: str = "auto", save: str = "blocking", **case: Any) -> dict:
    """``tiers``: of the block; None for stock. Folders of checkpoints are in ``tmp_path``."""
    tiers = case.pop("tiers", STORED)
    if tiers is not None:
        swap = tmp_path / "swap"
        swap.mkdir(exist_ok=True)
        case["block"] = {"nvme_path": str(swap), **tiers, "checkpoint": {"frozen": key, "save": save}}
    actions = [
        [what, str(tmp_path / first), *rest] if what in ("save", "load", "export") else [what, first, *rest]
        for what, first, *rest in do
    ]
    return run_case({**LORA, **case, "do": actions}, tmp_path, name, worker=WORKER)[0]


def lacks(result: dict, folder: str) -> bool:
    """Whether a checkpoint has no frozen parameters."""
    saved = result["saved"][folder]
    assert (saved["fragments"] is None) == (saved["shapes"] is None)
    return saved["fragments"] is None


def differences(one: dict, other: dict) -> list[str]:
    return [
        f"{key} {name}"
        for key in ("p16", "p32")
        for name in one[key].keys() | other[key].keys()
        if not torch.equal(one[key][name], other[key][name])
    ]


@pytest.mark.parametrize(
    ("tiers", "world_size", "save"),
    [
        ("stored", 1, "blocking"),
        ("in memory", 1, "background"),
        ("stored", 2, "background"),
        ("in memory", 2, "blocking"),
    ],
)
def test_a_base_that_was_left_out_is_built_again(tiers: str, world_size: int, save: str, tmp_path: Path) -> None:
    """Strictly loaded here and by stock, into a base that is built again; and with its weights alone."""
    case = {"tiers": TIERS[tiers], "world_size": world_size}
    first = run(tmp_path, "first", [("train", 2), ("save", "a"), ("train", 2), ("export", "whole")], save=save, **case)
    kept = run(tmp_path, "kept", [("train", 2), ("save", "b")], key="save", save=save, **case)
    assert lacks(first, "a")
    assert not lacks(kept, "b")
    assert first["saved"]["a"]["names"] == kept["saved"]["b"]["names"], "names stay"
    numel = sum(p.numel() for name, p in first["p16"].items() if "lora" not in name)
    assert kept["saved"]["b"]["bytes"] - first["saved"]["a"]["bytes"] > 1.9 * numel / world_size
    assert first["output"].count("checkpoints leave out") == 1

    again = run(tmp_path, "again", [("load", "a"), ("save", "c"), ("train", 2)], **case)
    assert lacks(again, "c")
    assert again["losses"] == first["losses"][2:]
    assert differences(first, again) == []
    stock = {
        name: run(tmp_path, name, [("load", name), ("train", 2)], tiers=None, world_size=world_size) for name in "ab"
    }
    assert stock["a"]["losses"] == stock["b"]["losses"]
    assert differences(stock["a"], stock["b"]) == []
    weights = run(tmp_path, "weights", [("load", "a", {"load_optimizer_states": False}), ("save", "d")], **case)
    at_save = run(tmp_path, "at_save", [("load", "a")], **case)
    assert all(torch.equal(weights["p16"][name], values) for name, values in at_save["p16"].items())
    assert lacks(weights, "d"), "what was gathered for the load is what it was"

    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    fp32 = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "a"))
    assert fp32.keys() == set(at_save["p32"])
    assert all(torch.equal(fp32[name], values) for name, values in at_save["p32"].items())


EVERYTHING = {
    "no adapter": ({"adapter": None, "frozen": ["tokens", "blocks.0"]}, []),
    "a frozen part beside the adapted model": ({"wrapped": "teacher"}, []),
    "another adapter": ({"others": ["second"]}, []),
    "an adapter that is trained in part": ({"frozen": ["lora_A"]}, []),
    "a base that was trained as a whole": ({"adapter": None}, [("adapt", {})]),
    "the base is begun anew": ({"adapter": {"init_lora_weights": "olora"}}, []),
    "an edit": ({}, [("edit", "tokens")]),
    "an edit that a checkpoint has": ({}, [("edit", "tokens"), ("save", "between"), ("load", "between")]),
    "frozen after it was trained": ({}, [("thaw", "lora_B", False)]),
}


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("name", EVERYTHING)
def test_what_nobody_builds_again_is_saved(name: str, tiers: str, tmp_path: Path) -> None:
    changes, do = EVERYTHING[name]
    case = {"tiers": TIERS[tiers], "world_size": 2 if tiers == "stored" else 1, **changes}
    first = run(tmp_path, "first", [("train", 1), *do, ("save", "a")], **case)
    assert not lacks(first, "a")
    assert not first["output"].count("checkpoints leave out")
    adapt = [("adapt", {})] if ("adapt", {}) in do else []
    again = run(tmp_path, "again", [*adapt, ("load", "a"), ("save", "b")], **case)
    if name.startswith("an edit"):
        assert not lacks(again, "b"), "what the checkpoint brought is nobody else's"
    if name != "frozen after it was trained":
        assert differences(first, again) == []
    stock = run(tmp_path, "stock", [*adapt, ("load", "a")], **{**case, "tiers": None})
    assert differences(again, stock) == []


LEFT_OUT = {
    "a part of another model": ({"wrapped": "alone"}, []),
    "a part that is trained whole": ({"adapter": {"modules_to_save": ["head"]}}, []),
    "int8": ({"int8": True}, []),
    "zero.Init": ({"zero_init": True}, []),
    "gathered as if for an edit": ({}, [("edit", "tokens", 0, 0.0)]),
    "edited before an engine": ({"adapter": {"init_lora_weights": "gaussian"}}, []),
}


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_base_as_the_script_built_it_is_left_out(name: str, tiers: str, tmp_path: Path) -> None:
    changes, do = LEFT_OUT[name]
    case = {"tiers": TIERS[tiers], "world_size": 1 if tiers == "stored" else 2, **changes}
    first = run(tmp_path, "first", [("train", 1), *do, ("save", "a"), ("train", 1)], **case)
    assert lacks(first, "a")
    again = run(tmp_path, "again", [("load", "a"), ("save", "b"), ("train", 1)], **case)
    assert lacks(again, "b")
    assert differences(first, again) == []


@pytest.mark.parametrize(("tiers", "changes"), [("stored", False), ("in memory", True)])
def test_a_write_that_nobody_is_told_of(tiers: str, changes: bool, tmp_path: Path) -> None:
    """One rank of the host: small parameters, which stay gathered, are what it has in memory. What is read from storage
    is a copy."""
    edit = ("edit", "model.norm.weight", None)
    found = run(tmp_path, "first", [("train", 1), edit, ("save", "a")], tiers=TIERS[tiers])
    assert lacks(found, "a") != changes


@pytest.mark.parametrize(
    ("saved_in", "loaded_in", "world_size"), [("stored", "in memory", 1), ("in memory", "stored", 2)]
)
def test_another_base_is_refused(saved_in: str, loaded_in: str, world_size: int, tmp_path: Path) -> None:
    """Built of other random numbers: no rank trains on, whatever tier the base is in. The same one is loaded."""
    run(tmp_path, "first", [("train", 2), ("save", "a")], tiers=TIERS[saved_in], world_size=world_size)
    loads: dict[str, Any] = {"do": [("load", "a"), ("train", 1)], "tiers": TIERS[loaded_in], "world_size": world_size}
    same = run(tmp_path, "same", **loads)
    assert same["client"]
    assert not any("fuyou" in key for key in same["client"])
    with pytest.raises(AssertionError, match="that this script has built have other values than it was trained with"):
        run(tmp_path, "other", seed=5, **loads)
    run(tmp_path, "nevertheless", seed=5, key="leave_out", **loads)


@pytest.mark.parametrize("named", [{}, {"load_optimizer_states": False}])
def test_a_base_that_is_another_in_one_ranks_part_alone_is_refused_by_all(named: dict, tmp_path: Path) -> None:
    """No rank is left waiting for the one that has found it."""
    run(tmp_path, "first", [("train", 1), ("save", "a")], world_size=2)
    do = [("edit", "blocks.0.up.base_layer.weight", {"at": 0}), ("load", "a", named), ("train", 1)]
    with pytest.raises(AssertionError, match=r"exited with \[1, 1\]") as failure:
        run(tmp_path, "other", do, world_size=2)
    assert str(failure.value).count("have other values than it was trained with (base_model.model.blocks.0.up") == 2


def test_the_key_and_the_argument(tmp_path: Path) -> None:
    do = [("train", 1), ("save", "a"), ("save", "b", {"exclude_frozen_parameters": True})]
    frozen = {"adapter": None, "frozen": ["tokens", "blocks.0"]}
    for key, case in (("save", {}), ("leave_out", frozen), ("auto", frozen)):
        found = run(tmp_path, key, do, key=key, **case)
        assert lacks(found, "a") == (key == "leave_out"), key
        assert lacks(found, "b")
        assert found["saved"]["b"]["names"] < found["saved"]["a"]["names"]


def test_a_base_that_a_checkpoint_has_is_compared(tmp_path: Path) -> None:
    """A checkpoint of before, or of ``save``: the base that is there anyway does not have to be saved again."""
    run(tmp_path, "kept", [("train", 1), ("save", "whole")], key="save")
    same = run(tmp_path, "same", [("load", "whole"), ("save", "a")])
    assert lacks(same, "a")
    other = run(tmp_path, "other", [("load", "whole"), ("save", "b"), ("train", 1)], seed=5)
    assert not lacks(other, "b")
    assert differences(run(tmp_path, "again", [("load", "b"), ("train", 1)], seed=6), other) == []


def test_what_is_behind_the_end_of_an_odd_parameter_makes_no_base_another(tmp_path: Path) -> None:
    """The second rank's part of it is memory as it was, in a checkpoint, too."""
    odd = {"model": {"width": 63}, "tiers": IN_MEMORY, "world_size": 2}
    run(tmp_path, "kept", [("train", 1), ("save", "whole")], key="save", **odd)
    for file in (tmp_path / "whole").glob("*/zero_pp_rank_1_mp_rank_00_model_states.pt"):
        saved = torch.load(file, weights_only=False)
        for name, part in saved["frozen_param_fragments"].items():
            part[part.numel() - 2 * part.numel() % saved["frozen_param_shapes"][name].numel() :] = 0.5
        torch.save(saved, file)
    assert lacks(run(tmp_path, "same", [("load", "whole"), ("save", "a")], **odd), "a")


def test_a_universal_checkpoint_of_adapters(run_python, tmp_path: Path) -> None:
    """Of two ranks, for one."""
    first = run(tmp_path, "first", [("train", 2), ("save", "a")], world_size=2)
    assert lacks(first, "a")
    folder = tmp_path / "a" / "global_step2"
    convert = ["-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(folder), "--no_strict"]
    convert += ["--output_folder", f"{folder}_universal", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    converted = run_python(convert)
    assert converted.returncode == 0, converted.stderr
    (tmp_path / "a" / "latest_universal").write_text("global_step2_universal")
    loaded = run(tmp_path, "loaded", [("load", "a")], config={"checkpoint": {"load_universal": True}})
    assert differences(first, loaded) == []
